"""Ours beside other ways to train on slow networks."""
