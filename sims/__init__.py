"""Whole clusters in one process, replayed from one seed: `python -m sims`."""
