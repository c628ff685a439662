"""The placement actor: what it offers to whom, what it takes, and how it ends."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from peercache.actors.effects import NotifyPool, Pull, Send
from peercache.actors.mailboxes import (
    DrainBegan,
    DrainCancelled,
    DrainChanged,
    PagesStored,
    PagesToGive,
    PullDone,
    RequestGive,
    TakenOver,
    TakeOver,
)
from peercache.actors.origin import Origin
from peercache.actors.placement.actor import (
    Placement,
)
from peercache.actors.placement.offers import (
    AGAIN_S,
    FULL_MAX,
    FULL_S,
    HANDED_OVER,
    HANDING_OVER,
    OFFER_BYTES,
    OFFER_PAGES,
    OFFER_S,
    SERVING,
    UNFINISHED_S,
    Batch,
    cut,
)
from peercache.actors.placement.takings import (
    OFFERED_MAX,
    PULL_BASE_S,
    PULL_MAX_S,
    TAKINGS_MAX,
)
from peercache.actors.pool.reservations import ENDED_MAX
from peercache.model.keys import tag_of
from peercache.model.records import HAS_CHECKSUM, ON_DISK, RECORD, RESIDENT
from peercache.model.status import Draining
from peercache.node.drain import Drainer
from peercache.observability.metrics import Metrics
from peercache.wire.messages.membership import (
    DrainNode,
    OfferPages,
    PagesTaken,
    ReportDrainState,
    RequestDrainState,
)
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    HERE,
    REFUSED_FULL,
    RESERVED,
    Committed,
    Granted,
)
from tests.unit.actors.placement_story import (
    INSIDE,
    ME,
    ONE,
    TWO,
    Placed,
    member,
    records_of,
)
from tests.unit.actors.test_pool_mirrors import Rig


class Story(Placed):
    """The placement actor of a node that is drained, or takes what others hand over."""

    def drain(self, *numbers: int, within_s: float = 60.0) -> list[Any]:
        """Begin, with these pages in the pool; return the offers."""
        begun = self.take(DrainBegan(self.now + within_s))
        assert begun == [
            NotifyPool(DrainChanged(is_draining=True)),
            NotifyPool(RequestGive(again=True)),
        ]
        groups = (PagesStored(records_of(*numbers), 1),) if numbers else ()
        effects = self.take(PagesToGive(groups, 0, 0))
        if NotifyPool(RequestGive(again=False)) in effects:
            # It asks ahead, so that no target waits for the pool.
            assert self.take(PagesToGive((), 0, 0)) == []
        return offers(effects)

    @property
    def giving(self) -> Any:
        return self.actor.giving


def offers(effects: list[Any]) -> list[tuple[int, int, list[int]]]:
    """Return the offers among effects: to whom, their number, the pages."""
    return [
        (effect.to, effect.message.number, generations_of(effect.message.records))
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, OfferPages)
    ]


def generations_of(records: bytes) -> list[int]:
    return (np.frombuffer(records, RECORD)["generation"] // 2).tolist()  # type: ignore[no-any-return]


def taken(number: int, *states: int) -> PagesTaken:
    return PagesTaken(number, bytes(states))


def test_pages_are_offered_until_none_are_left() -> None:
    """What a target has had before counts too; then the drain has ended."""
    story = Story()
    story.see(ONE)
    ((to, number, pages),) = story.drain(1, 2, 3)
    assert (to, pages, story.giving.progress.left) == (ONE, [1, 2, 3], 3)

    effects = story.take(taken(number, COMMITTED, HERE, COMMITTED), Origin(ONE))

    assert effects == []
    assert story.giving.state == HANDED_OVER
    progress = story.giving.progress
    assert (progress.given, progress.there, progress.lost, progress.left) == (2, 1, 0, 0)
    assert (progress.given_bytes, progress.there_bytes) == (2 * 4096, 4096)
    assert (progress.lost_bytes, progress.left_bytes) == (0, 0)


def test_each_target_has_one_offer() -> None:
    """So a slow one holds up the others least."""
    story = Story()
    story.see(ONE, TWO)
    numbers = range(1, 3 * OFFER_PAGES + 1)

    first = story.drain(*numbers)

    assert [(to, len(pages)) for to, _, pages in first] == [(ONE, OFFER_PAGES), (TWO, OFFER_PAGES)]
    again = offers(story.take(taken(first[1][1], *[COMMITTED] * OFFER_PAGES), Origin(TWO)))
    assert [(to, len(pages)) for to, _, pages in again] == [(TWO, OFFER_PAGES)]


def test_what_one_has_no_room_for_is_offered_to_another() -> None:
    """The full one is asked again after a while, and given up in the end."""
    story = Story()
    story.see(ONE, TWO)
    ((_, number, _),) = story.drain(1, 2)
    ((to, number, pages),) = offers(story.take(taken(number, COMMITTED, REFUSED_FULL), Origin(ONE)))
    assert (to, pages) == (TWO, [2])

    asked = 0
    effects = story.take(taken(number, REFUSED_FULL), Origin(TWO))
    while story.giving.state == HANDING_OVER:
        made = offers(effects)
        asked += len(made)
        for to, number, pages in made:
            assert pages == [2]
            effects = story.take(taken(number, REFUSED_FULL), Origin(to))
        if not made:
            effects = story.wait(FULL_S)

    assert asked == 2 * FULL_MAX - 1
    assert (story.giving.progress.given, story.giving.progress.lost) == (1, 1)
    assert story.giving.progress.lost_bytes == 4096


def test_a_drain_is_shown_in_pages_and_bytes_from_its_first_offer() -> None:
    """Status and metrics, the same: what is given, was there, is lost, and is left."""
    story, metrics = Story(), Metrics()
    story.actor.show(metrics)
    story.see(ONE)
    drainer = Drainer(
        story.giving, notify=story.take, others=lambda: 1, within_s=60.0, leave=lambda: None,
        nursery=Mock(), log=Mock(),
    )  # fmt: skip
    assert drainer.status() == Draining()
    drainer.answer(DrainNode(0, 0.0))
    story.take(DrainBegan(story.now + 60.0))
    named = PagesToGive((PagesStored(records_of(1, 2, 3), 1),), 2, 0, left_bytes=10_000)
    ((_, number, _),) = offers(story.take(named))
    whole = 3 * 4096 + 10_000
    assert (drainer.status().bytes, drainer.status().bytes_done) == (whole, 0)

    story.take(taken(number, COMMITTED, HERE, ABORTED), Origin(ONE))

    status = drainer.status()
    assert (status.pages, status.pages_done) == (5, 2)
    assert (status.bytes, status.bytes_done) == (whole, 2 * 4096)
    read = metrics.registry.get_sample_value
    shown = [
        read(f"peercache_drain_{name}", {"state": state})
        for name in ("pages", "bytes")
        for state in ("given", "there", "lost", "left")
    ]
    assert shown == [1, 1, 0, 3, 4096, 4096, 0, 4096 + 10_000]


def test_what_is_taken_over_is_counted() -> None:
    """Only what was committed: this node's metrics outlive those of the node that leaves."""
    story, metrics = Story(), Metrics()
    story.actor.show(metrics)
    story.see(ONE)
    (notified,) = offer(story, 1, 2)
    number = notified.fact.reserve.sequence
    story.take(Granted(0, number, bytes((RESERVED, RESERVED)), bytes(16)))
    story.take(PullDone(number, b"\1\0"))
    story.take(Committed(0, number, bytes((COMMITTED, ABORTED)), b"", 0))

    assert metrics.registry.get_sample_value("peercache_pages_taken_over_total") == 1


def test_a_silent_target_is_given_up_and_its_pages_go_elsewhere() -> None:
    """It may be of a build that knows no offers."""
    story = Story()
    story.see(ONE, TWO)
    ((_, number, _),) = story.drain(1)

    ((to, _, pages),) = offers(story.wait(OFFER_S))

    assert (to, pages) == (TWO, [1])
    # What it answers later counts no more: the other one may have the page by then.
    assert story.take(taken(number, COMMITTED), Origin(ONE)) == []
    assert story.giving.progress.given == 0


def test_a_target_that_dies_is_replaced_at_once() -> None:
    """The view shows it before its silence does."""
    story = Story()
    story.see(ONE)
    story.drain(1)

    ((to, _, pages),) = offers(story.see(TWO))

    assert (to, pages) == (TWO, [1])


def test_what_was_not_read_in_time_is_offered_once_more() -> None:
    """It may have been removed: then it is lost, and nothing else is."""
    story = Story()
    story.see(ONE)
    ((_, number, _),) = story.drain(1, 2)
    ((_, number, pages),) = offers(story.take(taken(number, COMMITTED, ABORTED), Origin(ONE)))
    assert pages == [2]

    story.take(taken(number, ABORTED), Origin(ONE))

    assert story.giving.state == HANDED_OVER
    assert (story.giving.progress.given, story.giving.progress.lost) == (1, 1)


def test_an_answer_that_does_not_fit_ends_the_trust_in_a_target() -> None:
    """And an answer of another node, or to no offer, changes nothing."""
    story = Story()
    story.see(ONE, TWO)
    ((_, number, _),) = story.drain(1, 2)
    assert story.take(taken(number, COMMITTED, COMMITTED), Origin(TWO)) == []
    assert story.take(taken(number + 7, COMMITTED, COMMITTED), Origin(ONE)) == []

    ((to, _, pages),) = offers(story.take(taken(number, COMMITTED), Origin(ONE)))

    assert (to, pages) == (TWO, [1, 2])


def test_the_last_node_hands_nothing_over() -> None:
    """It ends at once, and reports what is lost."""
    story = Story()
    story.see()

    assert story.drain(1, 2) == []

    assert story.giving.state == HANDED_OVER
    assert (story.giving.progress.lost, story.giving.progress.left) == (2, 0)


def test_it_ends_when_its_time_is_over() -> None:
    """What was not taken by then is lost."""
    story = Story()
    story.see(ONE)
    story.drain(1, 2, within_s=3.0)

    assert story.wait(2.9) == []
    assert story.giving.state == HANDING_OVER
    story.wait(0.2)

    assert story.giving.state == HANDED_OVER
    assert story.giving.progress.lost == 2


def test_sets_that_began_before_are_waited_for() -> None:
    """Their pages are the hottest: the order is made again when they are there, or time is over."""
    story = Story()
    story.see(ONE)
    story.take(DrainBegan(story.now + 60.0))
    unfinished = PagesToGive((PagesStored(records_of(1), 1),), 0, 2)

    assert story.take(unfinished) == []
    assert story.wait(AGAIN_S) == [NotifyPool(RequestGive(again=True))]
    story.now += UNFINISHED_S

    assert [pages for _, _, pages in offers(story.take(unfinished))] == [[1]]


def test_a_drain_ends_whose_time_is_over_when_it_asks_again() -> None:
    """Both are due at one tick of a node that was slow; a tick that leaves one of them ends it."""
    story = Story()
    story.see(ONE)
    story.take(DrainBegan(story.now + AGAIN_S))
    story.take(PagesToGive((PagesStored(records_of(1), 1),), 0, 2))
    story.now += 2 * AGAIN_S

    assert story.actor.on_tick(story.now) == [NotifyPool(RequestGive(again=True))]

    assert story.giving.state == HANDED_OVER
    assert story.actor.deadline() > story.now


def test_a_second_drain_joins_the_first_and_a_cancelled_one_can_begin_again() -> None:
    """Nothing is offered after a cancel."""
    story = Story()
    story.see(ONE)
    ((_, number, _),) = story.drain(1, 2)
    assert story.take(DrainBegan(story.now + 1.0)) == []

    assert story.take(DrainCancelled()) == [NotifyPool(DrainChanged(is_draining=False))]
    assert story.giving.state == SERVING
    assert story.take(taken(number, COMMITTED, COMMITTED), Origin(ONE)) == []
    assert story.take(PagesToGive((PagesStored(records_of(3), 1),), 0, 0)) == []
    assert story.take(DrainCancelled()) == []

    assert [pages for _, _, pages in story.drain(1, 2)] == [[1, 2]]


def test_a_target_that_was_given_up_is_offered_pages_of_a_second_drain() -> None:
    """It had no room then."""
    story = Story()
    story.see(ONE)
    ((_, number, _),) = story.drain(1)
    for _ in range(FULL_MAX):
        effects = story.take(taken(number, REFUSED_FULL), Origin(ONE)) or story.wait(FULL_S)
        number = next((number for _, number, _ in offers(effects)), 0)
    assert story.giving.state == HANDED_OVER
    story.take(DrainCancelled())

    assert [pages for _, _, pages in story.drain(1)] == [[1]]


def test_an_offer_is_bounded_in_pages_and_bytes() -> None:
    """A page that is larger than the bound goes alone."""
    parts = cut(Batch(1, records_of(*range(1, 6), length=20 * 2**20)))

    assert [len(part.records) for part in parts] == [1] * 5
    assert [len(part.records) for part in cut(Batch(1, records_of(1)))] == [1]


# --- taking ---------------------------------------------------------------------------------------


def drains(question: int, state: str = HANDING_OVER) -> ReportDrainState:
    """Return what a node answers that is asked whether it drains."""
    return ReportDrainState(question, {"state": state, "problem": ""})


def ask(story: Story, *numbers: int, flags: int = RESIDENT, number: int = 5, by: int = ONE) -> int:
    """Let a node offer pages; return the number of the question that it gets."""
    records = records_of(*numbers, flags=flags, holder=by).tobytes()
    (asked,) = story.take(OfferPages(number, 7, records), Origin(by))
    assert asked.to == Origin(by)
    assert isinstance(asked.message, RequestDrainState)
    return asked.message.request


def offer(story: Story, *numbers: int, number: int = 5, by: int = ONE, **kwargs: Any) -> list[Any]:
    """Let a node that drains offer pages."""
    question = ask(story, *numbers, number=number, by=by, **kwargs)
    return story.take(drains(question), Origin(by))


def finish(story: Story, notified: Any) -> list[Any]:
    """Let the pool have no room for what it is asked for; return what follows."""
    reserve = notified.fact.reserve
    states = bytes((REFUSED_FULL,)) * (len(reserve.keys) // 16)
    return story.take(Granted(0, reserve.sequence, states, bytes(8 * len(states))))


def test_an_offer_is_reserved_read_and_committed() -> None:
    """In this order; its checksums go along, and each page is answered for."""
    story = Story()
    story.see(ONE)
    (notified,) = offer(story, 1, 2, 3, flags=RESIDENT | HAS_CHECKSUM)
    assert isinstance(notified.fact, TakeOver)
    reserve = notified.fact.reserve
    assert (reserve.namespace, len(reserve.keys)) == (7, 48)

    states, offsets = bytes((RESERVED, HERE, RESERVED)), np.array([64, 0, 128], "<u8").tobytes()
    (pull,) = story.take(Granted(0, reserve.sequence, states, offsets))
    assert isinstance(pull, Pull)
    assert pull.member == member(ONE)
    assert (pull.offsets.tolist(), generations_of(pull.records.tobytes())) == ([64, 128], [1, 3])

    (notified,) = story.take(PullDone(pull.job, bytes((1, 0))))
    assert isinstance(notified.fact, TakenOver)
    commit = notified.fact.commit
    assert commit.written == bytes((1, 0, 0))
    assert np.frombuffer(commit.checksums, "<u8").tolist() == [101, 0, 0]

    outcome = bytes((COMMITTED, HERE, ABORTED))
    (answer,) = story.take(Committed(0, commit.sequence, outcome, b"", 0))
    assert answer == Send(Origin(ONE), PagesTaken(5, outcome))


@pytest.mark.parametrize("why", ["a stranger", "drained itself", "not of its namespaces"])
def test_who_cannot_take_reports_that_there_is_no_room(why: str) -> None:
    """Then the offerer goes to another node at once."""
    spaces = frozenset({6}) if why == "not of its namespaces" else None
    story = Story(Placement(ME, lambda: spaces))
    story.see(*([] if why == "a stranger" else [ONE]))
    if why == "drained itself":
        story.take(DrainBegan(story.now + 60.0))

    effects = story.take(OfferPages(5, 7, records_of(1, 2).tobytes()), Origin(ONE))

    assert effects == [Send(Origin(ONE), PagesTaken(5, bytes((REFUSED_FULL,)) * 2))]


def test_pages_are_taken_only_from_a_node_that_reports_that_it_drains() -> None:
    """One that serves has no reason to hand pages over, and silence is no answer."""
    story = Story()
    story.see(ONE, TWO)
    question = ask(story, 1, 2)

    # Another node cannot answer for it, and no other question is meant.
    assert story.take(drains(question), Origin(TWO)) == []
    assert story.take(drains(question + 1), Origin(ONE)) == []
    refused = story.take(drains(question, SERVING), Origin(ONE))

    assert refused == [Send(Origin(ONE), PagesTaken(5, bytes((REFUSED_FULL,)) * 2))]
    assert story.take(drains(question), Origin(ONE)) == []


def test_a_node_that_offers_without_end_has_one_place() -> None:
    """Of what it offers meanwhile the newest waits; others are read at once."""
    story = Story()
    story.see(ONE, TWO)
    (first,) = offer(story, 1, number=1)
    for number in range(2, 10):
        assert offer(story, number, number=number) == []

    (other,) = offer(story, 1, number=1, by=TWO)

    assert isinstance(other.fact, TakeOver)
    answer, then = finish(story, first)
    assert answer == Send(Origin(ONE), PagesTaken(1, bytes((REFUSED_FULL,))))
    assert then.fact.reserve.keys == records_of(9)["key"].tobytes()
    (answer,) = finish(story, then)
    assert answer.message.number == 9


def test_offers_beyond_the_places_wait_for_their_turn() -> None:
    """In their order: who has had a place waits behind those that have had none."""
    story = Story()
    many = [30 + node for node in range(TAKINGS_MAX + 2)]
    story.see(*many)
    begun = [notified for node in many for notified in offer(story, node, by=node)]
    assert len(begun) == TAKINGS_MAX
    assert offer(story, 99, by=many[0]) == []

    arrived_at = story.now
    story.now += 5.0

    order = []
    for notified in begun[:3]:
        answer, then = finish(story, notified)
        assert isinstance(answer.message, PagesTaken)
        order.append(then.fact.reserve.keys)
        assert then.fact.offered_at == arrived_at

    assert order == [records_of(number)["key"].tobytes() for number in (*many[TAKINGS_MAX:], 99)]


def test_an_offer_that_has_waited_for_many_others_is_taken() -> None:
    """The pool remembers how the last ENDED_MAX of these reservations ended, not all."""
    story, rig = Story(), Rig()
    story.see(ONE, TWO)
    question = ask(story, 1, by=ONE)
    for number in range(ENDED_MAX + 2):
        (notified,) = offer(story, 100 + number, by=TWO)
        *_, granted = rig.say(notified.fact, INSIDE)
        (pull,) = story.take(granted.fact)
        (notified,) = story.take(PullDone(pull.job, bytes((0,))))
        rig.say(notified.fact, INSIDE)
        story.take(Committed(0, pull.job, bytes((ABORTED,)), b"", 0))

    (notified,) = story.take(drains(question), Origin(ONE))
    *_, granted = rig.say(notified.fact, INSIDE)

    assert granted.fact.states == bytes((RESERVED,))


def test_what_waits_is_turned_away_when_this_node_drains_and_forgotten_with_its_node() -> None:
    """Its offerer goes to another node."""
    story = Story()
    story.see(ONE, TWO)
    ask(story, 1)
    question = ask(story, 1, 2, by=TWO)
    story.see(TWO)

    *_, answer = story.take(DrainBegan(story.now + 60.0))

    assert answer == Send(Origin(TWO), PagesTaken(5, bytes((REFUSED_FULL,)) * 2))
    assert story.take(drains(question), Origin(TWO)) == []


def test_an_offer_must_be_read_at_a_rate() -> None:
    """Else a node that sends a byte now and then keeps a place; the largest offer has its time."""
    story = Story()
    story.see(ONE)
    spans = []
    for length in (4096, OFFER_BYTES, 2**31):
        records = records_of(1, length=length).tobytes()
        (asked,) = story.take(OfferPages(5, 7, records), Origin(ONE))
        (notified,) = story.take(drains(asked.message.request), Origin(ONE))
        sequence = notified.fact.reserve.sequence
        (pull,) = story.take(Granted(0, sequence, bytes((RESERVED,)), bytes(8)))
        spans.append(pull.within_s)
        story.take(PullDone(pull.job, bytes(1)))
        story.take(Committed(0, sequence, bytes((ABORTED,)), b"", 0))

    assert spans[0] == pytest.approx(PULL_BASE_S, rel=0.01)
    assert spans[1:] == [PULL_MAX_S, PULL_MAX_S]
    assert PULL_MAX_S < OFFER_S


def test_a_node_offers_no_page_of_a_namespace_that_its_certificate_does_not_allow() -> None:
    """Every target would refuse it; the drain goes on with the others, and counts it as lost."""
    story = Story(Placement(ME, lambda: frozenset({1})))
    story.see(ONE)
    story.take(DrainBegan(story.now + 60.0))

    groups = PagesStored(records_of(1, 2), tag_of(2, 9)), PagesStored(records_of(3), tag_of(1, 9))
    made = offers(story.take(PagesToGive(groups, 0, 0)))

    assert [pages for _, _, pages in made] == [[3]]
    assert (story.giving.progress.lost, story.giving.progress.lost_bytes) == (2, 2 * 4096)


def test_an_offer_that_makes_no_sense_takes_nothing() -> None:
    """Pages on disk, none at all, or too many."""
    story = Story()
    story.see(ONE)
    for records in (
        records_of(1, flags=ON_DISK),
        records_of(),
        records_of(*range(1, OFFERED_MAX + 2)),
    ):
        effects = story.take(OfferPages(5, 7, records.tobytes()), Origin(ONE))
        assert effects == [Send(Origin(ONE), PagesTaken(5, bytes((ABORTED,)) * len(records)))]
