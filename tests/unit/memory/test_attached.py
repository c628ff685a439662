"""Another process's segment, mapped: what is believed, and what ends a mapping."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peercache.errors import PeerUnreachable, Rejected
from peercache.memory import attached, copying
from peercache.memory.attached import AttachedSegment, SealTable
from peercache.memory.copying import copy_pages
from peercache.memory.layout import HEADER_BYTES, segment_name
from peercache.memory.published import PublishedSegment
from peercache.model.ids import Incarnation
from peercache.model.runs import PageRuns
from peercache.model.seal import ODD, SEAL
from peercache.trust.sharing import Sharing
from tests.descriptors import open_files

GRANULE = 16384
NODE = Incarnation(5)
FIRST = np.zeros(1, np.uint64)


def publish(folder: Path, granules: int = 8, *, populated: bool = True) -> PublishedSegment:
    segment = PublishedSegment.create(
        folder, incarnation=NODE, page_bytes=granules * GRANULE, granule=GRANULE
    )
    if populated:
        segment.populate(granules * GRANULE)
    return segment


def attach(path: Path, *, writable: bool = False) -> AttachedSegment:
    return AttachedSegment.open(path, incarnation=NODE, writable=writable)


def copy(
    segment: AttachedSegment,
    host: np.ndarray[Any, Any],
    *,
    to_slots: bool,
    offset: int = 0,
) -> int:
    """Copy one page between `host` and a slot; return how many pages went."""
    return copy_pages(
        PageRuns.of([[(host.ctypes.data, host.nbytes)]]),
        np.array([segment.pages_address + offset], np.uint64),
        to_slots=to_slots,
        deadline=time.monotonic() + 60,
    )


def read_only_at(path: Path) -> int:
    """Return where this process has mapped a file that it may not write there."""
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    (begin,) = [
        words[0].split("-")[0] for words in mapped if words[1] == "r--s" and words[-1] == str(path)
    ]
    return int(begin, 16)


@pytest.fixture
def owner(shm_dir: Path) -> Iterator[PublishedSegment]:
    owner = publish(shm_dir)
    yield owner
    owner.close()


def test_words_and_bytes_of_another_process_are_seen_fresh(
    start_owner: Callable[..., Any],
) -> None:
    """Each call loads what the owner stored last, at the word of each slot's first granule."""
    owner = start_owner(NODE)
    segment = attach(owner.path)
    offsets = np.array([3, 0, 3], np.uint64) * np.uint64(GRANULE)
    host = np.zeros(2 * GRANULE, np.uint8)

    seen = []
    for word in (10, 20):
        owner.send(f"store 3 {word}")
        owner.send(f"fill {3 * GRANULE} {2 * GRANULE} {word}")
        copied = copy(segment, host, to_slots=False, offset=3 * GRANULE)
        seen.append((copied, set(host.tolist()), segment.words(offsets).tolist()))

    assert seen == [(1, {10}, [10, 0, 10]), (1, {20}, [20, 0, 20])]
    assert (segment.granule, segment.page_bytes) == (GRANULE, 64 * GRANULE)
    segment.close(1.0)


def test_writer_writes_pages_and_never_words(owner: PublishedSegment) -> None:
    """A writer's copy lands in the owner's page memory; its table is read-only."""
    segment = attach(owner.path, writable=True)
    host = np.full(GRANULE, 3, np.uint8)

    copied = copy(segment, host, to_slots=True, offset=GRANULE)

    assert copied == 1
    assert (owner.pages[GRANULE : 2 * GRANULE] == 3).all()
    assert (owner.pages[:GRANULE] == 0).all()
    to_words = read_only_at(owner.path) + owner.layout.seals_offset - segment.pages_address
    assert copy(segment, host[:8], to_slots=True, offset=to_words) == 0
    assert owner.words[0] == 0
    segment.close(1.0)


def test_reader_cannot_write(owner: PublishedSegment) -> None:
    """A copy into a reader's mapping ends as not copied; nothing changes, nothing crashes."""
    segment = attach(owner.path)

    copied = copy(segment, np.ones(GRANULE, np.uint8), to_slots=True)

    assert copied == 0
    assert (owner.pages == 0).all()
    segment.close(1.0)


def test_missing_file_is_unreachable(shm_dir: Path) -> None:
    """A node on a host of the same boot id whose folder we do not see."""
    with pytest.raises(PeerUnreachable):
        attach(shm_dir / segment_name(NODE))


def test_header_of_another_incarnation_is_rejected(owner: PublishedSegment, shm_dir: Path) -> None:
    """A file under the right name that belongs to another node is not believed."""
    other = Incarnation(6)
    path = shm_dir / segment_name(other)
    path.hardlink_to(owner.path)

    with pytest.raises(Rejected, match="it is of node"):
        AttachedSegment.open(path, incarnation=other, writable=False)
    with pytest.raises(Rejected, match="is no file of node"):
        AttachedSegment.open(owner.path, incarnation=other, writable=False)


def test_file_of_another_size_than_its_header_wants_is_rejected(owner: PublishedSegment) -> None:
    """Cut short anywhere, or grown: never mapped, so never a bus error."""
    whole = owner.layout.total_bytes

    # Downwards, so that the header stays as long as it can.
    for size in (whole + 4096, whole - 1, HEADER_BYTES + 8, HEADER_BYTES, 75, 1, 0):
        os.truncate(owner.path, size)
        with pytest.raises(Rejected, match="bytes, "):
            attach(owner.path)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("garbage", "not a published segment"),
        ("zeros", "not a published segment"),
        ("pipe", "no regular file"),
        ("folder", "no regular file"),
        ("link", "cannot open"),
        ("nul", "cannot open"),
    ],
)
def test_what_is_no_segment_is_rejected_without_blocking(
    shm_dir: Path, kind: str, reason: str
) -> None:
    """Whatever a peer's path leads to, opening it ends with Rejected."""
    path = shm_dir / segment_name(NODE)
    match kind:
        case "garbage":
            path.write_bytes(bytes(range(256)) * 64)
        case "zeros":
            path.write_bytes(bytes(1 << 20))
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link":
            (shm_dir / "target").write_bytes(b"short")
            path.symlink_to(shm_dir / "target")
        case "nul":
            path = Path(f"{shm_dir}/\0/{segment_name(NODE)}")

    with pytest.raises(Rejected, match=reason):
        attach(path)


def test_mapping_outlives_its_owner_and_its_file(start_owner: Callable[..., Any]) -> None:
    """After SIGKILL and unlink of the file, bytes and words are those of the last moment."""
    owner = start_owner(NODE)
    owner.send("store 0 4")
    owner.send(f"fill 0 {GRANULE} 8")
    segment = attach(owner.path)
    owner.kill()
    owner.path.unlink()
    host = np.zeros(GRANULE, np.uint8)

    copied = copy(segment, host, to_slots=False)

    assert copied == 1
    assert set(host.tolist()) == {8}
    assert segment.words(FIRST).tolist() == [4]
    segment.close(1.0)


def test_file_cut_short_under_a_mapping_is_no_crash(owner: PublishedSegment) -> None:
    """A mapped file is truncated: bytes fail to copy, words are odd."""
    segment = attach(owner.path)
    os.truncate(owner.path, 0)

    copied = copy(segment, np.zeros(GRANULE, np.uint8), to_slots=False)

    assert copied == 0
    assert segment.words(np.zeros(2, np.uint64)).tolist() == [int(ODD)] * 2
    assert segment.seals(np.zeros(2, np.uint64))["word"].tolist() == [int(ODD)] * 2
    assert segment.populate() == 0
    segment.close(1.0)


def test_populate_follows_the_owner_and_fills_no_hole(shm_dir: Path) -> None:
    """Only what the owner has populated is touched: the rest would be charged to us."""
    owner = publish(shm_dir, granules=8, populated=False)
    segment = attach(owner.path, writable=True)

    steps = []
    for granules in (0, 3, 8):
        owner.populate(granules * GRANULE)
        blocks = owner.path.stat().st_blocks
        steps.append((segment.populate(), owner.path.stat().st_blocks - blocks))

    assert steps == [(0, 0), (3 * GRANULE, 0), (8 * GRANULE, 0)]
    segment.close(1.0)
    owner.close()


def test_closed_segment_takes_no_new_use(owner: PublishedSegment) -> None:
    """After close, a use is refused; a second close finds it done."""
    segment = attach(owner.path)

    closed = [segment.close(0.0), segment.close(0.0)]

    assert closed == [True, True]
    assert segment.pages_address == 0
    with pytest.raises(PeerUnreachable), segment.in_use():
        pass
    assert segment.populate() == 0


def test_close_that_runs_out_of_time_leaves_the_unmapping_to_the_last_user(
    owner: PublishedSegment,
) -> None:
    """Under a copy nothing is unmapped: two users, a close of no timeout, then they end."""
    segment = attach(owner.path)
    address = segment.pages_address

    mapped = []
    with segment.in_use():
        with segment.in_use():
            mapped.append((segment.close(0.0), is_mapped(address)))
            mapped.append((segment.words(FIRST).tolist() == [0], is_mapped(address)))
        mapped.append((segment.close(0.0), is_mapped(address)))
    mapped.append((segment.close(0.0), is_mapped(address)))

    assert mapped == [(False, True), (True, True), (False, True), (True, False)]


def test_close_waits_for_the_last_use_in_another_thread(owner: PublishedSegment) -> None:
    """Close with timeout returns once the use has ended, and not before."""
    segment = attach(owner.path)
    inside, order = threading.Event(), []

    def use() -> None:
        with segment.in_use():
            inside.set()
            # Close has begun as soon as uses are refused.
            with suppress(PeerUnreachable):
                while True:
                    with segment.in_use():
                        os.sched_yield()
            order.append(("used", is_mapped(segment.pages_address)))

    user = threading.Thread(target=use)
    user.start()
    inside.wait()
    order.append(("closed", segment.close(60.0)))
    user.join()

    assert order == [("used", True), ("closed", True)]


def test_use_that_fails_is_no_use_any_more(owner: PublishedSegment) -> None:
    """An exception within a use gives it back."""
    segment = attach(owner.path)

    with pytest.raises(RuntimeError), segment.in_use():
        raise RuntimeError

    assert segment.close(0.0)


def is_mapped(address: int) -> bool:
    """Return whether this process has a mapping at the address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return "peercache-" in line
    return False


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a file of another user")
def test_a_segment_of_another_uid_is_never_mapped(owner: PublishedSegment) -> None:
    """Its owner could truncate it during a copy, and a load beyond the end is a bus error."""
    os.chown(owner.path, 65_534, -1)

    with pytest.raises(Rejected, match=r"65534.*share_uids") as caught:
        attach(owner.path)
    assert caught.value.reason == "owner"

    shared = Sharing.of(share_uids=("65534",))
    segment = AttachedSegment.open(owner.path, incarnation=NODE, writable=False, sharing=shared)
    segment.close(1.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a file of another user")
def test_bytes_and_seals_of_a_sharing_user_come_by_the_kernels_copy(shm_dir: Path) -> None:
    """They are the same as by a load, for more slots than one call of the kernel takes."""
    owner = publish(shm_dir, granules=1500)
    owner.store_words(np.arange(1500), np.arange(1500, dtype=np.uint64) * np.uint64(2))
    owner.pages[:] = 7
    offsets = np.arange(1500, dtype=np.uint64)[::-1] * np.uint64(GRANULE)
    ours = attach(owner.path)
    expected = ours.words(offsets).tolist(), ours.seals(offsets).tolist()
    ours.close(1.0)
    os.chown(owner.path, 65_534, -1)
    shared = Sharing.of(share_uids=("65534",))
    segment = AttachedSegment.open(owner.path, incarnation=NODE, writable=True, sharing=shared)
    host = np.zeros(2 * GRANULE, np.uint8)

    runs = PageRuns.of([[(host.ctypes.data, host.nbytes)]])
    copied = segment.copy(runs, FIRST, to_slots=False, deadline=time.monotonic() + 60)

    assert (segment.words(offsets).tolist(), segment.seals(offsets).tolist()) == expected
    assert expected[0] == list(range(2998, -2, -2))
    assert (copied, set(host.tolist())) == (1, {7})
    for load in (segment.words, segment.seals):
        with pytest.raises(AssertionError):
            load(np.array([1500 * GRANULE], np.uint64))
    segment.close(1.0)
    owner.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a file of another user")
@pytest.mark.parametrize("writable", [False, True])
def test_no_byte_of_a_sharing_users_segment_is_loaded(
    owner: PublishedSegment, monkeypatch: pytest.MonkeyPatch, *, writable: bool
) -> None:
    """Its owner may cut it short at any moment: a load would end this process, a copy only ends."""
    os.chown(owner.path, 65_534, -1)
    shared = Sharing.of(share_uids=("65534",))
    segment = AttachedSegment.open(owner.path, incarnation=NODE, writable=writable, sharing=shared)
    loads: list[Any] = []
    monkeypatch.setattr(copying, "_scatter", lambda *of: loads.append(of) or 0)
    monkeypatch.setattr(
        attached, "prefault", lambda *_of, may_load, **_more: loads.extend(["page"] * may_load)
    )
    host = np.zeros(GRANULE, np.uint8)

    runs = PageRuns.of([[(host.ctypes.data, host.nbytes)]])
    copied = segment.copy(runs, FIRST, to_slots=writable, deadline=time.monotonic() + 60)

    assert copied == 1
    assert segment.populate() == owner.layout.page_bytes
    assert loads == []
    segment.close(1.0)


def test_seals_that_went_while_they_were_loaded_are_unread(shm_dir: Path) -> None:
    """The kernel copies those that are still there: one that is missing makes all of them so."""
    owner = publish(shm_dir, granules=1500)
    owner.store_words(np.arange(1500), np.full(1500, 2, np.uint64))
    with owner.path.open("rb") as file:
        mapping = mmap.mmap(
            file.fileno(), owner.layout.pages_offset, mmap.MAP_SHARED, mmap.PROT_READ
        )
    seals = np.frombuffer(mapping, SEAL, 1500, owner.layout.seals_offset)
    table = SealTable(seals, granule=GRANULE, by_kernel=True)
    offsets = np.array([0, 1499 * GRANULE], np.uint64)
    before = table.words(offsets).tolist()

    os.truncate(owner.path, owner.layout.seals_offset + 4096)

    assert before == [2, 2]
    assert table.words(offsets).tolist() == [int(ODD)] * 2
    assert table.load(offsets)["word"].tolist() == [int(ODD)] * 2
    owner.close()


def test_populate_ends_where_the_kernel_refuses(
    owner: PublishedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only speed is lost: the thread that populates must not end with an error."""
    segment = attach(owner.path)

    def refuse(*_of: Any, **_more: Any) -> None:
        raise OSError(errno.ENOMEM, "no memory for page tables")

    monkeypatch.setattr(attached, "prefault", refuse)

    assert segment.populate() == 0
    segment.close(1.0)


def test_closed_segment_keeps_no_descriptor(owner: PublishedSegment) -> None:
    """A descriptor of a dead node's file would keep all of its memory."""
    before = open_files().count(owner.path)
    segment = attach(owner.path)
    assert open_files().count(owner.path) > before

    segment.close(1.0)

    assert open_files().count(owner.path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a file of another user")
def test_where_the_kernels_copy_is_forbidden_a_sharing_users_segment_is_not_mapped(
    owner: PublishedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(owner.path, 65_534, -1)
    monkeypatch.setattr(attached, "kernel_copies", lambda: False)

    with pytest.raises(Rejected, match="allow process_vm_readv"):
        AttachedSegment.open(
            owner.path, incarnation=NODE, writable=False,
            sharing=Sharing.of(share_uids=("65534",)),
        )  # fmt: skip


@pytest.mark.parametrize("mode", [0o602, 0o666])
def test_a_segment_that_every_user_may_write_is_never_mapped(
    owner: PublishedSegment, mode: int
) -> None:
    owner.path.chmod(mode)

    with pytest.raises(Rejected, match="every user"):
        attach(owner.path)


def test_a_link_in_the_place_of_a_segment_is_not_followed(
    owner: PublishedSegment, shm_dir: Path
) -> None:
    moved = shm_dir / "moved"
    owner.path.rename(moved)
    owner.path.symlink_to(moved)

    with pytest.raises(Rejected, match="cannot open"):
        attach(owner.path)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another group")
def test_with_a_group_its_members_may_map_a_segment(shm_dir: Path) -> None:
    sharing = Sharing.of(share_group="65532")
    owner = PublishedSegment.create(
        shm_dir, incarnation=NODE, page_bytes=GRANULE, granule=GRANULE, sharing=sharing
    )
    assert (owner.path.stat().st_gid, owner.path.stat().st_mode & 0o777) == (65_532, 0o660)

    AttachedSegment.open(owner.path, incarnation=NODE, writable=True, sharing=sharing).close(1.0)
    with pytest.raises(Rejected, match="share_group"):
        attach(owner.path)
    owner.close()
