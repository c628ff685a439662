"""The index in memory against a dictionary, and tenants of the disk: every byte accounted for."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from peercache.actors.disk.actor import DiskTier
from peercache.actors.disk.index import DONORS_MAX, Begun, DiskIndex
from peercache.actors.disk.key_table import FEW_KEYS, KeyTable, halves_of
from peercache.actors.disk.slabs import BLOCK_BYTES, slab_bytes_for, slot_blocks, slots_in
from peercache.actors.mailboxes import DiskIndexed, NamespaceNamed
from peercache.actors.origin import Origin
from peercache.actors.ports import DISK_ENTRY, DiskOpened
from peercache.actors.tenants import OTHERS, Tenants
from peercache.config.entries import parse_quotas
from peercache.model.keys import Namespace, parts_of, tags_of
from peercache.observability.metrics import Metrics
from tests.examples import examples
from tests.unit.actors.disk_world import DiskWorld

SLAB = 64 * BLOCK_BYTES


@cache
def key_of(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def keys_of(numbers: list[int]) -> bytes:
    return b"".join(key_of(number) for number in numbers)


def u64(values: list[int]) -> np.ndarray:
    return np.array(values, np.uint64)


class Driven:
    """An index, and a dictionary of what it must hold."""

    def __init__(self, slabs: int = 4) -> None:
        self.index = DiskIndex(capacity_bytes=slabs * SLAB, slab_bytes=SLAB)
        self.sequence = 0

    def begin(self, numbers: list[int], lengths: list[int], namespace: int = 1) -> Begun:
        self.sequence += 1
        count = len(numbers)
        return self.index.begin(
            keys_of(numbers), tags_of([namespace] * count), u64(lengths),
            u64([self.sequence] * count), 100 + self.sequence,
        )  # fmt: skip

    def add(self, numbers: list[int], length: int = 5000) -> Begun:
        begun = self.begin(numbers, [length] * len(numbers))
        self.index.finish(begun.entries[begun.entries >= 0])
        return begun

    def held(self, numbers: range) -> list[int]:
        found = self.index.find(keys_of(list(numbers)))
        return [number for number, entry in zip(numbers, found, strict=True) if entry >= 0]


def test_slots_waste_at_most_a_sixteenth() -> None:
    """Every length has a slot that fits it, and common sizes have one that fits exactly."""
    lengths = np.array([*range(1, 200_000, 61), 2**20, 3 * 2**20, 28 * 2**16, 2**32 - 1], np.uint64)
    pages = -(-lengths.astype(np.int64) // BLOCK_BYTES)

    blocks = slot_blocks(lengths) - 1

    assert (blocks >= pages).all()
    assert ((blocks - pages) * 16 <= pages).all()
    assert slot_blocks(u64([2**20])).tolist() == [257]
    assert slots_in(256 * 2**20, 257) == 255


def test_slab_size_follows_the_store() -> None:
    """A small store has several slabs, a very large one not too many files."""
    assert slab_bytes_for(32 * 2**20) == 2 * 2**20
    assert slab_bytes_for(100 * 10**9) == 256 * 2**20
    assert slab_bytes_for(10 * 10**12) == 4 * 2**30


def test_page_is_found_once_it_is_written() -> None:
    """While it is being written it is known, so that it is not written twice, and not found."""
    driven = Driven()

    begun = driven.begin([1, 2], [5000, 9000])

    assert driven.index.knows(key_of(1)).tolist() == [True]
    assert driven.index.find(keys_of([1, 2])).tolist() == [-1, -1]
    assert driven.begin([1, 2], [5000, 9000]).entries.tolist() == [-1, -1]
    driven.index.finish(begun.entries)
    assert driven.index.find(keys_of([2, 1, 3])).tolist() == [
        begun.entries[1], begun.entries[0], -1,
    ]  # fmt: skip
    rows = driven.index.entries(begun.entries)
    assert rows["length"].tolist() == [5000, 9000]
    assert rows["key"].tobytes() == keys_of([1, 2])
    assert rows["place"].tolist() == begun.places.tolist()
    assert rows["used"].tolist() == [101, 101]


def test_a_scan_lists_what_a_namespace_holds_and_ends() -> None:
    """By entries, which keep their numbers: neither pages being written, nor other names'."""
    driven = Driven()
    driven.add([1, 2, 3])
    theirs = driven.begin([4], [5000], namespace=2)
    driven.index.finish(theirs.entries)
    driven.begin([5], [5000])

    first, at = driven.index.scan(0, 1, count=2)
    rest, end = driven.index.scan(at, 1, count=100)

    assert driven.index.keys(first) + driven.index.keys(rest) == keys_of([1, 2, 3])
    assert (at, end) == (2, driven.index.end)
    assert driven.index.scan(10**6, 1, count=1)[1] == end


def test_page_larger_than_a_slab_is_refused() -> None:
    """It gets no place, and no page is evicted for it."""
    driven = Driven()
    driven.add(list(range(20)))
    longest = driven.index.page_bytes_max

    begun = driven.begin([50, 51], [longest, SLAB])

    assert (begun.entries >= 0).tolist() == [True, False]
    assert begun.gone.count == 0


def test_coldest_pages_go_first() -> None:
    """A full index evicts in the order of the last touch, and never more than it must."""
    driven = Driven(slabs=2)
    fits = 2 * slots_in(SLAB, 3)
    driven.add(list(range(fits)))
    driven.index.touch(driven.index.find(keys_of([0, 1, 2])))

    begun = driven.add(list(range(100, 110)))

    assert begun.gone.keys == keys_of(list(range(3, 13)))
    assert sorted(begun.gone.places.tolist()) == sorted(begun.places.tolist())


def test_page_touched_since_it_was_looked_at_is_not_the_coldest_of_a_full_index() -> None:
    """Victims are looked for in advance; a touch in between counts."""
    driven = Driven(slabs=2)
    fits = 2 * slots_in(SLAB, 3)
    driven.add(list(range(fits)))
    first = driven.add([100])

    driven.index.touch(driven.index.find(key_of(1)))
    second = driven.add([101])

    assert (first.gone.keys, second.gone.keys) == (key_of(0), key_of(2))


def test_pinned_page_does_not_go() -> None:
    """Nor is its place given out while a load reads it, not even if it is removed."""
    driven = Driven(slabs=1)
    fits = slots_in(SLAB, 3)
    driven.add(list(range(fits)))
    pinned = driven.index.find(key_of(0))
    place = int(driven.index.entries(pinned)["place"][0])
    driven.index.pin(pinned)

    first = driven.add(list(range(100, 100 + fits)))
    assert driven.index.find(key_of(0)).tolist() == pinned.tolist()
    driven.index.remove(pinned)
    second = driven.add(list(range(200, 200 + fits)))

    assert (first.entries >= 0).sum() == fits - 1
    assert place not in second.places.tolist()
    assert driven.index.find(key_of(0)).tolist() == [-1]
    driven.index.unpin(pinned)
    assert place in driven.add(list(range(300, 300 + fits))).places.tolist()


def test_size_without_room_takes_the_coldest_slab_of_another() -> None:
    """One odd page size costs one slab, and cannot fail forever."""
    driven = Driven(slabs=3)
    driven.add(list(range(3 * slots_in(SLAB, 3))))
    driven.index.touch(driven.index.find(keys_of(list(range(slots_in(SLAB, 3))))))

    begun = driven.add([500], 20_000)

    assert begun.entries[0] >= 0
    assert begun.gone.count == slots_in(SLAB, 3)
    assert driven.held(range(slots_in(SLAB, 3))) == list(range(slots_in(SLAB, 3)))


def test_slabs_follow_the_demand() -> None:
    """A size that is used takes slab after slab from one that is not."""
    driven = Driven(slabs=8)
    driven.add(list(range(8 * slots_in(SLAB, 3))))

    for number in range(1000, 1400):
        driven.add([number], 20_000)
    left = len(driven.held(range(8 * slots_in(SLAB, 3))))

    assert left <= 2 * slots_in(SLAB, 3)
    driven.index.check()


def test_refused_slab_gives_out_nothing_until_it_is_reopened() -> None:
    """The file system has no room for it; the others evict instead."""
    driven = Driven(slabs=2)
    fits = slots_in(SLAB, 3)
    driven.add(list(range(fits)))
    begun = driven.begin([50], [5000])

    driven.index.refuse(begun.entries)
    after = driven.add([51])

    assert after.gone.keys == key_of(0)
    assert driven.index.figures()["disk_bytes_closed"] == SLAB
    driven.index.reopen()
    assert driven.add([52]).gone.count == 0
    assert driven.index.figures()["disk_bytes_closed"] == 0


def test_pages_of_a_namespace_and_of_an_age_are_found() -> None:
    """For clear, and for a time to live."""
    driven = Driven()
    driven.add([1, 2])
    begun = driven.begin([3], [5000], namespace=9)

    assert driven.index.of_namespaces([9]).tolist() == begun.entries.tolist()
    assert len(driven.index.used_before(102, 0, 10)) == 2
    driven.index.finish(begun.entries)
    assert len(driven.index.used_before(103, 0, 10)) == 3
    assert driven.index.used_before(103, 1, 1).tolist() == [1]
    driven.index.touch(begun.entries, 500)
    assert len(driven.index.used_before(103, 0, 10)) == 2


def test_loaded_index_is_the_one_that_was() -> None:
    """Entries, places and order of age survive a restart."""
    driven = Driven()
    driven.add([1, 2, 3], 5000)
    driven.add([4, 5], 20_000)
    driven.index.touch(driven.index.find(key_of(2)))
    rows = driven.index.entries(driven.index.hottest_first()[::-1])

    again = DiskIndex(capacity_bytes=4 * SLAB, slab_bytes=SLAB)
    again.load(rows)

    assert again.entries(again.hottest_first())["key"].tobytes() == keys_of([2, 5, 4, 3, 1])
    assert again.figures() == driven.index.figures()
    assert again.coldest(2).tolist() == again.find(keys_of([1, 3])).tolist()


def test_hundred_thousand_entries_take_less_than_a_hundred_bytes_each() -> None:
    """Measured, with all that grows with the number of pages."""
    count, slab = 100_000, 256 * 2**20
    a_slab = slots_in(slab, 257)
    rows = np.zeros(count, DISK_ENTRY)
    number = np.arange(count)
    rows["key"] = np.frombuffer(random.Random(1).randbytes(16 * count), "V16")
    rows["place"] = number // a_slab * slab + (number % a_slab * 257 + 1) * BLOCK_BYTES
    rows["length"] = 2**20
    tracemalloc.start()

    index = DiskIndex(capacity_bytes=(count // a_slab + 1) * slab, slab_bytes=slab)
    index.load(rows)

    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / count < 100
    assert (index.find(rows["key"].tobytes()) == np.arange(count)).all()


@pytest.mark.parametrize("seed", range(2))
def test_key_table_agrees_with_a_dictionary(seed: int) -> None:
    """Adds and removes of batches, many keys to a chain, the heads doubling on the way."""
    rng = random.Random(seed)
    table, oracle = KeyTable(), {}
    spare = list(range(6000))
    table.reserve(len(spare))
    for _ in range(60):
        new = [k for k in dict.fromkeys(rng.randrange(4000) for _ in range(200)) if k not in oracle]
        rows = [spare.pop(rng.randrange(len(spare))) for _ in new]
        table.add(np.array(rows, np.int64), halves_of(keys_of(new)))
        oracle.update(zip(new, rows, strict=True))
        for old in rng.sample(sorted(oracle), min(len(oracle), rng.randrange(250))):
            spare.append(oracle[old])
            table.remove(np.array([oracle.pop(old)], np.int64))
        every = list(range(4000))
        assert table.find(halves_of(keys_of(every))).tolist() == [oracle.get(k, -1) for k in every]
        # A few keys go another way, without arrays.
        few = rng.sample(every, FEW_KEYS)
        assert table.find(halves_of(keys_of(few))).tolist() == [oracle.get(k, -1) for k in few]
        assert len(table) == len(oracle)


class IndexMachine(RuleBasedStateMachine):
    """Random batches; a dictionary knows what is there, a set of places who is where."""

    @initialize(slabs=st.integers(1, 5))
    def start(self, slabs: int) -> None:
        self.driven = Driven(slabs)
        self.index = self.driven.index
        self.pages: dict[int, tuple[int, int]] = {}  # number -> (entry, place), HELD
        self.writing: list[list[tuple[int, int, int]]] = []  # [(number, entry, place)] a batch
        self.ended: dict[int, int] = {}  # pinned, and removed: entry -> place
        self.pins: dict[int, int] = {}

    @rule(
        numbers=st.lists(st.integers(0, 60), max_size=20),
        lengths=st.lists(st.sampled_from([1, 9000, 70_000]), min_size=1, max_size=3),
    )
    def begin(self, numbers: list[int], lengths: list[int]) -> None:
        known = set(self.pages) | {n for batch in self.writing for n, _, _ in batch}
        known -= {n for batch in self.writing for n, entry, _ in batch if entry in self.ended}
        begun = self.driven.begin(numbers, [lengths[n % len(lengths)] for n in numbers])
        gone = {begun.gone.keys[at : at + 16] for at in range(0, len(begun.gone.keys), 16)}
        for number in [n for n in self.pages if key_of(n) in gone]:
            assert self.pages[number][0] not in self.pins, "a pinned page went"
            del self.pages[number]
        taken = [
            (number, int(entry))
            for number, entry in zip(numbers, begun.entries, strict=True)
            if entry >= 0
        ]
        assert not known & {number for number, _ in taken}
        batch = [(n, entry, int(p)) for (n, entry), p in zip(taken, begun.places, strict=True)]
        self.writing.append(batch)

    @precondition(lambda self: self.writing)
    @rule(good=st.booleans(), which=st.integers(0, 100))
    def end_writing(self, good: bool, which: int) -> None:
        batch = self.writing.pop(which % len(self.writing))
        entries = np.array([entry for _, entry, _ in batch], np.int64)
        ended = [place for _, entry, place in batch if entry in self.ended]
        if good:
            is_held, places = self.index.finish(entries)
            assert (is_held.sum(), places.tolist()) == (len(batch) - len(ended), ended)
        else:
            self.index.abandon(entries)
        for number, entry, place in batch:
            if entry in self.ended:
                del self.ended[entry]
            elif good:
                self.pages[number] = (entry, place)

    @rule(numbers=st.lists(st.integers(0, 60), max_size=10, unique=True))
    def remove(self, numbers: list[int]) -> None:
        writing = {n: (e, p) for batch in self.writing for n, e, p in batch if e not in self.ended}
        chosen = {n: self.pages.get(n) or writing.get(n) for n in numbers}
        chosen = {n: found for n, found in chosen.items() if found}
        gone = self.index.remove(np.array([entry for entry, _ in chosen.values()], np.int64))
        assert gone.count == len(chosen)
        for number, (entry, place) in chosen.items():
            if number in writing or entry in self.pins:
                self.ended[entry] = place
            # A page that is being written has no row yet.
            assert (place in gone.places.tolist()) == (number not in writing)
            self.pages.pop(number, None)

    @rule(number=st.integers(0, 60))
    def pin(self, number: int) -> None:
        if number in self.pages:
            entry = self.pages[number][0]
            self.index.pin(np.array([entry]))
            self.pins[entry] = self.pins.get(entry, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 100))
    def unpin(self, which: int) -> None:
        entry = sorted(self.pins)[which % len(self.pins)]
        self.index.unpin(np.array([entry]))
        self.pins[entry] -= 1
        if not self.pins[entry]:
            del self.pins[entry]
        if entry not in self.pins:
            self.ended.pop(entry, None)

    @rule(numbers=st.lists(st.integers(0, 60), max_size=10))
    def touch(self, numbers: list[int]) -> None:
        entries = self.index.find(keys_of(numbers))
        self.index.touch(entries[entries >= 0])

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        found = self.index.find(keys_of(list(range(61))))
        assert found.tolist() == [self.pages.get(n, (-1, 0))[0] for n in range(61)]
        held = [place for _, place in self.pages.values()]
        flying = [place for batch in self.writing for _, e, place in batch if e not in self.ended]
        places = held + flying + list(self.ended.values())
        assert len(set(places)) == len(places), "a place was given out twice"
        figures = self.index.figures()
        taken = figures["disk_bytes_used"] + figures["disk_bytes_in_flight"]
        assert taken + figures["disk_bytes_free"] == figures["disk_bytes"]
        blocks = slot_blocks(
            self.index.entries(np.array([e for e, _ in self.pages.values()], int))["length"]
        )
        assert figures["disk_bytes_used"] == int(blocks.sum()) * BLOCK_BYTES


IndexMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestIndexMachine = IndexMachine.TestCase


TAGS = {name: Namespace(name, "geometry").tag() for name in "abc-"}


def slot_bytes(length: int) -> int:
    return int(slot_blocks(np.array([length], np.uint64))[0]) * BLOCK_BYTES


class Shared:
    """An index that tenants share, and what a dictionary holds of it."""

    def __init__(self, text: str, slabs: int = 4) -> None:
        self.index = DiskIndex(capacity_bytes=slabs * SLAB, slab_bytes=SLAB)
        self.tenants = Tenants(parse_quotas(text), whole=slabs * SLAB, disk=True)
        self.index.share_between(self.tenants)
        self.owner: dict[bytes, str] = {}
        self.count = 0

    def add(self, name: str, count: int, blocks: int = 2) -> list[str]:
        """Store pages whose slots have so many blocks; return whose pages went for them."""
        keys = [(self.count + at).to_bytes(16, "big") for at in range(count)]
        self.count += count
        begun = self.index.begin(
            b"".join(keys),
            tags_of([TAGS[name]] * count),
            np.array([(blocks - 1) * BLOCK_BYTES] * count, np.uint64),
            np.array([self.count] * count, np.uint64),
            100,
        )
        went = [
            self.owner.pop(begun.gone.keys[at : at + 16])
            for at in range(0, 16 * begun.gone.count, 16)
        ]
        assert begun.gone.namespaces.tolist() == [parts_of(TAGS[owner]) for owner in went]
        self.index.finish(begun.entries[begun.entries >= 0])
        for key, entry in zip(keys, begun.entries.tolist(), strict=True):
            if entry >= 0:
                self.owner[key] = name
        self.index.check()
        return went

    def pages(self) -> Counter[str]:
        """Return how many pages each has."""
        return Counter(self.owner.values())

    def taken(self) -> dict[str, int]:
        """Return the bytes of each, as the index counts them."""
        return {name: self.tenants.of(tag).taken for name, tag in TAGS.items()}


def test_borrowed_room_goes_back_to_a_tenant_within_its_quota() -> None:
    """And no more than what was borrowed."""
    shared = Shared("a=50%;b=50%")
    shared.add("a", 200)

    for _ in range(30):
        shared.add("b", 7)

    half = 2 * SLAB // (2 * BLOCK_BYTES)
    assert shared.pages()["a"] == half
    assert shared.pages()["b"] >= half - 4, "a slab's own block holds no page"


def test_the_borrower_of_the_lowest_priority_gives_first() -> None:
    """Its pages go before colder ones of a borrower that counts for more."""
    shared = Shared("a=50%;b=10%,priority=2;c=10%,priority=1")
    shared.add("b", 60)
    shared.add("c", 64)

    assert set(shared.add("a", 40)) == {"c"}


def test_a_flood_without_a_quota_evicts_nothing_that_is_sure() -> None:
    """Pages of all sizes."""
    shared = Shared("a=50%")
    shared.add("a", 60)

    went = [
        name for blocks in (2, 3, 9, 2) for _ in range(20) for name in shared.add("-", 8, blocks)
    ]

    assert set(went) == {"-"}
    assert shared.pages()["a"] == 60


def test_borrowed_room_of_another_size_goes_back_however_busy_its_borrower_is() -> None:
    """Models differ in the size of their pages: a quota that one size of them gets is no quota."""
    shared = Shared("a=60%", slabs=40)
    for _ in range(60):
        shared.add("-", 31)

    for _ in range(400):
        shared.add("a", 2, 9)
        shared.add("-", 31)

    sure = shared.tenants.of(TAGS["a"])
    assert sure.taken > 0.95 * sure.quota
    assert shared.pages()["-"] > 13 * 31


def test_of_busy_borrowers_of_another_size_the_lowest_priority_gives() -> None:
    shared = Shared("a=60%;b=1%,priority=2;c=1%,priority=1", slabs=40)
    for name in "cb":
        for _ in range(20):
            shared.add(name, 31)

    went = [name for _ in range(90) for name in shared.add("a", 1, 9)]

    assert set(went) == {"a", "c"}


def test_a_new_size_gets_room_however_many_colder_slabs_cannot_go() -> None:
    """The coldest slabs are of a tenant within its quota, and more than are looked at closely."""
    shared = Shared("a=70%", slabs=2 * DONORS_MAX)
    a_slab = 31
    for name, slabs in (("a", DONORS_MAX + 8), ("-", DONORS_MAX - 8)):
        for _ in range(slabs):
            assert shared.add(name, a_slab) == []

    went = shared.add("-", 7, 9)

    assert set(went) == {"-"}
    assert shared.pages() == {"a": (DONORS_MAX + 8) * a_slab, "-": (DONORS_MAX - 9) * a_slab + 7}


def test_a_new_size_gets_room_though_colder_slabs_count_for_more() -> None:
    """They are of a borrower of a higher priority, which keeps them."""
    shared = Shared("a=1%,priority=2;b=1%,priority=1", slabs=2 * DONORS_MAX)
    for name in "ab":
        for _ in range(DONORS_MAX):
            shared.add(name, 31)

    assert set(shared.add("b", 7, 9)) == {"b"}


@given(
    st.lists(
        st.tuples(st.sampled_from("abc-"), st.integers(1, 12), st.sampled_from([2, 3, 5, 9])),
        max_size=30,
    )
)
@settings(max_examples=examples(25))
def test_no_page_goes_for_another_tenant_while_its_own_is_within_its_quota(
    steps: list[tuple[str, int, int]],
) -> None:
    """In every order of writers and sizes; and the sums are those of a slow count."""
    shared = Shared("a=50%,priority=1;b=25%;c=25%,priority=2")
    for name, count, blocks in steps:
        before = shared.taken()
        for victim in set(shared.add(name, count, blocks)) - {name}:
            assert before[victim] > shared.tenants.of(TAGS[victim]).quota
            # A page at most is given beyond what was borrowed.
            left = shared.tenants.of(TAGS[victim])
            assert left.taken > left.quota - 9 * BLOCK_BYTES
        slow = Counter[tuple[int, int]]()
        for row in shared.index.entries(shared.index.hottest_first()):
            slow[row["namespace"].item()] += slot_bytes(int(row["length"]))
        assert shared.taken() == {name: slow[parts_of(tag)] for name, tag in TAGS.items()}


def test_pages_evicted_from_the_disk_are_counted_by_tenant() -> None:
    """Seven of a borrower go for seven of a tenant that is guaranteed the disk, and then its
    own.
    """
    world = DiskWorld(slabs=1, quotas=parse_quotas("sure=100%"))
    sure = Namespace("sure").tag()
    world.set(*range(7))
    world.finish()

    def evicted() -> tuple[float, float]:
        return tuple(
            world.count("namespace_pages_evicted_total", namespace=name, tier="disk")
            for name in ("sure", OTHERS)
        )

    assert evicted() == (0, 0)
    world.set(*range(100, 107), namespace=sure)
    world.finish()
    assert evicted() == (0, 7)
    world.set(*range(200, 203), namespace=sure)
    world.finish()
    assert evicted() == (3, 7)
    assert world.count("disk_pages_lost_total", reason="evicted") == 10


def test_a_name_that_is_reported_later_finds_its_pages() -> None:
    """A restart knows tags only; a writer that states its name gets what its pages are due."""
    metrics = Metrics()
    tier = DiskTier(
        queue_bytes_max=SLAB, report_rate=1000, metrics=metrics, quotas=parse_quotas("team-*=50%")
    )
    tag = Namespace("team-1").tag()
    index = DiskIndex(capacity_bytes=4 * SLAB, slab_bytes=SLAB)
    lengths, sequences = np.array([BLOCK_BYTES], np.uint64), np.ones(1, np.uint64)
    index.begin(bytes(16), tags_of([tag]), lengths, sequences, 1)
    entries = index.entries(np.array([0]))
    fresh = DiskIndex(capacity_bytes=4 * SLAB, slab_bytes=SLAB)
    fresh.load(entries)
    opened = DiskOpened(4 * SLAB, SLAB, entries, 100)
    tier.on_message(Origin(0), DiskIndexed(opened, fresh), 0.0)
    assert fresh.tenants.of(tag) is fresh.tenants.others

    tier.on_message(Origin(0), NamespaceNamed("team-1"), 0.0)

    assert fresh.tenants.of(tag).taken == 2 * BLOCK_BYTES
    assert fresh.tenants.others.taken == 0
    labels = {"namespace": "team-1", "tier": "disk"}
    shown = metrics.registry.get_sample_value("peercache_namespace_bytes", labels)
    assert shown == 2 * BLOCK_BYTES
