"""How far one read has come: which pages are there, and which will not come this way."""

from __future__ import annotations

from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from peercache.model.reads import ODD, PeerRead
from peercache.model.runs import U64
from peercache.rdma.plan import Published, inside

Pages: TypeAlias = npt.NDArray[np.intp]
"""Places of pages in a read."""


@final
class Progress:
    """The state of one read over all its attempts.

    complete: (n,) bool, pages whose word was read after all of their bytes.
    seen:     (n,) uint64, the words of the complete ones; else ODD.
    outside:  (n,) bool, slots that lie outside the peer's page memory: never asked for.
    unopened: (n,) bool, slots that the peer has not registered yet.
    total_bytes: of all pages.
    avoided:  rails that have failed in this read, on a new channel.
    """

    def __init__(self, read: PeerRead, deadline: float) -> None:
        """Start with nothing read."""
        count = len(read.offsets)
        self.read = read
        self.total_bytes = int(read.lengths.sum())
        self.deadline = deadline
        self.seen: U64 = np.full(count, ODD, np.uint64)
        self.complete = np.zeros(count, np.bool_)
        self.outside = np.zeros(count, np.bool_)
        self.unopened = np.zeros(count, np.bool_)
        self.avoided: set[int] = set()

    @property
    def peer(self) -> int:
        """Return the incarnation that is read from."""
        return self.read.member.incarnation

    def left(self) -> Pages:
        """Return the pages that are still to be read here, in order."""
        return (~(self.complete | self.outside | self.unopened)).nonzero()[0]

    def elsewhere(self) -> Pages:
        """Return the pages that another fabric might read."""
        return np.flatnonzero(~(self.complete | self.outside))

    def part(self, pages: Pages) -> PeerRead:
        """Return the read of some pages only."""
        read = self.read
        if len(pages) == len(read.offsets):
            return read
        runs = read.runs.take(pages)
        return PeerRead(read.member, read.offsets[pages], read.lengths[pages], runs)

    def keep_inside(self, pages: Pages, published: Published) -> Pages:
        """Return those of the pages that lie in the peer's page memory; note the others."""
        good = inside(published, self.read.offsets[pages], self.read.lengths[pages])
        if good.all():
            return pages
        self.outside[pages[~good]] = True
        return pages[good]

    def take(self, pages: Pages, words: U64, complete: npt.NDArray[np.bool_]) -> None:
        """Note what an attempt has brought for these pages."""
        done = pages[complete]
        self.seen[done] = words[complete]
        self.complete[done] = True
