"""The disk tier with real nodes: pages outlive eviction and restarts, byte for byte."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from peercache import Client
from peercache.cli import main as cli
from peercache.model.records import RESIDENT
from peercache.storage.check import stats_of
from tests.pace import PROMPT_S, TIMEOUT_S, assert_within, wait_until
from tests.system.nodes import PAGE_BYTES, LocalCluster, free_port, keys_of, pages_of
from tests.tmpfs import mounted_tmpfs

PAGES = 96
"""12 MiB, in pools of 4."""


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """A cluster that is ended in every case."""
    with LocalCluster() as cluster:
        yield cluster


def flags_of(folder: Path, name: str) -> list[str]:
    """Return the flags of a node with a disk of its own."""
    path = folder / name
    path.mkdir(exist_ok=True)
    return ["--disk-enabled", "true", "--disk-path", str(path), "--disk-size", "64MiB"]


def names_of(first: int, count: int) -> list[str]:
    """Return keys."""
    return keys_of("disk", first + count)[first:]


def store_all(client: Client, names: list[str]) -> None:
    """Set pages in batches that the pool takes; each must be stored."""
    for begin in range(0, len(names), 8):
        batch = names[begin : begin + 8]
        assert all(client.batch_set(batch, pages_of(batch)))


def is_stored_in_memory(client: Client, names: list[str]) -> bool:
    """Set pages; return whether all of them are in memory afterwards."""
    store_all(client, names)
    return client.overlap(names).stored(RESIDENT) == len(names)


def read_all(client: Client, names: list[str], within_s: float = TIMEOUT_S) -> list[bool]:
    """Get pages in one batch, again until all have come; check every byte of every hit."""
    until = time.monotonic() + within_s
    while True:
        buffers = np.zeros((len(names), PAGE_BYTES), np.uint8)
        hits = client.batch_get(names, list(buffers))
        for name, buffer, hit in zip(names, buffers, hits, strict=True):
            assert not hit or buffer.tobytes() == pages_of([name])[0].tobytes(), "wrong bytes"
        if all(hits) or time.monotonic() > until:
            return hits
        time.sleep(0.05)


def wait_for_disk_pages(client: Client, pages: int) -> None:
    """Wait until a node has so many pages on its disk."""
    wait_until(lambda: client.stats().get("home_disk_pages", 0) >= pages)


def open_disk(client: Client) -> None:
    """Wait until a node's disk is open."""
    wait_until(lambda: client.stats().get("home_disk_open") == 1)


def test_more_pages_than_the_pool_holds_are_read_back_from_disk(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Three times the pool is set, and read at home and from another node, in one batch each."""
    writer = cluster.start(pool="4MiB", flags=flags_of(tmp_path, "a"))
    reader = cluster.start(pool="4MiB", flags=flags_of(tmp_path, "b"))
    cluster.wait_for_members(writer, 2)
    names = names_of(0, PAGES)
    at_home = cluster.client(writer)
    elsewhere = cluster.client(reader)
    open_disk(at_home)

    for begin in range(0, PAGES, 16):
        store_all(at_home, names[begin : begin + 16])
        wait_for_disk_pages(at_home, begin + 16)

    assert at_home.batch_exists(names) == PAGES
    assert all(read_all(at_home, names))
    assert all(read_all(elsewhere, names))
    assert at_home.stats()["home_pool_pages"] <= 32


def test_everything_is_read_back_after_every_node_was_restarted(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Killed and started again on the same folder, nodes serve what they had on disk."""
    names = names_of(0, PAGES)
    node = cluster.start("one", pool="4MiB", flags=flags_of(tmp_path, "a"))
    client = cluster.client(node)
    open_disk(client)
    for begin in range(0, PAGES, 16):
        store_all(client, names[begin : begin + 16])
        wait_for_disk_pages(client, begin + 16)
    # An index row comes a moment after its page; until then a kill may lose it.
    wait_until(lambda: stats_of(tmp_path / "a" / "0").pages == PAGES)

    node.kill()
    started = time.monotonic()
    again = cluster.start("one", pool="4MiB", flags=flags_of(tmp_path, "a"))
    fresh = cluster.client(again)
    first = read_all(fresh, names[:1])
    first_s = time.monotonic() - started

    assert first == [True]
    assert_within(first_s, PROMPT_S)
    assert all(read_all(fresh, names))
    assert all(read_all(client, names)), "the client that was there all the time finds it too"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["through", "on_evict"])
def test_graceful_restart_keeps_every_page(
    cluster: LocalCluster, tmp_path: Path, policy: str
) -> None:
    """Pages that are only in memory at SIGTERM are written before the node ends, and it logs it."""
    flags = [*flags_of(tmp_path, "a"), "--write-policy", policy]
    node = cluster.start("one", pool="32MiB", flags=flags)
    client = cluster.client(node)
    names = names_of(0, PAGES)
    open_disk(client)
    store_all(client, names)

    assert node.terminate() == 0
    again = cluster.start("one", pool="32MiB", flags=flags)
    fresh = cluster.client(again)

    assert all(read_all(fresh, names))
    assert '"pages_left": 0' in node.said()


def test_removed_pages_stay_removed_over_a_restart(cluster: LocalCluster, tmp_path: Path) -> None:
    """What was removed from disk is not there after a restart either."""
    names = names_of(0, 16)
    node = cluster.start("one", pool="4MiB", flags=flags_of(tmp_path, "a"))
    client = cluster.client(node)
    open_disk(client)
    store_all(client, names)
    wait_for_disk_pages(client, 16)

    went = client.remove(names[:4])
    # What was removed is forgotten within a moment; until then a kill may bring it back.
    wait_until(lambda: stats_of(tmp_path / "a" / "0").pages == 12)
    node.kill()
    again = cluster.start("one", pool="4MiB", flags=flags_of(tmp_path, "a"))
    fresh = cluster.client(again)
    open_disk(fresh)
    wait_until(lambda: fresh.batch_exists(names[-1:]) == 1)

    assert went == 4
    assert fresh.contains(names[:4]) == [False] * 4


def test_node_without_a_usable_folder_serves_from_memory(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """It is visible in its log and its figures, and is otherwise as ever."""
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    flags = ["--disk-enabled", "true", "--disk-path", str(blocked), "--disk-size", "64MiB"]
    flags += ["--metrics-port", free_port()]
    node = cluster.start(pool="4MiB", flags=flags)
    client = cluster.client(node)
    names = names_of(0, 4)

    store_all(client, names)
    wait_until(lambda: "opened" not in str(client.stats().get("home_disk_problem")))

    assert all(read_all(client, names))
    assert client.stats()["home_disk_open"] == 0
    assert "disk.ended" in node.said()
    reported = json.loads(node.page("/healthz"))
    assert reported["status"] == "degraded"
    assert str(blocked) in reported["reason"]


def test_a_small_file_system_that_is_full_is_shown_as_full(
    cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not as the part of disk_size that fits on it; the start logs that it is smaller."""
    with mounted_tmpfs(tmp_path / "small", "16m") as small:
        flags = [*flags_of(small, "a"), "--disk-free-floor", "0.1"]
        node = cluster.start(pool="4MiB", flags=flags)
        client = cluster.client(node)
        new = iter(range(0, 1_000_000, 8))

        def disk() -> dict[str, int]:
            # A page that is evicted before it is written does not get to the disk.
            store_all(client, names_of(next(new), 8))
            cli.main(["status", "--at", node.ready["control"], "--json"])
            (member,) = json.loads(capsys.readouterr().out)["members"]
            found: dict[str, int] = member["status"]["disk"]
            return found

        wait_until(lambda: disk()["used"] > 0.8 * disk()["size"] > 0)
        assert disk()["size"] < 16 * 2**20
        assert "disk.size_limited" in node.said()
        node.kill()


def test_damaged_pages_are_misses_and_the_others_hits(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Flipped bytes in the slabs cost those pages, a counter each, and nothing else."""
    node = cluster.start(pool="4MiB", flags=flags_of(tmp_path, "a"))
    client = cluster.client(node)
    names, others = names_of(0, 16), names_of(16, 64)
    open_disk(client)
    store_all(client, names)
    wait_for_disk_pages(client, 16)
    store_all(client, others)

    for slab in (tmp_path / "a").rglob("slab-*"):
        with slab.open("r+b") as file:
            content = bytearray(file.read())
            # A byte in every third page, wherever it is.
            for at in range(2 * 4096 + 500, len(content), 3 * PAGE_BYTES):
                content[at] ^= 0xFF
            file.seek(0)
            file.write(content)
    hits = read_all(client, names, within_s=0.0)
    again = read_all(client, names, within_s=0.0)

    assert 0 < sum(hits) < 16
    assert again == hits
    assert "disk.page_damaged" in node.said()
    assert all(client.batch_set(names, pages_of(names)))
    assert all(read_all(client, names))


def test_folder_that_vanishes_ends_the_tier_and_not_the_node(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """What was on disk only is withdrawn, what is in memory is served, and it is said."""
    node = cluster.start(pool="4MiB", flags=flags_of(tmp_path, "a"))
    client = cluster.client(node)
    names, others = names_of(0, 16), names_of(16, 32)
    open_disk(client)
    store_all(client, names)
    wait_for_disk_pages(client, 16)
    # Of pages that are stored within five seconds the last ones are evicted first.
    wait_until(lambda: is_stored_in_memory(client, others))

    def has_vanished() -> bool:
        # The node may begin a file in it meanwhile.
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        return not (tmp_path / "a").exists()

    wait_until(has_vanished)
    wait_until(lambda: client.stats()["home_disk_open"] == 0)

    assert "disk.ended" in node.said()
    assert all(read_all(client, others))
    wait_until(lambda: not any(client.contains(names)))

    def are_stored_and_read() -> bool:
        store_all(client, names)
        return all(read_all(client, names, within_s=0.0))

    # That the others were read is sent once a second: it may come when half of these are stored,
    # which are then the ones to give way.
    wait_until(are_stored_and_read)
