"""Names to numbers: the system's resolver, in threads of its own that are left behind when late."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, final

import trio

from peercache.discovery.port import SourceFailed

RESOLVE_S = 5.0
"""How long a name may take: glibc asks a server for five seconds before it asks the next."""

THREADS_MAX = 2
"""Threads that wait for names, late ones too: a resolver that hangs holds no more."""

Lookup: TypeAlias = Callable[[str, int], list[str]]


def looked_up(name: str, port: int) -> list[str]:
    """Return the numeric addresses of a name, IPv4 and IPv6; raise OSError for none. Blocks."""
    rows = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(row[4][0]) for row in rows))


@final
class Resolver:
    """Looks names up for one source, without a wait of the loop."""

    def __init__(self, text: str, lookup: Lookup = looked_up) -> None:
        """Look up for the source of this entry."""
        self._text = text
        self._lookup = lookup
        self._threads = trio.CapacityLimiter(THREADS_MAX)

    async def resolve(self, name: str, port: int) -> list[str]:
        """Return the numeric addresses of a name; raise SourceFailed for none in time."""
        look = partial(self._lookup, name, port)
        with trio.move_on_after(RESOLVE_S):
            try:
                return await trio.to_thread.run_sync(
                    look, abandon_on_cancel=True, limiter=self._threads
                )
            except (OSError, UnicodeError) as error:
                why = getattr(error, "strerror", None) or error
                raise SourceFailed(
                    f"discovery_addr: {self._text}: the name {name} does not resolve ({why}): "
                    "correct it, or make its record"
                ) from error
        raise SourceFailed(
            f"discovery_addr: {self._text}: the name {name} does not resolve within "
            f"{RESOLVE_S:g} s: look at /etc/resolv.conf of this host"
        )
