"""Benchmarks of the library alone. Functions return rows, and print nothing."""
