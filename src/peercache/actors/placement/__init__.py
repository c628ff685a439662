"""Placement: pages on their way to other nodes: of a drain, or ahead of their eviction."""
