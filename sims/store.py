"""The simulated page store: `storage` with a dictionary instead of files, step by step.

Its jobs are generators that yield between the steps of a copy, so that a page may be evicted while
it is written, and a slot may be read while it is filled.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import pairwise
from typing import Protocol

import attrs
import numpy as np
import xxhash

from peercache.actors.disk.slabs import slot_blocks
from peercache.actors.ports import (
    DISK_CHANGED,
    DISK_DAMAGED,
    DISK_DONE,
    DISK_ENTRY,
    DISK_FAILED,
    DISK_FULL,
    DISK_REPLACED,
    Load,
    Write,
)
from peercache.model.keys import KEY_BYTES, parts_of, tag_of
from sims.content import Page
from sims.planted import CHECKSUM_NOT_VERIFIED, planted


class PoolMemory(Protocol):
    """The pool's page memory, as a store needs it."""

    def word_at(self, offset: int) -> int:
        """Return the generation word of the slot at an offset."""

    def read(self, offset: int, size: int) -> Page:
        """Return bytes as they are."""

    def load(self, offset: int, slot_offset: int, data: Page) -> None:
        """Store bytes of a page from disk into its slot."""


@attrs.define(eq=False)
class StoredPage:
    """The content of a slot: its header and its bytes."""

    key: bytes
    namespace: int
    length: int
    sequence: int
    written: int
    checksum: int
    data: Page


@attrs.define(eq=False)
class Image:
    """The content of the disk, which outlives the node.

    slots: by place, what was last written there.
    rows:  by place, the key that the index file has there, if it is safe.
    used:  by place, when the page there was used, if the node has noted that.
    """

    slots: dict[int, StoredPage] = attrs.field(factory=dict)
    rows: dict[int, bytes] = attrs.field(factory=dict)
    used: dict[int, int] = attrs.field(factory=dict)
    _unsafe: list[tuple[int, bytes | None]] = attrs.field(factory=list)
    """Changes of rows that a crash may still undo, oldest first."""

    def note(self, place: int, key: bytes | None) -> None:
        """Change a row: safe with the next `sync`."""
        self._unsafe.append((place, key))

    def sync(self) -> None:
        """Make all changes of rows safe."""
        for place, key in self._unsafe:
            if key is None:
                self.rows.pop(place, None)
            else:
                self.rows[place] = key
        self._unsafe.clear()

    def crash(self) -> None:
        """Lose what is not safe: only rows, because overwritten bytes are permanently gone."""
        self._unsafe.clear()

    def entries(self) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """Return the entries of DiskOpened: of two rows of one key the last written one."""
        newest: dict[bytes, tuple[int, StoredPage]] = {}
        for place, key in self.rows.items():
            stored = self.slots.get(place)
            if stored is None or stored.key != key:
                continue  # The slot's header is another page's: the index is repaired at start.
            known = newest.get(key)
            if known is None or known[1].sequence < stored.sequence:
                newest[key] = (place, stored)
        self.rows = {place: key for key, (place, _) in newest.items()}
        found = np.zeros(len(newest), DISK_ENTRY)
        ordered = sorted(newest.items(), key=lambda item: item[1][1].sequence)
        for row, (key, (place, stored)) in zip(found, ordered, strict=True):
            row["key"] = np.void(key)
            row["namespace"], row["place"] = parts_of(stored.namespace), place
            row["sequence"], row["length"] = stored.sequence, stored.length
            row["written"] = stored.written
            row["used"] = self.used.get(place, stored.written)
        found["slot"] = slot_blocks(found["length"].astype(np.uint64))
        return found


@attrs.define(eq=False)
class Store:
    """Does the jobs of one node, one step at a time."""

    image: Image
    memory: PoolMemory
    steps_a_page: int = 2
    unix_s: int = 0

    def write(
        self, job: Write, at: int, outcome: int = DISK_DONE
    ) -> Generator[None, None, tuple[int, int]]:
        """Write one page of a job; outcome: the intended result. Return it, and the checksum."""
        record = job.records[at]
        offset, length = int(record["offset"]), int(record["length"])
        generation, place = int(record["generation"]), int(job.places[at])
        if self.memory.word_at(offset) != generation:
            return DISK_CHANGED, 0
        parts: list[Page] = []
        for begin, end in self._steps(length):
            parts.append(self.memory.read(offset + begin, end - begin))
            yield
        if self.memory.word_at(offset) != generation:
            return DISK_CHANGED, 0
        if outcome in (DISK_FAILED, DISK_FULL):
            return outcome, 0
        data = np.concatenate(parts)
        checksum = xxhash.xxh3_64_intdigest(data.tobytes())
        key = record["key"].tobytes()
        self.image.used.pop(place, None)
        self.image.slots[place] = StoredPage(
            key, tag_of(*job.namespaces[at].item()), length, int(job.sequences[at]), self.unix_s,
            checksum, data,
        )  # fmt: skip
        yield
        self.image.note(place, key)
        return DISK_DONE, checksum

    def load(
        self, job: Load, at: int, outcome: int = DISK_DONE
    ) -> Generator[None, None, tuple[int, int]]:
        """Read one page of a job into its slot; return its outcome and checksum."""
        key = job.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
        stored = self.image.slots.get(int(job.places[at]))
        if outcome == DISK_FAILED:
            return DISK_FAILED, 0
        found = None if stored is None else (stored.key, parts_of(stored.namespace), stored.length)
        if stored is None:
            return DISK_DAMAGED, 0
        # Bytes with the checksum that the node knows are the page: its header is not read.
        is_known = job.known is not None and int(job.known[at]) == stored.checksum
        if not is_known and found != (key, job.namespaces[at].item(), int(job.lengths[at])):
            return DISK_REPLACED, 0
        offset = int(job.offsets[at])
        for begin, end in self._steps(stored.length):
            self.memory.load(offset + begin, offset, stored.data[begin:end])
            yield
        checksum = xxhash.xxh3_64_intdigest(stored.data.tobytes())
        if checksum != stored.checksum and CHECKSUM_NOT_VERIFIED not in planted:
            return DISK_DAMAGED, 0
        return DISK_DONE, stored.checksum

    def forget(self, places: list[int]) -> None:
        """Delete rows."""
        for place in places:
            self.image.note(place, None)

    def note_use(self, places: list[int], unix_s: list[int]) -> None:
        """Note when places were used."""
        self.image.used.update(zip(places, unix_s, strict=True))

    def _steps(self, length: int) -> Iterator[tuple[int, int]]:
        steps = self.steps_a_page
        return pairwise(sorted({length * step // steps for step in range(steps + 1)}))
