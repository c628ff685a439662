"""The finder: follows every source of a node, for as long as the node runs.

`DnsSource` is dns://NAME:PORT: all addresses of a name, such as that of a headless service, asked
again.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, final

import trio

from peercache.config.entries import DnsAddress, EtcdAddress, SourceAddress
from peercache.config.quantities import format_address
from peercache.discovery.etcd import EtcdSource
from peercache.discovery.kubernetes import ApiServer, KubernetesSource
from peercache.discovery.port import (
    AddressSource,
    Lookup,
    Resolver,
    SourceFailed,
    Tell,
    cleaned,
    looked_up,
    printable,
)
from peercache.observability.metrics import Metrics

ASK_AGAIN_S = 10.0
"""How often a name is asked: the system's resolver does not tell how long its answer holds, and a
new node knocks itself."""


@final
class DnsSource:
    """The addresses of one name."""

    def __init__(self, address: DnsAddress, lookup: Lookup = looked_up) -> None:
        """Ask the system's resolver."""
        self._address = address
        self.text = address.text
        self._resolver = Resolver(lookup)

    async def follow(self, tell: Tell) -> None:
        """Tell all addresses, again and again; raise SourceFailed."""
        name, port = self._address.name, self._address.port
        while True:
            hosts = await self._resolver.resolve(name, port)
            tell([format_address(host, port) for host in hosts])
            await trio.sleep(ASK_AGAIN_S)


AGAIN_MIN_S = 1.0
AGAIN_MAX_S = 30.0
"""Back-off of a source that fails: a thousand nodes do not keep a server from its start."""


def source_of(
    address: SourceAddress,
    *,
    name: str,
    own_address: Callable[[], str],
    rng: random.Random,
    etcd_tls: Callable[[], ssl.SSLContext],
) -> AddressSource:
    """Return what asks a source.

    name, own_address: under which name this node may be found, and where.
    etcd_tls: makes the TLS of etcds://. Raises ConfigError.
    """
    if isinstance(address, DnsAddress):
        return DnsSource(address)
    if isinstance(address, EtcdAddress):
        tls = etcd_tls if address.has_tls else None
        if tls is not None:
            tls()  # A wrong file is noticed at the start.
        return EtcdSource(address, name=name, own_address=own_address, rng=rng, tls=tls)
    return KubernetesSource(address, ApiServer.of_this_pod(address.text), rng=rng)


@final
class Finder:
    """Collects what all sources say; one that fails keeps what it said last."""

    def __init__(
        self,
        sources: Sequence[AddressSource],
        *,
        tell: Callable[[tuple[str, ...]], None],
        rng: random.Random,
        metrics: Metrics,
        log: Any,
    ) -> None:
        """Tell the addresses of all sources together whenever they have changed."""
        self._sources = sources
        self._tell = tell
        self._rng = rng
        self._metrics = metrics
        self._log = log
        self._found: dict[str, frozenset[str]] = {}
        self._problems: dict[str, str] = {}

    async def run(self) -> None:
        """Work until cancelled."""
        async with trio.open_nursery() as nursery:
            for source in self._sources:
                nursery.start_soon(self._follow, source)

    async def _follow(self, source: AddressSource) -> None:
        pause_s = AGAIN_MIN_S
        while True:
            began = trio.current_time()
            try:
                await source.follow(partial(self._take, source.text))
            except SourceFailed as failure:
                self._fail(source.text, str(failure))
            except Exception as error:
                # Nothing that a source sends ends a node.
                self._fail(source.text, printable(repr(error)))
            if trio.current_time() - began > AGAIN_MAX_S:
                # It has worked for a while.
                pause_s = AGAIN_MIN_S
            await trio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, AGAIN_MAX_S)

    def _take(self, text: str, raw: Iterable[str]) -> None:
        answer = cleaned(raw)
        self._metrics.discovery_answering.labels(text).set(1)
        self._metrics.discovery_addresses.labels(text).set(len(answer.addresses))
        self._metrics.discovery_dropped.labels(text).inc(answer.dropped)
        if self._problems.pop(text, ""):
            self._log.info("discovery.source_answers_again", source=text)
        before = self._found.get(text)
        if before == answer.addresses:
            return
        self._log.info(
            "discovery.addresses_changed",
            source=text,
            count=len(answer.addresses),
            dropped=answer.dropped,
        )
        self._found[text] = answer.addresses
        # In one order on every host: the answer of a name has none.
        self._tell(tuple(sorted(frozenset().union(*self._found.values()))))

    def _fail(self, text: str, said: str) -> None:
        problem = f"discovery_addr: {text}: {said}"
        self._metrics.discovery_answering.labels(text).set(0)
        self._metrics.discovery_failures.labels(text).inc()
        if text not in self._problems:
            self._log.warning("discovery.source_failed", source=text, problem=problem)
        self._problems[text] = problem
