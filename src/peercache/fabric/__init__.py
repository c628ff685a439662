"""The fabrics that move bytes: their port, shared memory, and tcp."""
