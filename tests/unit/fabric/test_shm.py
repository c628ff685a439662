"""The shared-memory fabric: the word after the bytes, and nothing outside a peer's page memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from peercache.fabric.shm import RETRY_S, SEGMENTS_MAX, ShmFabric
from peercache.memory.layout import boot_id, segment_name
from peercache.memory.published import PublishedSegment
from peercache.model.ids import Incarnation
from peercache.model.member import Member
from peercache.model.reads import PeerRead
from peercache.model.runs import U64, PageRuns
from peercache.model.seal import ODD
from peercache.observability.log import LOGGER
from peercache.observability.reasons import INTERNAL, PEER_UNREACHABLE, REFUSED
from tests.descriptors import open_files
from tests.system.nodes import capture_logs

GRANULE = 16384
NODE = Incarnation(9)
FOREVER = 1e18

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        """Start at 0."""
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@pytest.fixture
def owner(shm_dir: Path) -> Iterator[PublishedSegment]:
    """Publish 16 slots: slot i is full of byte i + 1, and its word is 100 + 2 i."""
    segment = publish(shm_dir)
    yield segment
    segment.close()


def publish(folder: Path, node: int = NODE, slots: int = 16, *, more: int = 0) -> PublishedSegment:
    """Publish slots with pages, and more without, which are not populated."""
    segment = PublishedSegment.create(
        folder,
        incarnation=Incarnation(node),
        page_bytes=(slots + more) * GRANULE,
        granule=GRANULE,
    )
    segment.populate(slots * GRANULE)
    segment.pages[: slots * GRANULE].reshape(slots, GRANULE)[:] = np.arange(
        1, slots + 1, dtype=np.uint8
    )[:, None]
    segment.store_words(np.arange(slots), 100 + 2 * np.arange(slots, dtype=np.uint64))
    return segment


def member(path: Path | str, node: int = NODE, boot: str | None = None) -> Member:
    return Member(
        incarnation=node, counter=0, state=0, head_rank=255, host_name="here", control="",
        data="", boot_id=boot_id() if boot is None else boot, segment=str(path),
    )  # fmt: skip


def asking(
    peer: Member,
    host: Bytes,
    offsets: list[int],
    lengths: list[int] | None = None,
    word: np.uint64 | None = None,
) -> PeerRead:
    """Read the slots at `offsets` into the rows of `host`, two runs a page."""
    pages, size = host.shape
    half = size // 2
    rows = host.ctypes.data + np.arange(pages) * size
    addresses = np.stack([rows, rows + half], 1)
    runs = PageRuns.regular(addresses, np.full(2 * pages, half), pages)
    places = np.array(offsets, np.uint64)
    return PeerRead(
        peer,
        places,
        runs.lengths if lengths is None else np.array(lengths, np.uint64),
        runs,
        np.full(len(places), word) if word is not None else generations_of(places),
    )


def generations_of(offsets: U64) -> U64:
    """Return the words that `publish` gives slots."""
    return np.uint64(100) + np.uint64(2) * (offsets // np.uint64(GRANULE))


def fabric(**options: Any) -> ShmFabric:
    return ShmFabric(boot_id=boot_id(), clock=options.pop("clock", Clock()), **options)


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (16 * GRANULE, GRANULE),
        (15 * GRANULE, 2 * GRANULE),
        (2**64 - GRANULE, GRANULE),
        (2**64 - GRANULE, 2 * GRANULE),
        (0, 2**63),
        (2**63, 2**63),
        (GRANULE + 8, GRANULE),
        (0, 0),
        (16 * GRANULE, 0),
    ],
)
def test_page_outside_the_page_memory_is_refused_and_others_are_read(
    owner: PublishedSegment, offset: int, length: int
) -> None:
    """Records are hints: one that leads outside, or between slots, reads nothing."""
    shm, host = fabric(), np.zeros((3, GRANULE), np.uint8)
    # The destination agrees with the record, whose size may be more than any memory: so the
    # addresses lead nowhere, and must not be looked at.
    good = asking(member(owner.path), host, [GRANULE, 0, 3 * GRANULE])
    sizes = np.array([GRANULE, length, GRANULE], np.uint64)
    addresses = np.array([host[0].ctypes.data, 4096, host[2].ctypes.data], np.uint64)
    places = np.array([GRANULE, offset, 3 * GRANULE], np.uint64)
    runs = PageRuns(addresses, sizes, np.arange(4))
    read = PeerRead(good.member, places, sizes, runs, generations_of(places))

    fetched = shm.read(read, FOREVER)

    assert fetched.seals["word"].tolist() == [102, int(ODD), 106]
    assert fetched.failure == REFUSED
    assert host[:, 0].tolist() == [2, 0, 4]
    shm.close()


def test_slot_that_never_held_a_page_is_not_touched(shm_dir: Path) -> None:
    """Such a record is a lie: a read of memory that its owner lacks would be charged to us."""
    with closing(publish(shm_dir, slots=1, more=15)) as owner:
        shm, host = fabric(), np.zeros((1, GRANULE), np.uint8)
        blocks = owner.path.stat().st_blocks

        fetched = shm.read(asking(member(owner.path), host, [GRANULE], word=0), FOREVER)

        assert fetched.seals["word"].tolist() == [0]
        assert owner.path.stat().st_blocks == blocks
        shm.close()


def test_destination_of_another_size_than_its_page_stays_untouched(
    owner: PublishedSegment,
) -> None:
    """Lengths and runs that differ are refused page by page."""
    shm, host = fabric(), np.zeros((2, GRANULE), np.uint8)

    fetched = shm.read(
        asking(member(owner.path), host, [0, GRANULE], [GRANULE // 2, GRANULE]), FOREVER
    )

    assert fetched.seals["word"].tolist() == [int(ODD), 102]
    assert fetched.failure == REFUSED
    assert not host[0].any()
    shm.close()


def test_destination_that_is_not_there_is_no_crash(owner: PublishedSegment) -> None:
    """Pages before the bad address count; it and those after it are odd."""
    shm, host = fabric(), np.zeros((3, GRANULE), np.uint8)
    read = asking(member(owner.path), host, [0, GRANULE, 2 * GRANULE])
    read.runs.addresses[2] = 4096

    fetched = shm.read(read, FOREVER)

    assert fetched.seals["word"].tolist() == [100, int(ODD), int(ODD)]
    assert fetched.failure == INTERNAL
    shm.close()


def test_only_segments_of_our_host_that_open_are_reached(
    owner: PublishedSegment, shm_dir: Path
) -> None:
    """Equal boot id, a path, a file that is there, and its incarnation: all of them."""
    shm, host = fabric(), np.zeros((1, GRANULE), np.uint8)
    other = shm_dir / segment_name(10)
    other.hardlink_to(owner.path)
    strangers = [
        member(owner.path, boot="another host"),
        member("", 13),
        member(shm_dir / segment_name(11), 11),
        member(other, 10),
        member("/etc/hostname", 12),
    ]

    reached = [shm.reaches(stranger) for stranger in strangers]
    failures = [shm.read(asking(s, host, [0]), FOREVER) for s in strangers]

    assert reached == [False] * len(strangers)
    assert {fetched.failure for fetched in failures} == {PEER_UNREACHABLE}
    assert [fetched.seals["word"].tolist() for fetched in failures] == [[int(ODD)]] * len(strangers)
    assert not host.any()
    assert shm.reaches(member(owner.path))
    shm.close()


def test_segment_in_another_folder_is_not_reached(owner: PublishedSegment, shm_dir: Path) -> None:
    """A peer could name a folder whose file system answers late or never."""
    elsewhere = fabric(folders={"/dev/shm"})
    here = fabric(folders={"/dev/shm", str(shm_dir)})

    assert not elsewhere.reaches(member(owner.path))
    assert here.reaches(member(owner.path))
    elsewhere.close()
    here.close()


def test_segment_that_is_closed_before_its_read_is_a_miss(owner: PublishedSegment) -> None:
    """Its member may be forgotten between the choice of the fabric and the read."""
    shm, host = fabric(), np.zeros((1, GRANULE), np.uint8)
    assert shm.reaches(member(owner.path))
    [segment] = shm._segments.values()
    segment.close(1.0)

    fetched = shm.read(asking(member(owner.path), host, [0]), FOREVER)

    assert fetched.failure == PEER_UNREACHABLE
    assert fetched.seals["word"].tolist() == [int(ODD)]
    assert not host.any()
    shm.close()


def test_remembered_failures_are_bounded(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that is forgotten so is only looked for once more."""
    monkeypatch.setattr("peercache.fabric.shm.FAILURES_MAX", 2)
    shm = fabric()
    for node in (NODE, 11, 12):
        assert not shm.reaches(member(shm_dir / segment_name(node), node))

    owner = publish(shm_dir)
    later = publish(shm_dir, 12)

    assert shm.reaches(member(owner.path))
    assert not shm.reaches(member(later.path, 12))
    shm.close()
    owner.close()
    later.close()


def test_failure_to_open_is_believed_for_a_while(shm_dir: Path) -> None:
    """A node that has just started is found after RETRY_S, and is not looked for before."""
    clock = Clock()
    shm = fabric(clock=clock)
    peer = member(shm_dir / segment_name(NODE))
    reached = [shm.reaches(peer)]
    owner = publish(shm_dir)

    for now in (RETRY_S * 0.9, RETRY_S):
        clock.now = now
        reached.append(shm.reaches(peer))

    assert reached == [False, False, True]
    shm.close()
    owner.close()


def test_forgotten_member_is_unmapped_after_the_read_that_uses_it(
    owner: PublishedSegment,
) -> None:
    """A member declared dead under a read: the read ends well, then the mapping goes."""
    mapped = []

    def forget() -> None:
        shm.forget(NODE)
        mapped.append(mappings(owner.path))

    shm, host = fabric(between=forget), np.zeros((1, GRANULE), np.uint8)
    before = mappings(owner.path)

    fetched = shm.read(asking(member(owner.path), host, [GRANULE]), FOREVER)

    assert fetched.seals["word"].tolist() == [102]
    assert mapped == [before + 2]
    assert mappings(owner.path) == before
    shm.forget(NODE)
    shm.close()


def test_close_ends_every_mapping_and_later_reads_miss(owner: PublishedSegment) -> None:
    """After close no peer is reached, and nothing is mapped again."""
    shm, host = fabric(), np.zeros((1, GRANULE), np.uint8)
    before = mappings(owner.path)
    assert shm.reaches(member(owner.path))

    shm.close()

    fetched = shm.read(asking(member(owner.path), host, [0]), FOREVER)
    assert fetched.failure == PEER_UNREACHABLE
    assert mappings(owner.path) == before


def test_mappings_are_bounded_and_the_oldest_used_goes_first(shm_dir: Path) -> None:
    """One mapping more than the limit ends the one whose use is longest ago."""
    shm = fabric()
    owners = [publish(shm_dir, node, slots=1) for node in range(1, SEGMENTS_MAX + 2)]
    before = [mappings(owner.path) for owner in owners]
    descriptors = open_files().count(owners[1].path)
    for number, owner in enumerate(owners[:-1], 1):
        assert shm.reaches(member(owner.path, number))
    assert shm.reaches(member(owners[0].path, 1))

    assert shm.reaches(member(owners[-1].path, len(owners)))

    more = [mappings(owner.path) - b for owner, b in zip(owners, before, strict=True)]
    assert more == [2, 0] + [2] * (len(owners) - 2)
    assert open_files().count(owners[1].path) == descriptors
    shm.close()
    for owner in owners:
        owner.close()


def test_threads_that_read_and_forget_at_once_get_whole_answers(owner: PublishedSegment) -> None:
    """Reads during `forget`, without pause: each is a right page or a miss, and none crashes."""
    shm = fabric()
    peer, wrong, rounds = member(owner.path), [], 300

    def reading(slot: int) -> None:
        host = np.zeros((1, GRANULE), np.uint8)
        for _ in range(rounds):
            host[:] = 0
            fetched = shm.read(asking(peer, host, [slot * GRANULE]), FOREVER)
            hit = fetched.seals["word"][0] == 100 + 2 * slot
            if hit != (fetched.failure == "") or (hit and not (host == slot + 1).all()):
                wrong.append((slot, fetched))

    threads = [threading.Thread(target=reading, args=(slot,)) for slot in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        shm.forget(NODE)
    for thread in threads:
        thread.join()

    assert wrong == []
    shm.close()


def mappings(path: Path) -> int:
    """Return how many mappings of the file this process has."""
    return Path("/proc/self/maps").read_text().count(str(path))


def events_of(lines: list[str]) -> list[str]:
    """Return which lines are about attached segments."""
    events = ("shm.attach_failed", "shm.attached")
    return [event for line in lines for event in events if event in line]


def test_a_node_whose_memory_is_not_here_is_logged_once(
    shm_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A container of this kernel with another /dev/shm: each restart is a new incarnation."""
    clock = Clock()
    caplog.set_level(logging.INFO, logger=LOGGER)
    with closing(fabric(clock=clock)) as shm, capture_logs() as lines:
        for incarnation in range(20, 25):
            other = attrs.evolve(
                member(shm_dir / segment_name(Incarnation(incarnation)), incarnation),
                control="127.0.0.1:7000",
            )
            for _ in range(3):
                assert not shm.reaches(other)
                clock.now += RETRY_S

        assert events_of(lines) == ["shm.attach_failed"]

        owner = publish(shm_dir, 30)
        there = attrs.evolve(member(owner.path, 30), control="127.0.0.1:7000")
        assert shm.reaches(there)
        owner.close()
        shm.forget(30)
        assert not shm.reaches(there)

    assert events_of(lines) == [
        "shm.attach_failed",
        "shm.attached",
        "shm.attach_failed",
    ]
