"""Pages that a node will evict next: to whom it offers them, how fast, and what it takes itself."""

from __future__ import annotations

import random
from typing import Any

import attrs
import numpy as np
import pytest

from peercache.actors.effects import NotifyPool, Pull, Send
from peercache.actors.mailboxes import (
    ColdPages,
    DrainBegan,
    DrainCancelled,
    PagesGiven,
    PullDone,
    RequestSpill,
    SpilledPages,
    TakenOver,
    TakeOver,
)
from peercache.actors.origin import Origin
from peercache.actors.placement.actor import (
    Placement,
)
from peercache.actors.placement.offers import (
    AWAY_MAX,
    HALT_S,
    LOOK_S,
    LOST_S,
    OFFER_S,
    REFUSED_S,
    ROOM_S,
    SETTLE_S,
    SILENT_S,
    VAIN_S,
    OfferProgress,
    Offers,
)
from peercache.model.keys import tag_of
from peercache.model.member import DEAD, SUSPECT, Member
from peercache.wire.messages.membership import (
    OfferSpill,
    PagesTaken,
    ReportRoom,
)
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    HERE,
    REFUSED_FULL,
    REFUSED_SIZE,
    RESERVED,
    Committed,
    Granted,
)
from tests.unit.actors.placement_story import (
    ME,
    ONE,
    PAGE,
    RATE,
    THREE,
    TWO,
    Placed,
    member,
    records_of,
)


@attrs.define(eq=False)
class Story(Placed):
    """The placement actor of a node that spills."""

    actor: Placement = attrs.field(init=False)
    rate: int = RATE
    min_age_s: float = 60.0
    spaces: frozenset[int] | None = None

    def __attrs_post_init__(self) -> None:
        spilling = Offers(self.rate, self.min_age_s, random.Random(1))
        self.actor = Placement(ME, lambda: self.spaces, spilling)

    @property
    def progress(self) -> OfferProgress:
        return self.actor.spilling.progress

    def pause(self, seconds: float) -> list[Any]:
        """Let time pass in which the process does nothing."""
        self.now += seconds
        return self.actor.on_tick(self.now)

    def name(self, *numbers: int, age: float = 100.0, length: int = PAGE) -> list[Any]:
        """Let the pool, which is asked, name pages of one namespace; return what follows."""
        groups = (((7), records_of(*numbers, length=length), np.full(len(numbers), age)),)
        return self.take(ColdPages(groups if numbers else (), abs(age)))

    def offered(self, *numbers: int, age: float = 100.0, **rooms: Any) -> tuple[int, OfferSpill]:
        """Let the pool name pages, and every node that is asked have room; return the offer."""
        return self.answer(self.name(*numbers, age=age, **rooms), {})

    def answer(
        self, asked: list[Any], rooms: dict[int, tuple[int, float]]
    ) -> tuple[int, OfferSpill]:
        """Answer for the nodes that are asked; return to whom what is offered."""
        effects = self.answer_all(asked, rooms)
        (offer,) = effects
        assert isinstance(offer, Send)
        assert isinstance(offer.message, OfferSpill)
        assert isinstance(offer.to, int)
        return offer.to, offer.message


def asks_pool(effects: list[Any]) -> bool:
    return any(isinstance(e, NotifyPool) and isinstance(e.fact, RequestSpill) for e in effects)


def begun(**kwargs: Any) -> Story:
    """Return a story whose node has asked its pool."""
    story = Story(**kwargs)
    story.see(ONE, TWO)
    assert asks_pool(story.wait(LOOK_S))
    return story


def test_a_node_alone_or_without_a_rate_asks_nothing() -> None:
    """Its pool evicts as always."""
    alone, off = Story(), Story(rate=0)
    alone.see()
    off.see(ONE, TWO)

    assert alone.wait(60.0) == off.wait(60.0) == []


def test_pages_go_to_the_node_with_the_most_room() -> None:
    """They are evicted first from then on, and the pool is asked for more at once."""
    story = begun()

    to, offer = story.answer(story.name(1, 2, 3), {ONE: (2**30, 0.0), TWO: (PAGE, 900.0)})

    assert (to, np.frombuffer(offer.ages).tolist()) == (ONE, [100.0] * 3)
    assert offer.records == records_of(1, 2, 3).tobytes()
    answer = PagesTaken(offer.number, bytes((COMMITTED, HERE, ABORTED)))
    given, *then = story.take(answer, Origin(ONE))
    assert isinstance(given.fact, PagesGiven)
    assert given.fact.drops["generation"].tolist() == [2, 4]
    assert story.progress == OfferProgress(moved=1, there=1, failed=1, moved_bytes=PAGE)
    assert asks_pool([*then, *story.wait(LOOK_S)])


def test_without_room_they_go_to_the_node_with_the_coldest_pages() -> None:
    """If these are twice as old as the coldest one here, and older than the least age."""
    story = begun()
    assert story.answer(story.name(1), {ONE: (0, 201.0), TWO: (0, 202.0)})[0] == TWO


@pytest.mark.parametrize(("age", "colder"), [(100.0, 200.0), (10.0, 60.0)])
def test_nothing_is_offered_where_nothing_is_colder(age: float, colder: float) -> None:
    """Nodes are asked again after a while."""
    story = begun()
    effects = []
    for effect in story.name(1, 2, age=age):
        effects += story.take(ReportRoom(effect.message.number, 0, colder), Origin(effect.to))

    assert effects == []
    assert story.progress == OfferProgress(refused=2)
    assert not asks_pool(story.wait(REFUSED_S - 0.01))
    assert asks_pool(story.wait(LOOK_S + 0.02))


def test_a_page_that_is_on_disk_too_goes_into_free_room_only() -> None:
    """However cold the pages of others are."""
    for free, is_offered in ((PAGE, True), (0, False)):
        story = begun()
        effects = []
        for effect in story.name(1, age=-100.0):
            report = ReportRoom(effect.message.number, free, 1e6)
            effects += story.take(report, Origin(effect.to))
        assert [isinstance(e.message, OfferSpill) for e in effects] == [True] * is_offered


def test_two_nodes_are_asked_and_who_does_not_answer_is_not_waited_for() -> None:
    """An answer to another question, or of a node that was not asked, has no effect."""
    story = Story()
    story.see(ONE, TWO, THREE, member(24, DEAD))
    story.wait(LOOK_S)
    asked = story.name(1)
    assert len({effect.to for effect in asked}) == 2
    first, second = (effect.to for effect in asked)
    number = asked[0].message.number
    (other,) = {ONE, TWO, THREE} - {first, second}

    assert story.take(ReportRoom(number - 1, PAGE, 0.0), Origin(first)) == []
    assert story.take(ReportRoom(number, PAGE, 0.0), Origin(other)) == []
    assert story.take(ReportRoom(number, PAGE, 0.0), Origin(first)) == []
    effects = story.wait(ROOM_S + LOOK_S)

    assert [effect.to for effect in effects] == [first]
    assert isinstance(effects[0].message, OfferSpill)


def test_a_node_that_does_not_answer_an_offer_is_left_alone() -> None:
    """For a minute; the pages count as failed, and others are asked."""
    story = begun()
    to, offer = story.offered(1, 2)

    effects = story.wait(OFFER_S + LOOK_S)

    assert story.progress == OfferProgress(failed=2)
    assert asks_pool(effects)
    asked = {effect.to for _ in range(8) for effect in _asked_again(story)}
    assert asked == {ONE, TWO} - {to}
    late = PagesTaken(offer.number, bytes((COMMITTED,)) * 2)
    assert story.take(late, Origin(to)) == []
    story.wait(SILENT_S)
    assert to in {effect.to for _ in range(8) for effect in _asked_again(story)}


def _asked_again(story: Story) -> list[Any]:
    asked = story.name(1)
    for effect in asked:
        story.take(ReportRoom(effect.message.number, 0, 0.0), Origin(effect.to))
    story.wait(REFUSED_S + LOOK_S)
    return asked


def test_a_node_that_reports_room_and_takes_nothing_leaves_its_turn_to_others() -> None:
    """However much room it reports: else it alone would keep a cluster from moving pages."""
    story = begun()
    rooms = {ONE: (2**40, 1e9), TWO: (PAGE, 0.0)}
    to, offer = story.answer(story.name(1), rooms)
    assert to == ONE

    story.take(PagesTaken(offer.number, bytes((REFUSED_FULL,))), Origin(ONE))
    story.wait(REFUSED_S + LOOK_S)
    then, _ = story.answer(story.name(1), rooms)

    assert then == TWO
    story.wait(OFFER_S + VAIN_S)
    assert story.answer(story.name(1), rooms)[0] == ONE


def test_an_offer_to_a_node_that_dies_ends_at_once() -> None:
    """So the next one can begin."""
    story = begun()
    to, _ = story.offered(1)

    story.see(ONE if to == TWO else TWO, member(to, DEAD))

    assert asks_pool(story.wait(LOOK_S + 0.01))
    assert story.progress == OfferProgress(failed=1)


def test_a_node_that_leaves_with_an_offer_is_not_remembered() -> None:
    """There is a bound: never more are left alone than there are, here one of two."""
    story = begun()
    silent, _ = story.offered(1)
    story.wait(OFFER_S + LOOK_S)
    to, _ = story.answer(story.name(2), {})

    story.see(silent, member(to, SUSPECT))
    story.wait(LOOK_S + 0.01)

    assert to != silent
    assert story.progress == OfferProgress(failed=2)


def test_an_answer_that_does_not_fit_moves_nothing() -> None:
    """Neither one with too few states, nor one of another node."""
    story = begun()
    to, offer = story.offered(1, 2)
    other = ONE if to == TWO else TWO

    assert story.take(PagesTaken(offer.number, bytes((COMMITTED,)) * 2), Origin(other)) == []
    story.take(PagesTaken(offer.number, bytes((COMMITTED,))), Origin(to))

    assert story.progress == OfferProgress(failed=2)


def test_pages_are_offered_at_a_rate() -> None:
    """The next offer waits for as long as the bytes of the last one take."""
    story = begun(rate=2 * PAGE)
    to, offer = story.offered(1, 2, 3)

    effects = story.take(PagesTaken(offer.number, bytes((COMMITTED,)) * 3), Origin(to))

    assert not asks_pool([*effects, *story.wait(1.4)])
    assert asks_pool(story.wait(0.2))


def test_pages_of_one_namespace_are_offered_together() -> None:
    """One after the other; those that the certificate does not allow are not."""
    story = begun(spaces=frozenset({7, 8}))
    groups = tuple((tag_of(space, 1), records_of(space), np.array([100.0])) for space in (7, 8, 9))
    to, offer = story.answer(story.take(ColdPages(groups, 100.0)), {})
    given, *asked = story.take(PagesTaken(offer.number, bytes((COMMITTED,))), Origin(to))
    assert isinstance(given.fact, PagesGiven)
    asked += story.wait(LOOK_S)

    then_to, second = story.answer(asked, {})

    assert (offer.namespace, second.namespace) == (tag_of(7, 1), tag_of(8, 1))
    given, *then = story.take(PagesTaken(second.number, bytes((COMMITTED,))), Origin(then_to))
    assert asks_pool([*then, *story.wait(LOOK_S)])


def test_nothing_is_offered_while_a_member_is_suspect() -> None:
    """It may want a removal of which this node does not learn: what is here now is not spilled."""
    story = begun()
    story.see(TWO, member(ONE, SUSPECT))

    assert story.name(1) == []
    assert story.wait(30.0) == []
    assert story.ticks <= 31.0 / LOOK_S
    story.see(ONE, TWO)
    assert NotifyPool(RequestSpill(only_new=True)) in story.wait(LOOK_S)
    story.name()
    assert NotifyPool(RequestSpill(only_new=False)) in story.wait(LOOK_S)


SUSPECT_ONE, DEAD_ONE = [member(ONE, SUSPECT)], [member(ONE, DEAD)]
BACK = [member(ONE, counter=2)]
"""It has refuted that it is suspect or dead."""


@pytest.mark.parametrize(
    "views",
    [
        pytest.param([SUSPECT_ONE, BACK], id="suspect"),
        pytest.param([DEAD_ONE, BACK], id="dead"),
        pytest.param([SUSPECT_ONE, DEAD_ONE, BACK], id="suspect, then dead"),
        pytest.param([SUSPECT_ONE, DEAD_ONE, [], BACK], id="dead, then forgotten"),
    ],
)
def test_nothing_that_was_here_is_spilled_after_a_member_is_alive_again(
    views: list[list[Member]],
) -> None:
    """A removal of its clients may have missed this node."""
    story = begun()
    effects: list[Any] = []

    for view in views:
        story.see(TWO, *view)
        story.name()
        effects += story.wait(LOOK_S)

    assert effects.count(NotifyPool(RequestSpill(only_new=True))) == 1


@pytest.mark.parametrize(
    "view",
    [
        pytest.param([ONE, TWO, member(THREE, counter=2)], id="joined"),
        pytest.param([TWO], id="gone"),
        pytest.param([member(ONE, counter=2), TWO], id="moved"),
    ],
)
def test_what_is_here_is_spilled_after_other_changes_of_the_view(view: list[Any]) -> None:
    """No member was out of reach."""
    story = begun()
    story.name()

    story.see(*view)

    assert NotifyPool(RequestSpill(only_new=False)) in story.wait(LOOK_S)


def test_few_members_that_are_away_are_remembered() -> None:
    """Those that were seen last; a killed node that is started again is another member."""
    story = begun()
    dead = [member(1000 + number, DEAD) for number in range(AWAY_MAX + 2)]
    story.see(TWO, *dead)
    story.see(TWO)
    story.name()

    story.see(TWO, member(1000, counter=2))
    assert NotifyPool(RequestSpill(only_new=False)) in story.wait(LOOK_S)
    story.name()
    story.see(TWO, member(1000 + AWAY_MAX, counter=2))
    assert NotifyPool(RequestSpill(only_new=True)) in story.wait(LOOK_S)


def test_a_member_that_died_asks_for_nothing_any_more() -> None:
    """So what is here may be spilled."""
    story = begun()
    story.see(TWO, member(ONE, SUSPECT))
    story.name()
    story.see(TWO, member(ONE, DEAD))

    assert NotifyPool(RequestSpill(only_new=False)) in story.wait(LOOK_S)


@pytest.mark.parametrize(("seconds", "only_new"), [(LOST_S + LOOK_S, True), (HALT_S, False)])
def test_a_node_that_was_paused_does_first_what_waits_for_it(
    seconds: float, *, only_new: bool
) -> None:
    """After a long pause it spills nothing that it had: removals may have been given up."""
    story = begun()
    story.name()

    assert story.pause(seconds) == []

    effects = story.wait(SETTLE_S - 0.01)
    assert not asks_pool(effects)
    assert NotifyPool(RequestSpill(only_new)) in story.wait(LOOK_S + 0.02)


def test_a_node_that_is_drained_spills_nothing() -> None:
    """Its drain offers everything; cancelled, it goes on."""
    story = begun()
    story.take(DrainBegan(story.now + 60.0))
    assert story.name(1) == []
    story.wait(30.0)
    assert story.ticks <= 31.0 / LOOK_S
    story.take(DrainCancelled())

    assert asks_pool(story.wait(2 * LOOK_S))


# --- what a node takes ----------------------------------------------------------------------------


def take(story: Story, *numbers: int, ages: list[float] | None = None) -> list[Any]:
    """Let a node offer pages that it is about to evict."""
    packed = np.array(ages if ages is not None else [100.0] * len(numbers)).tobytes()
    records = records_of(*numbers, holder=ONE).tobytes()
    return story.take(OfferSpill(5, 7, records, packed), Origin(ONE))


def committed(
    sequence: int, states: list[int], *here: tuple[int, int], published: int
) -> Committed:
    """Return what the publisher answers; here: the number and the checksum of each page."""
    records = records_of(*[number for number, _ in here])
    records["checksum"] = [checksum for _, checksum in here]
    return Committed(0, sequence, bytes(states), records.tobytes(), published)


def test_a_spilled_page_is_reserved_read_and_committed_with_its_age() -> None:
    """Its holder does not drain, and the channel to it stays."""
    story = Story(min_age_s=33.0)
    story.see(ONE)

    (notified,) = take(story, 1, 2, ages=[90.0, -80.0])

    assert isinstance(notified.fact, TakeOver)
    assert isinstance(notified.fact.spilled, SpilledPages)
    assert notified.fact.spilled.ages.tolist() == [90.0, -80.0]
    assert notified.fact.spilled.min_age_s == 33.0
    sequence = notified.fact.reserve.sequence
    (pull,) = story.take(Granted(0, sequence, bytes((RESERVED, RESERVED)), bytes(16)))
    assert isinstance(pull, Pull)
    assert not pull.is_leaving
    (notified,) = story.take(PullDone(pull.job, bytes((1, 1))))
    assert isinstance(notified.fact, TakenOver)
    assert notified.fact.ages.tolist() == [90.0, -80.0]
    (answer,) = story.take(
        committed(sequence, [COMMITTED, COMMITTED], (1, 101), (2, 102), published=2)
    )
    assert answer == Send(Origin(ONE), PagesTaken(5, bytes((COMMITTED, COMMITTED))))


def test_a_node_that_spills_without_end_has_one_place() -> None:
    """Its newest offer waits for that place; another node's is taken at once."""
    story = Story()
    story.see(ONE, TWO)
    (first,) = take(story, 1)
    for number in range(2, 50):
        assert take(story, number) == []

    records = records_of(1, holder=TWO).tobytes()
    (other,) = story.take(OfferSpill(5, 7, records, bytes(8)), Origin(TWO))

    assert isinstance(other.fact, TakeOver)
    full = Granted(0, first.fact.reserve.sequence, bytes((REFUSED_FULL,)), bytes(8))
    answer, then = story.take(full)
    assert answer == Send(Origin(ONE), PagesTaken(5, bytes((REFUSED_FULL,))))
    assert then.fact.reserve.keys == records_of(49)["key"].tobytes()


def test_a_holder_keeps_what_the_owners_of_the_record_may_not_know_elsewhere() -> None:
    """The page stays here all the same."""
    story = Story()
    story.see(ONE)
    (notified,) = take(story, 1)
    sequence = notified.fact.reserve.sequence
    (pull,) = story.take(Granted(0, sequence, bytes((RESERVED,)), bytes(8)))
    story.take(PullDone(pull.job, b"\1"))

    (answer,) = story.take(committed(sequence, [COMMITTED], (1, 101), published=0))

    assert answer.message.states == bytes((ABORTED,))


@pytest.mark.parametrize(("checksum", "state"), [(101, HERE), (7, REFUSED_SIZE), (0, REFUSED_SIZE)])
def test_a_page_is_here_if_its_bytes_are_those_that_were_offered(checksum: int, state: int) -> None:
    """Its owners are asked for it too: it may have been stored a moment ago."""
    story = Story()
    story.see(ONE)
    (notified,) = take(story, 1)
    sequence = notified.fact.reserve.sequence

    (notified,) = story.take(Granted(0, sequence, bytes((HERE,)), bytes(8)))

    assert isinstance(notified.fact, TakenOver)
    assert notified.fact.commit.written == b"\0"
    (answer,) = story.take(committed(sequence, [HERE], (1, checksum), published=1))
    assert answer.message.states == bytes((state,))


@pytest.mark.parametrize("ages", [[], [1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_an_offer_without_an_age_for_each_page_takes_nothing(ages: list[float]) -> None:
    """It is answered, so that its sender goes on."""
    story = Story()
    story.see(ONE)

    effects = take(story, 1, 2, ages=ages)

    assert effects == [Send(Origin(ONE), PagesTaken(5, bytes((ABORTED,)) * 2))]


def test_a_node_that_does_not_spill_takes_what_others_spill() -> None:
    """A node without an engine lends its memory and needs no setting; a stranger's is refused."""
    story = Story(rate=0)
    assert take(story, 1) == [Send(Origin(ONE), PagesTaken(5, bytes((REFUSED_FULL,))))]
    story.see(ONE)

    (notified,) = take(story, 1)

    assert isinstance(notified.fact, TakeOver)
