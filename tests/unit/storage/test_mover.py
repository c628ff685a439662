"""What is said of a page before its job's deadline is final: nothing is reported unjudged."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from peercache.actors.ports import (
    DISK_DAMAGED,
    DISK_DONE,
    DISK_FAILED,
    DISK_LATE,
    LateEnded,
    Load,
    LoadDone,
    Write,
    WriteDone,
)
from peercache.model.keys import tags_of
from peercache.model.records import RECORD
from peercache.observability.log import get_logger
from peercache.storage import mover
from peercache.storage.jobs import Job, Unit, Workers
from peercache.storage.layout import SlotHeader, checksum_of, pack_slot
from peercache.storage.mover import PageMover, PoolMemory, units_of
from tests.pace import TIMEOUT_S

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

    @contextmanager
    def using(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Open no slab: all pages are read by calls."""
        yield [-1] * len(numbers)

    def read(self, place: int, buffers: Sequence[memoryview]) -> int:
        if len(buffers) > 2:
            raise OSError(errno.EIO, "one of these blocks is bad")
        self._wait_at(place)
        return self.read_one(place, buffers)

    def _wait_at(self, place: int) -> None:
        if place == self.stuck_place:
            self.stuck.set()
            assert self.go.wait(TIMEOUT_S)


class Rig:
    """A mover on one thread, over files that get stuck."""

    def __init__(self) -> None:
        self.files = Files()
        self.memory, self.words = np.zeros(2**16, np.uint8), np.zeros(16, np.uint64)
        self.mover = PageMover(
            self.files,  # type: ignore[arg-type]
            pool=PoolMemory(self.memory, self.words, BLOCK),
            ended=lambda _: None,
            log=get_logger(),
        )
        self.facts: list[Any] = []
        self.workers = Workers(
            self.mover.perform,
            threads=1,
            stuck_s=TIMEOUT_S,
            clock=time.monotonic,
            judged=lambda _unit, _said: None,
            notify=self.facts.append,
            look=lambda _unit: None,
            log=get_logger(),
        )

    def begin(self, effect: Load | Write) -> None:
        """Have it done, as far as the call that gets stuck; then end the time it has."""
        job = Job.of(effect, 2)
        self.workers.submit(job, units_of(job, [BLOCK, BLOCK], effect.until))
        assert self.files.stuck.wait(TIMEOUT_S)
        self.workers.end("its time is over")

    def finish(self) -> None:
        """Let the call return, and wait for what is said then."""
        self.files.go.set()
        until = time.monotonic() + TIMEOUT_S
        while not any(isinstance(fact, LateEnded) for fact in self.facts):
            assert time.monotonic() < until
            time.sleep(0.001)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.files.go.set()
    made.workers.close(TIMEOUT_S)


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
        tags_of([1, 1]),
        np.full(2, BLOCK, np.uint64),
        np.array([BLOCK, 3 * BLOCK], np.uint64),
        np.array([0, BLOCK], np.uint64),
        time.monotonic() + TIMEOUT_S,
    )

    rig.begin(load)
    reported = next(fact for fact in rig.facts if isinstance(fact, LoadDone))
    rig.finish()

    assert DISK_DONE not in reported.outcomes
    assert reported.outcomes == bytes((DISK_LATE, DISK_LATE))


def test_page_that_was_answered_for_is_not_overwritten_later(rig: Rig) -> None:
    """Its slot may be reused by then: it is judged before it is reported."""
    rig.files.stuck_place = 9 * BLOCK
    rig.words[:2] = 2
    records = np.zeros(2, RECORD)
    records["length"], records["offset"], records["generation"] = BLOCK, [0, BLOCK], 2
    write = Write(
        1,
        records,
        tags_of([1, 1]),
        np.array([BLOCK, 9 * BLOCK], np.uint64),
        np.array([1, 2], np.uint64),
        time.monotonic() + TIMEOUT_S,
    )

    rig.begin(write)
    reported = next(fact for fact in rig.facts if isinstance(fact, WriteDone))
    # The pool evicts it, well after it was reported to be on disk.
    rig.words[0] = 4
    rig.finish()

    assert reported.outcomes == bytes((DISK_DONE, DISK_LATE))
    assert [place for place, _ in rig.files.written] == [BLOCK, 9 * BLOCK]


class Failing(Files):
    """Slab files whose writes raise what `errors` specifies, one after the other, then succeed."""

    def __init__(self, *errors: int) -> None:
        super().__init__()
        self.errors = list(errors)

    def write(self, place: int, buffers: Sequence[memoryview]) -> None:
        if self.errors and (number := self.errors.pop(0)):
            raise OSError(number, "no write")
        super().write(place, buffers)


def mover_of(files: Files, pages: int, reasons: list[str]) -> PageMover:
    """Return a mover of a pool of pages of one block; it notes why the tier ends."""
    return PageMover(
        files,  # type: ignore[arg-type]
        pool=PoolMemory(np.zeros(pages * BLOCK, np.uint8), np.full(pages, 2, np.uint64), BLOCK),
        ended=reasons.append,
        log=get_logger(),
    )


def written(files: Files, pages: int, *, apart: int = 3) -> tuple[bytes, list[str]]:
    """Write pages of one block; return their outcomes, and why the tier ends."""
    reasons: list[str] = []
    records = np.zeros(pages, RECORD)
    records["length"], records["generation"] = BLOCK, 2
    records["offset"] = np.arange(pages) * BLOCK
    places = np.array([BLOCK * (1 + page * apart) for page in range(pages)], np.uint64)
    numbers = np.arange(pages, dtype=np.uint64)
    effect = Write(1, records, tags_of([1] * pages), places, numbers, time.monotonic() + TIMEOUT_S)
    unit = Unit(Job.of(effect, pages), range(pages), effect.until)
    mover_of(files, pages, reasons).perform(unit)
    return bytes(unit.outcomes), reasons


def test_calls_that_fail_in_a_row_end_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that succeeds between them shows that the disk has not gone."""
    assert mover.FAILURES_MAX > 3
    monkeypatch.setattr(mover, "FAILURES_MAX", 3)

    said, reasons = written(Failing(*[errno.EIO] * 2, 0, *[errno.EIO] * 2), 6)
    assert list(said) == [DISK_FAILED, DISK_FAILED, DISK_DONE, DISK_FAILED, DISK_FAILED, DISK_DONE]
    assert reasons == []

    _, reasons = written(Failing(*[errno.EIO] * 3), 4)
    assert [reason.startswith("3 calls in a row failed") for reason in reasons] == [True]


def test_a_want_of_descriptors_does_not_end_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other files of the process, or of the host, are closed some day; the disk is well."""
    monkeypatch.setattr(mover, "FAILURES_MAX", 3)

    said, reasons = written(Failing(*[errno.EMFILE, errno.ENFILE] * 4, 0), 9)

    assert list(said) == [DISK_FAILED] * 8 + [DISK_DONE]
    assert reasons == []


def test_read_only_file_system_ends_the_tier() -> None:
    said, reasons = written(Failing(errno.EROFS), 1)

    assert said == bytes((DISK_FAILED,))
    assert reasons == ["here is read-only"]


def test_pages_of_a_run_that_fails_are_written_singly() -> None:
    """Only the page whose block is bad is lost."""
    said, reasons = written(Failing(errno.EIO, 0, errno.EIO), 3, apart=2)

    assert list(said) == [DISK_DONE, DISK_FAILED, DISK_DONE]
    assert reasons == []


def test_pages_behind_a_block_at_which_a_read_ends_are_read_singly() -> None:
    """A device reports what it has read before a bad block, and no error."""
    files = Files()
    page = b"p" * BLOCK

    def until_bad(place: int, buffers: Sequence[memoryview]) -> int:
        if len(buffers) > 2 or place == 3 * BLOCK:
            return BLOCK
        header = pack_slot(SlotHeader(bytes(16), 0, BLOCK, place, 1, checksum_of(page), 1))
        buffers[0][: len(header)] = header
        buffers[1][:] = page
        return 2 * BLOCK

    files.read = until_bad  # type: ignore[method-assign]
    places = np.array([BLOCK, 3 * BLOCK, 5 * BLOCK], np.uint64)
    offsets = np.arange(3, dtype=np.uint64) * np.uint64(BLOCK)
    lengths = np.full(3, BLOCK, np.uint64)
    load = Load(
        1, bytes(48), tags_of([0] * 3), lengths, places, offsets, time.monotonic() + TIMEOUT_S
    )
    unit = Unit(Job.of(load, 3), range(3), load.until)
    mover_of(files, 3, []).perform(unit)

    assert list(unit.outcomes) == [DISK_DONE, DISK_DAMAGED, DISK_DONE]


def test_page_whose_slab_has_gone_is_written_into_a_new_one() -> None:
    """The slab is prepared again before the page is written a second time."""
    files = Failing(errno.ENOENT)
    calls: list[str] = []
    files.forget = lambda number: calls.append(f"forget {number}")  # type: ignore[attr-defined]
    files.prepare = lambda number, blocks: calls.append(f"prepare {number} {blocks}")  # type: ignore[method-assign]

    said, _ = written(files, 1)

    assert said == bytes((DISK_DONE,))
    assert calls == ["prepare 0 2", "forget 0", "prepare 0 2"]
    assert [place for place, _ in files.written] == [BLOCK]
