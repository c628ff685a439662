"""Control messages over nng: sockets, links, outboxes, questions and their answers."""
