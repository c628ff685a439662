"""RDMA does not encrypt: where it may be used beside TLS, from the settings of both sides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peercache.actors.effects import Send
from peercache.actors.origin import Origin
from peercache.actors.ports import RdmaAbsent, RdmaFact, RdmaServes
from peercache.actors.rdma.actor import RdmaActor
from peercache.client import assembly
from peercache.client.assembly import ClientParts
from peercache.config.settings import Config
from peercache.memory.published import PublishedSegment
from peercache.node.node import Node
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics
from peercache.trust.rights import Session, refusal
from peercache.wire.messages.declared import Message, Role
from peercache.wire.messages.session import OpenChannel, Refused
from tests.contracts.fabric_suite import GRANULE, INCARNATION, Destination, published_segment
from tests.contracts.fakes import FakeFabric
from tests.rdma.fake_bench import CLIENT, FakeBench
from tests.rdma.fake_device import FakeRail, World, rng

PLAIN: dict[str, Any] = {}
TLS = {"tls_ca": "ca.crt", "tls_cert": "own.crt", "tls_key": "own.key"}
TRUSTED = {**TLS, "rdma_clear_text": True}
ANY, SOME = None, frozenset({7})


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[PublishedSegment]:
    """A published segment, all of it usable."""
    with published_segment(tmp_path) as published:
        yield published


def devices_of_node(settings: dict[str, Any], segment: PublishedSegment) -> RdmaFact:
    """Return what a node tells its rdma actor first: that it has devices, or why not."""
    told: list[RdmaFact] = []
    mailbox = SimpleNamespace(tell=lambda _, fact: told.append(fact))
    node: Any = SimpleNamespace(
        config=Config.load(settings), metrics=Metrics(), log=get_logger(), _rng=rng(),
        _queue_pairs=None, _segment=segment,
        _crew=SimpleNamespace(mailboxes=SimpleNamespace(rdma=mailbox)),
    )  # fmt: skip
    Node._open_queue_pairs(node)
    if node._queue_pairs is not None:
        return RdmaServes()
    sent = Node._serve_rdma(node, None)  # type: ignore[arg-type]
    with pytest.raises(StopIteration):
        sent.send(None)
    return told[0]


def client_opens_rails(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether a client looks for devices."""
    rail: Any = FakeRail(World())
    monkeypatch.setattr(assembly, "open_rails", lambda _: ((rail,), ()))
    wiring: Any = SimpleNamespace(_config=Config.load(settings), log=get_logger())
    return bool(ClientParts._open_rails(wiring))


@pytest.mark.parametrize(
    ("node", "client", "reads", "fabric", "why"),
    [
        (PLAIN, PLAIN, ANY, "rdma", ""),
        (TRUSTED, TRUSTED, ANY, "rdma", ""),
        (TLS, TRUSTED, ANY, "tcp", "no_rdma"),
        (TRUSTED, TLS, ANY, "tcp", ""),
        (TLS, TLS, ANY, "tcp", ""),
        (TRUSTED, TRUSTED, SOME, "tcp", "namespace"),
        (PLAIN, PLAIN, SOME, "tcp", "namespace"),
    ],
)
def test_pages_go_over_rdma_only_where_both_sides_trust_its_network(
    segment: PublishedSegment,
    monkeypatch: pytest.MonkeyPatch,
    node: dict[str, Any],
    client: dict[str, Any],
    reads: frozenset[int] | None,
    fabric: str,
    why: str,
) -> None:
    """A client whose certificate names namespaces gets no queue pair: one key opens all pages."""
    over_tcp = FakeFabric(granule=GRANULE)
    over_tcp.peers[INCARNATION] = segment
    over_tcp.name = "tcp"
    bench = FakeBench(segment, fallback=over_tcp)
    actor = RdmaActor(channels_a_client_max=4)
    actor.on_message(Origin(0), devices_of_node(node, segment), 0.0)
    session = Session(CLIENT, Role.READER, reads=reads)
    refused: list[str] = []

    def answer(wanted: OpenChannel) -> Message | None:
        if reason := refusal(session, wanted):
            refused.append(reason)
            return Refused(wanted.request, reason, "")
        (effect,) = actor.on_message(Origin(CLIENT, 1), wanted, 0.0)
        if isinstance(effect, Send):
            assert isinstance(effect.message, Refused)
            refused.append(effect.message.reason)
            return effect.message
        return bench.server.open(CLIENT, wanted)

    bench.answer = answer
    offsets, contents = bench.pages(2)
    into = Destination.of([[GRANULE]] * 2)
    has_rails = client_opens_rails(client, monkeypatch)

    got = bench.get(offsets, into) if has_rails else None
    pairs = bench.server.channel_count
    bench.close()

    assert has_rails is bool(got)
    assert refused == ([why] if why else [])
    assert pairs == (1 if fabric == "rdma" else 0)
    if got is not None:
        assert got.fabric == fabric
        assert [into.page(page) for page in range(2)] == contents


def test_node_says_why_it_serves_no_rdma(segment: PublishedSegment) -> None:
    """The reason reaches clients and people: which setting it is."""
    encrypted = devices_of_node(TLS, segment)
    other = devices_of_node({**TRUSTED, "fabric": "tcp"}, segment)

    assert encrypted == RdmaAbsent("this node has TLS, and not rdma_clear_text = true")
    assert other == RdmaAbsent("this node has fabric = tcp")
