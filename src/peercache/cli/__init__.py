"""The `peercache` command: what people start by hand on a host."""
