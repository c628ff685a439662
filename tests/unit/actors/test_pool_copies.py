"""Which pages of a pool have a copy on another node, and how the two nodes learn of each other."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from peercache.actors.effects import NotifyPlacement, Send
from peercache.actors.mailboxes import (
    CopiesLost,
    CopiesMade,
    HeldDead,
    HoldersChanged,
    PagesForgotten,
    PagesToCopy,
    PagesWritten,
    RequestCopies,
    RequestSpill,
    ReserveAhead,
    SpilledPages,
    TakenOver,
    TakeOver,
)
from peercache.actors.pool.copies import (
    COPY_PAGES,
    DOUBT_S,
    REPEAT_S,
    REPORT_KEYS,
    REPORT_S,
)
from peercache.actors.pool.reservations import AHEAD_DIVISOR
from peercache.model.keys import split_keys
from peercache.model.records import DROP
from peercache.wire.messages.membership import CopiesEvicted
from peercache.wire.messages.pool import (
    OVER_QUOTA,
    RESERVED,
    RETAINED,
    Commit,
    Demote,
    Remove,
    Reserve,
    Retain,
    Touched,
)
from tests.examples import examples
from tests.unit.actors.test_pool_mirrors import CLIENT, GRANULE, INSIDE, Rig, key, taken

ONE, TWO = 21, 22


class Copier(Rig):
    """A pool whose pages have copies elsewhere, and that takes copies of others."""

    def __init__(self, *, copies: int = 2, **kwargs: Any) -> None:
        super().__init__(copies=copies, **kwargs)
        self.sent: list[tuple[int, CopiesEvicted]] = []
        """Reports that went ahead of an offer, or of the reading of one."""

    def sends(self, effects: list[Any]) -> list[Any]:
        """Note the reports that come first; return the rest."""
        while isinstance(effects[0], Send):
            self.sent.append((effects[0].to, effects[0].message))
            effects = effects[1:]
        return effects

    def ask(self, *, only_new: bool = False, again: bool = True) -> PagesToCopy:
        (reported,) = self.sends(self.say(RequestCopies(only_new, again), INSIDE))
        assert isinstance(reported, NotifyPlacement)
        assert isinstance(reported.fact, PagesToCopy)
        return reported.fact

    def named(self, *, only_new: bool = False) -> list[int]:
        """Return the pages without a copy that are named next."""
        return numbers_in(self.ask(only_new=only_new))

    def drops(self, *numbers: int) -> Any:
        records = self.pool.records_of(b"".join(map(key, numbers)))
        drops = np.zeros(len(records), DROP)
        drops["key"], drops["generation"] = records["key"], records["generation"]
        return drops

    def copied(self, *numbers: int, to: int = ONE, is_sure: bool = True) -> None:
        self.say(CopiesMade(self.drops(*numbers), to, is_sure), INSIDE)

    def take(self, *numbers: int, source: int = ONE) -> None:
        """Take copies of pages of another node."""
        ages = np.full(len(numbers), 0.0)
        self.sequence += 1
        lengths = np.full(len(numbers), GRANULE, "<u8").tobytes()
        reserve = Reserve(0, self.sequence, 1, b"".join(map(key, numbers)), lengths)
        asked = TakeOver(reserve, SpilledPages(ages, 0.0))
        granted = taken(self.sends(self.say(asked, INSIDE)))
        written = bytes(state == RESERVED for state in granted)
        commit = Commit(0, self.sequence, written, bytes(8 * len(numbers)), 0.0)
        self.say(TakenOver(commit, ages, is_copy=True), INSIDE)
        self.copied(*numbers, to=source)

    def asked_to_retain(self, *numbers: int, to: int) -> dict[int, tuple[int, ...]]:
        """Let pages be copied; return which the other node is asked to retain, by seconds."""
        effects = self.say(CopiesMade(self.drops(*numbers), to), INSIDE)
        asked = [(effect.to, effect.message) for effect in effects]
        assert all(node == to and isinstance(one, Retain) for node, one in asked)
        return {
            round(one.seconds): tuple(
                int.from_bytes(each, "big") for each in sorted(split_keys(one.keys))
            )
            for _, one in asked
        }

    def report(self, number: int, *numbers: int, source: int = ONE) -> list[Any]:
        """Hear from another node that it has evicted pages."""
        report = CopiesEvicted(number, b"".join(map(key, numbers)))
        return self.say(CopiesLost(source, report), INSIDE)

    def reports(self, within: float = REPORT_S) -> dict[int, tuple[int, list[int]]]:
        """Return what each node learns within a time: the number of the report, and the pages."""
        until, found = self.now + within, {}
        while self.pool.deadline() <= until:
            self.now = max(self.now, self.pool.deadline())
            for effect in self.pool.on_tick(self.now):
                assert isinstance(effect, Send)
                assert isinstance(effect.message, CopiesEvicted)
                keys = effect.message.keys
                pages = [int.from_bytes(keys[i : i + 16], "big") for i in range(0, len(keys), 16)]
                found[effect.to] = effect.message.number, sorted(pages)
        self.now = until
        return found


def numbers_in(named: PagesToCopy) -> list[int]:
    keys = [k for _, records, _ in named.groups for k in records["key"].tolist()]
    return [int.from_bytes(each, "big") for each in keys]


def test_pages_that_a_client_stores_are_named_until_they_have_a_copy() -> None:
    """The deepest of a prompt first; what no node took is named again, after what was stored."""
    rig = Copier()
    rig.store(1, 2, 3)
    assert rig.pool.copies.single_count == 3

    assert rig.named() == [3, 2, 1]
    rig.copied(1, 3)
    rig.store(4)

    assert rig.named() == [4]
    assert rig.named() == [4, 2]
    assert rig.pool.copies.single_count == 2
    assert rig.pool.copies.counts() == {ONE: 2}


def test_what_no_node_took_waits_until_it_may_be_named_again() -> None:
    """Meanwhile what is stored has its turn at once."""
    rig = Copier()
    rig.store(1, 2)
    rig.named()
    rig.store(3)

    assert numbers_in(rig.ask(again=False)) == [3]
    assert rig.ask(again=False).groups == ()
    assert sorted(rig.named()) == [1, 2, 3]


def test_with_one_copy_of_each_page_none_is_named() -> None:
    """Yet what it evicts of other nodes' pages it reports."""
    rig = Copier(copies=1, pages=2)
    rig.take(7)
    rig.store(1)
    assert rig.named() == []

    rig.store(2, 3)

    assert rig.reports() == {ONE: (1, [7])}


def test_a_batch_of_names_is_bounded() -> None:
    """One message does not have all pages of a pool."""
    rig = Copier(pages=2 * COPY_PAGES)
    rig.store(*range(COPY_PAGES + 5))

    first, second = rig.named(), rig.named()

    assert (len(first), len(set(first + second))) == (COPY_PAGES, COPY_PAGES + 5)


def test_the_node_with_the_copy_learns_what_is_evicted() -> None:
    """Within a moment, in one report for each node; pages without a copy concern none."""
    rig = Copier(pages=4)
    rig.store(1, 2, 3, 4)
    rig.copied(1, 2, to=ONE)
    rig.copied(3, to=TWO)

    rig.store(5, 6, 7, 8)

    assert rig.reports() == {ONE: (1, [1, 2]), TWO: (1, [3])}
    assert rig.pool.copies.counts() == {}
    assert rig.pool.copies.single_count == 4


@pytest.mark.parametrize("late_s", [0.0, REPORT_S, 0.3])
def test_what_a_late_tick_evicts_is_reported_after_it(late_s: float) -> None:
    """Slots that a Commit has asked for ahead are reserved late where the node's loop stalls."""
    rig = Copier(pages=AHEAD_DIVISOR)
    rig.store(*range(AHEAD_DIVISOR))
    rig.copied(0)
    rig.now += 10.0
    ahead = Reserve(0, rig.sequence + 1, 1, b"", np.full(1, GRANULE, "<u8").tobytes())
    rig.say(ReserveAhead(CLIENT, ahead), INSIDE)

    rig.now = rig.pool.deadline() + late_s
    rig.pool.on_tick(rig.now)

    assert rig.pool.deadline() == pytest.approx(rig.now + REPORT_S)
    assert rig.reports() == {ONE: (1, [0])}


def test_what_is_removed_is_not_reported() -> None:
    """The removal comes to the other node by itself."""
    rig = Copier()
    rig.store(1, 2)
    rig.copied(1)

    rig.say(Remove(1, 1, key(1), 0.1), INSIDE)

    assert rig.reports(60.0) == {}
    assert rig.named() == [2]


def test_what_is_on_disk_is_not_lost_with_its_place_in_memory() -> None:
    """The node still has the page."""
    rig = Copier(pages=2, has_disk=True)
    rig.store(1, 2)
    rig.copied(1, 2)
    rig.say(PagesWritten(key(1), np.array([GRANULE])), INSIDE)

    rig.store(3, 4)

    assert rig.reports() == {ONE: (1, [2])}


def test_a_page_whose_copy_is_evicted_elsewhere_is_named_again() -> None:
    """Only where that node had the copy."""
    rig = Copier()
    rig.store(1, 2, 3)
    rig.copied(1, 2)
    rig.copied(3, to=TWO)

    rig.report(1, 1, 3, 99)

    assert rig.named() == [1]


def test_pages_whose_node_is_dead_are_named_again() -> None:
    """All of them."""
    rig = Copier()
    rig.store(1, 2, 3)
    rig.copied(1, 2)
    rig.copied(3, to=TWO)

    rig.say(HoldersChanged((TWO,)), INSIDE)

    assert sorted(rig.named()) == [1, 2]


def test_a_page_that_was_taken_as_a_copy_has_one() -> None:
    """Until the node that offered it evicts its own."""
    rig = Copier()
    rig.take(1, 2)
    assert rig.named() == []

    rig.report(1, 2)

    assert rig.named() == [2]


def test_a_copy_of_a_retained_page_is_retained_for_as_long() -> None:
    """It is made after every member was asked to retain the page; one that is gone is not named."""
    rig = Copier(pages=64)
    rig.store(1, 2, 3, 4, 5)
    rig.retain(1, 2, seconds=60.0)
    rig.retain(3, seconds=90.0)
    rig.retain(5, seconds=10.0)
    rig.now += 20.0
    rig.pool.on_tick(rig.now)

    assert rig.asked_to_retain(1, 2, 3, 4, 5, to=ONE) == {40: (1, 2), 70: (3,)}
    assert rig.asked_to_retain(1, to=TWO) == {}, "another node has its copy"


def test_a_third_node_that_offers_a_page_in_vain_changes_nothing() -> None:
    """The page has its copy, where it was."""
    rig = Copier(pages=2)
    rig.store(1)
    rig.copied(1, to=ONE)
    rig.copied(1, to=0)
    assert rig.named() == []

    rig.store(2, 3)

    assert rig.reports() == {ONE: (1, [1])}


def test_a_page_that_is_mirrored_while_it_is_copied_counts_once() -> None:
    """A reader of this node is faster than the copy; then a client of this node sets the page."""
    rig = Copier()
    ages, lengths = np.full(1, 0.0), np.full(1, GRANULE, "<u8").tobytes()
    rig.sequence = number = 1
    asked = TakeOver(Reserve(0, number, 1, key(1), lengths), SpilledPages(ages, 0.0))
    rig.say(asked, INSIDE)
    rig.mirror(1)
    commit = Commit(0, number, b"\1", bytes(8), 0.0)
    rig.say(TakenOver(commit, ages, is_copy=True), INSIDE)
    rig.copied(1)

    rig.store(1)

    assert rig.pool.copies.counts() == {ONE: 1}
    assert rig.pool.copies.single_count == 0


def test_a_mirrored_page_that_a_client_sets_is_named() -> None:
    """It was a copy that goes first; now it is a page of this node, and named once."""
    rig = Copier()
    rig.mirror(1)
    assert rig.named() == []

    rig.store(1)

    assert rig.named() == [1]
    assert rig.pool.copies.single_count == 1


def test_a_mirrored_page_that_is_retained_is_named() -> None:
    """It is a page like others from then on, also when it is retained no longer."""
    rig = Copier()
    rig.mirror(1, 2)

    rig.retain(1, seconds=30.0)
    rig.wait(rig.now + 31.0)

    assert rig.named() == [1]
    assert rig.pool.copies.single_count == 1


def test_a_mirrored_page_that_is_over_the_quota_of_retained_ones_stays_one() -> None:
    """Nothing has changed but the answer."""
    rig = Copier()
    rig.mirror(*range(4))

    states = rig.retain(*range(4))

    assert OVER_QUOTA in states
    kept = [number for number, state in enumerate(states) if state == RETAINED]
    assert sorted(rig.named()) == kept
    assert rig.pool.copies.single_count == len(kept)


def test_a_page_that_went_while_it_was_copied_is_reported() -> None:
    """Else the other node would rely on it."""
    rig = Copier(pages=2)
    rig.store(1, 2)
    offered = rig.drops(1, 2)
    rig.store(3)

    rig.say(CopiesMade(offered, ONE), INSIDE)

    ((_, gone),) = rig.reports().values()
    assert gone == [n for n in (1, 2) if rig.holds(n) == [False]]
    assert len(gone) == 1


def test_a_node_that_may_have_taken_a_page_learns_of_its_eviction() -> None:
    """Its answer was lost; the page is offered to others, and both learn it."""
    rig = Copier(pages=2)
    rig.store(1)
    rig.copied(1, to=ONE, is_sure=False)
    assert rig.named() == [1]
    rig.copied(1, to=TWO)

    rig.store(2, 3)

    assert rig.reports() == {ONE: (1, [1]), TWO: (1, [1])}


def test_a_third_node_with_the_page_is_asked_first_when_a_copy_is_lost() -> None:
    """It relies on the page here, so it most likely has it."""
    rig = Copier()
    rig.store(1, 2)
    rig.copied(1, 2, to=ONE)
    rig.copied(1, to=TWO)

    rig.report(1, 1, 2)

    first, second = rig.ask(), rig.ask()
    assert (TWO, [1]) in [(each.node, numbers_in(each)) for each in (first, second)]
    assert 2 in numbers_in(first) + numbers_in(second)


def test_after_a_lost_report_all_pages_of_that_node_are_offered_to_it_again() -> None:
    """What it still has it then reports; a report without pages shows it as well."""
    for number, pages in ((3, (1,)), (2, ())):
        rig = Copier()
        rig.store(1, 2, 3)
        rig.copied(1, 2, 3)
        assert rig.report(1, 3) == []
        assert rig.named() == [3]

        rig.report(number, *pages)
        rig.wait(rig.now)

        named = [rig.ask() for _ in range(3)]
        assert sorted(n for each in named if each.node == ONE for n in numbers_in(each)) == [
            n for n in (1, 2) if n not in pages
        ]


def test_a_node_that_others_held_dead_offers_its_pages_with_a_copy_again() -> None:
    """They have forgotten that it relies on their pages, and report no eviction of those."""
    rig = Copier()
    rig.store(1, 2, 3)
    rig.copied(1, 2, to=ONE)
    rig.copied(3, to=TWO)
    assert rig.named() == []

    rig.say(HeldDead(), INSIDE)
    rig.wait(rig.now)

    named = {each.node: sorted(numbers_in(each)) for each in (rig.ask(), rig.ask())}
    assert named == {ONE: [1, 2], TWO: [3]}


def test_a_node_in_doubt_still_learns_what_is_evicted_here() -> None:
    """It may have the copies, whatever becomes of the offer."""
    rig = Copier(pages=2)
    rig.store(1)
    rig.copied(1)
    rig.report(5)
    rig.wait(rig.now)
    assert rig.ask().node == ONE

    rig.store(2, 3)

    assert rig.reports() == {ONE: (1, [1])}


def test_reports_without_a_gap_cost_no_look_at_all_pages() -> None:
    """And reports that repeat numbers at will have the pages looked at now and then at most."""
    rig = Copier()
    rig.store(1)
    rig.copied(1)
    rig.report(1, 50)
    rig.report(1)
    assert rig.named() == []
    looks = 0
    for number in range(100):
        rig.report(1000 - number)
        rig.wait(rig.now)
        looks += bool(rig.named())
        rig.copied(1)
        rig.now += DOUBT_S / 50
    assert looks == 2


def test_the_number_of_the_last_report_is_sent_again() -> None:
    """So a node learns too that it has missed the last one; ever more rarely."""
    rig = Copier(pages=2)
    rig.store(1, 2)
    rig.copied(1, 2)
    rig.store(3)
    ((number, _),) = rig.reports().values()

    assert rig.reports(REPEAT_S) == {ONE: (number, [])}
    sent = [rig.reports(60.0) for _ in range(60)]
    assert 10 <= sent.count({ONE: (number, [])}) <= 15
    assert sent.count({}) >= 45


def test_a_long_report_is_cut() -> None:
    """No message grows with the pool."""
    count = REPORT_KEYS + 3
    rig = Copier(pages=count)
    rig.store(*range(2000))
    for begin in range(2000, count, 2000):
        rig.store(*range(begin, min(begin + 2000, count)))
    rig.copied(*range(count))
    effects: list[Any] = []
    for number in range(count):
        rig.store(count + number)
    while rig.pool.deadline() <= rig.now + REPORT_S:
        rig.now = rig.pool.deadline()
        effects += rig.pool.on_tick(rig.now)

    assert [(e.message.number, len(e.message.keys) // 16) for e in effects] == [
        (1, REPORT_KEYS),
        (2, 3),
    ]


def test_after_a_pause_only_new_pages_are_named() -> None:
    """Of the others this node may have missed the removal; they count as pages without a copy."""
    rig = Copier()
    rig.store(1, 2)

    assert rig.named(only_new=True) == []
    rig.store(3)

    assert rig.named() == [3]
    assert rig.pool.copies.single_count == 3


def test_a_page_with_a_copy_is_not_spilled() -> None:
    """It has another home already."""
    rig = Copier(pages=8)
    rig.store(*range(8))
    rig.now += 100.0
    rig.copied(*range(6))

    (reported,) = rig.say(RequestSpill(), INSIDE)

    assert {
        int.from_bytes(k, "big") for _, r, _ in reported.fact.groups for k in r["key"].tolist()
    } <= {
        6,
        7,
    }


class Pair(RuleBasedStateMachine):
    """Two pools that copy from each other, over a network that loses what it likes.

    Reports come in order, or not at all; offers are answered, or not.
    """

    NAMES: ClassVar = {ONE: TWO, TWO: ONE}

    def __init__(self) -> None:
        super().__init__()
        self.rigs = {name: Copier(pages=4) for name in self.NAMES}
        self.queues: dict[int, list[CopiesEvicted]] = {ONE: [], TWO: []}
        """Reports on their way to each."""
        self.sent = {ONE: 0, TWO: 0}

    @rule(
        at=st.sampled_from([ONE, TWO]),
        pages=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
    )
    def store(self, at: int, pages: list[int]) -> None:
        self.rigs[at].store(*pages)

    @rule(
        at=st.sampled_from([ONE, TWO]),
        is_answered=st.booleans(),
        is_taken=st.booleans(),
        is_lost=st.booleans(),
    )
    def offer(self, at: int, *, is_answered: bool, is_taken: bool, is_lost: bool) -> None:
        rig, other = self.rigs[at], self.rigs[self.NAMES[at]]
        pages = rig.named()
        offered = rig.drops(*pages)
        self._send(at, is_lost=is_lost)
        if pages and is_taken:
            # Messages between two nodes stay in their order.
            self._deliver(self.NAMES[at])
            other.take(*pages, source=at)
            self._send(self.NAMES[at], is_lost=is_lost)
            self._deliver(at)
        if pages and is_answered and is_taken:
            held = [held for n in pages for held in other.holds(n)]
            rig.say(CopiesMade(offered[np.array(held)], self.NAMES[at]), INSIDE)
        elif pages and not is_answered:
            rig.say(CopiesMade(offered, self.NAMES[at], is_sure=False), INSIDE)

    def _send(self, at: int, *, is_lost: bool) -> None:
        for _, report in self.rigs[at].sent:
            self.sent[at] = report.number
            if not is_lost:
                self.queues[self.NAMES[at]].append(report)
        self.rigs[at].sent.clear()

    @rule(at=st.sampled_from([ONE, TWO]), page=st.integers(0, 9))
    def mirror_and_retain(self, at: int, page: int) -> None:
        self.rigs[at].mirror(page)
        self.rigs[at].retain(page, seconds=REPEAT_S)

    @rule(seconds=st.sampled_from([0.0, REPORT_S, REPEAT_S, DOUBT_S]), is_lost=st.booleans())
    def pass_time(self, seconds: float, *, is_lost: bool) -> None:
        self._let_pass(seconds, is_lost=is_lost)

    @precondition(lambda self: any(self.queues.values()))
    @rule()
    def deliver(self) -> None:
        for at in self.NAMES:
            self._deliver(at)

    def _deliver(self, at: int) -> None:
        while self.queues[at]:
            self.rigs[at].say(CopiesLost(self.NAMES[at], self.queues[at].pop(0)), INSIDE)

    def _let_pass(self, seconds: float, *, is_lost: bool) -> None:
        for at, rig in self.rigs.items():
            until = rig.now + seconds
            while rig.pool.deadline() <= until:
                rig.now = max(rig.now, rig.pool.deadline())
                for effect in rig.pool.on_tick(rig.now):
                    self.sent[at] = effect.message.number
                    if not is_lost:
                        self.queues[self.NAMES[at]].append(effect.message)
            rig.now = until

    @invariant()
    def counts_are_whole(self) -> None:
        for rig in self.rigs.values():
            rig.pool.check()

    def teardown(self) -> None:
        """Once a last report has come, no page relies on one that is gone."""
        self._let_pass(REPORT_S, is_lost=False)
        self.deliver()
        for at, other in self.NAMES.items():
            self.rigs[other].report(self.sent[at], source=at)
        self._let_pass(DOUBT_S, is_lost=False)
        self.deliver()
        for at, rig in self.rigs.items():
            named = {n for _ in range(8) for n in rig.named()}
            other = self.rigs[self.NAMES[at]]
            for number in range(10):
                page = rig.pool.pages.find(key(number))
                is_its_own = page is not None and not page.slot.is_mirror
                if is_its_own and other.holds(number) == [False]:
                    assert number in named, f"{number} is at {at} alone, and it does not know it"


TestPair = Pair.TestCase
TestPair.settings = settings(max_examples=examples(60), stateful_step_count=25)


def elsewhere(rig: Copier, where: str, *numbers: int) -> None:
    """Let pages be on disk, or on another node."""
    if where == "disk":
        keys = b"".join(map(key, numbers))
        rig.say(PagesWritten(keys, np.full(len(numbers), GRANULE)), INSIDE)
    elif where == "other node":
        rig.copied(*numbers)


def read(rig: Copier, *numbers: int) -> None:
    rig.say(Touched(rig.drops(*numbers).tobytes()))


@pytest.mark.parametrize("wait_s", [0.0, 1.0])
@pytest.mark.parametrize("where", ["disk", "other node"])
def test_of_one_second_pages_that_are_elsewhere_too_go_first(where: str, wait_s: float) -> None:
    """Else a set in two batches would evict its own first one, which is nowhere else."""
    rig = Copier(pages=32, has_disk=True)
    rig.store(*range(24))
    elsewhere(rig, where, *range(24))
    rig.now += 10.0
    read(rig, *range(24))
    rig.store(*range(100, 108))
    rig.now += wait_s

    rig.store(*range(108, 116))

    assert all(rig.holds(*range(100, 116)))
    assert rig.holds(*range(24)) == [True] * 16 + [False] * 8, "the deepest of them"


@pytest.mark.parametrize("wait_s", [0.0, 1.0])
def test_of_one_second_mirrored_pages_go_first(wait_s: float) -> None:
    """Few of them, touched last: their bytes are on another node."""
    rig = Copier(pages=32)
    rig.store(*range(24))
    rig.mirror(*range(24, 28))
    rig.now += 10.0
    read(rig, *range(24))
    rig.store(*range(100, 104))
    read(rig, *range(24, 28))
    rig.now += wait_s

    rig.store(*range(104, 108))

    assert all(rig.holds(*range(24), *range(100, 108)))


@pytest.mark.parametrize("where", ["disk", "other node", "nowhere else"])
def test_pages_of_which_all_are_elsewhere_or_none_keep_their_order(where: str) -> None:
    """Also one that was written to disk only after its second: what counts is when it goes."""
    rig = Copier(pages=8, has_disk=True)
    rig.store(1, 2, 3, 4)
    elsewhere(rig, where, 1, 2, 3, 4)
    rig.store(5, 6, 7, 8)
    rig.now += 10.0
    elsewhere(rig, where, 5, 6, 7, 8)

    rig.store(9, 10, 11, 12)

    assert rig.holds(*range(1, 9)) == [True] * 4 + [False] * 4


@pytest.mark.parametrize("taken", [0, 1])
def test_a_page_that_is_nowhere_else_goes_first_if_it_was_demoted(taken: int) -> None:
    """Before any of its second went, and after."""
    rig = Copier(pages=8, has_disk=True)
    rig.store(*range(8))
    elsewhere(rig, "disk", *range(4))
    rig.now += 10.0
    rig.store(*range(100, 100 + taken))
    rig.say(Demote(7, 1, key(6)), INSIDE)

    rig.store(110)

    assert rig.holds(6) == [False]


def test_a_page_that_is_deleted_from_the_disk_goes_with_those_that_are_nowhere_else() -> None:
    """What is known is known of a page, and not of the next one in its slot."""
    rig = Copier(pages=512, has_disk=True)
    rig.store(*range(512))
    elsewhere(rig, "disk", *range(512))
    rig.say(PagesForgotten(key(511)), INSIDE)
    rig.say(Remove(9, 1, key(510)), INSIDE)
    rig.store(600)
    rig.now += 10.0

    rig.store(*range(700, 702))

    assert rig.holds(508, 509, 511, 600) == [False, False, True, True]


@pytest.mark.parametrize("is_moved", [False, True])
def test_each_second_that_a_batch_evicts_has_an_order_of_its_own(is_moved: bool) -> None:
    """Pages of a later second stay, wherever else they are."""
    rig = Copier(pages=36, has_disk=True)
    for begin in (0, 12, 24):
        rig.store(*range(begin, begin + 12 - is_moved * (begin == 24)))
        elsewhere(rig, "disk", *range(begin, begin + 6))
        rig.now += 10.0
    if is_moved:
        rig.take(90)

    rig.store(*range(100, 118))

    assert rig.holds(*range(12, 24)) == [False] * 6 + [True] * 6
    assert all(rig.holds(*range(24, 35)))
