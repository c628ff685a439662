"""What a batch of pages becomes: READs, each into a few pieces, and the words behind them.

Pure arithmetic over arrays, so it is tested without a device. Pages follow each other as one stream
of bytes; the stream is cut where memory changes hands (runs, registrations, the largest READ), and
put together again where both sides go on without a gap. It is posted in *portions*. In each, the
words of the pages that it completes come behind all its bytes; the first of them is fenced: it
starts only after every READ before it has completed, and what follows starts after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import TypeAlias, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.reads import ODD, PeerRead
from peercache.model.runs import I64, U64, PageRuns
from peercache.rdma.key_table import MemoryKeys

READ_BYTES_MAX = 2**20
"""Most bytes of one READ, but for its last piece: sixteen of them outstanding fill any link, and a
page that is complete is known soon."""

PORTION_BYTES = 16 * 2**20
"""Bytes before the next words. A fence lets the pipe run dry for one round trip; every 16 MiB that
is a hundredth of the time at 46 GB/s, and a deadline costs what was under way, no more."""

PORTION_WORK_MAX = 256
"""Work requests of a portion: 128 scattered pages and their words. Half a millisecond to post, and
two of them are what a queue pair has room for, so that 16 of those cost a peer 3 MiB."""

WORD_BYTES = 8

WORD_GAP_BYTES = 512
"""Words so close to each other are read at once, with what lies between: a work request costs us
more than half a kilobyte costs the link. Neighbours of 1 MiB are 512 bytes apart."""


@attrs.frozen
class Limits:
    """What a connection can do. pieces: scatter entries of a READ; work: requests of a portion."""

    pieces: int
    work: int = PORTION_WORK_MAX
    read_bytes: int = READ_BYTES_MAX
    portion_bytes: int = PORTION_BYTES


@attrs.frozen(eq=False)
class Published:
    """A peer's published memory, as its regions say. Addresses are the peer's own."""

    pages_address: int
    page_bytes: int
    words_address: int
    granule: int
    keys: MemoryKeys

    def word_addresses(self, offsets: U64) -> U64:
        """Return where the generation word of each slot lies."""
        index = offsets // np.uint64(self.granule)
        addresses: U64 = np.uint64(self.words_address) + index * np.uint64(WORD_BYTES)
        return addresses


@attrs.frozen(eq=False)
class Words:
    """The words of one portion.

    remote, keys, lengths: the READs. at: where each goes in the word buffer, in bytes.
    pages: whose words they are; slots: the index of each in the word buffer, in words.
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

    remote, keys: of each READ. pieces: how many scatter entries each has.
    addresses, sizes, local_keys: all scatter entries, in order.
    begin, end: which bytes of the stream these are.
    """

    remote: list[int]
    keys: list[int]
    pieces: list[int]
    addresses: list[int]
    sizes: list[int]
    local_keys: list[int]
    begin: int
    end: int
    words: Words


class Missing(Enum):
    """Why there is no plan: some memory is not registered, ours or the peer's."""

    OURS = "ours"
    THEIRS = "theirs"


@attrs.frozen(eq=False)
class ReadPlan:
    """A whole read. buffer_bytes: the largest word buffer that a portion needs."""

    portions: tuple[Portion, ...]
    buffer_bytes: int


@attrs.frozen(eq=False)
class _Stream:
    """The bytes of all pages, as parts of which each has one place on either side."""

    pages: I64
    remote: U64
    keys: U64
    local: U64
    local_keys: U64
    lengths: U64

    def __len__(self) -> int:
        return len(self.lengths)

    def cut(self, sources: I64, before: U64, lengths: U64) -> _Stream:
        """Return the stream with each part cut into those that begin `before` bytes into it."""
        return _Stream(
            self.pages[sources],
            self.remote[sources] + before,
            self.keys[sources],
            self.local[sources] + before,
            self.local_keys[sources],
            lengths,
        )


def inside(published: Published, offsets: U64, lengths: U64) -> npt.NDArray[np.bool_]:
    """Return which slots lie in the page memory, in whole, where slots may begin."""
    page_bytes = np.uint64(published.page_bytes)
    # A sum could wrap around, a difference of checked numbers cannot.
    good: npt.NDArray[np.bool_] = (lengths > 0) & (lengths <= page_bytes)
    good &= offsets <= page_bytes - np.minimum(lengths, page_bytes)
    # The word of an offset within a granule is another slot's.
    good &= offsets % np.uint64(published.granule) == 0
    return good


def opened(published: Published, offsets: U64, lengths: U64) -> npt.NDArray[np.bool_]:
    """Return which slots the regions that we know open to us, with their words."""
    begins = np.uint64(published.pages_address) + offsets
    words = published.keys.cut(
        published.word_addresses(offsets), np.full(len(offsets), WORD_BYTES, np.uint64)
    )
    return published.keys.cut(begins, lengths).covered & words.covered


def plan(
    published: Published, offsets: U64, runs: PageRuns, local: MemoryKeys, limits: Limits
) -> ReadPlan | Missing:
    """Plan to read slots, which are `inside`, into runs that `local` covers."""
    whole = _stream_of(published, offsets, runs, local)
    if isinstance(whole, Missing):
        return whole
    words = _keys_of_words(published, offsets)
    if isinstance(words, Missing):
        return words
    stream = _cut_to_size(whole, limits.read_bytes)
    if not len(stream):
        return ReadPlan((), 0)
    starts_piece, starts_read = _joints(stream, limits)
    pieces_at = starts_piece.nonzero()[0]
    reads_at = starts_read.nonzero()[0]
    ends = stream.lengths.cumsum(dtype=np.uint64)
    # Each page's word comes in the portion that its last part is in.
    ends_page = np.ones(len(stream), np.bool_)
    ends_page[:-1] = stream.pages[1:] != stream.pages[:-1]
    last_part = ends_page.nonzero()[0]
    read_of_page = reads_at.searchsorted(last_part, side="right") - 1
    words_until = read_of_page.searchsorted(np.arange(len(reads_at)), side="right")
    borders = np.append(reads_at, len(stream))
    read_ends = ends[borders[1:] - 1]
    piece_of_read = pieces_at.searchsorted(borders)
    piece_counts = piece_of_read[1:] - piece_of_read[:-1]
    piece_sizes = np.add.reduceat(stream.lengths, pieces_at)
    portions = []
    for first, last in _spans(read_ends, words_until, limits):
        from_piece, to_piece = piece_of_read[first], piece_of_read[last]
        at = pieces_at[from_piece:to_piece]
        heads = reads_at[first:last]
        page_low = int(words_until[first - 1]) if first else 0
        pages = stream.pages[last_part[page_low : int(words_until[last - 1])]]
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
                words=_words_of(*words, pages),
            )
        )
    largest = max((portion.words.buffer_bytes for portion in portions), default=0)
    return ReadPlan(tuple(portions), largest)


def _keys_of_words(published: Published, offsets: U64) -> tuple[U64, U64] | Missing:
    """Return the address of each slot's word, and what opens it."""
    addresses = published.word_addresses(offsets)
    found = published.keys.cut(addresses, np.full(len(offsets), WORD_BYTES, np.uint64))
    return (addresses, found.keys) if found.covered.all() else Missing.THEIRS


def _words_of(all_addresses: U64, all_keys: U64, pages: I64) -> Words:
    """Plan the READs of some pages' words, neighbours in one."""
    if not len(pages):
        none = np.empty(0, np.int64)
        return Words([], [], [], [], none, none, 0)
    addresses, keys = all_addresses[pages], all_keys[pages]
    order = np.argsort(addresses, kind="stable")
    ordered, keys = addresses[order], keys[order]
    gaps = ordered[1:] - ordered[:-1]
    joins = (gaps <= WORD_GAP_BYTES) & (keys[1:] == keys[:-1])
    begins_read = np.ones(len(ordered), np.bool_)
    begins_read[1:] = ~joins
    heads = begins_read.nonzero()[0]
    tails = np.full(len(heads), len(ordered) - 1)
    tails[:-1] = heads[1:] - 1
    lengths = ordered[tails] - ordered[heads] + np.uint64(WORD_BYTES)
    at = np.zeros(len(heads), np.uint64)
    lengths[:-1].cumsum(out=at[1:])
    group = begins_read.cumsum() - 1
    slots = np.empty(len(pages), np.int64)
    within = at[group] + (ordered - ordered[heads][group])
    slots[order] = (within // np.uint64(WORD_BYTES)).astype(np.int64)
    return Words(
        remote=ordered[heads].tolist(),
        keys=keys[heads].tolist(),
        lengths=lengths.tolist(),
        at=at.tolist(),
        pages=pages,
        slots=slots,
        buffer_bytes=int(at[-1] + lengths[-1]),
    )


def clipped(runs: PageRuns, begin: int, end: int) -> PageRuns:
    """Return the bytes begin to end of the stream of all pages, as the runs of a single page."""
    ends = np.cumsum(runs.sizes, dtype=np.uint64)
    begins = ends - runs.sizes
    low, high = np.uint64(begin), np.uint64(end)
    chosen = np.flatnonzero((ends > low) & (begins < high) & (runs.sizes > 0))
    skipped = np.maximum(begins[chosen], low) - begins[chosen]
    sizes = np.minimum(ends[chosen], high) - begins[chosen] - skipped
    return PageRuns(runs.addresses[chosen] + skipped, sizes, np.array([0, len(chosen)], np.int64))


def bounced(runs: PageRuns) -> PageRuns:
    """Return runs that lay the stream of all pages out from address 0, one run a page."""
    lengths = runs.lengths
    begins = np.cumsum(lengths, dtype=np.uint64) - lengths
    return PageRuns(begins, lengths, np.arange(len(runs) + 1, dtype=np.int64))


def stripes(lengths: U64, rails: int, block_bytes: int) -> list[npt.NDArray[np.intp]]:
    """Return which pages go over which rail: whole pages, dealt out in blocks, in page order.

    So the rails are under way in the same part of the batch, and what is complete at a deadline is
    mostly a leading run.
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
        # The peer's first: what lacks there cannot be helped with memory of ours.
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
    """Return which parts begin a new scatter entry, and which a new READ."""
    count = len(stream)
    starts_read = np.ones(count, np.bool_)
    starts_read[1:] = (stream.remote[1:] != stream.remote[:-1] + stream.lengths[:-1]) | (
        stream.keys[1:] != stream.keys[:-1]
    )
    # A stretch is contiguous on the peer's side; it is cut again at whole multiples of a READ.
    begins = stream.lengths.cumsum(dtype=np.uint64) - stream.lengths
    number = (begins - begins[_head_of(starts_read)]) // np.uint64(limits.read_bytes)
    starts_read[1:] |= number[1:] != number[:-1]
    starts_piece = starts_read.copy()
    starts_piece[1:] |= (stream.local[1:] != stream.local[:-1] + stream.lengths[:-1]) | (
        stream.local_keys[1:] != stream.local_keys[:-1]
    )
    # Entries of one READ have one size: the provider of Soft-RoCE takes the first one's for all,
    # and reports success.
    pieces_at = starts_piece.nonzero()[0]
    sizes = np.add.reduceat(stream.lengths, pieces_at)
    starts_read[pieces_at[1:]] |= sizes[1:] != sizes[:-1]
    # No more scatter entries than the device takes.
    piece = starts_piece.cumsum()
    place: I64 = piece - piece[_head_of(starts_read)]
    starts_read |= starts_piece & (place % limits.pieces == 0)
    return starts_piece, starts_read


def _head_of(starts: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Return for each part the part that begins its group."""
    heads: npt.NDArray[np.intp] = np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0))
    return heads


def _spans(
    read_ends: U64, words_until: npt.NDArray[np.intp], limits: Limits
) -> Iterator[tuple[int, int]]:
    """Yield (first, last) READs of each portion."""
    work_until = np.arange(1, len(read_ends) + 1) + words_until
    first = 0
    while first < len(read_ends):
        bytes_before = read_ends[first - 1] if first else np.uint64(0)
        work_before = int(work_until[first - 1]) if first else 0
        fits = min(
            int(read_ends.searchsorted(bytes_before + np.uint64(limits.portion_bytes), "right")),
            int(work_until.searchsorted(work_before + limits.work, "right")),
        )
        # One READ and its words are always a portion: a READ completes few pages.
        last = max(fits, first + 1)
        yield first, last
        first = last


PageIndices: TypeAlias = npt.NDArray[np.intp]
"""Places of pages in a read."""


@final
class ReadProgress:
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

    def left(self) -> PageIndices:
        """Return the pages that are still to be read here, in order."""
        return (~(self.complete | self.outside | self.unopened)).nonzero()[0]

    def elsewhere(self) -> PageIndices:
        """Return the pages that another fabric might read."""
        return np.flatnonzero(~(self.complete | self.outside))

    def part(self, pages: PageIndices) -> PeerRead:
        """Return the read of some pages only."""
        read = self.read
        if len(pages) == len(read.offsets):
            return read
        runs = read.runs.take(pages)
        return PeerRead(read.member, read.offsets[pages], read.lengths[pages], runs)

    def keep_inside(self, pages: PageIndices, published: Published) -> PageIndices:
        """Return those of the pages that lie in the peer's page memory; note the others."""
        good = inside(published, self.read.offsets[pages], self.read.lengths[pages])
        if good.all():
            return pages
        self.outside[pages[~good]] = True
        return pages[good]

    def take(self, pages: PageIndices, words: U64, complete: npt.NDArray[np.bool_]) -> None:
        """Note what an attempt has brought for these pages."""
        done = pages[complete]
        self.seen[done] = words[complete]
        self.complete[done] = True
