"""The owner's side of a segment: its layout, a full file system, and what is left of the dead."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peercache.errors import AddressTaken, PoolTooLarge, Rejected
from peercache.memory import kernel
from peercache.memory.attached import AttachedSegment
from peercache.memory.layout import (
    HEADER_BYTES,
    Header,
    Layout,
    boot_id,
    is_node_file,
    pack_header,
    parse_header,
    segment_name,
)
from peercache.memory.published import POPULATE_CHUNK_BYTES, PublishedSegment, remove_leftovers
from peercache.model.ids import Incarnation
from peercache.model.seal import SEAL
from peercache.trust.sharing import Sharing
from tests.children import in_child

GRANULE = 16384
NODE = Incarnation(0x1234_5678_9ABC_DEF0)


def publish(folder: Path, granules: int = 8, node: Incarnation = NODE) -> PublishedSegment:
    return PublishedSegment.create(
        folder, incarnation=node, page_bytes=granules * GRANULE, granule=GRANULE
    )


@pytest.fixture
def segment(shm_dir: Path) -> Iterator[PublishedSegment]:
    segment = publish(shm_dir)
    yield segment
    segment.close()


def test_created_segment_states_whose_it_is_and_is_private(
    segment: PublishedSegment, shm_dir: Path
) -> None:
    """The file has the node's name, its full size, mode 0600 and a header that parses."""
    found = segment.path.stat()
    header = parse_header(segment.path.read_bytes()[:4096])
    assert segment.path == shm_dir / segment_name(NODE)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size == Layout.of(8 * GRANULE, GRANULE).total_bytes
    assert (header.incarnation, header.page_bytes, header.boot_id) == (NODE, 8 * GRANULE, boot_id())


def test_words_of_slots_never_committed_are_zero(segment: PublishedSegment) -> None:
    """No record has the generation zero, so none fits the seal of an unused slot."""
    assert len(segment.words) == len(segment.seals) == 8
    assert not segment.seals.view(np.uint8).any()


def test_store_words_changes_the_named_words_and_no_others(segment: PublishedSegment) -> None:
    """Words are stored at their indices, in order; an index before the table is our bug."""
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


def test_store_words_stores_what_the_seals_name_before_the_words(segment: PublishedSegment) -> None:
    """Key, space and length of each slot are stored with its word; an odd word leaves them."""
    named = np.zeros(2, SEAL)
    named["key"], named["space"], named["length"] = [b"k" * 16, b"l" * 16], [7, 2**64 - 1], [1, 2]

    segment.store_words(np.array([6, 1]), np.array([12, 14], np.uint64), named)
    segment.store_words(np.array([6]), np.array([13], np.uint64))

    seals = segment.seals[[6, 1, 0]]
    assert seals["word"].tolist() == [13, 14, 0]
    assert seals["key"].tolist() == [b"k" * 16, b"l" * 16, bytes(16)]
    assert (seals["space"].tolist(), seals["length"].tolist()) == ([7, 2**64 - 1, 0], [1, 2, 0])


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
    """Two pools that fit one by one: the second one's populate reports it, and both live on.

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


def test_second_segment_of_one_incarnation_is_refused(
    segment: PublishedSegment, shm_dir: Path
) -> None:
    """A file that is there is never reopened or overwritten."""
    segment.store_words(np.array([0]), np.array([42], np.uint64))

    with pytest.raises(AddressTaken):
        publish(shm_dir)

    assert segment.words[0] == 42
    assert segment.path.exists()


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


def test_forked_child_that_closes_leaves_the_file(segment: PublishedSegment) -> None:
    """The file belongs to the process that made it; a child's exit must not take it away."""
    assert in_child(segment.close) == 0

    assert segment.path.exists()


def test_words_are_never_torn_for_another_process(start_owner: Callable[..., Any]) -> None:
    """While an owner stores words of equal halves without pause, no load has unequal ones."""
    owner = start_owner(NODE)
    segment = AttachedSegment.open(owner.path, incarnation=NODE, writable=False)
    offsets = np.zeros(1000, np.uint64)
    owner.send("store 0 0")
    owner.send("spin 1000000")

    seen: set[int] = set()
    rounds = 0
    while (rounds < 300 or len(seen) < 5) and rounds < 100_000:
        seen.update(np.unique(segment.words(offsets)).tolist())
        rounds += 1

    assert len(seen) >= 5
    assert all(word >> 32 == word & 0xFFFF_FFFF for word in seen)
    segment.close(1.0)


HEADER = Header(Incarnation(0xABCDEF), 16384, 64 * 16384, "0" * 36)


@given(st.integers(0, 12), st.integers(1, 5000), st.integers(0, 4095))
def test_layout_gives_each_granule_its_seal_and_overlaps_nothing(
    shift: int, granules: int, rest: int
) -> None:
    """Header, seals and pages follow each other, pages aligned, for every size."""
    granule = 4096 << shift

    layout = Layout.of(granules * granule + rest, granule)

    assert layout.page_bytes == granules * granule
    assert layout.seals_count == granules
    assert layout.seals_offset >= HEADER_BYTES
    assert layout.pages_offset >= layout.seals_offset + 32 * granules
    assert layout.total_bytes == layout.pages_offset + layout.page_bytes
    assert layout.pages_offset % (2 * 2**20 if layout.page_bytes >= 2 * 2**20 else 4096) == 0
    assert layout.seals_offset % 32 == 0


def test_every_truncation_of_a_header_is_rejected() -> None:
    """A file that ends within its header is no segment."""
    raw = pack_header(HEADER)

    for size in range(len(raw)):
        with pytest.raises(Rejected):
            parse_header(raw[:size])


@pytest.mark.parametrize(
    ("offset", "replacement", "reason"),
    [
        (0, b"PEERCACH", "not a published segment"),
        (8, struct.pack("<I", 1), "layout version 1"),
        (16, struct.pack("<Q", 0), "incarnation 0"),
        (24, struct.pack("<Q", 0), "granule of 0"),
        (24, struct.pack("<Q", 2048), "granule of 2048"),
        (24, struct.pack("<Q", 16385), "granule of 16385"),
        (32, struct.pack("<Q", 0), "page memory of 0"),
        (32, struct.pack("<Q", 16384 + 1), "page memory of 16385"),
        (32, struct.pack("<Q", 2**63), "page memory of 9223372036854775808"),
        (40, b"\xff", "boot id"),
    ],
)
def test_header_with_a_wrong_field_is_rejected_with_its_reason(
    offset: int, replacement: bytes, reason: str
) -> None:
    """Each field that cannot be is named."""
    raw = bytearray(pack_header(HEADER))
    raw[offset : offset + len(replacement)] = replacement

    with pytest.raises(Rejected, match=reason):
        parse_header(bytes(raw))


@given(st.binary(max_size=200), st.booleans())
def test_garbage_is_rejected_and_never_crashes(garbage: bytes, begins_well: bool) -> None:
    """Arbitrary bytes raise Rejected, or are a header that could have been packed."""
    raw = pack_header(HEADER)[:12] + garbage if begins_well else garbage

    try:
        header = parse_header(raw)
    except Rejected:
        return

    assert parse_header(pack_header(header)) == header


def test_boot_id_fits_a_header() -> None:
    """The boot id of this host comes back from a header as it went in."""
    header = Header(Incarnation(1), 4096, 4096, boot_id())

    assert 0 < len(boot_id()) <= 36
    assert parse_header(pack_header(header)) == header
    assert parse_header(pack_header(header).ljust(HEADER_BYTES, b"\0")) == header


def test_only_segment_names_are_segment_names() -> None:
    """Other files of the folder are never taken for ours."""
    assert segment_name(0xABC) == "peercache-0000000000000abc"
    assert is_node_file(segment_name(2**64 - 1))
    for name in ("peercache-", "peercache-xyz", segment_name(1) + "~", "a" + segment_name(1),
                 segment_name(1) + "\n", segment_name(10).upper()):  # fmt: skip
        assert not is_node_file(name)


def test_segment_of_a_killed_process_is_removed_and_of_a_live_one_stays(
    shm_dir: Path, start_owner: Callable[..., Any]
) -> None:
    """SIGKILL gives the file free; a process that lives keeps its own, this one's included."""
    dead, alive, mine = start_owner(1), start_owner(2), publish(shm_dir)
    before = remove_leftovers(shm_dir)
    dead.kill()

    removed = remove_leftovers(shm_dir)

    assert before == []
    assert removed == [segment_name(1)]
    assert sorted(shm_dir.iterdir()) == sorted([alive.path, mine.path])
    assert remove_leftovers(shm_dir) == []
    mine.close()


def test_what_is_no_segment_file_stays(shm_dir: Path) -> None:
    """Other names, folders, pipes and links are left alone, and none of them blocks."""
    (shm_dir / "peercache-notes").write_text("mine")
    (shm_dir / segment_name(1)).mkdir()
    os.mkfifo(shm_dir / segment_name(2))
    (shm_dir / segment_name(3)).symlink_to(shm_dir / "peercache-notes")
    before = sorted(shm_dir.iterdir())

    removed = remove_leftovers(shm_dir)

    assert removed == []
    assert sorted(shm_dir.iterdir()) == before


def test_folder_that_is_not_there_has_no_leftovers(tmp_path: Path) -> None:
    """A wrong folder is reported elsewhere; here it is only empty."""
    assert remove_leftovers(tmp_path / "nowhere") == []


def test_file_being_created_survives_a_removal_before_its_lock(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 the file is made · 2 another start removes it · 3 its lock is taken: made again."""
    real, events = fcntl.flock, []

    def flock(file: int, operation: int) -> None:
        if not events:
            events.append("removed")
            events.extend(remove_leftovers(shm_dir))
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)

    segment = publish(shm_dir)

    assert events == ["removed", segment_name(NODE)]
    assert remove_leftovers(shm_dir) == []
    assert segment.path.exists()
    segment.close()


def test_removal_that_comes_late_does_not_remove_the_successor(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 a remover opens a dead file · 2 it goes, a new one has its name · 3 the remover locks."""
    (shm_dir / segment_name(NODE)).write_bytes(b"of a dead process")
    real, made = fcntl.flock, []

    def flock(file: int, operation: int) -> None:
        if not made:
            made.append("soon")
            (shm_dir / segment_name(NODE)).unlink()
            made.append(publish(shm_dir))
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)

    removed = remove_leftovers(shm_dir)

    segment = made[1]
    assert isinstance(segment, PublishedSegment)
    assert removed == []
    assert segment.path.exists()
    segment.close()


def test_no_created_segment_is_lost_while_others_remove_leftovers(shm_dir: Path) -> None:
    """Two processes remove leftovers without pause while this one creates segments."""
    script = (
        "import sys\n"
        "from peercache.memory.published import remove_leftovers\n"
        "print('ready', flush=True)\n"
        "while True: remove_leftovers(sys.argv[1])\n"
    )
    removers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(shm_dir)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for remover in removers:
        assert remover.stdout is not None
        remover.stdout.readline()

    lost = []
    for number in range(1, 301):
        segment = publish(shm_dir, node=Incarnation(number))
        if not segment.path.exists():
            lost.append(number)
        segment.close()

    alive = [remover.poll() is None for remover in removers]
    for remover in removers:
        remover.kill()
        remover.wait()
        assert remover.stdout is not None
        remover.stdout.close()
    assert alive == [True, True]
    assert lost == []


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a file of another user")
def test_the_leftover_of_another_uid_stays(shm_dir: Path, start_owner: Callable[..., Any]) -> None:
    """Only files of uids that share the host are this node's to remove."""
    dead = start_owner(1)
    dead.kill()
    os.chown(dead.path, 65_534, -1)

    assert remove_leftovers(shm_dir) == []
    assert dead.path.exists()
    assert remove_leftovers(shm_dir, Sharing.of(share_uids=("65534",))) == [segment_name(1)]
