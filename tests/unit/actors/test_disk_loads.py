"""Loads, without the pool that watches too: what the disk actor alone says of each page."""

from __future__ import annotations

import numpy as np

from peercache.actors.disk.index import DiskIndex
from peercache.actors.disk.open_index import DiskLoads, OpenIndex
from peercache.actors.effects import Effect, TellPromote
from peercache.actors.mailboxes import PagesLoaded, RequestLoad
from peercache.actors.ports import DISK_DAMAGED, DISK_DONE, DISK_UNTRIED, Load, LoadDone
from peercache.model.keys import tags_of

LENGTH = 3000


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Disk:
    """Loads of an index that holds two pages."""

    def __init__(self) -> None:
        self.open_index = OpenIndex()
        self.index = self.open_index.index = DiskIndex(capacity_bytes=2**20, slab_bytes=2**18)
        ones, lengths = np.ones(2, np.uint64), np.full(2, LENGTH, np.uint64)
        begun = self.index.begin(key(1) + key(2), tags_of([1, 1]), lengths, ones, 1)
        self.index.finish(begun.entries)
        self.loads = DiskLoads(self.open_index)

    def begin(self, *numbers: int, length: int = LENGTH) -> list[Effect]:
        """Ask for pages, whose slots are at 100, 200, …"""
        lengths = np.full(len(numbers), length, np.int64)
        offsets = np.arange(1, len(numbers) + 1, dtype=np.uint64) * np.uint64(100)
        return self.loads.begin(
            RequestLoad(7, b"".join(map(key, numbers)), 1, lengths, offsets, 9.0)
        )

    def done(self, *outcomes: int) -> list[Effect]:
        """Answer the only job."""
        checksums = np.arange(1, len(outcomes) + 1, dtype=np.uint64) * np.uint64(11)
        return self.loads.done(LoadDone(1, bytes(outcomes), checksums))

    def remove(self, number: int) -> None:
        self.index.remove(self.index.find(key(number)))


def told(effects: list[Effect]) -> tuple[list[int], list[int]]:
    """Return the outcomes and the checksums that the promote actor is told."""
    (effect,) = effects
    assert isinstance(effect, TellPromote)
    assert isinstance(effect.fact, PagesLoaded)
    return list(effect.fact.outcomes), effect.fact.checksums.tolist()


def test_a_page_that_is_removed_while_it_is_loaded_is_not_told_as_loaded() -> None:
    disk = Disk()
    (load,) = disk.begin(1, 2)
    assert isinstance(load, Load)
    disk.remove(1)

    assert told(disk.done(DISK_DONE, DISK_DONE)) == ([DISK_UNTRIED, DISK_DONE], [11, 22])
    assert len(disk.loads) == 0


def test_a_page_that_went_before_its_load_is_lost_and_the_others_keep_their_slots() -> None:
    disk = Disk()
    disk.remove(1)

    (load,) = disk.begin(1, 2)

    assert isinstance(load, Load)
    assert (load.keys, load.offsets.tolist()) == (key(2), [200])
    assert told(disk.done(DISK_DONE)) == ([DISK_DAMAGED, DISK_DONE], [0, 11])


def test_pages_of_which_none_can_be_loaded_are_answered_at_once() -> None:
    """One that was stored in another length may be asked for again."""
    disk = Disk()

    assert told(disk.begin(1, length=LENGTH + 1)) == ([DISK_UNTRIED], [0])
    assert told(disk.begin(3)) == ([DISK_DAMAGED], [0])
    disk.open_index.index = None
    assert told(disk.begin(1)) == ([DISK_UNTRIED], [0])
    assert len(disk.loads) == 0


def test_pages_of_a_disk_that_ended_meanwhile_are_not_loaded() -> None:
    """The pool may have been told since that they are not on disk."""
    disk = Disk()
    disk.begin(1, 2)
    disk.open_index.index = None

    outcomes, _ = told(disk.done(DISK_DONE, DISK_DAMAGED))

    assert outcomes == [DISK_UNTRIED, DISK_DAMAGED]
    assert len(disk.loads) == 0
