"""Removal: removes pages and namespaces from every member, or retains pages, for clients."""
