"""The read and write paths without I/O: generators that say what to ask, copy and compare next."""
