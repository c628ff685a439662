"""Plain values without I/O: identities, keys, records, runs of bytes, the ring, the view."""
