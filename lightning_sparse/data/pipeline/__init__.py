"""Samples to batches: which samples a rank sees, how batches are made of them, and the iterables that hand them out."""
