"""How far a prefix reaches: for each pool, and for all pools together.

Pure. A prefix of n pages is usable if all its KV pages exist and every gating pool has the pages
that its policy requires for a prefix with this end. SGLang cuts only at such ends, so all of them
are returned: ranks with different ends agree on one that all have.

`Overlap` shows which pages of a prompt each holder has on each tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.records import ON_DISK, RESIDENT

Mask = npt.NDArray[np.bool_]

ALL_PAGES = "all_pages"
TRAILING_PAGES = "trailing_pages"
BLOCK_GROUPS = "block_groups"


@attrs.frozen(eq=False)
class SidePages:
    """The existing pages of one pool.

    policy:      one of the three above; with any other, no prefix is usable.
    present:     (n,) bool of the pages of the prefix; with BLOCK_GROUPS of the transfer's own keys.
    trailing:    with TRAILING_PAGES: how many pages before the end must be there.
    block_pages, group_pages: with BLOCK_GROUPS: pages that a group covers, and keys in a group.
    """

    policy: str
    present: Mask
    trailing: int = 1
    block_pages: int = 0
    group_pages: int = 0

    @property
    def gates(self) -> bool:
        """Return whether this pool limits the length of the prefix."""
        return self.policy != BLOCK_GROUPS

    @property
    def is_whole(self) -> bool:
        """Return whether this pool allows a prefix to end after every page."""
        return self.policy in {ALL_PAGES, TRAILING_PAGES} and bool(self.present.all())

    def ends(self, pages: int) -> Mask:
        """Return at which lengths a prefix of at most `pages` may end, (pages + 1,) bool."""
        if self.policy not in {ALL_PAGES, TRAILING_PAGES}:
            return np.zeros(pages + 1, np.bool_)
        window = pages if self.policy == ALL_PAGES else self.trailing
        ends = ends_of(self.present[:pages], window)
        ends[0] = False
        return ends

    def covered(self, pages: int) -> int:
        """Return how many pages the leading whole groups cover, at most `pages`."""
        if self.group_pages < 1 or self.block_pages < 1:
            return 0
        groups = leading(self.present) // self.group_pages
        return min(groups * self.block_pages, pages)


@attrs.frozen
class Prefix:
    """How far a prefix reaches.

    pages:   length of the longest usable prefix. ends: the lengths of all usable ones, ascending.
    kv:      leading KV pages. sides: the longest prefix of each pool, with KV pages only.
    """

    pages: int
    ends: list[int]
    kv: int
    sides: list[int]


def prefix_of(kv: Mask | None, asked: int, sides: list[SidePages]) -> Prefix:
    """Return how far a prefix of `asked` pages reaches.

    kv: (asked,) bool, the KV pages that exist; None if KV pages have no bytes. Then the pools hold
        everything, and at least one pool must require every page, otherwise nothing is known.
    """
    if kv is not None and kv.all() and all(side.is_whole for side in sides):
        # The case of a warm prompt; the arrays below take five times as long.
        return Prefix(asked, list(range(1, asked + 1)), asked, [asked] * len(sides))
    if kv is not None:
        pages = leading(kv)
    else:
        pages = asked if any(side.policy == ALL_PAGES for side in sides) else 0
    usable = np.ones(pages + 1, np.bool_)
    usable[0] = False
    lengths: list[int] = []
    for side in sides:
        if not side.gates:
            lengths.append(side.covered(asked))
            continue
        ends = side.ends(pages)
        lengths.append(int(np.flatnonzero(ends)[-1]) if ends.any() else 0)
        usable &= ends
    ends_at: list[int] = np.flatnonzero(usable).tolist()
    return Prefix(ends_at[-1] if ends_at else 0, ends_at, pages, lengths)


def leading(present: Mask) -> int:
    """Return the length of the leading run of existing pages."""
    return len(present) if present.all() else int(np.argmin(present))


def ends_of(present: Mask, window: int) -> Mask:
    """Return for 0, 1, … pages whether the last `window` of them all exist: (pages + 1,).

    A prefix shorter than the window needs all of its pages.
    """
    count = np.arange(len(present) + 1)
    begins = np.maximum(count - window, 0)
    # The sum over the window before each end.
    counted = np.concatenate([[0], np.cumsum(present)])
    ends: Mask = counted - counted[begins] == count - begins
    return ends


HOLDERS_MAX = 64
"""Holders in one answer: those with the longest prefixes. A directory returns no more."""

ANYWHERE = RESIDENT | ON_DISK

Flags = npt.NDArray[np.uint8]


@attrs.frozen(eq=False)
class Overlap:
    """Which members hold which pages of a batch.

    holders: incarnations, each once; `Client.member_addresses` has their addresses.
    flags:   (holders, pages) uint8: 1 in memory, 2 on disk, 3 both, 0 if the holder does not have
             the page.
    whole:   whether all other pages are absent. False: a node that may know more did not answer.
    """

    holders: tuple[int, ...]
    flags: Flags
    whole: bool

    @classmethod
    def joined(cls, parts: Sequence[Overlap]) -> Overlap:
        """Return the overlap of the concatenated pages of several batches."""
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
        """Return the overlap of `pages` pages before any answer."""
        return cls((), np.zeros((0, pages), np.uint8), whole=False)

    @classmethod
    def merged(cls, pages: int, parts: Iterable[tuple[npt.NDArray[np.intp], Overlap]]) -> Overlap:
        """Return the union of several answers. parts: indices of pages, and their overlap."""
        answers = list(parts)
        holders = dict.fromkeys(holder for _, part in answers for holder in part.holders)
        rows = {holder: row for row, holder in enumerate(holders)}
        flags: Flags = np.zeros((len(rows), pages), np.uint8)
        for places, part in answers:
            its = np.array([rows[holder] for holder in part.holders], np.intp)
            flags[its[:, None], places] |= part.flags
        return cls(tuple(rows), flags, whole=True).shortened()

    def shortened(self) -> Overlap:
        """Keep the holders of the longest prefixes; if others are dropped, it is not whole."""
        if len(self.holders) <= HOLDERS_MAX:
            return self
        kept = np.sort(np.argsort(-self.run(), kind="stable")[:HOLDERS_MAX])
        holders = tuple(self.holders[at] for at in kept.tolist())
        return Overlap(holders, self.flags[kept], whole=False)

    def run(self, tier: int = ANYWHERE) -> npt.NDArray[np.intp]:
        """Return for each holder how many leading pages it has on these tiers: (holders,) int.

        tier: 1 memory, 2 disk, 3 any.
        """
        return leading_columns((self.flags & tier) != 0)

    def pages(self, tier: int = ANYWHERE) -> npt.NDArray[np.intp]:
        """Return for each holder how many pages it has on these tiers, anywhere: (holders,) int."""
        counted: npt.NDArray[np.intp] = np.count_nonzero(self.flags & tier, axis=1)
        return counted

    def stored(self, tier: int = ANYWHERE) -> int:
        """Return how many leading pages are held on these tiers, each by any holder."""
        anywhere: Flags = np.bitwise_or.reduce(self.flags, axis=0)
        return int(leading_columns(((anywhere & tier) != 0)[None])[0])


def leading_columns(has: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Return how many leading columns of each row are true: (rows,)."""
    closed = np.concatenate([has, np.zeros((len(has), 1), np.bool_)], axis=1)
    run: npt.NDArray[np.intp] = closed.argmin(axis=1)
    return run
