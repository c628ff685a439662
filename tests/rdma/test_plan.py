"""What a batch becomes, without a device: a READ done by hand must bring the very bytes.

The table of keys cuts ranges where the keys change, and opens nothing that no piece covers.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.model.runs import PageRuns
from peercache.model.seal import SEAL_BYTES
from peercache.rdma.key_table import Cut, MemoryKeys, Piece
from peercache.rdma.plan import (
    PORTION_WORK_MAX,
    SEAL_GAP_BYTES,
    Limits,
    Look,
    Missing,
    Portion,
    Published,
    ReadPlan,
    bounced,
    clipped,
    inside,
    opened,
    plan,
    stripes,
)
from tests.examples import examples

GRANULE = 4096
PAGES_ADDRESS = 2**40
SEALS_ADDRESS = 2**39
PAGE_BYTES = 64 * GRANULE
OURS = 2**20
OURS_BYTES = 2**19
LOCAL_KEY, REMOTE_KEY, SEALS_KEY = 11, 22, 33


def published_with(pieces: list[Piece]) -> Published:
    """Return page memory that these regions open."""
    return Published(PAGES_ADDRESS, PAGE_BYTES, SEALS_ADDRESS, GRANULE, MemoryKeys.of(pieces))


SEALS_PIECE = (SEALS_ADDRESS, PAGE_BYTES // GRANULE * SEAL_BYTES, SEALS_KEY)
WHOLE = published_with([(PAGES_ADDRESS, PAGE_BYTES, REMOTE_KEY), SEALS_PIECE])
ALL_OURS = MemoryKeys.of([(OURS, OURS_BYTES, LOCAL_KEY)])
LIMITS = Limits(pieces=4, work=64, read_bytes=4 * GRANULE, portion_bytes=16 * GRANULE)


class Peer:
    """Does by hand what devices do: remote memory, seals' words, and our own, as arrays."""

    def __init__(self) -> None:
        """Fill the peer's memory with noise, and our own with a byte that is not in a page."""
        rng = np.random.default_rng(1)
        self.pages = rng.integers(0, 255, PAGE_BYTES, np.uint8)
        self.words = 2 * np.arange(PAGE_BYTES // GRANULE, dtype=np.uint64) + np.uint64(100)
        self.ours = np.full(OURS_BYTES, 255, np.uint8)
        self.begun: dict[int, int] = {}
        self.got: dict[int, int] = {}

    def run(
        self, made: ReadPlan, keys: Published, local: MemoryKeys, ends: npt.NDArray[np.uint64]
    ) -> None:
        """Carry out a plan; every address must be open under its key.

        ends: where each page ends in the stream of bytes.
        """
        for portion in made.portions:
            self._look(portion.first, keys, self.begun)
            began = 1 + int(ends.searchsorted(portion.end, side="left"))
            assert self.begun.keys() >= set(range(began)), "bytes before the first look"
            self._read(portion, keys, local)
            self._look(portion.last, keys, self.got)
            assert all(ends[page] <= portion.end for page in self.got), "bytes after the last look"

    def _look(self, look: Look, keys: Published, into: dict[int, int]) -> None:
        buffer = np.full(max(1, look.buffer_bytes // SEAL_BYTES), 7, np.uint64)
        rows = zip(look.remote, look.keys, look.lengths, look.at, strict=True)
        for remote, key, length, at in rows:
            assert key_of(keys.keys, remote, length) == key
            first = (remote - SEALS_ADDRESS) // SEAL_BYTES
            count = length // SEAL_BYTES
            buffer[at // SEAL_BYTES :][:count] = self.words[first : first + count]
        for page, slot in zip(look.pages.tolist(), look.slots.tolist(), strict=True):
            assert page not in into, f"the seal of page {page} is read twice"
            into[page] = int(buffer[slot])

    def _read(self, portion: Portion, keys: Published, local: MemoryKeys) -> None:
        at = 0
        for remote, key, count in zip(portion.remote, portion.keys, portion.pieces, strict=True):
            sizes = portion.sizes[at : at + count]
            total = sum(sizes)
            assert key_of(keys.keys, remote, total) == key
            source = remote - PAGES_ADDRESS
            for index in range(at, at + count):
                address, size = portion.addresses[index], portion.sizes[index]
                assert key_of(local, address, size) == portion.local_keys[index]
                self.ours[address - OURS :][:size] = self.pages[source : source + size]
                source += size
            at += count
        assert at == len(portion.addresses)


def key_of(table: MemoryKeys, begin: int, length: int) -> int:
    """Return the one key that opens a range."""
    cut = table.cut(np.array([begin], np.uint64), np.array([length], np.uint64))
    assert cut.covered.all()
    assert len(set(cut.keys.tolist())) == 1, "a READ crosses the border of a registration"
    return int(cut.keys[0])


def run(
    slots: list[tuple[int, list[tuple[int, int]]]],
    *,
    published: Published = WHOLE,
    local: MemoryKeys = ALL_OURS,
    limits: Limits = LIMITS,
) -> tuple[ReadPlan, Peer]:
    """Plan to read (offset, runs) slots, carry it out, and check every byte and seal."""
    offsets = np.array([offset for offset, _ in slots], np.uint64)
    runs = PageRuns.of([[(OURS + at, size) for at, size in pieces] for _, pieces in slots])
    made = plan(published, offsets, runs, local, limits)
    assert isinstance(made, ReadPlan), made
    peer = Peer()
    peer.run(made, published, local, runs.lengths.cumsum(dtype=np.uint64))
    expected = np.full(OURS_BYTES, 255, np.uint8)
    for offset, pieces in slots:
        source = offset
        for at, size in pieces:
            expected[at : at + size] = peer.pages[source : source + size]
            source += size
    assert np.array_equal(peer.ours, expected)
    assert (
        peer.begun
        == peer.got
        == {page: int(peer.words[offset // GRANULE]) for page, (offset, _) in enumerate(slots)}
    )
    check_limits(made, limits)
    return made, peer


def check_limits(made: ReadPlan, limits: Limits) -> None:
    """Assert what a queue pair and its buffer of seals have room for."""
    for portion in made.portions:
        looks = (portion.first, portion.last)
        pages = sum(len(look.pages) for look in looks)
        work = len(portion.remote) + sum(len(look.remote) for look in looks)
        assert work <= max(limits.work, 1 + pages)
        assert all(1 <= count <= limits.pieces for count in portion.pieces)
        assert portion.buffer_bytes <= made.buffer_bytes
        assert portion.buffer_bytes <= pages * (SEAL_BYTES + SEAL_GAP_BYTES)
        at = 0
        for count in portion.pieces:
            sizes = portion.sizes[at : at + count]
            assert len(set(sizes)) <= 1, "entries of one READ differ in size"
            assert sum(sizes) < 2 * limits.read_bytes
            at += count
    begins = [portion.begin for portion in made.portions]
    ends = [portion.end for portion in made.portions]
    assert begins == [0, *ends[:-1]][: len(begins)]


@pytest.mark.parametrize(
    ("slots", "pieces", "seals"),
    [
        # What follows each other there and here is one READ, and one a look.
        ([(page, [(page * GRANULE, GRANULE)]) for page in range(4)], [1], 4),
        # Gaps between destinations cost entries, not READs.
        ([(page, [(2 * page * GRANULE, GRANULE)]) for page in range(4)], [4], 4),
        # A READ takes four entries.
        ([(0, [(10 * run, 5) for run in range(50)])], [4] * 12 + [2], 1),
        # Soft-RoCE's provider counts every entry as long as the first, and reports success.
        ([(0, [(0, 100), (200, 100), (400, 50), (500, 100)])], [2, 1, 1], 1),
        # Nothing is merged across what is not asked for; only seals are, with what is between.
        ([(2 * page, [(page * GRANULE, GRANULE)]) for page in range(4)], [1] * 4, 7),
    ],
    ids=["neighbours", "scattered here", "many pieces", "pieces of many sizes", "apart"],
)
def test_what_is_merged_into_one_read(
    slots: list[tuple[int, list[tuple[int, int]]]], pieces: list[int], seals: int
) -> None:
    """The entries of each READ of a batch, and the seals that each of its looks reads at once."""
    made, _ = run([(page * GRANULE, runs) for page, runs in slots])

    (portion,) = made.portions
    assert portion.pieces == pieces
    assert portion.first.lengths == portion.last.lengths == [seals * SEAL_BYTES]


def test_seals_far_apart_are_read_one_by_one() -> None:
    """More kilobytes between two seals cost more than a request."""
    far = SEAL_GAP_BYTES // SEAL_BYTES + 1
    published = Published(
        PAGES_ADDRESS,
        2 * far * GRANULE,
        SEALS_ADDRESS,
        GRANULE,
        MemoryKeys.of(
            [(PAGES_ADDRESS, 2 * far * GRANULE, 1), (SEALS_ADDRESS, 2 * far * SEAL_BYTES, 2)]
        ),
    )
    offsets = np.array([far * GRANULE, 0], np.uint64)
    runs = PageRuns.of([[(OURS, 8)], [(OURS + 8, 8)]])

    made = plan(published, offsets, runs, ALL_OURS, LIMITS)

    assert isinstance(made, ReadPlan)
    for look in (made.portions[0].first, made.portions[0].last):
        assert (look.lengths, look.slots.tolist()) == ([SEAL_BYTES, SEAL_BYTES], [1, 0])


def test_long_page_has_its_looks_in_the_first_and_the_last_of_its_portions() -> None:
    """Portions end where they are full, in the middle of a page too."""
    made, _ = run([(0, [(0, 40 * GRANULE)]), (40 * GRANULE, [(40 * GRANULE, GRANULE)])])

    assert [portion.first.pages.tolist() for portion in made.portions] == [[0], [], [1]]
    assert [portion.last.pages.tolist() for portion in made.portions] == [[], [], [0, 1]]
    assert [portion.end - portion.begin for portion in made.portions] == [65536, 65536, 36864]


def test_seals_of_two_registrations_are_two_reads() -> None:
    """Neighbours across the border have a key each."""
    seals = [(SEALS_ADDRESS, 3 * SEAL_BYTES, 8), (SEALS_ADDRESS + 96, SEALS_PIECE[1] - 96, 9)]
    published = published_with([(PAGES_ADDRESS, PAGE_BYTES, REMOTE_KEY), *seals])

    made, _ = run(
        [(page * GRANULE, [(page * GRANULE, GRANULE)]) for page in range(6)], published=published
    )

    assert made.portions[0].first.keys == made.portions[0].last.keys == [8, 9]


def test_memory_that_is_not_registered_is_named() -> None:
    """Ours and the peer's have different remedies."""
    one, runs = np.array([0], np.uint64), PageRuns.of([[(OURS, 8)]])
    half = published_with([(PAGES_ADDRESS + GRANULE, GRANULE, 1), SEALS_PIECE])
    no_seals = published_with([(PAGES_ADDRESS, PAGE_BYTES, 1)])

    assert plan(WHOLE, one, runs, MemoryKeys.of([]), LIMITS) is Missing.OURS
    assert plan(half, one, runs, ALL_OURS, LIMITS) is Missing.THEIRS
    assert plan(half, one, runs, MemoryKeys.of([]), LIMITS) is Missing.THEIRS
    assert plan(no_seals, one, runs, ALL_OURS, LIMITS) is Missing.THEIRS
    offsets, lengths = np.array([0, GRANULE], np.uint64), np.array([8, 8], np.uint64)
    assert opened(half, offsets, lengths).tolist() == [False, True]


@pytest.mark.parametrize(
    ("offset", "length", "is_inside"),
    [
        (0, 1, True),
        (PAGE_BYTES - GRANULE, GRANULE, True),
        (PAGE_BYTES - GRANULE, GRANULE + 1, False),
        (PAGE_BYTES, 1, False),
        (2**64 - GRANULE, GRANULE, False),
        (2**63, 1, False),
        (0, 0, False),
        (1, 1, False),
    ],
)
def test_slot_that_is_not_in_the_page_memory_is_noticed(
    offset: int, length: int, *, is_inside: bool
) -> None:
    """Sums that wrap around included."""
    found = inside(WHOLE, np.array([offset], np.uint64), np.array([length], np.uint64))

    assert found.tolist() == [is_inside]


def test_small_pages_never_fill_a_queue_pair_over() -> None:
    """Five thousand scattered pages come in portions of bounded work."""
    count = 5000
    published = Published(
        PAGES_ADDRESS, count * 2 * GRANULE, SEALS_ADDRESS, GRANULE,
        MemoryKeys.of(
            [(PAGES_ADDRESS, count * 2 * GRANULE, 1), (SEALS_ADDRESS, count * 2 * SEAL_BYTES, 2)]
        ),
    )  # fmt: skip
    offsets = np.random.default_rng(2).permutation(count).astype(np.uint64) * np.uint64(2 * GRANULE)
    runs = PageRuns.of([[(OURS + page, 1)] for page in range(count)])

    made = plan(published, offsets, runs, ALL_OURS, Limits(pieces=16))

    assert isinstance(made, ReadPlan)
    for looks in ([each.first for each in made.portions], [each.last for each in made.portions]):
        assert [page for look in looks for page in look.pages.tolist()] == list(range(count))
    for portion in made.portions:
        looks = [portion.first, portion.last]
        work = len(portion.remote) + sum(len(look.remote) for look in looks)
        assert work <= PORTION_WORK_MAX
        assert sum(len(look.pages) for look in looks) <= PORTION_WORK_MAX


def test_bounced_pages_are_one_behind_the_other() -> None:
    """Runs of any shape become one stream from address 0, and find their way back from a part."""
    runs = PageRuns.of([[(1000, 10), (3000, 20)], [(5000, 0)], [(6000, 7)]])

    flat = bounced(runs)
    part = clipped(runs, 5, 32)

    assert flat.addresses.tolist() == [0, 30, 30]
    assert flat.sizes.tolist() == [30, 0, 7]
    assert list(zip(part.addresses.tolist(), part.sizes.tolist(), strict=True)) == [
        (1005, 5), (3000, 20), (6000, 2),
    ]  # fmt: skip
    assert part.starts.tolist() == [0, 3]


def test_stripes_deal_whole_pages_in_blocks_in_order() -> None:
    """Both rails are under way in the same part of the batch."""
    lengths = np.full(12, 10, np.uint64)

    dealt = stripes(lengths, rails=2, block_bytes=20)

    assert [pages.tolist() for pages in dealt] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


def test_stripes_share_a_small_batch_evenly() -> None:
    """Else one rail would have it all."""
    dealt = stripes(np.full(8, 10, np.uint64), rails=2, block_bytes=10**9)

    assert [len(pages) for pages in dealt] == [4, 4]


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, list[tuple[int, int]]]]:
    """Draw slots anywhere, and runs that do not overlap each other."""
    slots = []
    at = 0
    for _ in range(draw(st.integers(1, 12))):
        first = draw(st.integers(0, PAGE_BYTES // GRANULE - 1))
        room = PAGE_BYTES - first * GRANULE
        pieces: list[tuple[int, int]] = []
        for wanted in draw(st.lists(st.integers(0, 3 * GRANULE), min_size=1, max_size=8)):
            size = min(wanted, room)
            at += draw(st.sampled_from([0, 0, 1, 700]))
            if at + size > OURS_BYTES:
                break
            pieces.append((at, size))
            at += size
            room -= size
        if sum(size for _, size in pieces):
            slots.append((first * GRANULE, pieces))
    return slots


@st.composite
def pieces_of(draw: st.DrawFn, begin: int, length: int) -> list[Piece]:
    """Draw a way to register a range in pieces."""
    inner = draw(st.lists(st.integers(1, length - 1), max_size=4, unique=True))
    cuts = sorted([0, *inner, length])
    return [
        (begin + low, high - low, index + 50) for index, (low, high) in enumerate(pairwise(cuts))
    ]


@settings(max_examples=examples(300))
@given(
    slots=batches(),
    remote=pieces_of(PAGES_ADDRESS, PAGE_BYTES),
    local=pieces_of(OURS, OURS_BYTES),
    pieces=st.integers(1, 5),
    read_granules=st.integers(1, 5),
    portion_granules=st.integers(2, 20),
    work=st.integers(8, 64),
)
def test_any_batch_brings_the_very_bytes_within_the_limits(
    slots: list[tuple[int, list[tuple[int, int]]]],
    remote: list[Piece],
    local: list[Piece],
    pieces: int,
    read_granules: int,
    portion_granules: int,
    work: int,
) -> None:
    """Whatever is merged and cut: done by hand, each byte and each seal is the right one."""
    limits = Limits(
        pieces=pieces,
        work=work,
        read_bytes=read_granules * GRANULE,
        portion_bytes=portion_granules * GRANULE,
    )

    run(
        slots,
        published=published_with([*remote, SEALS_PIECE]),
        local=MemoryKeys.of(local),
        limits=limits,
    )


# --- the table of keys ----------------------------------------------------------------------------


def u64(*values: int) -> np.ndarray:
    """Return numbers as the table takes them."""
    return np.array(values, np.uint64)


def parts_of(cut: Cut) -> list[tuple[int, int, int, int]]:
    """Return (source, begin, length, key) of every part."""
    columns = (cut.sources, cut.begins, cut.lengths, cut.keys)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_range_is_cut_at_borders_only() -> None:
    """The usual page needs one key; one that straddles two chunks is read with two, in order."""
    table = MemoryKeys.of([(1000, 500, 7), (1500, 500, 8), (2000, 10, 9)])

    cut = table.cut(u64(1900, 1400), u64(50, 605))

    assert parts_of(cut) == [
        (0, 1900, 50, 8),
        (1, 1400, 100, 7),
        (1, 1500, 500, 8),
        (1, 2000, 5, 9),
    ]


PIECES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(1, 9)), max_size=8)
RANGES = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 30)), max_size=8)


@given(PIECES, RANGES)
def test_cut_agrees_with_a_walk_over_every_byte(
    pieces: list[Piece], ranges: list[tuple[int, int]]
) -> None:
    """A range is covered exactly if each byte is in some piece, and each part in its key's."""
    open_to = {
        byte: {key for begin, length, key in pieces if begin <= byte < begin + length}
        for byte in range(120)
    }

    cut = MemoryKeys.of(pieces).cut(
        u64(*[begin for begin, _ in ranges]), u64(*[length for _, length in ranges])
    )

    for number, (begin, length) in enumerate(ranges):
        mine = [part for part in parts_of(cut) if part[0] == number]
        covered = all(open_to[byte] for byte in range(begin, begin + length))
        assert bool(cut.covered[number]) == covered
        bytes_of_parts = [(byte, key) for _, at, size, key in mine for byte in range(at, at + size)]
        expected = list(range(begin, begin + length)) if covered else []
        assert [byte for byte, _ in bytes_of_parts] == expected
        assert all(key in open_to[byte] for byte, key in bytes_of_parts)
    assert all(length > 0 for _, _, length, _ in parts_of(cut))
    assert [part[0] for part in parts_of(cut)] == sorted(part[0] for part in parts_of(cut))
