"""Removal: pages and namespaces that clients want removed from every member, or retained."""
