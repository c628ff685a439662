"""A node: the wiring of actors, sockets, memory and fabrics; `python -m peercache.node`."""
