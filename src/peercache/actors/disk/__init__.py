"""Disk: which pages of this node are on its disk, where they lie, and which are deleted."""
