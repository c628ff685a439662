"""The owner's side of a segment: a full file system, exported views, and whose the file is."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peercache.errors import AddressTaken, PoolTooLarge
from peercache.memory import kernel
from peercache.memory.attached import AttachedSegment
from peercache.memory.layout import Layout, boot_id, parse_header, segment_name
from peercache.memory.published import POPULATE_CHUNK_BYTES, PublishedSegment
from peercache.model.ids import Incarnation
from peercache.model.seal import SEAL

GRANULE = 16384
NODE = Incarnation(0x1234_5678_9ABC_DEF0)


def publish(folder: Path, granules: int = 8, node: Incarnation = NODE) -> PublishedSegment:
    return PublishedSegment.create(
        folder, incarnation=node, page_bytes=granules * GRANULE, granule=GRANULE
    )


def test_created_segment_says_whose_it_is_and_is_private(shm_dir: Path) -> None:
    """The file has the node's name, its full size, mode 0600 and a header that parses."""
    segment = publish(shm_dir)

    found = segment.path.stat()
    header = parse_header(segment.path.read_bytes()[:4096])
    assert segment.path == shm_dir / segment_name(NODE)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size == Layout.of(8 * GRANULE, GRANULE).total_bytes
    assert (header.incarnation, header.page_bytes, header.boot_id) == (NODE, 8 * GRANULE, boot_id())
    segment.close()


def test_words_of_slots_never_committed_are_zero(shm_dir: Path) -> None:
    """No record has the generation zero, so none fits the seal of an unused slot."""
    segment = publish(shm_dir)

    assert len(segment.words) == len(segment.seals) == 8
    assert not segment.seals.view(np.uint8).any()
    segment.close()


def test_store_words_changes_the_named_words_and_no_others(shm_dir: Path) -> None:
    """Words are stored at their indices, in order; an index before the table is our bug."""
    segment = publish(shm_dir)

    segment.store_words(np.array([3, 5, 3]), np.array([10, 20, 30], np.uint64))
    segment.store_words(np.array([], np.int64), np.array([], np.uint64))

    assert segment.words.tolist() == [0, 0, 0, 30, 0, 20, 0, 0]
    with pytest.raises(AssertionError):
        segment.store_words(np.array([-1]), np.array([40], np.uint64))
    with pytest.raises(AssertionError):
        segment.store_words(np.array([8]), np.array([40], np.uint64))
    with pytest.raises(AssertionError):
        # Not even those before it.
        segment.store_words(np.array([0, 8]), np.array([40, 40], np.uint64))
    assert segment.words.tolist() == [0, 0, 0, 30, 0, 20, 0, 0]
    segment.close()


def test_store_words_stores_what_the_seals_name_before_the_words(shm_dir: Path) -> None:
    """Key, space and length of each slot stand beside its word; an odd word leaves them."""
    segment = publish(shm_dir)
    named = np.zeros(2, SEAL)
    named["key"], named["space"], named["length"] = [b"k" * 16, b"l" * 16], [7, 2**64 - 1], [1, 2]

    segment.store_words(np.array([6, 1]), np.array([12, 14], np.uint64), named)
    segment.store_words(np.array([6]), np.array([13], np.uint64))

    seals = segment.seals[[6, 1, 0]]
    assert seals["word"].tolist() == [13, 14, 0]
    assert seals["key"].tolist() == [b"k" * 16, b"l" * 16, bytes(16)]
    assert (seals["space"].tolist(), seals["length"].tolist()) == ([7, 2**64 - 1, 0], [1, 2, 0])
    segment.close()


def test_populate_makes_memory_usable_in_steps(shm_dir: Path) -> None:
    """What is usable grows to what was asked, never beyond the pool, and never shrinks."""
    segment = publish(shm_dir, granules=4 * POPULATE_CHUNK_BYTES // GRANULE)
    page_bytes = segment.layout.page_bytes

    steps = [segment.populate(upto) for upto in (GRANULE, page_bytes // 2, GRANULE, 2 * page_bytes)]

    assert steps == [GRANULE, page_bytes // 2, page_bytes // 2, page_bytes]
    assert segment.path.stat().st_blocks * 512 >= page_bytes
    segment.close()


def test_pool_that_cannot_fit_is_refused_before_anything_is_made(shm_dir: Path) -> None:
    """More than the file system has free is a clear error, and leaves no file."""
    with pytest.raises(PoolTooLarge) as caught:
        publish(shm_dir, granules=2**50 // GRANULE)

    assert caught.value.wanted_bytes > 2**50
    assert caught.value.free_bytes < 2**50
    assert list(shm_dir.iterdir()) == []


@pytest.mark.parametrize("advice", [23, 9999])
def test_full_file_system_is_an_error_and_never_a_bus_error(
    small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch, advice: int
) -> None:
    """Two pools that fit one by one: the second one's populate says so, and both live on.

    With an advice that no kernel knows, this one answers as those before 5.14 do.
    """
    monkeypatch.setattr(kernel, "_POPULATE_WRITE", advice)
    first = publish(small_tmpfs, granules=120)
    second = publish(small_tmpfs, granules=150, node=Incarnation(2))
    first.populate(120 * GRANULE)

    with pytest.raises(PoolTooLarge) as caught:
        second.populate(150 * GRANULE)

    first.pages[:] = 7
    second.pages[: second.usable_bytes] = 9
    assert second.usable_bytes < 150 * GRANULE
    assert caught.value.path == str(small_tmpfs)
    assert second.populate(0) == second.usable_bytes
    first.close()
    second.close()


def test_file_system_that_fills_up_while_a_segment_is_made_leaves_no_file(
    small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 there is room · 2 another file takes it · 3 words are reserved: an error, no bus error."""
    real, filler = fcntl.flock, small_tmpfs / "filler"

    def flock(file: int, operation: int) -> None:
        with filler.open("wb") as other:
            found = os.statvfs(small_tmpfs)
            os.posix_fallocate(other.fileno(), 0, found.f_bavail * found.f_frsize)
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)

    with pytest.raises(PoolTooLarge):
        publish(small_tmpfs, granules=8)

    assert list(small_tmpfs.iterdir()) == [filler]


def test_second_segment_of_one_incarnation_is_refused(shm_dir: Path) -> None:
    """A file that is there is never reopened or overwritten."""
    segment = publish(shm_dir)
    segment.store_words(np.array([0]), np.array([42], np.uint64))

    with pytest.raises(AddressTaken):
        publish(shm_dir)

    assert segment.words[0] == 42
    assert segment.path.exists()
    segment.close()


def test_close_unlinks_and_leaves_exported_views_alive(shm_dir: Path) -> None:
    """A holder of a view of the pages may use it after close."""
    segment = publish(shm_dir)
    segment.populate(8 * GRANULE)
    view = segment.pages[: 2 * GRANULE]
    view[:] = 5

    segment.close()
    segment.close()

    assert list(shm_dir.iterdir()) == []
    assert (view == 5).all()
    assert segment.populate(8 * GRANULE) == 8 * GRANULE
    assert segment.pages.size == segment.words.size == 0


def test_populate_after_close_touches_nothing(shm_dir: Path) -> None:
    """A worker thread that comes late finds the segment closed and returns."""
    segment = publish(shm_dir)
    segment.close()

    assert segment.populate(8 * GRANULE) == 0


def test_forked_child_that_closes_leaves_the_file(shm_dir: Path) -> None:
    """The file belongs to the process that made it; a child's exit must not take it away."""
    segment = publish(shm_dir)
    child = os.fork()
    if child == 0:
        segment.close()
        os._exit(0)
    os.waitpid(child, 0)

    assert segment.path.exists()
    segment.close()


def test_words_are_never_torn_for_another_process(start_owner: Callable[..., Any]) -> None:
    """While an owner stores words of equal halves without pause, no load has unequal ones."""
    owner = start_owner(NODE)
    segment = AttachedSegment.open(owner.path, incarnation=NODE, writable=False)
    offsets = np.zeros(1000, np.uint64)
    owner.tell("store 0 0")
    owner.tell("spin 1000000")

    seen: set[int] = set()
    rounds = 0
    while (rounds < 300 or len(seen) < 5) and rounds < 100_000:
        seen.update(np.unique(segment.words(offsets)).tolist())
        rounds += 1

    assert len(seen) >= 5
    assert all(word >> 32 == word & 0xFFFF_FFFF for word in seen)
    segment.close(1.0)
