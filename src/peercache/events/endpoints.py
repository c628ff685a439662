"""Binds a publisher's socket to the endpoint that its user has written."""

from __future__ import annotations

import errno

import zmq

PORT_MAX = 65_535


def bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind; raise OSError that says why an endpoint cannot be bound."""
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp://") and port.isdecimal() and int(port) > PORT_MAX:
        # ZeroMQ takes what is left of it in 16 bits: no router would find the publisher there.
        raise OSError(errno.EINVAL, f"a port is at most {PORT_MAX}")
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, str(error.strerror)) from None
