"""Resolves host names and connects, without waiting past a deadline.

The system's resolver has no timeout that we could set: if a name server does not answer, it blocks
its caller for seconds. A numeric address needs no resolver. A name is resolved on a thread of its
own, one for each name at a time; an answer that comes too late serves the next read.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeAlias, final

Address: TypeAlias = tuple[socket.AddressFamily, tuple[Any, ...]]
"""Address family, and the address for `socket.connect`."""


def look_up(host: str, port: int, flags: int) -> list[Address]:
    """Resolve with the system's resolver, without a timeout; raise OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]


@final
class Names:
    """Resolves HOST, PORT to the addresses to try, in order."""

    def __init__(self, ask: Callable[[str, int, int], list[Address]] = look_up) -> None:
        """Resolve nothing yet."""
        self._look_up = ask
        self._lock = threading.Lock()
        self._asked: dict[tuple[str, int], Future[list[Address]]] = {}

    def resolve(self, host: str, port: int, timeout_s: float) -> list[Address]:
        """Return the addresses; none if there is no such name, or no answer within timeout_s."""
        try:
            return self._look_up(host, port, socket.AI_NUMERICHOST)
        except (OSError, ValueError):
            pass  # It is a name, or not an address at all.
        key = (host, port)
        with self._lock:
            answer = self._asked.get(key)
            if answer is None:
                answer = Future()
                asking = threading.Thread(
                    target=self._ask, args=(key, answer), name="peercache-names", daemon=True
                )
                try:
                    asking.start()
                except RuntimeError:  # No thread can be started: same as no name server.
                    return []
                self._asked[key] = answer
        try:
            return answer.result(timeout_s)
        except (OSError, FutureTimeoutError):
            return []

    def _ask(self, key: tuple[str, int], answer: Future[list[Address]]) -> None:
        try:
            answer.set_result(self._look_up(*key, 0))
        except Exception as error:  # Every failure is passed to the reads that wait for the answer.
            answer.set_exception(error if isinstance(error, OSError) else OSError(str(error)))
        # Answers are not cached: a name may move, and every answer opens a long-lived channel.
        with self._lock:
            del self._asked[key]


SEND_BUFFER_BYTES = 256 * 2**10
"""Holds two requests of COUNT_MAX pages, so that sending one ahead does not wait for the server."""


def dial(
    addresses: Sequence[Address],
    *,
    until: float,
    connect_timeout_s: float,
    clock: Callable[[], float],
) -> socket.socket | None:
    """Return a connection to the first address that answers, or None."""
    until = min(until, clock() + connect_timeout_s)
    for family, address in addresses:
        left = until - clock()
        if left <= 0:
            break
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(left)
            connection.connect(address)
            connection.settimeout(None)
            # The last seals of a response are a small packet behind large ones.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        except OSError:
            connection.close()
            continue
        return connection
    return None
