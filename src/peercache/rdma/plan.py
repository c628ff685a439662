"""The plan of a read: READs of several pieces each, between two READs of the pages' seals.

Pure arithmetic over arrays, so tests need no device. The pages are one stream of bytes. The stream
is cut at the borders of runs, of registrations and of the largest READ, and joined again where both
ends continue without a gap. It is posted in *portions*: the seals of the pages that begin in it,
all of its bytes, the seals of the pages that end in it. The first READ of the bytes and the first
one of the last seals are fenced: the device starts it only after every READ before it has
completed, and starts the next READs after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, TypeAlias, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.reads import PeerRead
from peercache.model.runs import I64, U64, PageRuns
from peercache.model.seal import SEAL_BYTES, Seals, unread_seals
from peercache.rdma.key_table import MemoryKeys

READ_BYTES_MAX = 2**20
"""The most bytes of one READ, without its last piece. Sixteen outstanding READs of this size fill
any link, and the reader soon knows that a page is complete."""

PORTION_BYTES = 16 * 2**20
"""Bytes between two checks of seals. A fence leaves the link idle for one round trip: two fences
every 16 MiB cost a fiftieth of the time at 46 GB/s. A deadline wastes at most the portions in
flight."""

PORTION_WORK_MAX = 384
"""Work requests of a portion: 128 scattered pages and two checks of each, which take less than a
millisecond to post. A queue pair has room for two portions; 16 queue pairs cost a peer 4.5 MiB."""

SEAL_GAP_BYTES = 64 * SEAL_BYTES
"""One READ fetches seals within this distance, with the bytes between them: a work request costs
about as much as some kilobytes on the link. The seals of adjacent 1 MiB pages are this far
apart."""


@attrs.frozen
class Limits:
    """Limits of a connection. pieces: scatter entries of a READ; work: requests of a portion."""

    pieces: int
    work: int = PORTION_WORK_MAX
    read_bytes: int = READ_BYTES_MAX
    portion_bytes: int = PORTION_BYTES


@attrs.frozen(eq=False)
class Published:
    """The published memory of a peer, with the keys of its regions. Addresses are the peer's."""

    pages_address: int
    page_bytes: int
    seals_address: int
    granule: int
    keys: MemoryKeys

    def seal_addresses(self, offsets: U64) -> U64:
        """Return the address of each slot's seal."""
        index = offsets // np.uint64(self.granule)
        addresses: U64 = np.uint64(self.seals_address) + index * np.uint64(SEAL_BYTES)
        return addresses


@attrs.frozen(eq=False)
class Look:
    """The READs of the seals of some pages.

    remote, keys, lengths: those of each READ. at: its offset in the look's buffer, in bytes.
    pages: the pages of the seals. slots: the index of each page's seal in the buffer, in seals.
    """

    remote: list[int]
    keys: list[int]
    lengths: list[int]
    at: list[int]
    pages: I64
    slots: I64
    buffer_bytes: int


@attrs.frozen(eq=False)
class Portion:
    """One chain of work requests.

    remote, keys: of each READ. pieces: the number of its scatter entries.
    addresses, sizes, local_keys: all scatter entries, in order.
    begin, end: the bytes of the stream.
    first: the first look, at the pages that begin in this portion.
    last:  the last look, at the pages that end in it.
    """

    remote: list[int]
    keys: list[int]
    pieces: list[int]
    addresses: list[int]
    sizes: list[int]
    local_keys: list[int]
    begin: int
    end: int
    first: Look
    last: Look

    @property
    def buffer_bytes(self) -> int:
        """Return the room for both looks, the first one in front."""
        return self.first.buffer_bytes + self.last.buffer_bytes


class Missing(Enum):
    """Why there is no plan: local memory, or memory of the peer, is not registered."""

    OURS = "ours"
    THEIRS = "theirs"


@attrs.frozen(eq=False)
class ReadPlan:
    """The portions of a read. buffer_bytes: the largest buffer of seals that a portion needs."""

    portions: tuple[Portion, ...]
    buffer_bytes: int


@attrs.frozen(eq=False)
class _Stream:
    """The bytes of all pages, as parts that are contiguous at both ends."""

    pages: I64
    remote: U64
    keys: U64
    local: U64
    local_keys: U64
    lengths: U64

    def __len__(self) -> int:
        return len(self.lengths)

    def cut(self, sources: I64, before: U64, lengths: U64) -> _Stream:
        """Return the parts `sources`, each from `before` bytes into it, with new lengths."""
        return _Stream(
            self.pages[sources],
            self.remote[sources] + before,
            self.keys[sources],
            self.local[sources] + before,
            self.local_keys[sources],
            lengths,
        )


def inside(published: Published, offsets: U64, lengths: U64) -> npt.NDArray[np.bool_]:
    """Return which slots are wholly in the page memory and begin at a granule."""
    page_bytes = np.uint64(published.page_bytes)
    # A sum could overflow, a difference of checked numbers cannot.
    good: npt.NDArray[np.bool_] = (lengths > 0) & (lengths <= page_bytes)
    good &= offsets <= page_bytes - np.minimum(lengths, page_bytes)
    # An offset within a granule would have the seal of another slot.
    good &= offsets % np.uint64(published.granule) == 0
    return good


def opened(published: Published, offsets: U64, lengths: U64) -> npt.NDArray[np.bool_]:
    """Return the slots with bytes and seals in known regions of the peer."""
    begins = np.uint64(published.pages_address) + offsets
    seals = published.keys.cut(
        published.seal_addresses(offsets), np.full(len(offsets), SEAL_BYTES, np.uint64)
    )
    return published.keys.cut(begins, lengths).covered & seals.covered


def plan(
    published: Published, offsets: U64, runs: PageRuns, local: MemoryKeys, limits: Limits
) -> ReadPlan | Missing:
    """Plan to read slots, which are `inside`, into `runs`; `local` has the keys of the runs."""
    whole = _stream_of(published, offsets, runs, local)
    if isinstance(whole, Missing):
        return whole
    seals = _keys_of_seals(published, offsets)
    if isinstance(seals, Missing):
        return seals
    stream = _cut_to_size(whole, limits.read_bytes)
    if not len(stream):
        return ReadPlan((), 0)
    starts_piece, starts_read = _joints(stream, limits)
    pieces_at = starts_piece.nonzero()[0]
    reads_at = starts_read.nonzero()[0]
    ends = stream.lengths.cumsum(dtype=np.uint64)
    # The first look at a page is in the portion of its first part, the last one in that of its last
    # part.
    turns = (stream.pages[1:] != stream.pages[:-1]).nonzero()[0]
    first_part = np.concatenate(([0], turns + 1))
    last_part = np.append(turns, len(stream) - 1)
    begun_until = _pages_until(reads_at, first_part)
    ended_until = _pages_until(reads_at, last_part)
    borders = np.append(reads_at, len(stream))
    read_ends = ends[borders[1:] - 1]
    piece_of_read = pieces_at.searchsorted(borders)
    piece_counts = piece_of_read[1:] - piece_of_read[:-1]
    piece_sizes = np.add.reduceat(stream.lengths, pieces_at)
    portions = []
    for first, last in _spans(read_ends, begun_until + ended_until, limits):
        from_piece, to_piece = piece_of_read[first], piece_of_read[last]
        at = pieces_at[from_piece:to_piece]
        heads = reads_at[first:last]
        begun = _within(begun_until, first, last)
        ended = _within(ended_until, first, last)
        first_look = _look_at(*seals, stream.pages[first_part[begun]])
        # Usually the same pages begin and end in a portion.
        last_look = first_look
        if begun != ended:
            last_look = _look_at(*seals, stream.pages[last_part[ended]])
        portions.append(
            Portion(
                remote=stream.remote[heads].tolist(),
                keys=stream.keys[heads].tolist(),
                pieces=piece_counts[first:last].tolist(),
                addresses=stream.local[at].tolist(),
                sizes=piece_sizes[from_piece:to_piece].tolist(),
                local_keys=stream.local_keys[at].tolist(),
                begin=int(read_ends[first - 1]) if first else 0,
                end=int(read_ends[last - 1]),
                first=first_look,
                last=last_look,
            )
        )
    largest = max((portion.buffer_bytes for portion in portions), default=0)
    return ReadPlan(tuple(portions), largest)


def _pages_until(
    reads_at: npt.NDArray[np.intp], parts: npt.NDArray[np.intp]
) -> npt.NDArray[np.intp]:
    """Return how many of these parts, one per page, are in the READs up to each READ."""
    read_of_page = reads_at.searchsorted(parts, side="right") - 1
    until: npt.NDArray[np.intp] = read_of_page.searchsorted(np.arange(len(reads_at)), side="right")
    return until


def _within(until: npt.NDArray[np.intp], first: int, last: int) -> slice:
    """Return which pages are of the READs first to last."""
    return slice(int(until[first - 1]) if first else 0, int(until[last - 1]))


def _keys_of_seals(published: Published, offsets: U64) -> tuple[U64, U64] | Missing:
    """Return the address and the key of each slot's seal."""
    addresses = published.seal_addresses(offsets)
    found = published.keys.cut(addresses, np.full(len(offsets), SEAL_BYTES, np.uint64))
    return (addresses, found.keys) if found.covered.all() else Missing.THEIRS


def _look_at(all_addresses: U64, all_keys: U64, pages: I64) -> Look:
    """Plan the READs of some pages' seals; one READ fetches neighbours."""
    if not len(pages):
        none = np.empty(0, np.int64)
        return Look([], [], [], [], none, none, 0)
    addresses, keys = all_addresses[pages], all_keys[pages]
    order = np.argsort(addresses, kind="stable")
    ordered, keys = addresses[order], keys[order]
    gaps = ordered[1:] - ordered[:-1]
    joins = (gaps <= SEAL_GAP_BYTES) & (keys[1:] == keys[:-1])
    begins_read = np.ones(len(ordered), np.bool_)
    begins_read[1:] = ~joins
    heads = begins_read.nonzero()[0]
    tails = np.full(len(heads), len(ordered) - 1)
    tails[:-1] = heads[1:] - 1
    lengths = ordered[tails] - ordered[heads] + np.uint64(SEAL_BYTES)
    at = np.zeros(len(heads), np.uint64)
    lengths[:-1].cumsum(out=at[1:])
    group = begins_read.cumsum() - 1
    slots = np.empty(len(pages), np.int64)
    within = at[group] + (ordered - ordered[heads][group])
    slots[order] = (within // np.uint64(SEAL_BYTES)).astype(np.int64)
    return Look(
        remote=ordered[heads].tolist(),
        keys=keys[heads].tolist(),
        lengths=lengths.tolist(),
        at=at.tolist(),
        pages=pages,
        slots=slots,
        buffer_bytes=int(at[-1] + lengths[-1]),
    )


def clipped(runs: PageRuns, begin: int, end: int) -> PageRuns:
    """Return the bytes begin to end of the stream, as the runs of a single page."""
    ends = np.cumsum(runs.sizes, dtype=np.uint64)
    begins = ends - runs.sizes
    low, high = np.uint64(begin), np.uint64(end)
    chosen = np.flatnonzero((ends > low) & (begins < high) & (runs.sizes > 0))
    skipped = np.maximum(begins[chosen], low) - begins[chosen]
    sizes = np.minimum(ends[chosen], high) - begins[chosen] - skipped
    return PageRuns(runs.addresses[chosen] + skipped, sizes, np.array([0, len(chosen)], np.int64))


def bounced(runs: PageRuns) -> PageRuns:
    """Return runs that place the stream at address 0, one run for each page."""
    lengths = runs.lengths
    begins = np.cumsum(lengths, dtype=np.uint64) - lengths
    return PageRuns(begins, lengths, np.arange(len(runs) + 1, dtype=np.int64))


def rows_of(seals: npt.NDArray[Any]) -> U64:
    """Return seals, or memory for seals, as rows of eight words, the generation word first.

    A view: numpy copies seals with fields ten times as slowly, field by field.
    """
    return seals.view(np.uint64).reshape(-1, SEAL_BYTES // 8)


def stripes(lengths: U64, rails: int, block_bytes: int) -> list[npt.NDArray[np.intp]]:
    """Return the pages of each rail: whole pages, striped in blocks, in page order.

    So all rails work on the same part of the batch, and the complete pages at a deadline are mostly
    a leading run.
    """
    if rails == 1:
        return [np.arange(len(lengths))]
    total = int(lengths.sum())
    block = max(1, min(block_bytes, -(-total // rails)))
    begins = np.cumsum(lengths, dtype=np.uint64) - lengths
    rail_of = (begins // np.uint64(block)).astype(np.int64) % rails
    return [np.flatnonzero(rail_of == rail) for rail in range(rails)]


def _stream_of(
    published: Published, offsets: U64, runs: PageRuns, local: MemoryKeys
) -> _Stream | Missing:
    pages: I64 = np.arange(len(runs), dtype=np.int64)
    remote = np.uint64(published.pages_address) + offsets
    counts = runs.starts[1:] - runs.starts[:-1]
    if not (counts == 1).all():
        pages = pages.repeat(counts)
        begins = runs.sizes.cumsum(dtype=np.uint64) - runs.sizes
        first = np.minimum(runs.starts[:-1], max(len(begins) - 1, 0))
        remote = remote.repeat(counts) + (begins - begins[first].repeat(counts))
    ours = local.cut(runs.addresses, runs.sizes)
    if not ours.covered.all():
        # Check the peer first: a bounce buffer cannot replace memory that the peer lacks.
        is_open = opened(published, offsets, runs.lengths).all()
        return Missing.OURS if is_open else Missing.THEIRS
    if not ours.is_whole:
        before = ours.begins - runs.addresses[ours.sources]
        pages, remote = pages[ours.sources], remote[ours.sources] + before
    theirs = published.keys.cut(remote, ours.lengths)
    if not theirs.covered.all():
        return Missing.THEIRS
    if theirs.is_whole:
        return _Stream(pages, remote, theirs.keys, ours.begins, ours.keys, ours.lengths)
    at = theirs.sources
    into = ours.begins[at] + (theirs.begins - remote[at])
    return _Stream(pages[at], theirs.begins, theirs.keys, into, ours.keys[at], theirs.lengths)


def _cut_to_size(stream: _Stream, bytes_max: int) -> _Stream:
    largest = np.uint64(bytes_max)
    if (stream.lengths <= largest).all():
        return stream
    counts = ((stream.lengths + largest - np.uint64(1)) // largest).astype(np.int64)
    sources = np.repeat(np.arange(len(stream)), counts)
    number = np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts, counts)
    before = number.astype(np.uint64) * largest
    return stream.cut(sources, before, np.minimum(stream.lengths[sources] - before, largest))


def _joints(stream: _Stream, limits: Limits) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return the parts that begin a new scatter entry, and the parts that begin a new READ."""
    count = len(stream)
    starts_read = np.ones(count, np.bool_)
    starts_read[1:] = (stream.remote[1:] != stream.remote[:-1] + stream.lengths[:-1]) | (
        stream.keys[1:] != stream.keys[:-1]
    )
    # A contiguous stretch at the peer is cut again at multiples of the largest READ.
    begins = stream.lengths.cumsum(dtype=np.uint64) - stream.lengths
    number = (begins - begins[_head_of(starts_read)]) // np.uint64(limits.read_bytes)
    starts_read[1:] |= number[1:] != number[:-1]
    starts_piece = starts_read.copy()
    starts_piece[1:] |= (stream.local[1:] != stream.local[:-1] + stream.lengths[:-1]) | (
        stream.local_keys[1:] != stream.local_keys[:-1]
    )
    # All entries of a READ have one size: the provider of Soft-RoCE uses the size of the first one
    # for all of them, and reports success.
    pieces_at = starts_piece.nonzero()[0]
    sizes = np.add.reduceat(stream.lengths, pieces_at)
    starts_read[pieces_at[1:]] |= sizes[1:] != sizes[:-1]
    # A READ has no more scatter entries than the device supports.
    piece = starts_piece.cumsum()
    place: I64 = piece - piece[_head_of(starts_read)]
    starts_read |= starts_piece & (place % limits.pieces == 0)
    return starts_piece, starts_read


def _head_of(starts: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Return for each part the first part of its group."""
    heads: npt.NDArray[np.intp] = np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0))
    return heads


def _spans(
    read_ends: U64, looks_until: npt.NDArray[np.intp], limits: Limits
) -> Iterator[tuple[int, int]]:
    """Yield the range of READs of each portion. looks_until: seals to read, up to each READ."""
    work_until = np.arange(1, len(read_ends) + 1) + looks_until
    first = 0
    while first < len(read_ends):
        bytes_before = read_ends[first - 1] if first else np.uint64(0)
        work_before = int(work_until[first - 1]) if first else 0
        fits = min(
            int(read_ends.searchsorted(bytes_before + np.uint64(limits.portion_bytes), "right")),
            int(work_until.searchsorted(work_before + limits.work, "right")),
        )
        # A READ with its seals always fits: it has few pages, or their seals are one READ.
        last = max(fits, first + 1)
        yield first, last
        first = last


PageIndices: TypeAlias = npt.NDArray[np.intp]
"""Indices of pages in a read."""


@final
class ReadProgress:
    """The state of one read over all its attempts.

    complete: (n,) bool, pages whose seal was read after all of their bytes.
    seen:     (n,) SEAL, the seals of the complete pages; else the word is ODD.
    outside:  (n,) bool, slots outside the page memory of the peer: no READ asks for them.
    unopened: (n,) bool, slots that the peer has not registered yet.
    total_bytes: of all pages.
    avoided:  rails that failed in this read, on a new channel.
    """

    def __init__(self, read: PeerRead, deadline: float) -> None:
        """Start with nothing read."""
        count = len(read.offsets)
        self.read = read
        self.total_bytes = int(read.lengths.sum())
        self.deadline = deadline
        self.seen: Seals = unread_seals(count)
        self.complete = np.zeros(count, np.bool_)
        self.outside = np.zeros(count, np.bool_)
        self.unopened = np.zeros(count, np.bool_)
        self.avoided: set[int] = set()

    @property
    def peer(self) -> int:
        """Return the incarnation of the owner."""
        return self.read.member.incarnation

    def left(self) -> PageIndices:
        """Return the pages that are still to be read over rdma, in order."""
        return (~(self.complete | self.outside | self.unopened)).nonzero()[0]

    def elsewhere(self) -> PageIndices:
        """Return the pages that another fabric may read."""
        return np.flatnonzero(~(self.complete | self.outside))

    def part(self, pages: PageIndices) -> PeerRead:
        """Return the read of some pages only."""
        read = self.read
        if len(pages) == len(read.offsets):
            return read
        runs = read.runs.take(pages)
        generations = read.generations[pages]
        return PeerRead(read.member, read.offsets[pages], read.lengths[pages], runs, generations)

    def keep_inside(self, pages: PageIndices, published: Published) -> PageIndices:
        """Return the pages inside the peer's page memory; note the others as outside."""
        good = inside(published, self.read.offsets[pages], self.read.lengths[pages])
        if good.all():
            return pages
        self.outside[pages[~good]] = True
        return pages[good]

    def take(self, pages: PageIndices, seals: Seals, complete: npt.NDArray[np.bool_]) -> None:
        """Note the result of an attempt for these pages."""
        done = pages[complete]
        rows_of(self.seen)[done] = rows_of(seals)[complete]
        self.complete[done] = True
