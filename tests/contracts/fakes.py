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
from peercache.model.reads import ODD, Fetched, PeerRead
from peercache.model.runs import U64
from peercache.observability.reasons import CLOSED, DEADLINE, PEER_UNREACHABLE, REFUSED


class Memory(Protocol):
    """What one peer publishes: pages (uint8) and words (uint64, one a granule)."""

    pages: npt.NDArray[np.uint8]
    words: U64


@attrs.define
class PlainMemory:
    """Published memory that is none: arrays of this process."""

    pages: npt.NDArray[np.uint8]
    words: U64

    @classmethod
    def of(cls, page_bytes: int, granule: int) -> PlainMemory:
        """Make memory in which no slot was ever committed."""
        return cls(np.zeros(page_bytes, np.uint8), np.ones(page_bytes // granule, np.uint64))

    @property
    def usable_bytes(self) -> int:
        """Return the size of the page memory."""
        return len(self.pages)


class FakeFabric:
    """Reads the memory of peers that live in this very process, page by page.

    peers:   incarnation to memory; take one out to make it unreachable.
    between: called once a page, after its bytes and before its word.
    before:  called once a page, before its bytes.
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
        """Copy page by page, each word after its page."""
        words = np.full(len(read.offsets), ODD)
        with self._reading:
            return Fetched(words, self._read(read, words, deadline), self.name)

    def close(self) -> None:
        """Read nothing any more."""
        with self._reading:
            self._closed = True

    def _read(self, read: PeerRead, words: U64, deadline: float) -> str:
        for page in range(len(words)):
            memory = self.peers.get(read.member.incarnation)
            if self._closed or memory is None:
                return CLOSED if self._closed else PEER_UNREACHABLE
            if self._clock() >= deadline:
                return DEADLINE
            offset, length = int(read.offsets[page]), int(read.lengths[page])
            inside = length > 0 and offset + length <= len(memory.pages)
            if not inside or offset % self._granule:
                return REFUSED
            self.before()
            begin = offset
            for run in range(read.runs.starts[page], read.runs.starts[page + 1]):
                size = int(read.runs.sizes[run])
                source = memory.pages[begin : begin + size]
                ctypes.memmove(int(read.runs.addresses[run]), source.ctypes.data, size)
                begin += size
            self.between()
            words[page] = memory.words[offset // self._granule]
        return ""


def _nothing() -> None:
    """Happen by default."""
