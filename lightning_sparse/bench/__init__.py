"""Diagnostics and benchmarks. Functions return findings and rows, and print nothing."""
