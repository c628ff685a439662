"""Disk: which pages of this node are on its disk, where they are, and which are deleted."""
