"""dns://NAME:PORT: all addresses of a name, such as that of a headless service, asked again."""

from __future__ import annotations

from typing import final

import trio

from peercache.config.discovery import DnsAddress
from peercache.config.quantities import format_address
from peercache.discovery.port import Tell
from peercache.discovery.resolving import Lookup, Resolver, looked_up

ASK_AGAIN_S = 10.0
"""How often a name is asked: the system's resolver does not tell how long its answer holds, and a
new node knocks itself."""


@final
class DnsSource:
    """The addresses of one name."""

    def __init__(self, address: DnsAddress, lookup: Lookup = looked_up) -> None:
        """Ask the system's resolver."""
        self._address = address
        self._resolver = Resolver(address.text, lookup)

    @property
    def text(self) -> str:
        """The entry of `discovery_addr`."""
        return self._address.text

    async def follow(self, tell: Tell) -> None:
        """Tell all addresses, again and again; raise SourceFailed."""
        name, port = self._address.name, self._address.port
        while True:
            hosts = await self._resolver.resolve(name, port)
            tell([format_address(host, port) for host in hosts])
            await trio.sleep(ASK_AGAIN_S)
