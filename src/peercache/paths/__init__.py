"""The read and write paths without I/O: generators of steps that the bridge performs."""
