"""Measurements for the first minutes on a GPU."""
