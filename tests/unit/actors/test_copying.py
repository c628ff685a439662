"""Pages without a copy: to whom a node offers them, and what both nodes note of it."""

from __future__ import annotations

import random
from typing import Any

import attrs
import numpy as np
import pytest

from peercache.actors.effects import NotifyPool, Send
from peercache.actors.mailboxes import (
    ColdPages,
    CopiesLost,
    CopiesMade,
    HoldersChanged,
    PagesToCopy,
    PullDone,
    RequestCopies,
    RequestSpill,
    TakenOver,
    TakeOver,
)
from peercache.actors.origin import Origin
from peercache.actors.placement.actor import Placement
from peercache.actors.placement.offers import LOOK_S, OFFER_S, REFUSED_S, OfferProgress, Offers
from peercache.model.member import ALIVE, DEAD, SUSPECT
from peercache.wire.messages.membership import (
    CopiesEvicted,
    OfferSpill,
    PagesTaken,
    RequestRoom,
)
from peercache.wire.messages.pool import COMMITTED, HERE, REFUSED_FULL, RESERVED, Granted
from tests.unit.actors.placement_story import (
    ME,
    ONE,
    PAGE,
    RATE,
    THREE,
    TWO,
    Placed,
    made_in,
    member,
    records_of,
)
from tests.unit.actors.test_spilling import committed


@attrs.define(eq=False)
class Story(Placed):
    """The placement actor of a node that keeps two copies of each page."""

    actor: Placement = attrs.field(init=False)
    rate: int = RATE
    spill_rate: int = 0

    def __attrs_post_init__(self) -> None:
        copying = Offers(self.rate, 20.0, random.Random(1), is_copying=True)
        spilling = Offers(self.spill_rate, 20.0, random.Random(2))
        self.actor = Placement(ME, spilling=spilling, copying=copying)

    @property
    def progress(self) -> OfferProgress:
        return self.actor.copying.progress

    def name(self, *numbers: int, age: float = 0.5, node: int = 0, length: int = PAGE) -> list[Any]:
        """Let the pool name pages without a copy."""
        ages = np.full(len(numbers), age)
        return self.take(PagesToCopy(((7, records_of(*numbers, length=length), ages),), node))


def begun(**kwargs: Any) -> Story:
    """Return a story whose node has asked its pool."""
    story = Story(**kwargs)
    story.see(ONE, TWO)
    assert NotifyPool(RequestCopies()) in story.wait(LOOK_S)
    return story


def offer_of(effects: list[Any]) -> tuple[int, OfferSpill]:
    (offer,) = effects
    assert isinstance(offer, Send)
    assert isinstance(offer.to, int)
    assert isinstance(offer.message, OfferSpill)
    return offer.to, offer.message


def test_a_page_without_a_copy_is_offered_and_stays() -> None:
    """The pool learns who has it, and is asked for the next ones at once."""
    story = begun()

    to, offer = offer_of(story.answer_all(story.name(1, 2, 3), {TWO: (PAGE, 900.0)}))

    assert (to, offer.is_copy, np.frombuffer(offer.ages).tolist()) == (ONE, True, [0.5] * 3)
    answer = PagesTaken(offer.number, bytes((COMMITTED, HERE, REFUSED_FULL)))
    effects = story.take(answer, Origin(ONE))
    assert made_in(effects) == [([2, 4], ONE, True)]
    assert story.progress == OfferProgress(moved=1, there=1, refused=1, moved_bytes=PAGE)
    assert NotifyPool(RequestCopies()) in [*effects, *story.wait(LOOK_S)]


def test_a_copy_takes_the_place_of_what_is_colder() -> None:
    """Twice as old as the page, and of the least age; else it is refused, and tried again."""
    for age, colder, is_offered in (
        (0.5, 20.5, True),
        (0.5, 19.5, False),
        (30.0, 61.0, True),
        (30.0, 59.0, False),
    ):
        story = begun()
        effects = story.answer_all(story.name(1, age=age), {ONE: (0, colder), TWO: (0, 0.0)})
        assert bool([e for e in effects if isinstance(e, Send)]) == is_offered
        if not is_offered:
            assert story.progress == OfferProgress(refused=1)
            requests: list[Any] = []
            for _ in range(12):
                story.take(PagesToCopy(()))
                requests += story.wait(LOOK_S)
            assert NotifyPool(RequestCopies()) in requests


def test_pages_that_no_node_took_hold_up_no_others() -> None:
    """Until a pause is over the pool names only pages that were not offered yet."""
    story = begun()
    effects = story.answer_all(story.name(1), {ONE: (0, 0.0), TWO: (0, 0.0)})
    assert effects == [NotifyPool(RequestCopies(again=False))]

    assert story.take(PagesToCopy(())) == []
    requests = story.wait(REFUSED_S - 0.05)
    assert requests == [NotifyPool(RequestCopies(again=False))]


def test_of_two_nodes_with_room_the_one_with_more_takes_it() -> None:
    """Whatever the age of its pages."""
    story = begun()
    rooms = {ONE: (2 * PAGE, 500.0), TWO: (9 * PAGE, 1.0)}
    assert offer_of(story.answer_all(story.name(1, 2), rooms))[0] == TWO


def test_a_node_that_may_have_the_pages_is_asked_first_and_for_no_room() -> None:
    """If it is there; what it has not is offered to the others at once."""
    story = begun()

    to, offer = offer_of(story.name(1, 2, node=TWO))
    assert to == TWO
    effects = story.take(PagesTaken(offer.number, bytes((HERE, REFUSED_FULL))), Origin(TWO))
    assert made_in(effects) == [([2], TWO, True)]
    assert NotifyPool(RequestCopies()) in effects

    asked = story.name(2, node=THREE)
    assert all(isinstance(effect.message, RequestRoom) for effect in asked)


def test_of_an_offer_without_an_answer_the_node_may_have_taken_pages() -> None:
    """It must learn when they are evicted here; another node is asked next."""
    story = begun()
    to, _ = offer_of(story.answer_all(story.name(1), {}))

    effects = story.wait(OFFER_S + LOOK_S)

    assert made_in(effects) == [([2], to, False)]
    (asked,) = story.name(1)
    assert asked.to != to


def test_a_node_whose_answer_comes_after_its_death_holds_no_copy() -> None:
    """The pool has dropped its copies by then, and would rely on this one."""
    story = begun()
    to, offer = offer_of(story.answer_all(story.name(1), {}))
    story.see(*{ONE, TWO} - {to}, member(to, DEAD))

    effects = story.take(PagesTaken(offer.number, bytes((COMMITTED,))), Origin(to))

    assert made_in(effects) == [([2], 0, True)]


def test_a_copy_goes_to_another_host() -> None:
    """To a node of the own host only where there is no other one."""
    near, far = member(ONE, host=str(ME)), member(TWO)
    story = Story()
    story.see(near, far)
    story.wait(LOOK_S)
    assert [effect.to for effect in story.name(1)] == [TWO]

    alone = Story()
    alone.see(near)
    alone.wait(LOOK_S)
    assert [effect.to for effect in alone.name(1)] == [ONE]


def test_a_node_of_the_own_host_that_was_suspect_may_have_removed_pages() -> None:
    """No copy goes there, but its clients remove pages everywhere."""
    host, story = str(ME), Story()
    story.see(member(ONE, host=host), TWO)
    story.see(member(ONE, SUSPECT, host), TWO)
    story.wait(LOOK_S)

    story.see(member(ONE, host=host, counter=2), TWO)

    assert NotifyPool(RequestCopies(only_new=True)) in story.wait(LOOK_S)


def test_spill_and_copies_have_one_rate() -> None:
    """What one offers, the other waits for."""
    story = Story(rate=10 * PAGE, spill_rate=10 * PAGE)
    story.see(ONE)
    story.wait(LOOK_S)
    _, offer = offer_of(story.answer_all(story.name(*range(1, 11)), {}))
    story.take(PagesTaken(offer.number, bytes((COMMITTED,)) * 10), Origin(ONE))

    cold = ColdPages(((7, records_of(20), np.array([99.0])),), 99.0)
    assert story.take(cold) == []
    assert not [e for e in story.wait(0.9) if isinstance(e, Send)]

    (asked,) = [e for e in story.wait(0.2) if isinstance(e, Send)]
    assert isinstance(asked.message, RequestRoom)
    assert not [e for e in story.wait(60.0) if e == NotifyPool(RequestSpill(only_new=True))]


def test_the_pool_learns_which_nodes_may_hold_copies() -> None:
    """A suspected one may; a dead one holds none, nor does one that has only just joined."""
    story = Story(rate=0)
    assert story.see(ONE, TWO) == []
    assert story.see(ONE, member(TWO, SUSPECT)) == []
    assert NotifyPool(HoldersChanged((ONE,))) in story.see(ONE, member(TWO, DEAD))
    assert story.wait(60.0) == []


def test_a_report_of_evicted_copies_comes_to_the_pool_after_the_answer_before_it() -> None:
    """However long both waited: by the answer the pool learns of copies that are gone by now."""
    story = begun()
    to, offered = offer_of(story.answer_all(story.name(1), {}))
    report = CopiesEvicted(1, records_of(1)["key"].tobytes())

    effects = story.take(PagesTaken(offered.number, bytes((COMMITTED,))), Origin(to))
    effects += story.take(report, Origin(to))

    facts = [effect.fact for effect in effects if isinstance(effect, NotifyPool)]
    made = next(at for at, fact in enumerate(facts) if isinstance(fact, CopiesMade))
    assert facts.index(CopiesLost(to, report)) > made


# --- what a node takes ----------------------------------------------------------------------------


def offer(story: Story, number: int, *numbers: int, is_copy: bool) -> list[Any]:
    ages = np.full(len(numbers), 50.0).tobytes()
    records = records_of(*numbers, holder=ONE).tobytes()
    return story.take(OfferSpill(number, 7, records, ages, is_copy), Origin(ONE))


@pytest.mark.parametrize(("offerer", "holder"), [(ALIVE, ONE), (DEAD, 0)])
def test_of_a_copy_the_pool_learns_who_has_the_other(offerer: int, holder: int) -> None:
    """Of what is answered as kept; what the owners may not know has no copy, as it seems.

    Nor has a page whose offerer died while it was read.
    """
    for published, both, alone in ((2, [2, 4], []), (1, [], [2, 4])):
        story = Story()
        story.see(ONE)
        (notified,) = offer(story, 5, 1, 2, is_copy=True)
        assert isinstance(notified.fact, TakeOver)
        sequence = notified.fact.reserve.sequence
        (pull,) = story.take(Granted(0, sequence, bytes((RESERVED,)) * 2, bytes(16)))
        (notified,) = story.take(PullDone(pull.job, b"\1\1"))
        assert isinstance(notified.fact, TakenOver)
        assert notified.fact.is_copy

        story.see(member(ONE, offerer))
        states = [COMMITTED, COMMITTED]
        effects = story.take(committed(sequence, states, (1, 101), (2, 102), published=published))

        assert made_in(effects) == [(both, holder, True), (alone, 0, True)]
        assert isinstance(effects[-1].message, PagesTaken)


def test_offers_of_both_kinds_wait_side_by_side() -> None:
    """One node spills and copies at the same time: neither offer is dropped for the other."""
    story = Story()
    story.see(ONE)
    (first,) = offer(story, 5, 1, is_copy=False)
    assert offer(story, 6, 2, is_copy=True) == []
    assert offer(story, 7, 3, is_copy=False) == []

    answers: list[Any] = []
    notified = first
    for _ in range(3):
        sequence = notified.fact.reserve.sequence
        answer, *then = story.take(Granted(0, sequence, bytes((REFUSED_FULL,)), bytes(8)))
        answers.append(answer.message)
        if then:
            (notified,) = then

    assert sorted(answer.number for answer in answers) == [5, 6, 7]
