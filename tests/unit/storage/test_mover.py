"""What is said of a page before its job's deadline is final: nothing is told that is not judged."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from peercache.actors.storage_port import (
    DISK_DONE,
    DISK_LATE,
    LateEnded,
    Load,
    LoadDone,
    Spill,
    SpillDone,
)
from peercache.model.records import RECORD
from peercache.observability.log import get_logger
from peercache.storage.jobs import Job, Workers
from peercache.storage.layout import SlotHeader, checksum_of, pack_slot
from peercache.storage.mover import PageMover, units_of
from tests.pace import PATIENCE_S

BLOCK = 4096
KEYS = [b"A" * 16, b"B" * 16]


class Files:
    """Slab files of which one call does not return until `go`."""

    class folder:  # noqa: N801 - as the mover asks for it
        slab_bytes = 2**20
        path = "here"

        @staticmethod
        def is_there() -> bool:
            return True

    def __init__(self) -> None:
        self.stuck, self.go = threading.Event(), threading.Event()
        self.stuck_place = 0
        self.written: list[tuple[int, bytes]] = []
        self.read_one: Callable[[int, Sequence[memoryview]], int] = lambda _place, _into: 0

    def name_of(self, place: int) -> str:
        return f"slab of {place}"

    def prepare(self, number: int, blocks: int) -> None:
        del number, blocks

    def write(self, place: int, buffers: Sequence[memoryview]) -> None:
        self._wait_at(place)
        self.written.append((place, bytes(buffers[0][:6])))

    def read(self, place: int, buffers: Sequence[memoryview]) -> int:
        if len(buffers) > 2:
            raise OSError(errno.EIO, "one of these blocks is bad")
        self._wait_at(place)
        return self.read_one(place, buffers)

    def _wait_at(self, place: int) -> None:
        if place == self.stuck_place:
            self.stuck.set()
            assert self.go.wait(PATIENCE_S)


class Rig:
    """A mover on one thread, over files that get stuck."""

    def __init__(self) -> None:
        self.files = Files()
        self.memory, self.words = np.zeros(2**16, np.uint8), np.zeros(16, np.uint64)
        self.mover = PageMover(
            self.files,  # type: ignore[arg-type]
            pages=self.memory,
            words=self.words,
            granule=BLOCK,
            ended=lambda _: None,
            log=get_logger(),
        )
        self.facts: list[Any] = []
        self.workers = Workers(
            self.mover.perform,
            threads=1,
            stuck_s=PATIENCE_S,
            clock=time.monotonic,
            judged=lambda _unit, _said: None,
            tell=self.facts.append,
            look=lambda _unit: None,
            log=get_logger(),
        )

    def begin(self, effect: Load | Spill) -> None:
        """Have it done, as far as the call that gets stuck; then end the time it has."""
        job = Job.of(effect, 2)
        self.workers.submit(job, units_of(job, [BLOCK, BLOCK], effect.until))
        assert self.files.stuck.wait(PATIENCE_S)
        self.workers.end("its time is over")

    def finish(self) -> None:
        """Let the call return, and wait for what is said then."""
        self.files.go.set()
        until = time.monotonic() + PATIENCE_S
        while not any(isinstance(fact, LateEnded) for fact in self.facts):
            assert time.monotonic() < until
            time.sleep(0.001)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.files.go.set()
    made.workers.close(PATIENCE_S)


def test_page_that_was_read_and_not_judged_is_late(rig: Rig) -> None:
    """The pages of a run with a bad block are read singly: the first had a wrong checksum."""
    rig.files.stuck_place = 3 * BLOCK

    def damaged(place: int, into: Sequence[memoryview]) -> int:
        header = pack_slot(SlotHeader(KEYS[0], 1, BLOCK, place, 1, checksum_of(b"g" * BLOCK), 1))
        into[0][: len(header)] = header
        into[1][:] = b"X" * BLOCK
        return 2 * BLOCK

    rig.files.read_one = damaged
    load = Load(
        1,
        b"".join(KEYS),
        np.ones(2, np.uint64),
        np.full(2, BLOCK, np.uint64),
        np.array([BLOCK, 3 * BLOCK], np.uint64),
        np.array([0, BLOCK], np.uint64),
        time.monotonic() + PATIENCE_S,
    )

    rig.begin(load)
    told = next(fact for fact in rig.facts if isinstance(fact, LoadDone))
    rig.finish()

    assert DISK_DONE not in told.outcomes
    assert told.outcomes == bytes((DISK_LATE, DISK_LATE))


def test_page_that_was_answered_for_is_not_overwritten_later(rig: Rig) -> None:
    """Its slot may be reused by then: it is judged before it is told."""
    rig.files.stuck_place = 9 * BLOCK
    rig.words[:2] = 2
    records = np.zeros(2, RECORD)
    records["length"], records["offset"], records["generation"] = BLOCK, [0, BLOCK], 2
    spill = Spill(
        1,
        records,
        np.ones(2, np.uint64),
        np.array([BLOCK, 9 * BLOCK], np.uint64),
        np.array([1, 2], np.uint64),
        time.monotonic() + PATIENCE_S,
    )

    rig.begin(spill)
    told = next(fact for fact in rig.facts if isinstance(fact, SpillDone))
    # The pool evicts it, well after it was told to be on disk.
    rig.words[0] = 4
    rig.finish()

    assert told.outcomes == bytes((DISK_DONE, DISK_LATE))
    assert [place for place, _ in rig.files.written] == [BLOCK, 9 * BLOCK]
