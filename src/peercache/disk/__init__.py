"""The page store: slab files, their index, and the threads that move pages. See `store`."""
