"""Overlap: how much of a prompt lies where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.records import ON_DISK, RESIDENT

HOLDERS_MAX = 64
"""Holders of one answer: those of the longest beginnings. A directory tells no more of one page."""

ANYWHERE = RESIDENT | ON_DISK

Flags = npt.NDArray[np.uint8]


@attrs.frozen(eq=False)
class Overlap:
    """Which members hold which pages of a batch.

    holders: incarnations, each once.
    flags:   (holders, pages) uint8: RESIDENT, ON_DISK, both, or 0 where the holder has no page.
    whole:   that what is not named is absent. False: a node that may know more was not heard.
    """

    holders: tuple[int, ...]
    flags: Flags
    whole: bool

    @classmethod
    def joined(cls, parts: Sequence[Overlap]) -> Overlap:
        """Return the overlap of the pages of several batches, one after the other."""
        if len(parts) == 1:
            return parts[0].shortened()
        holders = tuple(dict.fromkeys(h for part in parts for h in part.holders))
        pages = sum(part.flags.shape[1] for part in parts)
        flags: Flags = np.zeros((len(holders), pages), np.uint8)
        begin = 0
        for part in parts:
            end = begin + part.flags.shape[1]
            flags[[holders.index(holder) for holder in part.holders], begin:end] = part.flags
            begin = end
        return cls(holders, flags, all(part.whole for part in parts)).shortened()

    @classmethod
    def unknown(cls, pages: int) -> Overlap:
        """Return what is known of so many pages before anything is heard."""
        return cls((), np.zeros((0, pages), np.uint8), whole=False)

    @classmethod
    def merged(cls, pages: int, parts: Iterable[tuple[npt.NDArray[np.intp], Overlap]]) -> Overlap:
        """Return what several nodes know together. parts: places of pages, and what one knows."""
        told = list(parts)
        holders = dict.fromkeys(holder for _, part in told for holder in part.holders)
        rows = {holder: row for row, holder in enumerate(holders)}
        flags: Flags = np.zeros((len(rows), pages), np.uint8)
        for places, part in told:
            its = np.array([rows[holder] for holder in part.holders], np.intp)
            flags[its[:, None], places] |= part.flags
        return cls(tuple(rows), flags, whole=True).shortened()

    def shortened(self) -> Overlap:
        """Keep the holders of the longest beginnings; without the others it is not whole."""
        if len(self.holders) <= HOLDERS_MAX:
            return self
        kept = np.sort(np.argsort(-self.run(), kind="stable")[:HOLDERS_MAX])
        holders = tuple(self.holders[at] for at in kept.tolist())
        return Overlap(holders, self.flags[kept], whole=False)

    def run(self, tier: int = ANYWHERE) -> npt.NDArray[np.intp]:
        """Return for each holder how many leading pages it has on these tiers: (holders,)."""
        return leading((self.flags & tier) != 0)

    def pages(self, tier: int = ANYWHERE) -> npt.NDArray[np.intp]:
        """Return for each holder how many pages it has on these tiers, anywhere in the batch."""
        counted: npt.NDArray[np.intp] = np.count_nonzero(self.flags & tier, axis=1)
        return counted

    def stored(self, tier: int = ANYWHERE) -> int:
        """Return how many leading pages are held by any holder on these tiers."""
        anywhere: Flags = np.bitwise_or.reduce(self.flags, axis=0)
        return int(leading(((anywhere & tier) != 0)[None])[0])


def leading(has: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Return how many leading columns of each row are true: (rows,)."""
    closed = np.concatenate([has, np.zeros((len(has), 1), np.bool_)], axis=1)
    run: npt.NDArray[np.intp] = closed.argmin(axis=1)
    return run
