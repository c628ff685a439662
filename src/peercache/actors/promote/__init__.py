"""Promote: pages on their way from the disk back into the pool, and the readers that wait."""
