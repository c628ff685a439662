"""Fakes that obey a port's contract: they pass the same suite as the real thing."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.member import Member
from peercache.model.reads import Fetched, PeerRead
from peercache.model.runs import U64
from peercache.model.seal import SEAL, Seals, unread_seals
from peercache.observability.reasons import CLOSED, DEADLINE, PEER_UNREACHABLE, REFUSED


class Memory(Protocol):
    """What one peer publishes: pages (uint8), seals (one a granule), and their words, a view."""

    pages: npt.NDArray[np.uint8]
    seals: Seals
    words: U64


@attrs.define
class PlainMemory:
    """Published memory that is none: arrays of this process."""

    pages: npt.NDArray[np.uint8]
    seals: Seals
    words: U64 = attrs.field(init=False)

    @words.default
    def _words(self) -> U64:
        return self.seals["word"]

    @classmethod
    def of(cls, page_bytes: int, granule: int) -> PlainMemory:
        """Make memory in which no slot was ever committed."""
        return cls(np.zeros(page_bytes, np.uint8), np.zeros(page_bytes // granule, SEAL))

    @property
    def usable_bytes(self) -> int:
        """Return the size of the page memory."""
        return len(self.pages)


class FakeFabric:
    """Reads the memory of peers that live in this very process, page by page.

    peers:   incarnation to memory; take one out to make it unreachable.
    between: called once a page, after its bytes and before its seal.
    before:  called once a page, between the first look and its bytes.
    """

    name = "fake"

    def __init__(self, *, granule: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without peers."""
        self.peers: dict[int, Memory] = {}
        self.between: Callable[[], None] = _nothing
        self.before: Callable[[], None] = _nothing
        self._granule = granule
        self._clock = clock
        self._closed = False
        self._reading = threading.Lock()

    def reaches(self, member: Member) -> bool:
        """Return whether the peer's memory is known."""
        return member.incarnation in self.peers

    def read(self, read: PeerRead, deadline: float) -> Fetched:
        """Copy page by page, each seal after its page."""
        seals = unread_seals(len(read.offsets))
        with self._reading:
            return Fetched(seals, self._read(read, seals, deadline), self.name)

    def close(self) -> None:
        """Read nothing any more."""
        with self._reading:
            self._closed = True

    def _read(self, read: PeerRead, seals: Seals, deadline: float) -> str:
        for page in range(len(seals)):
            memory = self.peers.get(read.member.incarnation)
            if self._closed or memory is None:
                return CLOSED if self._closed else PEER_UNREACHABLE
            if self._clock() >= deadline:
                return DEADLINE
            offset, length = int(read.offsets[page]), int(read.lengths[page])
            inside = length > 0 and offset + length <= len(memory.pages)
            if not inside or offset % self._granule:
                return REFUSED
            index = offset // self._granule
            if memory.words[index] != read.generations[page]:
                seals["word"][page] = memory.words[index]
                continue
            self.before()
            begin = offset
            for run in range(read.runs.starts[page], read.runs.starts[page + 1]):
                size = int(read.runs.sizes[run])
                source = memory.pages[begin : begin + size]
                ctypes.memmove(int(read.runs.addresses[run]), source.ctypes.data, size)
                begin += size
            self.between()
            seals[page] = memory.seals[index]
        return ""


def words_at(memory: Memory, offsets: U64, granule: int) -> U64:
    """Return the word of each slot, as records of this moment name it; 2 for slots outside."""
    index = (offsets // np.uint64(granule)).astype(np.uint64)
    inside = index < len(memory.words)
    found: U64 = np.where(inside, memory.words[np.where(inside, index, 0)], np.uint64(2))
    return found


def _nothing() -> None:
    """Happen by default."""
