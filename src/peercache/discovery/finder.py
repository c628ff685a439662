"""The finder: follows every source of a node, for as long as the node runs.

`DnsSource` is dns://NAME:PORT: all addresses of a name, such as that of a headless service,
resolved again and again.
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
    OnAddresses,
    Resolver,
    SourceFailed,
    cleaned,
    looked_up,
    printable,
)
from peercache.observability.metrics import Metrics

ASK_AGAIN_S = 10.0
"""How often a name is resolved: the system's resolver does not return how long its answer is valid,
and a new node contacts the others itself."""


@final
class DnsSource:
    """The addresses of one name."""

    def __init__(self, address: DnsAddress, lookup: Lookup = looked_up) -> None:
        """Use the system's resolver."""
        self._address = address
        self.text = address.text
        self._resolver = Resolver(lookup)

    async def follow(self, on_addresses: OnAddresses) -> None:
        """Report all addresses, again and again; raise SourceFailed."""
        name, port = self._address.name, self._address.port
        while True:
            hosts = await self._resolver.resolve(name, port)
            on_addresses([format_address(host, port) for host in hosts])
            await trio.sleep(ASK_AGAIN_S)


AGAIN_MIN_S = 1.0
AGAIN_MAX_S = 30.0
"""Back-off of a source that fails: a thousand nodes must not keep a server from starting."""


def source_of(
    address: SourceAddress,
    *,
    name: str,
    own_address: Callable[[], str],
    rng: random.Random,
    etcd_tls: Callable[[], ssl.SSLContext],
) -> AddressSource:
    """Return the client of a source.

    name, own_address: the name under which this node is published, and its address.
    etcd_tls: returns the TLS context for etcds://. Raises ConfigError.
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
    """Collects the addresses of all sources; a failing source keeps its last addresses."""

    def __init__(
        self,
        sources: Sequence[AddressSource],
        *,
        on_addresses: Callable[[tuple[str, ...]], None],
        rng: random.Random,
        metrics: Metrics,
        log: Any,
    ) -> None:
        """Call `on_addresses` with the addresses of all sources whenever they have changed."""
        self._sources = sources
        self._on_addresses = on_addresses
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
                # Nothing that a source sends must end a node.
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
        # In the same order on every host: a DNS answer has no order.
        self._on_addresses(tuple(sorted(frozenset().union(*self._found.values()))))

    def _fail(self, text: str, reason: str) -> None:
        problem = f"discovery_addr: {text}: {reason}"
        self._metrics.discovery_answering.labels(text).set(0)
        self._metrics.discovery_failures.labels(text).inc()
        if text not in self._problems:
            self._log.warning("discovery.source_failed", source=text, problem=problem)
        self._problems[text] = problem
