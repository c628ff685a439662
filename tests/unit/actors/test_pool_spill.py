"""What a pool names for spilling, and what it does with pages that other nodes spill."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.actors.effects import (
    NotifyDirectory,
    NotifyPlacement,
    NotifyPublisher,
    StoreWords,
)
from peercache.actors.mailboxes import (
    ColdPages,
    DrainChanged,
    PagesForgotten,
    PagesGiven,
    PagesWritten,
    RequestSpill,
    SpilledPages,
    TakenOver,
    TakeOver,
)
from peercache.actors.pool.size_classes import STALE_MIN
from peercache.actors.pool.slots import PERIOD_S
from peercache.actors.pool.spill_order import LIFETIME_SHARE, SPILL_AGAIN_S, SPILL_PAGES
from peercache.config.entries import parse_quotas
from peercache.model.keys import Namespace, space_of, tag_of
from peercache.model.records import DROP
from peercache.wire.messages.membership import RequestRoom
from peercache.wire.messages.pool import (
    COMMITTED,
    HERE,
    REFUSED_FULL,
    REFUSED_SIZE,
    REFUSED_TOO_LARGE,
    REPEATED,
    RESERVED,
    RETAINED,
    Commit,
    Remove,
    Reserve,
    Retain,
    Touched,
)
from tests.examples import examples
from tests.unit.actors.test_pool_mirrors import GRANULE, INSIDE, NODE, Taker, key, taken


class Spiller(Taker):
    """A pool that spills, and takes what others spill."""

    def cold(self, *, only_new: bool = False) -> dict[int, float]:
        """Return the pages that it would spill, with their ages, in order."""
        (reported,) = self.say(RequestSpill(only_new), INSIDE)
        assert isinstance(reported, NotifyPlacement)
        assert isinstance(reported.fact, ColdPages)
        return {
            int.from_bytes(name, "big"): round(age, 3)
            for _, records, ages in reported.fact.groups
            for name, age in zip(records["key"].tolist(), ages.tolist(), strict=True)
        }

    def reserve_size(self, number: int, size: int) -> None:
        """Store a page of a size, if it has room."""
        self.sequence += 1
        lengths = np.array([size], "<u8").tobytes()
        self.say(Reserve(5, self.sequence, 1, key(number), lengths))
        self.commit(1)

    def touch(self, *numbers: int) -> None:
        self.say(Touched(self.drops(*numbers).tobytes()))

    def drops(self, *numbers: int) -> Any:
        records = self.pool.records_of(b"".join(map(key, numbers)))
        drops = np.zeros(len(numbers), DROP)
        drops["key"], drops["generation"] = records["key"], records["generation"]
        return drops

    def take(self, ages: dict[int, float], min_age_s: float = 0.0) -> bytes:
        """Take pages of these ages; return their states."""
        offered = SpilledPages(np.array(list(ages.values())), min_age_s)
        self.sequence += 1
        lengths = np.full(len(ages), GRANULE, "<u8").tobytes()
        reserve = Reserve(0, self.sequence, 1, b"".join(map(key, ages)), lengths)
        granted = taken(self.say(TakeOver(reserve, offered), INSIDE))
        written = bytes(state == RESERVED for state in granted)
        commit = Commit(0, self.sequence, written, bytes(8 * len(ages)), 0.0)
        return taken(self.say(TakenOver(commit, offered.ages), INSIDE))

    def store_over_time(self, *numbers: int, apart_s: float = 10.0) -> None:
        """Store one page after the other; the last one `apart_s` ago."""
        for number in numbers:
            self.store(number)
            self.now += apart_s

    def store_pairs(self, end: int, *, begin: int = 0) -> None:
        """Store two pages every ten seconds; the deeper one of a pair has the greater number."""
        for pair in range(begin, end):
            self.store(2 * pair, 2 * pair + 1)
            self.now += 10.0

    def room(self) -> tuple[int, float]:
        (answer,) = self.say(RequestRoom(3), NODE)
        assert (answer.to, answer.message.number) == (NODE, 3)
        return answer.message.free_bytes, answer.message.coldest_age_s

    def oldest(self, count: int) -> list[int]:
        """Store new pages, and return those that go for it, in order."""
        before = [number for number in range(100) if self.holds(number) == [True]]
        gone: list[int] = []
        for new in range(1000, 1000 + count):
            self.store(new)
            gone += [n for n in before if n not in gone and self.holds(n) == [False]]
        return gone


def test_pages_are_named_for_spilling_when_little_room_is_left() -> None:
    """All that are nearly as old as the coldest, though what lacks room is less.

    What clients store within a second shall have room, at most an eighth of the pool.
    """
    rig = Spiller(pages=16)
    rig.store_pairs(7)
    assert rig.cold() == {}, "two pages have room"

    rig.store_pairs(8, begin=7)

    assert rig.cold() == {1: 80.0, 0: 80.0, 3: 70.0, 2: 70.0, 5: 60.0, 4: 60.0}
    rig.store(16, 17, 18, 19)
    rig.now += 10.0
    assert list(rig.cold()) == [5, 4, 7, 6], "four were evicted"


def test_a_node_whose_clients_have_stopped_storing_names_no_page() -> None:
    """Full as it is; what they stored within a second is forgotten bit by bit."""
    rig = Spiller(pages=16)
    rig.store_pairs(8)
    rig.now += 30.0
    assert rig.cold(), "the next page may come at any moment"

    rig.now += 60.0
    assert rig.cold() == {}

    rig.store(20)
    rig.now += 10.0
    assert rig.cold(), "they store again"


def test_what_no_page_can_use_is_no_room() -> None:
    """Two slots of four granules leave one of nine: a ninth of this pool holds no page."""
    rig = Spiller(pages=2304)
    for number in range(512):
        rig.reserve_size(number, 4 * GRANULE)
    rig.now += 30.0

    free_bytes, _ = rig.room()

    assert all(rig.holds(number) == [True] for number in range(512))
    assert free_bytes == 0
    assert rig.cold(), "the next page evicts one"


def test_no_more_pages_are_named_at_once_than_an_offer_has() -> None:
    """The begin of a prompt first: it is lost with its first page. The rest if room is lacking."""
    rig = Spiller(pages=320)
    for prompt in range(4):
        rig.store(*range(80 * prompt, 80 * prompt + 80))
        rig.now += 10.0
    begin = list(rig.cold())
    assert begin == list(range(80 + SPILL_PAGES - 1, 79, -1))

    rig.say(PagesGiven(rig.drops(*begin)), INSIDE)
    assert rig.cold() == {}, "room for forty is enough"

    rig.store(*range(320, 360))
    rig.now += 10.0
    assert list(rig.cold())[-16:] == list(range(159, 79 + SPILL_PAGES, -1))


def test_a_page_is_kept_that_was_touched_after_it_was_named() -> None:
    """However long the answer of the node takes that has it too."""
    rig = Spiller(pages=16)
    rig.store_pairs(8)
    named = rig.drops(*rig.cold())
    rig.touch(4)
    rig.now += 5.0

    rig.say(PagesGiven(named), INSIDE)

    assert rig.holds(4, 5) == [True, False]


def test_where_clients_store_room_is_offered_while_there_is_much_of_it() -> None:
    """And the age is that of a page that they will not evict with what they store at once."""
    rig = Spiller(pages=16)
    rig.store_pairs(6)
    assert rig.room()[0] == 2 * GRANULE, "two are for clients"
    rig.store_pairs(7, begin=6)
    assert rig.room() == (0, 70.0)

    rig.store(20, 21, 22, 23, 24, 25)
    rig.now += 10.0

    assert rig.room() == (0, 40.0), "six pages go for the next six"


def test_a_page_that_no_node_took_is_named_again_after_a_while() -> None:
    """Until then it counts as one that may go, and the next ones are not named for it."""
    rig = Spiller(pages=16)
    rig.store_pairs(8)
    named = list(rig.cold())
    assert named == [1, 0, 3, 2, 5, 4]
    rig.now += SPILL_AGAIN_S - 0.1
    assert rig.cold() == {}

    rig.now += 0.2

    assert list(rig.cold()) == named


def test_demand_of_long_ago_is_forgotten() -> None:
    """An idle node keeps hardly anything free, and nothing if nothing was ever stored there."""
    rig, other = Spiller(pages=16), Spiller(pages=16)
    rig.store_pairs(8)
    other.take(dict.fromkeys(range(16), 10.0))

    rig.now += 300.0
    other.touch(*range(16))
    other.now += 10.0

    rig.say(Remove(9, 1, key(15)), NODE)
    assert rig.cold() == {}, "one page has room"
    assert other.cold() == {}


def test_a_page_that_another_node_holds_now_is_evicted() -> None:
    """Its record is withdrawn, and its slot is free; one that was touched or stored again stays."""
    rig = Spiller(pages=16)
    rig.store_pairs(8)
    old = rig.drops(*rig.cold())
    rig.say(Remove(9, 1, key(0)), NODE)
    rig.touch(1)
    rig.now += 10.0
    rig.store_over_time(0)

    assert rig.say(PagesGiven(old[:2]), INSIDE) == []
    rig.store(16)
    rig.now += 10.0
    named = [number for number in rig.cold() if number < 6]
    words, directory, publisher = rig.say(PagesGiven(rig.drops(*named)), INSIDE)

    assert isinstance(words, StoreWords)
    assert isinstance(directory, NotifyDirectory)
    assert isinstance(publisher, NotifyPublisher)
    assert named == [2, 5, 4], "the deeper page of the coldest prompt was evicted"
    assert len(directory.fact.drops) == 3
    assert [n for n in range(17) if rig.holds(n) == [False]] == [2, 3, 4, 5]


def test_a_page_stays_that_was_read_since_it_was_offered_or_that_another_node_relies_on() -> None:
    """However late the answer is: two nodes that offer each other their copies both keep them."""
    rig = Spiller(pages=64)
    rig.store_over_time(*range(8))
    rig.store(*range(8, 64))
    rig.now += 10.0
    assert list(rig.cold()) == [0, 1, 2]

    rig.touch(1)
    assert rig.take({2: 200.0}) == bytes((HERE,))
    for _ in range(3):
        rig.now += 2.0
        rig.room()
    rig.say(PagesGiven(rig.drops(0, 1, 2)), INSIDE)

    assert rig.holds(0, 1, 2) == [False, True, True]


def test_a_page_that_came_from_another_node_keeps_its_age() -> None:
    """It goes before pages that were touched later, and after those touched earlier."""
    rig = Spiller(pages=8)
    rig.store_over_time(*range(6))

    assert rig.take({90: 35.0, 91: 15.0}) == bytes((COMMITTED,)) * 2

    assert rig.oldest(7) == [0, 1, 2, 90, 3, 4, 91]


def test_what_clients_store_in_slots_that_they_reserved_ahead_needs_room_too() -> None:
    """A pool names pages for it, and reports no room, as for what is reserved by name."""
    rig = Spiller(pages=64)

    def store_ahead(*numbers: int) -> None:
        rig.sequence += 1
        lengths = np.full(len(numbers), GRANULE, "<u8").tobytes()
        rig.say(Reserve(5, rig.sequence, 1, b"", lengths))
        named = b"".join(map(key, numbers))
        rig.say(Commit(6, rig.sequence, b"\1" * len(numbers), bytes(len(lengths)), 0.5, named))
        rig.now += 10.0

    for first in range(0, 62, 2):
        store_ahead(first, first + 1)
    assert (rig.cold(), rig.room()[0]) == ({}, 0), "two pages have room"

    store_ahead(62, 63)

    assert list(rig.cold())[:4] == [1, 0, 3, 2]


@pytest.mark.parametrize("rounds", [STALE_MIN - 1, STALE_MIN, STALE_MIN + 1, STALE_MIN + 2])
@pytest.mark.parametrize("others", [0, 4])
@pytest.mark.parametrize("before", [35.0, 5.0])
def test_pages_of_one_age_come_and_go_in_the_same_slots(
    rounds: int, others: int, before: float
) -> None:
    """What is left over of a page that was removed is no page, however often that happens.

    Without other pages the slots themselves come and go.
    """
    rig = Spiller(pages=8)
    rig.store_over_time(*range(others))
    for _ in range(rounds // 2):
        assert rig.take({90: before, 91: before}) == bytes((COMMITTED,)) * 2
        rig.say(Remove(9, 1, key(90) + key(91)), NODE)
        rig.now += 0.001

    rig.take({90: 35.0, 91: 35.0})
    rig.now += 5.0
    rig.store_over_time(*range(others, 6))

    assert rig.oldest(5)[-5:] == ([90, 91, 0, 1, 2] if not others else [0, 90, 91, 1, 2])


def test_a_page_expires_once_whose_slot_had_another_page_of_its_age() -> None:
    """Pages of one age come, are removed, and come again; a page next to them stays."""
    rig = Spiller(pages=1024, quotas=parse_quotas("chat=50%,ttl=60s"))
    chat = space_of(Namespace("chat").tag())
    offer(rig, [(1, GRANULE), (2, GRANULE)], [50.0, 0.0], tag=chat)
    rig.say(Remove(9, chat, key(1)), NODE)
    rig.now += 0.01
    offer(rig, [(3, GRANULE), (4, GRANULE)], [50.0, 50.0], tag=chat)

    rig.now += 20.0
    rig.pool.on_tick(rig.now)

    rig.pool.check()
    assert rig.holds(2, 3, 4) == [True, False, False]


def test_a_page_that_came_from_another_node_and_is_read_is_as_any_other() -> None:
    """And it may be spilled again."""
    rig = Spiller(pages=8)
    rig.store_over_time(*range(6))
    rig.take({90: 35.0, 91: 34.0})
    assert rig.cold() == {0: 60.0, 1: 50.0}

    rig.touch(90)
    rig.now += 10.0

    assert rig.oldest(4) == [0, 1, 2, 91]


@pytest.mark.parametrize(
    ("age", "min_age_s", "goes"),
    [(45.0, 0.0, 2), (35.0, 0.0, 3), (25.0, 35.0, 3), (-45.0, 0.0, 0), (80.0, 0.0, 0)],
)
def test_what_another_node_spills_evicts_only_colder_pages(
    age: float, min_age_s: float, goes: int
) -> None:
    """None that was touched within the least age; for a negative age nothing goes."""
    rig = Spiller(pages=8)
    rig.store_over_time(*range(8), apart_s=10.0)
    rig.now -= 20.0  # They are 60, 50, 40 … seconds old.

    states = rig.take({90 + at: age for at in range(8)}, min_age_s)

    assert states.count(COMMITTED) == goes
    assert [n for n in range(8) if rig.holds(n) == [False]] == list(range(goes))


def test_an_offer_of_what_is_here_is_no_use_of_it() -> None:
    """The page goes when it would have gone."""
    rig = Spiller(pages=8)
    rig.store_over_time(*range(8))

    assert rig.take({1: 35.0}) == bytes((HERE,))

    assert rig.oldest(2) == [0, 1]


def test_of_a_prompt_without_room_the_begin_is_taken() -> None:
    """Pages come coldest first, the deepest ones of their prompt."""
    rig = Spiller(pages=8)
    rig.store_over_time(*range(6))

    states = rig.take({93: 5.0, 92: 5.0, 91: 5.0, 90: 5.0}, min_age_s=1000.0)

    assert states == bytes((REFUSED_FULL, REFUSED_FULL, COMMITTED, COMMITTED))
    assert rig.holds(90, 91, 92, 93) == [True, True, False, False]


def test_a_retained_page_is_evicted_for_no_other_node() -> None:
    """However cold it is."""
    rig = Spiller(pages=4)
    rig.store_over_time(*range(4))
    rig.say(Retain(8, 1, key(0), 1000.0, 0.5), NODE)

    assert rig.take({90: 25.0}) == bytes((COMMITTED,))

    assert rig.holds(0, 1, 2, 3) == [True, False, True, True]


def test_pages_that_may_have_been_removed_elsewhere_are_never_named_again() -> None:
    """Those that are stored afterwards are."""
    rig = Spiller(pages=8)
    rig.store_over_time(*range(8))

    assert rig.cold(only_new=True) == {}

    rig.store_over_time(*range(8, 16))
    assert rig.cold() == {8: 80.0, 9: 70.0, 10: 60.0}


def test_a_page_that_is_on_disk_too_has_a_negative_age() -> None:
    """It costs a load to lose it, not a page."""
    rig = Spiller(pages=8, has_disk=True)
    rig.store_over_time(*range(8))
    rig.say(PagesWritten(key(2), np.array([GRANULE])), INSIDE)
    assert rig.cold() == {0: 80.0, 1: 70.0, 2: -60.0}

    rig.say(PagesForgotten(key(2)), INSIDE)
    rig.now += 10.0

    assert rig.cold() == {0: 90.0, 1: 80.0, 2: 70.0}


def test_a_pool_reports_its_room_and_the_age_of_its_coldest_page() -> None:
    """No page counts as older than one gets that nothing reads. A drained pool has no room."""
    rig = Spiller(pages=4)
    assert rig.room() == (4 * GRANULE, 0.0)
    rig.store_over_time(1, 2, 3)
    assert rig.room() == (0, 30.0)

    rig.take({90: 100.0})

    assert rig.room()[0] == 0
    assert rig.room()[1] == pytest.approx(40.0, abs=1.0), "a page each 10 s, room for four"
    rig.say(DrainChanged(is_draining=True), INSIDE)
    assert rig.room() == (0, 0.0)


def test_the_age_that_others_must_exceed_hangs_on_how_long_pages_last() -> None:
    """Else two equal nodes swap pages, when one of them has evicted more than the other."""
    rig = Spiller(pages=8)
    rig.store_over_time(*range(8))
    rig.touch(*range(8))
    rig.now += PERIOD_S

    (named,) = rig.say(RequestSpill(only_new=False), INSIDE)

    assert named.fact.groups
    assert named.fact.coldest_age_s == pytest.approx(LIFETIME_SHARE * 80.0, abs=2.0)


# --- what a hostile node may offer ----------------------------------------------------------------


def offer(
    rig: Spiller,
    pages: Sequence[tuple[int, int]],
    ages: Sequence[float],
    *,
    min_age_s: float = 0.0,
    tag: int = 1,
) -> bytes:
    """Offer pages (number, bytes) of these ages; return the states of the answer."""
    lengths = np.array([length for _, length in pages], "<u8").tobytes()
    offered = SpilledPages(np.array(ages), min_age_s)
    rig.sequence += 1
    reserve = Reserve(0, rig.sequence, tag, b"".join(key(number) for number, _ in pages), lengths)
    states = taken(rig.say(TakeOver(reserve, offered), INSIDE))
    if RESERVED not in states:
        return states
    written = bytes(state == RESERVED for state in states)
    commit = Commit(0, rig.sequence, written, bytes(8 * len(pages)), 0.0)
    return taken(rig.say(TakenOver(commit, offered.ages), INSIDE))


def tag_named(name: str) -> int:
    """Return a tag of a namespace."""
    return tag_of(space_of(Namespace(name).tag()), 1)


@pytest.mark.parametrize(("name", "keeps"), [("a", 0), ("b", 4), ("new", 4)])
def test_pages_of_other_namespaces_take_nothing_from_a_tenant_within_its_quota(
    name: str, keeps: int
) -> None:
    """However old its pages are. Pages of its own that are younger take their place."""
    rig = Spiller(pages=8, quotas=parse_quotas("a=50%"))
    for number in range(8):
        rig.store(number, namespace=tag_named("a" if number < 4 else "b"))
        rig.now += 10.0

    states = offer(rig, [(90 + n, GRANULE) for n in range(8)], [5.0] * 8, tag=tag_named(name))

    assert states.count(COMMITTED) == 8 - keeps
    assert states.count(REFUSED_FULL) == keeps
    assert rig.holds(0, 1, 2, 3).count(True) == keeps


@pytest.mark.parametrize(
    ("rule", "writer", "names"),
    [
        ("a=50%", "b", range(8, 64)),
        ("a=2%", "b", range(7)),
        ("a=12%", "a", range(8)),
        ("a=25%", "a", range(8, 64)),
        ("c=50%", "b", range(64)),
        ("b=88%", "b", range(8)),
    ],
)
def test_no_page_of_a_tenant_within_its_quota_is_offered_for_pages_of_other_tenants(
    rule: str, writer: str, names: range
) -> None:
    """However old it is. What is over a quota may go, and for its own pages a tenant's own."""
    rig = Spiller(pages=64, quotas=parse_quotas(rule))
    for number in range(8):
        rig.store(number, namespace=tag_named("a"))
    rig.now += 1000.0
    for number in range(8, 64):
        rig.store(number, namespace=tag_named("b"))
    rig.now += 1000.0

    rig.store(*range(64, 68), namespace=tag_named(writer))
    rig.now += PERIOD_S

    named = set(rig.cold())
    assert named
    assert named <= set(names)


def test_an_offer_of_absurd_pages_takes_those_that_are_not() -> None:
    """Empty ones, larger ones than the pool, and one key twice, of the same length and of two."""
    rig = Spiller(pages=8)
    pages = [(1, 0), (2, 2**32 - 1), (3, GRANULE), (3, GRANULE), (4, GRANULE), (4, 1), (5, 1)]

    states = offer(rig, pages, [0.0, 1e300, 5.0, 5.0, 5.0, 5.0, -1e300])

    assert states == bytes(
        (REFUSED_SIZE, REFUSED_TOO_LARGE, COMMITTED, REPEATED, COMMITTED, REFUSED_SIZE, COMMITTED)
    )
    assert rig.holds(1, 2, 3, 4, 5) == [False, False, True, True, True]


@pytest.mark.parametrize("usable", [0, 3])
def test_memory_that_dev_shm_did_not_give_is_no_room(usable: int) -> None:
    """A pool has what could be populated; the rest is neither reported as free nor taken."""
    rig = Spiller(pages=8, usable=usable)

    assert rig.room() == (usable * GRANULE, 0.0)
    states = offer(rig, [(n, GRANULE) for n in range(8)], [100.0] * 8)

    assert states.count(COMMITTED) == usable
    assert states.count(REFUSED_FULL) == 8 - usable
    assert rig.room()[0] == 0


SIZES = (1, GRANULE, GRANULE + 1, 3 * GRANULE, 4 * GRANULE, 9 * GRANULE)


@settings(deadline=None, max_examples=examples(60))
@given(seed=st.integers(0, 2**32))
def test_no_offer_evicts_what_was_touched_later_than_its_youngest_page(seed: int) -> None:
    """Whatever the sizes of its pages and those of the pool, whose extents may be divided again.

    Nor a retained page, nor one within the least age, nor for a page that is on a disk.
    """
    rng = random.Random(seed)
    rig = Spiller(pages=32)
    touched: dict[int, float] = {}
    retained: set[int] = set()
    for number in range(rng.randrange(4, 60)):
        rig.reserve_size(number, rng.choice(SIZES))
        touched[number] = rig.now
        # A quarter of the pool at most.
        if rng.random() < 0.1 and rig.retain(number, seconds=1e6) == [RETAINED]:
            retained.add(number)
        rig.now += rng.choice((1.0, 5.0, 30.0))
    for turn in range(rng.randrange(1, 6)):
        held = {number for number in touched if rig.holds(number) == [True]}
        pages = [(1000 * turn + 1000 + n, rng.choice(SIZES)) for n in range(rng.randrange(1, 12))]
        ages = [rng.choice((-1.0, 1.0)) * rng.choice((0.0, 10.0, 100.0, 1e9)) for _ in pages]
        least = rng.choice((0.0, 20.0, 200.0))

        offer(rig, pages, ages, min_age_s=least)

        gone = {number for number in held if rig.holds(number) == [False]}
        youngest = min((age for age in ages if age >= 0), default=math.inf)
        assert all(rig.now - touched[number] >= max(youngest, least) for number in gone)
        assert not gone & retained
        rig.now += 10.0
