"""Benchmarks. Only this folder emulates networks: `python -m benchmarks.network --help`."""
