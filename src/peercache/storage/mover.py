"""Moves pages between the pool's memory and slots, and verifies each: the only code that does.

Keeps   a slot is written from bytes of one page: the generation word of the page is compared with
        its record before and after the write, and the checksum in the header is computed before the
        write. So the slot holds that page, or a checksum that does not match. A page that is read
        is DONE only if its header names its place, key, namespace and length, and the bytes in the
        pool have the header's checksum: the ring (`is_valid` in _reads.c) and calls (`_problem`)
        compare the same. Only a Load writes to the pool's memory, and only within its slots.
"""

from __future__ import annotations

import errno
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.disk.slabs import BLOCK_BYTES, slot_blocks
from peercache.actors.ports import (
    DISK_CHANGED,
    DISK_DAMAGED,
    DISK_DONE,
    DISK_FAILED,
    DISK_FULL,
    DISK_REPLACED,
    Load,
    Write,
)
from peercache.model.keys import KEY_BYTES, parts_of, tag_of
from peercache.model.records import HAS_CHECKSUM
from peercache.model.runs import U64
from peercache.storage.jobs import Job, Unit
from peercache.storage.layout import SlotHeader, checksum_of, pack_slot, parse_slot
from peercache.storage.ring import READS_AT_ONCE, Ring
from peercache.storage.slab_files import NoRoomError, SlabFiles

UNIT_BYTES: Final = 4 * 2**20
"""What one thread takes at a time: large enough for a disk's full rate, small enough to share."""

UNIT_PAGES: Final = 64
"""Pages of a unit: two buffers each, far below the kernel's 1,024 a call."""

FAILURES_MAX: Final = 64
"""This many calls in a row fail only if the disk is permanently gone; a bad spot is smaller."""

ANOTHER_PAGE: Final = "another page"

NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)
"""Too many files are open: that is temporary, and unrelated to the disk."""


@attrs.frozen(eq=False)
class PoolMemory:
    """The pool as the store needs it: page memory, its generation words, and their granule."""

    pages: npt.NDArray[np.uint8]
    words: U64
    granule: int


@attrs.frozen(eq=False)
class _Loading:
    """The pages of a unit that is read: where each is on disk, and in memory."""

    unit: Unit
    effect: Load
    places: list[int]
    lengths: list[int]
    blocks: list[memoryview]
    """Of each page, memory for its header."""
    views: list[memoryview]
    """Of each page, its slot in the pool, in whole blocks."""

    def buffers_of(self, some: list[int]) -> list[memoryview]:
        """Return the memory of pages with consecutive slots, in the order of their bytes."""
        return [part for index in some for part in (self.blocks[index], self.views[index])]


class PageMover:
    """Performs units of Load and Write. Any thread may; each has headers of its own."""

    def __init__(
        self,
        files: SlabFiles,
        *,
        pool: PoolMemory,
        reads_at_once: int = READS_AT_ONCE,
        ended: Callable[[str], None],
        log: Any,
    ) -> None:
        """Move between `files` and the pool's memory.

        reads_at_once: reads in flight of each thread.
        ended:         called with the reason of a broken disk.
        """
        self._files = files
        self._reads_at_once = reads_at_once
        self._memory = pool.pages.data
        self._words = pool.words
        self._granule = np.uint64(pool.granule)
        self._ended = ended
        self._log = log
        self._own = threading.local()
        self._failures = 0

    def perform(self, unit: Unit) -> None:
        """Perform a unit and set the outcome of each of its pages."""
        effect = unit.job.effect
        if isinstance(effect, Write):
            self._write_unit(unit, effect)
        elif isinstance(effect, Load):
            self._load(unit, effect)

    # --- writing ----------------------------------------------------------------------------------

    def _write_unit(self, unit: Unit, effect: Write) -> None:
        records = effect.records[unit.pages.start : unit.pages.stop]
        places: list[int] = effect.places[unit.pages.start : unit.pages.stop].tolist()
        lengths: list[int] = records["length"].tolist()
        offsets: list[int] = records["offset"].tolist()
        views = [self._memory[at : at + _padded(n)] for at, n in zip(offsets, lengths, strict=True)]
        sums = [checksum_of(view[:n]) for view, n in zip(views, lengths, strict=True)]
        unit.job.checksums[unit.pages.start : unit.pages.stop] = sums
        good = self._unchanged(records) & _fits_checksums(records, sums)
        for index in np.flatnonzero(~good).tolist():
            unit.outcomes[index] = DISK_CHANGED
        headers = [
            _header(effect, page, places[i], sums[i], int(time.time()))
            for i, page in enumerate(unit.pages)
        ]
        blocks: list[int] = slot_blocks(records["length"]).tolist()
        chosen = np.flatnonzero(good).tolist()
        for run in _runs(chosen, places, lengths):
            if unit.is_over:
                return

            def write(some: list[int]) -> None:
                self._write_run(some, headers, views, blocks)

            verdicts = self._attempt(unit, run, places, write)
            self._judge_written(verdicts, records)
            _note_verdicts(unit, verdicts)

    def _write_run(
        self, run: list[int], headers: list[SlotHeader], views: list[memoryview], blocks: list[int]
    ) -> None:
        memory = self._headers()
        buffers: list[memoryview] = []
        for number, index in enumerate(run):
            block = memory[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
            packed = pack_slot(headers[index])
            block[: len(packed)] = packed
            buffers += (block, views[index])
        place = headers[run[0]].place
        slab = place // self._files.folder.slab_bytes
        self._files.prepare(slab, blocks[run[0]])
        try:
            self._files.write(place, buffers)
        except FileNotFoundError:
            # The slab file was removed in the meantime: write again, into a new one.
            self._log.warning("disk.slab_missing", file=self._files.name_of(place))
            self._files.forget(slab)
            self._files.prepare(slab, blocks[run[0]])
            self._files.write(place, buffers)

    def _judge_written(self, verdicts: dict[int, int], records: npt.NDArray[np.void]) -> None:
        """Compare the words again: a page that changed while it was written is not on disk."""
        same = self._unchanged(records)
        for index, verdict in list(verdicts.items()):
            if verdict == DISK_DONE and not same[index]:
                verdicts[index] = DISK_CHANGED

    def _unchanged(self, records: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Return which slots still have the generation of their records."""
        generations = records["generation"]
        words = self._words[(records["offset"] // self._granule).astype(np.int64)]
        same: npt.NDArray[np.bool_] = (words == generations) & (generations & np.uint64(1) == 0)
        return same

    # --- reading ----------------------------------------------------------------------------------

    def _load(self, unit: Unit, effect: Load) -> None:
        ring = self._ring()
        if ring.is_open:
            places = effect.places[unit.pages.start : unit.pages.stop]
            slabs = (places // np.uint64(self._files.folder.slab_bytes)).tolist()
            with self._files.using(slabs) as files:
                ring.load(unit, effect, files)
            if DISK_DONE in unit.outcomes:
                self._failures = 0
        rest = [index for index, outcome in enumerate(unit.outcomes) if outcome != DISK_DONE]
        if rest:
            self._load_by_calls(unit, effect, rest)

    def _load_by_calls(self, unit: Unit, effect: Load, rest: list[int]) -> None:
        """Load the pages that the ring has not loaded; this finds, and logs, what is wrong."""
        begin, end = unit.pages.start, unit.pages.stop
        places: list[int] = effect.places[begin:end].tolist()
        lengths: list[int] = effect.lengths[begin:end].tolist()
        offsets: list[int] = effect.offsets[begin:end].tolist()
        views = [self._memory[at : at + _padded(n)] for at, n in zip(offsets, lengths, strict=True)]
        memory = self._headers()
        blocks = [memory[at * BLOCK_BYTES :][:BLOCK_BYTES] for at in range(len(places))]
        loading = _Loading(unit, effect, places, lengths, blocks, views)
        for run in _runs(rest, places, lengths):
            if unit.is_over:
                return
            self._load_run(loading, run)

    def _load_run(self, loading: _Loading, run: list[int]) -> None:
        """Read and verify the pages of a run."""
        unit, places, begin = loading.unit, loading.places, loading.unit.pages.start
        found: dict[int, int] = {}
        replaced: set[int] = set()

        def read(some: list[int]) -> None:
            buffers = loading.buffers_of(some)
            count = self._files.read(places[some[0]], buffers)
            if len(some) > 1 and count < sum(map(len, buffers)):
                # A read ends before a bad block without an error; the blocks after it are good.
                raise OSError(errno.EIO, f"read {count} bytes")
            for index in some:
                header = parse_slot(loading.blocks[index], places[index])
                view = loading.views[index]
                page = view[: loading.lengths[index]]
                problem = _problem(header, loading.effect, begin + index, count, page)
                count -= BLOCK_BYTES + len(view)
                found[index] = header.checksum if header is not None and not problem else -1
                if problem == ANOTHER_PAGE:
                    # Not damaged: a kill has left the row of the page that was here before.
                    replaced.add(index)
                elif problem:
                    self._note_damage(places[index], problem)

        verdicts = self._attempt(unit, run, places, read)
        for index, checksum in found.items():
            if checksum < 0:
                verdicts[index] = DISK_REPLACED if index in replaced else DISK_DAMAGED
            elif verdicts[index] == DISK_DONE:
                unit.job.checksums[begin + index] = checksum
        _note_verdicts(unit, verdicts)

    def _note_damage(self, place: int, problem: str) -> None:
        file = self._files.name_of(place)
        self._log.warning("disk.page_damaged", file=file, place=place, problem=problem)

    # --- failures of the file system --------------------------------------------------------------

    def _attempt(
        self, unit: Unit, run: list[int], places: list[int], move: Callable[[list[int]], None]
    ) -> dict[int, int]:
        """Move a run, or, if a bad block fails it, its pages one by one; return the outcomes.

        They are copied to the unit only when they are final: its deadline may pass at any moment.
        """
        try:
            move(run)
            outcome = DISK_DONE
            self._failures = 0
        except NoRoomError:
            outcome = DISK_FULL
        except FileNotFoundError as error:
            outcome = self._missing(unit, error, places[run[0]])
        except OSError as error:
            if len(run) > 1 and error.errno == errno.EIO and not unit.is_over:
                singly = [self._attempt(unit, [index], places, move) for index in run]
                return {index: outcome for one in singly for index, outcome in one.items()}
            self._note_failure(error, places[run[0]])
            outcome = DISK_FAILED
        return dict.fromkeys(run, outcome)

    def _missing(self, unit: Unit, error: OSError, place: int) -> int:
        slab = place // self._files.folder.slab_bytes
        self._files.forget(slab)
        if not self._files.folder.is_there():
            self._ended(f"{self._files.folder.path} has gone")
        if isinstance(unit.job.effect, Load):
            self._note_damage(place, "the file is missing")
            return DISK_DAMAGED
        self._note_failure(error, place)
        return DISK_FAILED

    def _note_failure(self, error: OSError, place: int) -> None:
        file = self._files.name_of(place)
        self._log.warning("disk.call_failed", file=file, place=place, error=str(error))
        if error.errno in NO_DESCRIPTOR:
            return
        self._failures += 1
        if error.errno == errno.EROFS:
            self._ended(f"{self._files.folder.path} is read-only")
        elif self._failures >= FAILURES_MAX:
            self._ended(f"{self._failures} calls in a row failed, the last with: {error}")

    def _ring(self) -> Ring:
        """Return this thread's ring."""
        ring: Ring | None = getattr(self._own, "ring", None)
        if ring is None:
            ring = self._own.ring = Ring(
                self._memory,
                self._headers(),
                pages_max=UNIT_PAGES,
                slab_bytes=self._files.folder.slab_bytes,
                depth=self._reads_at_once,
            )
        return ring

    def _headers(self) -> memoryview:
        """Return this thread's memory for header blocks."""
        memory: memoryview | None = getattr(self._own, "headers", None)
        if memory is None:
            memory = self._own.headers = memoryview(mmap.mmap(-1, UNIT_PAGES * BLOCK_BYTES))
        return memory


def _note_verdicts(unit: Unit, verdicts: dict[int, int]) -> None:
    """Copy final verdicts to the unit: pages without one at its deadline are late."""
    for index, verdict in verdicts.items():
        unit.outcomes[index] = verdict


def units_of(job: Job, lengths: list[int], until: float) -> list[Unit]:
    """Cut a job into units for one thread at a time."""
    units: list[Unit] = []
    begin, size = 0, 0
    for page, length in enumerate(lengths):
        if page > begin and (size + length > UNIT_BYTES or page - begin >= UNIT_PAGES):
            units.append(Unit(job, range(begin, page), until))
            begin, size = page, 0
        size += length
    if begin < len(lengths):
        units.append(Unit(job, range(begin, len(lengths)), until))
    return units


def _runs(chosen: list[int], places: list[int], lengths: list[int]) -> Iterator[list[int]]:
    """Yield runs of pages with consecutive slots: one call each."""
    run: list[int] = []
    end = -1
    for index in chosen:
        if run and places[index] != end:
            yield run
            run = []
        run.append(index)
        end = places[index] + BLOCK_BYTES + _padded(lengths[index])
    if run:
        yield run


def _padded(length: int) -> int:
    return -(-length // BLOCK_BYTES) * BLOCK_BYTES


def _header(effect: Write, page: int, place: int, checksum: int, unix_s: int) -> SlotHeader:
    record = effect.records[page]
    return SlotHeader(
        key=record["key"].tobytes(),
        namespace=tag_of(*effect.namespaces[page].item()),
        length=int(record["length"]),
        place=place,
        sequence=int(effect.sequences[page]),
        checksum=checksum,
        written=unix_s,
    )


def _fits_checksums(records: npt.NDArray[np.void], sums: list[int]) -> npt.NDArray[np.bool_]:
    """Return which pages have the checksum of their records, if there is one."""
    has_sum = records["flags"] & np.uint32(HAS_CHECKSUM) != 0
    fits: npt.NDArray[np.bool_] = ~has_sum | (records["checksum"] == np.array(sums, np.uint64))
    return fits


def _problem(
    header: SlotHeader | None, effect: Load, page: int, count: int, view: memoryview
) -> str:
    """Return the problem of a page that was read, "" if it is valid. count: bytes read."""
    if count < BLOCK_BYTES + len(view):
        return "the file ends before it"
    if header is None:
        return "no header of ours"
    wanted = effect.keys[page * KEY_BYTES : (page + 1) * KEY_BYTES]
    found = (header.key, parts_of(header.namespace), header.length)
    if found != (wanted, effect.namespaces[page].item(), int(effect.lengths[page])):
        return ANOTHER_PAGE
    return "" if checksum_of(view) == header.checksum else "its checksum is wrong"
