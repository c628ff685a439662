"""Whole nodes and clients over a cable: what one host stores, another reads by one-sided READs.

Two "hosts" in one guest: one uses rxe1, the other rxe2. `fabric = rdma` keeps the reader from
finding out that both are the same machine, where shared memory would be nearer.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest

from peercache import Client
from peercache.errors import ConfigError
from tests.pace import wait_until
from tests.rdma import links
from tests.rdma.links import received_bytes
from tests.system.nodes import (
    PAGE_BYTES,
    LocalCluster,
    NodeProcess,
    free_port,
    keys_of,
    pages_of,
    read,
)

pytestmark = pytest.mark.rdma

LEFT, RIGHT = "rxe1", "rxe2"
PAGES = 48
# Time is not what these tests state: the guest has one processor, and its host does other things.
PATIENT = {"exists_timeout_s": 60.0, "op_timeout_s": 60.0}


class TwoHosts(LocalCluster):
    """A node and clients on each end of a cable."""

    def host(self, device: str, home: str = "") -> NodeProcess:
        # The last flag wins: the cluster's own wants no metrics.
        flags = ["--rdma-device-names", device, "--metrics-port", free_port()]
        return self.start(home or device, flags=flags)

    def client_at(self, node: NodeProcess, device: str, **settings: object) -> Client:
        chosen = {"fabric": "rdma", "rdma_device_names": (device,), **PATIENT, **settings}
        made = Client.open(cluster=self.name, home=node.ready["home"], **chosen)
        self.clients.append(made)
        return made


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    """No node yet."""
    with TwoHosts() as cluster:
        yield cluster


def stored(client: Client, name: str) -> list[str]:
    """Set PAGES pages; return their keys."""
    keys = keys_of(name, PAGES)
    assert client.batch_set(keys, pages_of(keys)) == [True] * PAGES
    return keys


def warmed_up(reader: Client, keys: list[str]) -> None:
    """Read until all came by rdma: while a channel comes about, a slow machine makes misses."""
    wait_until(lambda: reader.batch_exists(keys) == PAGES)

    def is_warm() -> bool:
        hits = read(reader, keys)
        return all(hits) and hits_by_fabric(reader).get("pages_hit_rdma", 0) >= PAGES

    wait_until(is_warm)


def hits_by_fabric(client: Client) -> dict[str, float]:
    return {name: n for name, n in client.stats().items() if name.startswith("pages_hit") and n}


def scraped(node: NodeProcess) -> str:
    with urllib.request.urlopen(f"http://{node.ready['http']}/metrics") as page:
        return str(page.read().decode())


def test_pages_cross_the_cable_both_ways_and_metrics_say_how(hosts: TwoHosts) -> None:
    """Set on one host, read on the other, bit-exact; both nodes' metrics show rdma."""
    left, right = hosts.host(LEFT), hosts.host(RIGHT)
    at_left, at_right = hosts.client_at(left, LEFT), hosts.client_at(right, RIGHT)
    for writer, reader, node, interface in (
        (at_left, at_right, right, "rd2"),
        (at_right, at_left, left, "rd1"),
    ):
        keys = stored(writer, f"read-at-{interface}")
        warmed_up(reader, keys)
        before, hits = received_bytes(interface), hits_by_fabric(reader)["pages_hit_rdma"]

        assert read(reader, keys) == [True] * PAGES

        assert received_bytes(interface) - before > PAGES * PAGE_BYTES
        assert hits_by_fabric(reader) == {"pages_hit_rdma": hits + PAGES}
        expected = f'peercache_pages_hit_total{{fabric="rdma"}} {hits + PAGES:.1f}'
        wait_until(lambda n=node, e=expected: e in scraped(n))  # type: ignore[misc]


def test_a_batch_into_registered_memory_is_written_by_the_device(hosts: TwoHosts) -> None:
    """Memory that the engine registered, pages scattered in it, is filled with no copy of ours."""
    left, right = hosts.host(LEFT), hosts.host(RIGHT)
    keys = stored(hosts.client_at(left, LEFT), "registered")
    reader = hosts.client_at(right, RIGHT)
    memory = np.full(PAGES * PAGE_BYTES, 0xA5, np.uint8)
    end = reader.register_memory(memory.ctypes.data, len(memory), memory)
    warmed_up(reader, keys)
    half = PAGE_BYTES // 2
    # Each page in two pieces, the second before the first.
    places = [memory.ctypes.data + page * PAGE_BYTES for page in range(PAGES)]
    segments = [[(at + half, half), (at, half)] for at in places]

    hits = reader.batch_get_into(keys, segments)
    end()

    assert hits == [True] * PAGES
    for page, right_bytes in enumerate(pages_of(keys)):
        got = memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
        assert np.array_equal(got, np.roll(right_bytes, half))


def test_an_owner_killed_and_started_again_is_read_again(hosts: TwoHosts) -> None:
    """SIGKILL: misses in time while it is gone; what its successor stores is hit."""
    # The first one stays: it is where the others find each other.
    left, right = hosts.host(LEFT), hosts.host(RIGHT)
    reader = hosts.client_at(left, LEFT)
    keys = stored(hosts.client_at(right, RIGHT), "before")
    warmed_up(reader, keys)

    right.kill()
    started_s = time.monotonic()
    gone = read(reader, keys)
    took_s = time.monotonic() - started_s
    successor = hosts.host(RIGHT, home="again")
    hosts.wait_for_members(left, 2)
    newer = stored(hosts.client_at(successor, RIGHT), "after")
    wait_until(lambda: reader.batch_exists(newer) == PAGES)
    wait_until(lambda: read(reader, newer) == [True] * PAGES)

    assert not any(gone)
    assert took_s < PATIENT["op_timeout_s"] / 2


def test_a_pulled_cable_is_read_over_tcp_and_rdma_comes_back(
    hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fabric = auto`, and shared memory out of the way: no page is missed for a dead port."""
    # A peer of another boot: the reader believes it to be on another machine.
    left = hosts.host(LEFT)
    right = hosts.host(RIGHT)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("peercache.client.assembly.boot_id", lambda: "another machine")
        reader = hosts.client_at(right, RIGHT, fabric="auto")
    keys = stored(hosts.client_at(left, LEFT), "fallback")
    warmed_up(reader, keys)
    healthy = hits_by_fabric(reader)

    with links.pulled("rd1"):
        assert read(reader, keys) == [True] * PAGES
        without = hits_by_fabric(reader)

    def is_rdma_again() -> bool:
        before = hits_by_fabric(reader)["pages_hit_rdma"]
        assert read(reader, keys) == [True] * PAGES
        return hits_by_fabric(reader)["pages_hit_rdma"] == before + PAGES

    assert healthy["pages_hit_rdma"] >= PAGES
    assert without["pages_hit_tcp"] > healthy.get("pages_hit_tcp", 0)
    wait_until(is_rdma_again)


def test_rdma_asked_for_without_a_device_is_an_error(hosts: TwoHosts) -> None:
    """`fabric = rdma` and a name that no device has: said at once, by name."""
    node = hosts.host(LEFT)

    with pytest.raises(ConfigError, match="rxe9"):
        Client.open(
            cluster=hosts.name, home=node.ready["home"], fabric="rdma", rdma_device_names=("rxe9",)
        )


def test_two_rails_share_a_batch_of_whole_nodes(hosts: TwoHosts) -> None:
    """Two devices on each host: the bytes of one batch come over both cables."""
    left = hosts.start("left", flags=["--rdma-device-names", "rxe1,rxe3"])
    right = hosts.start("right", flags=["--rdma-device-names", "rxe2,rxe4"])
    writer = hosts.client_at(left, "rxe1", rdma_device_names=("rxe1", "rxe3"))
    reader = hosts.client_at(right, "rxe2", rdma_device_names=("rxe2", "rxe4"))
    keys = stored(writer, "rails")
    warmed_up(reader, keys)
    shares: list[list[float]] = []

    def is_shared() -> bool:
        before = [received_bytes("rd2"), received_bytes("rd4")]
        assert read(reader, keys) == [True] * PAGES
        after = [received_bytes("rd2"), received_bytes("rd4")]
        both = zip(before, after, strict=True)
        shares.append([(end - begin) / (PAGES * PAGE_BYTES) for begin, end in both])
        return min(shares[-1]) > 0.2

    # A rail that was slow once is left out for a while.
    wait_until(is_shared)
    print(shares)
