"""Control messages over nng: sockets, links, and requests with their answers."""
