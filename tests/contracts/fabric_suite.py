"""What every fabric must do. A fabric's own test class inherits the suite and gives a `bench`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt
import pytest

from peercache.fabric.port import Fabric
from peercache.memory.published import PublishedSegment
from peercache.model.ids import Incarnation
from peercache.model.member import ALIVE, Member
from peercache.model.reads import Fetched, PeerRead
from peercache.model.records import RECORD
from peercache.model.runs import PageRuns
from peercache.model.seal import ODD
from peercache.observability.reasons import DEADLINE, PEER_UNREACHABLE, REFUSED
from peercache.paths.verify import verified
from tests.contracts.fakes import Memory, words_at
from tests.pace import PROMPT_S, TIMEOUT_S

GRANULE = 4096
PAGE_MEMORY_BYTES = 24 * 2**20
INCARNATION = 0x51
UNTOUCHED = 0xEE


@contextlib.contextmanager
def published_segment(folder: Path) -> Iterator[PublishedSegment]:
    """Publish a segment in a folder, all of it usable."""
    published = PublishedSegment.create(
        folder,
        incarnation=Incarnation(INCARNATION),
        page_bytes=PAGE_MEMORY_BYTES,
        granule=GRANULE,
    )
    published.populate(PAGE_MEMORY_BYTES)
    try:
        yield published
    finally:
        published.close()


@attrs.define
class Owner:
    """Changes published memory as the pool does: a word is odd before a byte changes."""

    memory: Memory

    def store(
        self, offset: int, content: bytes, generation: int, *, key: bytes = b"", space: int = 0
    ) -> None:
        """Put a page into the slot at `offset`, over whatever was there."""
        self.evict(offset)
        self.memory.pages[offset : offset + len(content)] = np.frombuffer(content, np.uint8)
        self.memory.seals[offset // GRANULE] = (generation, key, space, len(content))

    def evict(self, offset: int) -> None:
        """Take a page away: its word is odd forever."""
        self.memory.words[offset // GRANULE] |= np.uint64(1)


class Bench(Protocol):
    """One owner, and one fabric that reads from it.

    between: set it to have something done after a page's bytes and before its word.
    """

    fabric: Fabric
    owner: Owner
    member: Member
    between: Callable[[], None]


@attrs.define
class Destination:
    """Memory of ours, filled with UNTOUCHED, into which pages are read with gaps between runs."""

    memory: npt.NDArray[np.uint8]
    runs: PageRuns
    lengths: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, sizes: Sequence[Sequence[int]], gap: int = 3) -> Destination:
        """Lay out runs of these sizes, a list a page, in order, `gap` bytes before each."""
        flat = np.array([size for page in sizes for size in page], np.uint64)
        ends = np.cumsum(flat + np.uint64(gap), dtype=np.uint64)
        memory = np.full(int(ends[-1]) + gap, UNTOUCHED, np.uint8)
        starts = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum([len(page) for page in sizes], out=starts[1:])
        runs = PageRuns(np.uint64(memory.ctypes.data) + ends - flat, flat, starts)
        return cls(memory, runs, runs.lengths)

    def page(self, index: int) -> bytes:
        """Return the bytes of one page, its runs joined."""
        base = self.memory.ctypes.data
        pieces = []
        for run in range(self.runs.starts[index], self.runs.starts[index + 1]):
            begin = int(self.runs.addresses[run]) - base
            pieces.append(self.memory[begin : begin + int(self.runs.sizes[run])].tobytes())
        return b"".join(pieces)

    def gaps_are_untouched(self) -> bool:
        """Return whether every byte that belongs to no run is as it was."""
        outside = np.ones(len(self.memory), bool)
        for address, size in zip(self.runs.addresses, self.runs.sizes, strict=True):
            begin = int(address) - self.memory.ctypes.data
            outside[begin : begin + int(size)] = False
        return bool((self.memory[outside] == UNTOUCHED).all())


def read(
    bench: Bench,
    offsets: Sequence[int],
    into: Destination,
    *,
    member: Member | None = None,
    generations: Sequence[int] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Fetched:
    """Read slots of the bench's owner; generations: those of the records, the present words."""
    asked = np.array(offsets, np.uint64)
    named = words_at(bench.owner.memory, asked, GRANULE)
    if generations is not None:
        named = np.array(generations, np.uint64)
    peer_read = PeerRead(member or bench.member, asked, into.lengths, into.runs, named)
    return bench.fabric.read(peer_read, time.monotonic() + timeout_s)


def content_of(seed: int, length: int) -> bytes:
    """Return bytes that differ from page to page and within a page."""
    return np.random.default_rng(seed).bytes(length)


def member_of(incarnation: int, **where: str) -> Member:
    """Return a member of a view; where: data, boot_id, segment."""
    known = {"data": "", "boot_id": "", "segment": "", **where}
    return Member(incarnation, 1, ALIVE, 255, "host", "", **known)


class FabricSuite:
    """The contract of ports.Fabric."""

    def test_bytes_land_in_scattered_runs_and_nowhere_else(self, bench: Bench) -> None:
        """Every page's bytes arrive in its runs, in order; the gaps between stay as they are."""
        sizes = [[1], [GRANULE], [100, 1, GRANULE - 7], [5] * 50, [2 * GRANULE, 3]]
        offsets = [0, 5 * GRANULE, 9 * GRANULE, 20 * GRANULE, 30 * GRANULE]
        contents = [content_of(index, sum(page)) for index, page in enumerate(sizes)]
        for offset, content in zip(offsets, contents, strict=True):
            bench.owner.store(offset, content, 2 * offset + 2)
        into = Destination.of(sizes)

        got = read(bench, offsets, into)

        assert got.failure == ""
        assert [into.page(index) for index in range(5)] == contents
        assert into.gaps_are_untouched()

    def test_words_are_those_that_the_owner_stored(self, bench: Bench) -> None:
        """Small and large, a word that was asked for is passed on as it is."""
        stored = [2, 2**63, 2**64 - 2, 8]
        for page, word in enumerate(stored):
            bench.owner.store(page * GRANULE, b"x", word)
        into = Destination.of([[1]] * 4)

        got = read(bench, [0, GRANULE, 2 * GRANULE, 3 * GRANULE], into)

        assert got.seals["word"].tolist() == stored
        assert got.seals["word"].dtype == np.uint64

    def test_word_of_a_page_is_that_of_its_first_granule(self, bench: Bench) -> None:
        """A page longer than a granule has one word; the others in its range mean nothing."""
        bench.owner.memory.words[:] = 2 * np.arange(len(bench.owner.memory.words)) + 1000
        bench.owner.memory.seals["length"] = 5 * GRANULE
        into = Destination.of([[5 * GRANULE], [GRANULE]])

        got = read(bench, [3 * GRANULE, 100 * GRANULE], into)

        assert got.seals["word"].tolist() == [1006, 1200]

    def test_thousands_of_pages_arrive_in_one_read(self, bench: Bench) -> None:
        """A batch larger than any request or system call takes is still one read."""
        count = 5000
        bench.owner.memory.words[:count] = 2 * np.arange(count) + 2
        bench.owner.memory.seals["length"] = 1
        bench.owner.memory.pages[: count * GRANULE : GRANULE] = np.arange(count) % 251
        into = Destination.of([[1]] * count, gap=0)

        got = read(bench, [page * GRANULE for page in range(count)], into)

        assert got.failure == ""
        assert np.array_equal(got.seals["word"], 2 * np.arange(count) + 2)
        assert np.array_equal(into.memory, np.arange(count) % 251)

    def test_page_of_many_megabytes_arrives(self, bench: Bench) -> None:
        """A page larger than what a fabric moves at a time arrives in full."""
        content = content_of(1, 9 * 2**20 + 11)
        bench.owner.store(GRANULE, content, 8)
        into = Destination.of([[len(content) - 5, 5]])

        got = read(bench, [GRANULE], into)

        assert got.seals["word"].tolist() == [8]
        assert into.page(0) == content

    def test_nothing_is_asked_and_nothing_fails(self, bench: Bench) -> None:
        """A read of no pages is no failure."""
        nothing = PageRuns.of([])
        none = np.zeros(0, np.uint64)

        got = bench.fabric.read(
            PeerRead(bench.member, none, none, nothing, none), time.monotonic() + TIMEOUT_S
        )

        assert got.failure == ""
        assert len(got.seals) == 0

    @pytest.mark.parametrize(
        ("offset", "length"),
        [
            (PAGE_MEMORY_BYTES, 1),
            (PAGE_MEMORY_BYTES - GRANULE, GRANULE + 1),
            (0, PAGE_MEMORY_BYTES + 1),
            (2**64 - GRANULE, GRANULE),
            (2**64 - GRANULE, 2 * GRANULE),
            (2**63, 1),
            (0, 2**32 - 1),
            (GRANULE // 2, 1),
        ],
    )
    def test_slot_outside_the_page_memory_is_refused(
        self, bench: Bench, offset: int, length: int
    ) -> None:
        """Nothing outside is read, sums that wrap around included, and the peer serves on."""
        bench.owner.store(0, b"inside", 4)
        memory = np.empty(length, np.uint8)
        runs = PageRuns.of([[(memory.ctypes.data, length)]])
        lengths = np.array([length], np.uint64)
        asked = np.array([offset], np.uint64)
        outside = PeerRead(bench.member, asked, lengths, runs, np.array([4], np.uint64))
        inside = Destination.of([[6]])

        got = bench.fabric.read(outside, time.monotonic() + TIMEOUT_S)
        after = read(bench, [0], inside)

        assert (got.failure, got.seals["word"].tolist()) == (REFUSED, [int(ODD)])
        assert (after.failure, inside.page(0)) == ("", b"inside")

    def test_deadline_that_is_over_reads_nothing(self, bench: Bench) -> None:
        """The answer is immediate, and no word is even."""
        bench.owner.store(0, b"late", 4)
        into = Destination.of([[4]] * 3)
        begun = time.monotonic()

        got = read(bench, [0, 0, 0], into, timeout_s=-1.0)

        assert time.monotonic() - begun < PROMPT_S
        assert got.failure == DEADLINE
        assert (got.seals["word"] == ODD).all()

    def test_other_incarnation_at_the_same_place_is_not_read(self, bench: Bench) -> None:
        """An address that another node has now serves no request for the old one."""
        bench.owner.store(0, b"mine", 4)
        stranger = attrs.evolve(bench.member, incarnation=INCARNATION + 1)
        into = Destination.of([[4]])

        got = read(bench, [0], into, member=stranger)

        assert got.failure in (REFUSED, PEER_UNREACHABLE)
        assert got.seals["word"].tolist() == [int(ODD)]
        assert into.page(0) != b"mine"

    def test_owner_that_rewrites_between_bytes_and_word_gives_another_word(
        self, bench: Bench
    ) -> None:
        """The slot is evicted and holds another page by the time its word is read.

        A fabric that sees both looks reports it by an odd word.
        """
        bench.owner.store(0, b"old", 10)
        into = Destination.of([[3]])
        bench.between = lambda: bench.owner.store(0, b"new", 12)

        got = read(bench, [0], into)

        assert got.failure == ""
        assert got.seals["word"].tolist() in ([12], [13])

    def test_owner_that_evicts_between_bytes_and_word_gives_an_odd_word(self, bench: Bench) -> None:
        """An eviction alone already shows in the word."""
        bench.owner.store(0, b"old", 10)
        into = Destination.of([[3]])
        bench.between = lambda: bench.owner.evict(0)

        got = read(bench, [0], into)

        assert got.seals["word"].tolist() == [11]

    def test_generation_that_comes_true_during_the_read_is_no_hit(self, bench: Bench) -> None:
        """A forged record can name the next generation: the bytes before it are another page's."""
        bench.owner.store(0, b"theirs", 10)
        into = Destination.of([[6]])
        future = np.array([12], np.uint64)
        forged = PeerRead(bench.member, np.zeros(1, np.uint64), into.lengths, into.runs, future)
        bench.between = lambda: bench.owner.store(0, b"secret", 12)

        got = bench.fabric.read(forged, time.monotonic() + TIMEOUT_S)

        assert got.failure == ""
        assert got.seals["word"].tolist() != [12]

    def test_seal_of_a_page_comes_with_its_word(self, bench: Bench) -> None:
        """Key, space and length are stored with the word, and arrive as the owner stored them."""
        bench.owner.store(0, b"one", 10, key=b"k" * 16, space=2**64 - 1)
        bench.owner.store(GRANULE, b"another", 12, key=b"l" * 16, space=5)
        into = Destination.of([[7], [3]])

        got = read(bench, [GRANULE, 0], into)

        assert got.seals["key"].tolist() == [b"l" * 16, b"k" * 16]
        assert got.seals["space"].tolist() == [5, 2**64 - 1]
        assert got.seals["length"].tolist() == [7, 3]

    def test_record_of_another_page_is_seen_in_the_seal(self, bench: Bench) -> None:
        """A forged record names the slot and the word of page A: the seal shows that it is A."""
        bench.owner.store(0, b"one", 10, key=b"a" * 16, space=7)
        record = np.zeros(1, RECORD)
        record["generation"], record["length"] = 10, 3
        found = []
        for key, space, length in ((b"a", 7, 3), (b"b", 7, 3), (b"a", 8, 3), (b"a", 7, 2)):
            record["key"], record["length"] = key * 16, length
            got = read(bench, [0], Destination.of([[length]]))
            found.append(verified(record, space, got.seals).tolist())

        assert found == [[True], [False], [False], [False]]

    def test_record_of_a_word_that_is_gone_or_to_come_is_seen(self, bench: Bench) -> None:
        """The look before the bytes: one such page of three, and the others arrive."""
        for page, content in enumerate((b"one", b"two", b"six")):
            bench.owner.store(page * GRANULE, content, 10 + 2 * page)
        for wrong in (8, 14, 13):
            into = Destination.of([[3]] * 3)
            got = read(bench, [0, GRANULE, 2 * GRANULE], into, generations=[10, wrong, 14])

            assert got.failure == ""
            assert got.seals["word"][[0, 2]].tolist() == [10, 14]
            assert got.seals["word"][1] not in (wrong, ODD)
            assert (into.page(0), into.page(2)) == (b"one", b"six")

    def test_many_threads_read_at_once(self, bench: Bench) -> None:
        """Reads of several threads do not mix."""
        pages = 64
        contents = [content_of(page, GRANULE) for page in range(pages)]
        for page, content in enumerate(contents):
            bench.owner.store(page * GRANULE, content, 2 * page + 2)
        wrong: list[str] = []

        def go(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(10):
                chosen = rng.integers(0, pages, 16)
                into = Destination.of([[GRANULE - 9, 9]] * 16)
                got = read(bench, (chosen * GRANULE).tolist(), into)
                if got.failure or not np.array_equal(got.seals["word"], 2 * chosen + 2):
                    wrong.append(got.failure or "words")
                if [into.page(index) for index in range(16)] != [contents[k] for k in chosen]:
                    wrong.append("bytes")

        threads = [threading.Thread(target=go, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert not wrong

    def test_after_close_nothing_is_read_and_nothing_raised(self, bench: Bench) -> None:
        """A closed fabric answers, at once, that it cannot."""
        bench.owner.store(0, b"here", 4)
        into = Destination.of([[4]])
        read(bench, [0], Destination.of([[4]]))

        bench.fabric.close()
        bench.fabric.close()
        got = read(bench, [0], into)

        assert got.failure != ""
        assert got.seals["word"].tolist() == [int(ODD)]
        assert into.page(0) != b"here"

    def test_member_that_is_nowhere_is_not_reached(self, bench: Bench) -> None:
        """A member without address or segment is neither reached nor an exception."""
        nowhere = member_of(0x99)
        into = Destination.of([[4]])

        got = read(bench, [0], into, member=nowhere)

        assert not bench.fabric.reaches(nowhere)
        assert got.failure == PEER_UNREACHABLE
        assert got.seals["word"].tolist() == [int(ODD)]

    def test_member_of_the_bench_is_reached(self, bench: Bench) -> None:
        """The owner whom the other tests read is one that the fabric reports as reachable."""
        reached = bench.fabric.reaches(bench.member)

        assert reached
