"""Host names to addresses, without ever waiting past a deadline.

The system's resolver has no time-out that we could set: a name server that is away holds its caller
for seconds. Addresses in figures never ask it; names are asked for on a thread of their own, one
for each name at a time, and an answer that comes too late serves whoever asks next.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeAlias, final

Address: TypeAlias = tuple[socket.AddressFamily, tuple[Any, ...]]
"""Family, and what `socket.connect` takes."""


def look_up(host: str, port: int, flags: int) -> list[Address]:
    """Ask the system's resolver, however long it takes; raise OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]


@final
class Names:
    """Resolves HOST, PORT to the addresses to try, in order."""

    def __init__(self, ask: Callable[[str, int, int], list[Address]] = look_up) -> None:
        """Ask nothing yet."""
        self._look_up = ask
        self._lock = threading.Lock()
        self._asked: dict[tuple[str, int], Future[list[Address]]] = {}

    def resolve(self, host: str, port: int, timeout_s: float) -> list[Address]:
        """Return the addresses, or none: no such name, or no answer within timeout_s."""
        try:
            return self._look_up(host, port, socket.AI_NUMERICHOST)
        except (OSError, ValueError):
            pass  # It is a name, then, or nothing at all.
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
                except RuntimeError:  # No thread to be had: as good as no name server.
                    return []
                self._asked[key] = answer
        try:
            return answer.result(timeout_s)
        except (OSError, FutureTimeoutError):
            return []

    def _ask(self, key: tuple[str, int], answer: Future[list[Address]]) -> None:
        try:
            answer.set_result(self._look_up(*key, 0))
        except Exception as error:  # Whatever it is, it belongs to those who wait.
            answer.set_exception(error if isinstance(error, OSError) else OSError(str(error)))
        # Nothing is remembered: a name may move, and every answer opens a channel that lasts.
        with self._lock:
            del self._asked[key]
