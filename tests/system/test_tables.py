"""The directory tables of real nodes, read by a client while the nodes are stopped, or spoilt."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from peercache.model.reads import TICK_AGE_MAX_S
from tests.pace import wait_until
from tests.system.nodes import LocalCluster, keys_of, pages_of, read

PAGES = 16
SHM = Path("/dev/shm")
HEADER_BYTES = 4096
TIMEOUT: dict[str, object] = {
    "fabric": "shm", "location_cache_entries": 0, "op_timeout_s": 2.0, "exists_timeout_s": 2.0,
}  # fmt: skip


def missed(stats: dict[str, int | float | str], reason: str) -> int:
    """Return how many pages were missed for a reason."""
    return int(stats.get(f"pages_missed_{reason}", 0))


@pytest.mark.slow
@pytest.mark.usefixtures("stalls")
def test_tables_of_stopped_nodes_find_what_they_know_and_call_nothing_absent() -> None:
    """1. Both nodes are stopped: no question is answered. 2. Their tables are filled with garbage.
    1. All that was stored is read, and nothing else is absent for certain. 2. No byte is wrong.
    """
    with LocalCluster() as cluster:
        nodes = cluster.start_many(2)
        stored, never = keys_of("stopped", PAGES), keys_of("never", PAGES)
        assert cluster.client(nodes[1]).batch_set(stored, pages_of(stored)) == [True] * PAGES
        reader = cluster.client(nodes[0], **TIMEOUT)
        probe = keys_of("probe", 1)
        # Authority has come: a page that never was is absent without a question.
        wait_until(lambda: reader.batch_exists(probe) == 0 and read(reader, probe) == [False])
        wait_until(lambda: missed(reader.stats(), "absent") > 0)
        before = missed(reader.stats(), "absent")

        for node in nodes:
            node.pause()
        stopped_at = time.monotonic()
        wait_until(lambda: time.monotonic() > stopped_at + 2 * TICK_AGE_MAX_S)
        found = reader.batch_exists(stored), read(reader, stored)
        not_found = read(reader, never)
        after = missed(reader.stats(), "absent")

        assert found == (PAGES, [True] * PAGES)
        assert not_found == [False] * PAGES
        assert after == before
        for seed in range(8):
            spoil(nodes[0].ready["node"], random.Random(seed), with_header=seed == 7)
            read(reader, [*never, *stored])
        for node in nodes:
            node.kill()


def spoil(node: str, rng: random.Random, *, with_header: bool) -> None:
    """Flip bits of a table, more of them in its rows than in its index."""
    path = SHM / f"peercache-table-{node}"
    file = os.open(path, os.O_RDWR)
    at, size, flipped = 0 if with_header else HEADER_BYTES, os.fstat(file).st_size, 0
    while at < size:
        try:
            begin = os.lseek(file, at, os.SEEK_DATA)
        except OSError:
            break
        at = os.lseek(file, begin, os.SEEK_HOLE)
        data = bytearray(os.pread(file, at - begin, begin))
        for place, byte in enumerate(data):
            if byte and rng.random() < 0.02:
                data[place] ^= 1 << rng.randrange(8)
                flipped += 1
        os.pwrite(file, data, begin)
    os.close(file)
    assert flipped > 10
