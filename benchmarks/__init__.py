"""Benchmarks, and the one place where networks are imitated: `python -m benchmarks.network --help`."""
