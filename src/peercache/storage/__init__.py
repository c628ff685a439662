"""The page store of the disk tier: slab files, their index, and the threads that move pages."""
