"""The contract of a page store: the real one, and the one that the simulations use, keep it."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peercache.actors.disk.index import DiskIndex
from peercache.actors.ports import (
    DISK_CHANGED,
    DISK_DAMAGED,
    DISK_DONE,
    DISK_REPLACED,
    DiskEffect,
    DiskFact,
    DiskOpened,
    Forget,
    ForgetDone,
    Load,
    LoadDone,
    Write,
    WriteDone,
)
from peercache.model.keys import tags_of
from peercache.model.runs import U64
from sims.store import Image, Store
from tests.unit.storage.rig import GRANULE, MIB, Log, Pool, Rig, key_of

SLAB_BYTES = 2 * MIB

OpenStore = Callable[[], Rig]
"""Opens a store on what the last one has left; the same place in every test."""


class PoolOfRig:
    """The rig's pool as the simulated store sees one."""

    def __init__(self, pool: Pool) -> None:
        """See this pool."""
        self._pool = pool

    def word_at(self, offset: int) -> int:
        """Return a slot's word."""
        return int(self._pool.words[offset // GRANULE])

    def read(self, offset: int, size: int) -> np.ndarray:
        """Return bytes as they are."""
        return self._pool.memory[offset : offset + size].copy()

    def load(self, offset: int, slot_offset: int, data: np.ndarray) -> None:
        """Store bytes of a page from disk."""
        assert self.word_at(slot_offset) & 1
        self._pool.memory[offset : offset + len(data)] = data


class AtOnce:
    """The simulated store, doing each job as soon as it is given."""

    def __init__(self, store: Store, notify: Callable[[DiskFact], None]) -> None:
        """Report what becomes of jobs."""
        self._store = store
        self._notify = notify

    def perform(self, effect: DiskEffect) -> None:
        """Do a job."""
        if isinstance(effect, Write):
            self._answer(WriteDone, effect, self._store.write)
        elif isinstance(effect, Load):
            self._answer(LoadDone, effect, self._store.load)
        elif isinstance(effect, Forget):
            self._store.forget(effect.places.tolist())
            self._store.image.sync()
            self._notify(ForgetDone(effect.job))

    def _answer(self, done: Any, effect: Write | Load, perform: Callable[..., Any]) -> None:
        found = [_end_of(perform(effect, at)) for at in range(len(effect.places))]
        checksums: U64 = np.array([checksum for _, checksum in found], np.uint64)
        self._notify(done(effect.job, bytes(outcome for outcome, _ in found), checksums))

    def close(self) -> None:
        """Make safe what is not yet."""
        self._store.image.sync()


def _end_of(page: Any) -> Any:
    while True:
        try:
            next(page)
        except StopIteration as end:  # noqa: PERF203 - a generator's value comes no other way
            return end.value


class SimulatedRig(Rig):
    """A rig around the simulated store."""

    def __init__(self, image: Image) -> None:
        """Open a store on an image."""
        self.pool = Pool()
        self.log = Log()
        self.facts: queue.SimpleQueue[DiskFact] = queue.SimpleQueue()
        self.reported: list[DiskFact] = []
        self.jobs = 0
        self.image = image
        self.store = AtOnce(Store(image, PoolOfRig(self.pool)), self.facts.put)  # type: ignore[assignment]
        self.opened = DiskOpened(16 * SLAB_BYTES, SLAB_BYTES, image.entries(), 1)
        self.index = DiskIndex(capacity_bytes=16 * SLAB_BYTES, slab_bytes=SLAB_BYTES)
        self.index.load(self.opened.entries)


@pytest.fixture(params=["real", "simulated"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """Each store in turn."""
    if request.param == "real":
        return lambda: Rig(tmp_path)
    image = Image()
    return lambda: SimulatedRig(image)


def flip(rig: Rig, number: int) -> None:
    """Flip a bit of a page where it is."""
    if isinstance(rig, SimulatedRig):
        rig.image.slots[rig.place_of(number)].data[1000] ^= 1
        return
    file, offset = rig.file_of(number)
    with file.open("r+b") as slab:
        slab.seek(offset + 4096 + 1000)
        byte = slab.read(1)[0]
        slab.seek(offset + 4096 + 1000)
        slab.write(bytes([byte ^ 1]))


def test_pages_come_back_byte_for_byte(open_store: OpenStore) -> None:
    """What was written is loaded, in any order."""
    with open_store() as rig:
        assert rig.write([1, 2, 3]) == bytes([DISK_DONE] * 3)

        assert rig.load([3, 1, 2]) == ["right"] * 3


def test_each_job_is_answered_once(open_store: OpenStore) -> None:
    """Under its own number."""
    with open_store() as rig:
        first, second = rig.send_write([1, 2]), rig.send_write([3])
        answers = [rig.await_fact(WriteDone) for _ in range(2)]

        assert sorted(answer.job for answer in answers) == [first, second]
        assert not [fact for fact in rig.reported if isinstance(fact, WriteDone)]


def test_restart_finds_what_was_written(open_store: OpenStore) -> None:
    """Each page once, where it is."""
    with open_store() as rig:
        rig.write([1, 2, 3])
        places = [rig.place_of(number) for number in (1, 2, 3)]

    with open_store() as again:
        assert [again.place_of(number) for number in (1, 2, 3)] == places
        assert again.load([2, 3, 1]) == ["right"] * 3


def test_evicted_page_is_not_written(open_store: OpenStore) -> None:
    """Its word has moved on: the slot may hold any page."""
    with open_store() as rig:
        records = rig.pool.commit([key_of(1)], [100_000])
        rig.pool.evict(records[0])
        begun = rig.index.begin(
            key_of(1), tags_of([5]), np.array([100_000], np.uint64),
            np.array([1], np.uint64), 0,
        )  # fmt: skip

        rig.perform(Write(7, records, tags_of([5]), begun.places, np.array([1], np.uint64), 1e9))

        assert rig.await_fact(WriteDone, 7).outcomes == bytes([DISK_CHANGED])


def test_a_place_that_holds_another_whole_page_gives_nothing(open_store: OpenStore) -> None:
    """As after a kill between the bytes of a page and its row: no damage, and no page."""
    with open_store() as rig:
        rig.write([1])

        assert rig.load([1], namespace=6) == [str(DISK_REPLACED)]


def test_flipped_bit_is_damage(open_store: OpenStore) -> None:
    """Others are as they were."""
    with open_store() as rig:
        rig.write([1, 2])
        flip(rig, 1)

        assert rig.load([1, 2]) == [str(DISK_DAMAGED), "right"]


def spoil_header(rig: Rig, number: int) -> None:
    """Let the header of a page be that of another one."""
    if isinstance(rig, SimulatedRig):
        rig.image.slots[rig.place_of(number)].key = key_of(number + 1)
        return
    file, offset = rig.file_of(number)
    with file.open("r+b") as slab:
        slab.seek(offset)
        slab.write(bytes(4096))


def test_page_with_the_known_checksum_is_loaded_whatever_its_header_states(
    open_store: OpenStore,
) -> None:
    """As its WriteDone reported it. So the header need not be read."""
    with open_store() as rig:
        known = rig.await_fact(WriteDone, rig.send_write([1, 2])).checksums
        spoil_header(rig, 1)

        assert rig.load([1, 2], known=known) == ["right", "right"]
        assert rig.load([1, 2])[0] in (str(DISK_DAMAGED), str(DISK_REPLACED))


def test_page_without_the_known_checksum_is_not_loaded(open_store: OpenStore) -> None:
    """Others are as they were; and one whose header confirms it is still the page."""
    with open_store() as rig:
        known = rig.await_fact(WriteDone, rig.send_write([1, 2, 3])).checksums
        flip(rig, 1)

        assert rig.load([1, 2], known=known[:2]) == [str(DISK_DAMAGED), "right"]
        job, _ = rig.send_load([3], known=known[:1])
        done = rig.await_fact(LoadDone, job)
        assert (done.outcomes, done.checksums.tolist()) == (bytes([DISK_DONE]), [known[2]])


def test_checksum_of_a_load_is_that_of_the_page(open_store: OpenStore) -> None:
    """What readers verify is what was read."""
    import xxhash

    with open_store() as rig:
        rig.write([1])
        job, (offset,) = rig.send_load([1])
        done = rig.await_fact(LoadDone, job)

        page = rig.pool.memory[offset : offset + 100_000].tobytes()
        assert done.checksums.tolist() == [xxhash.xxh3_64_intdigest(page)]


def test_forgotten_page_stays_forgotten_over_a_restart(open_store: OpenStore) -> None:
    """Once ForgetDone has been reported."""
    with open_store() as rig:
        rig.write([1, 2])
        rig.forget([1])

    with open_store() as again:
        assert again.index.find(key_of(1) + key_of(2)).tolist()[0] == -1
        assert again.load([2]) == ["right"]
