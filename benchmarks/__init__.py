"""Benchmarks that developers run from a checkout: `python -m benchmarks.NAME`."""
