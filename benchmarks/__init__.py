"""Benchmarks, each one command: see README.md."""
