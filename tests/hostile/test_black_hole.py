"""A stream that a stranger ends in its holder's name: the holder's pages are found again.

Without certificates any process may speak in a member's name (`test_control_tls.py` shows that with
them none can). It empties an owner's records by one Repair, under a number that its holder never
reaches. That used to be for good: 300 hits became 0, and nothing that the holder published came in.
"""

from __future__ import annotations

import time

import attrs
import pytest

from peercache.client.client import Client
from peercache.config.settings import Config
from peercache.model.records import BUCKETS, DOUBTED_NUMBERS
from peercache.wire.messages.directory import Repair
from peercache.wire.messages.session import Welcome
from tests.hostile.garbage import hello
from tests.hostile.strangers import Caller, metric
from tests.pace import FACTOR, assert_within, wait_until
from tests.system.nodes import CALL_S, LocalCluster, NodeProcess

COUNT = 300
SIZE = 16 * 1024
HEALED_S = 10.0
"""Two summaries and a repair take 3 s (`STREAM_LATE_S`, `Config.summary_s`); the rest is for a busy
machine."""


def pages(names: list[str]) -> list[bytes]:
    """Return pages whose bytes name them."""
    return [name.encode().ljust(16, b".") * (SIZE // 16) for name in names]


def hits(client: Client, names: list[str]) -> int:
    """Return how many pages a client reads, each of them right."""
    buffers = [bytearray(SIZE) for _ in names]
    found = client.batch_get(names, buffers)
    for hit, buffer, page in zip(found, buffers, pages(names), strict=True):
        assert not hit or buffer == page
    return sum(found)


def received(node: NodeProcess, kind: str) -> float:
    """Return how many messages of a kind a node has received."""
    return metric(node, "peercache_messages_received").get(kind, 0.0)


def end_stream(cluster: LocalCluster, owner: NodeProcess, holder: NodeProcess, number: int) -> None:
    """Say at an owner that a holder has nothing, in the holder's name and under this number."""
    before = received(owner, "Repair")
    sender = int(holder.ready["node"], 16)
    with Caller.at(owner, "control") as stranger:
        for said in (hello(cluster.name, is_node=True), Repair(number, bytes(range(BUCKETS)), b"")):
            stranger.say(said, sender=sender)
        assert isinstance(stranger.answer(), Welcome)
        wait_until(lambda: received(owner, "Repair") > before)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2**64 - 1, 10_000], ids=["end of the range", "a little ahead"])
def test_a_stream_that_a_stranger_ends_goes_on(number: int) -> None:
    """Three nodes: pages of one of them, read at another, before and after the are at both."""
    names = [f"page-{at}" for at in range(COUNT)]
    with LocalCluster() as cluster:
        holder, *owners = (cluster.start(flags=["--metrics-port=-1"]) for _ in range(3))
        for node in cluster.nodes:
            cluster.wait_for_members(node, 3)
        writer = cluster.client(holder)
        # After a view change a reader asks every owner, and one of three is the holder itself.
        settings = {"cluster": cluster.name, "home": owners[0].ready["home"]}
        settings |= {
            "op_timeout_s": CALL_S,
            "exists_timeout_s": CALL_S,
            "location_cache_entries": 0,
        }
        reader = Client.open(attrs.evolve(Config.load(settings), handover_s=0.0))
        cluster.clients.append(reader)
        assert all(writer.batch_set(names, pages(names)))
        wait_until(lambda: reader.batch_exists(names) == COUNT)
        assert hits(reader, names) == COUNT

        differed, jumps = received(holder, "SummaryDiffers"), -1.0

        def have_reported() -> bool:
            # An owner that has stalled makes the stream jump ahead: a lie from before is an old
            # message then, and changes nothing.
            nonlocal jumps
            if (seen := received(holder, "RequestFreshSummary")) > jumps:
                jumps = seen
                for owner in owners:
                    ahead = min(number + int(seen) * DOUBTED_NUMBERS, 2**64 - 1)
                    end_stream(cluster, owner, holder, ahead)
            return received(holder, "SummaryDiffers") >= differed + len(owners)

        began = time.monotonic()
        # Each owner reports that it has lost the records; before that nothing is shown.
        wait_until(have_reported)
        wait_until(lambda: hits(reader, names) == COUNT)

        assert_within(time.monotonic() - began, HEALED_S * FACTOR, "to find all pages again")
        later = [f"later-{at}" for at in range(50)]
        assert all(writer.batch_set(later, pages(later)))
        wait_until(lambda: hits(reader, later) == len(later))
        assert hits(reader, names) == COUNT
