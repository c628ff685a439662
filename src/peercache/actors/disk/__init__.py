"""Disk: which pages of this node are on its disk."""
