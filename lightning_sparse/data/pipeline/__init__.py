"""Samples to batches. Imports neither `cache` nor `peers`."""
