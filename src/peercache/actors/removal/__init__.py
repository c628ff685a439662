"""Removal: removes, retains and demotes pages on every member, for clients."""
