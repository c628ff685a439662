"""A node: actors, sockets, memory and fabrics put together; `python -m peercache.node`."""
