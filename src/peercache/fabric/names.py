"""Host names to addresses, without ever waiting past a deadline.

The system's resolver has no time-out that we could set: a name server that is away holds its caller
for seconds. Addresses in figures never ask it; names are asked for on a thread of their own, one
for each name at a time, and an answer that comes too late serves whoever asks next.
"""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeAlias, final

Address: TypeAlias = tuple[socket.AddressFamily, tuple[Any, ...]]
"""Family, and what `socket.connect` takes."""


@final
class Names:
    """Resolves HOST, PORT to the addresses to try, in order."""

    def __init__(self) -> None:
        """Ask nothing yet."""
        self._lock = threading.Lock()
        self._asked: dict[tuple[str, int], Future[list[Address]]] = {}

    def resolve(self, host: str, port: int, timeout_s: float) -> list[Address]:
        """Return the addresses, or none: no such name, or no answer within timeout_s."""
        try:
            return _look_up(host, port, socket.AI_NUMERICHOST)
        except OSError:
            pass  # It is a name, then.
        key = (host, port)
        with self._lock:
            answer = self._asked.get(key)
            if answer is None:
                answer = self._asked[key] = Future()
                threading.Thread(
                    target=self._ask, args=(key, answer), name="peercache-names", daemon=True
                ).start()
        try:
            return answer.result(timeout_s)
        except (OSError, FutureTimeoutError):
            return []

    def _ask(self, key: tuple[str, int], answer: Future[list[Address]]) -> None:
        try:
            answer.set_result(_look_up(*key, 0))
        except Exception as error:  # Whatever it is, it belongs to those who wait.
            answer.set_exception(error if isinstance(error, OSError) else OSError(str(error)))
        # Nothing is remembered: a name may move, and every answer opens a channel that lasts.
        with self._lock:
            del self._asked[key]


def _look_up(host: str, port: int, flags: int) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]
