"""Pages of others in the pool: mirrored, taken over from a node that is drained, and retained."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.actors.effects import (
    NotifyDirectory,
    NotifyDisk,
    NotifyPlacement,
    NotifyPublisher,
    Send,
    StoreWords,
)
from peercache.actors.mailboxes import (
    DrainChanged,
    PagesCommitted,
    PagesToGive,
    PoolGrew,
    RequestGive,
    RequestHeld,
    TakenOver,
    TakeOver,
)
from peercache.actors.origin import Origin
from peercache.actors.pool import answers, page_table
from peercache.actors.pool.actor import Pool
from peercache.actors.pool.page_table import LAPSES_MAX, STALE_ENDS_MIN
from peercache.actors.pool.reservations import (
    LATELY_S,
    LOOK_FRACTION,
    NAMESPACES_MAX,
    NEWCOMER_S,
    Mirrors,
)
from peercache.model.ids import Incarnation
from peercache.model.keys import COPIES, tag_of
from peercache.model.records import RECORD
from peercache.model.room import QuotaRule
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    HERE,
    NOT_HERE,
    OVER_QUOTA,
    REFUSED_DRAINING,
    REFUSED_FULL,
    RESERVED,
    RETAIN_MAX_S,
    RETAINED,
    Clear,
    Commit,
    Committed,
    Granted,
    Remove,
    Reserve,
    ReserveMirror,
    Retain,
    Retained,
)
from tests.examples import examples

GRANULE = 4096
CLIENT, OTHER, NODE, INSIDE = Origin(1, 3), Origin(2, 3), Origin(9), Origin(0)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Rig:
    """A pool of a few pages, half of which may be mirrored, and a clock."""

    def __init__(
        self,
        *,
        pages: int = 8,
        share: float = 0.5,
        has_disk: bool = False,
        uncommitted_max: int | None = None,
        copies: int = 1,
        quotas: Sequence[QuotaRule] = (),
        usable: int | None = None,
    ) -> None:
        self.pool = Pool(
            incarnation=Incarnation(77),
            granule=GRANULE,
            page_bytes=pages * GRANULE,
            usable_bytes=(pages if usable is None else usable) * GRANULE,
            client_uncommitted_max=(uncommitted_max or pages) * GRANULE,
            rng=random.Random(1),
            mirror_share=share,
            has_disk=has_disk,
            copies=copies,
            quotas=quotas,
        )
        self.now = 100.0
        self.sequence = 0

    def say(self, message: Any, sender: Origin = CLIENT) -> list[Any]:
        effects = self.pool.on_message(sender, message, self.now)
        self.pool.check()
        return effects

    def reserve(self, *numbers: int, kind: Any = ReserveMirror, namespace: int = 1) -> bytes:
        """Ask for slots; return the states."""
        self.sequence += 1
        lengths = np.full(len(numbers), GRANULE, "<u8").tobytes()
        keys = b"".join(map(key, numbers))
        answer = self.say(kind(5, self.sequence, namespace, keys, lengths))[-1]
        assert isinstance(answer, Send)
        assert isinstance(answer.message, Granted)
        assert answer.message.request == 5
        return answer.message.states

    def commit(self, count: int) -> list[Any]:
        """Commit all of the last reservation."""
        return self.say(Commit(6, self.sequence, b"\1" * count, bytes(8 * count), 0.1))

    def mirror(self, *numbers: int, namespace: int = 1) -> bytes:
        """Reserve and commit; return what became of each page."""
        states = self.reserve(*numbers, namespace=namespace)
        if RESERVED not in states:
            return states
        answer = self.commit(len(numbers))[-1]
        assert isinstance(answer, Send)
        assert isinstance(answer.message, Committed)
        return answer.message.states

    def store(self, *numbers: int, namespace: int = 1) -> bytes:
        """Store pages of the node's own; return the states of the Reserve."""
        states = self.reserve(*numbers, kind=Reserve, namespace=namespace)
        self.commit(len(numbers))
        return states

    def retain(self, *numbers: int, seconds: float = 60.0, namespace: int = 1) -> list[int]:
        """Retain pages; return the state of each."""
        keys = b"".join(map(key, numbers))
        (effect,) = self.say(Retain(7, namespace, keys, seconds), NODE)
        assert isinstance(effect, Send)
        assert effect.to == NODE
        assert isinstance(effect.message, Retained)
        assert effect.message.request == 7
        return list(effect.message.states)

    def wait(self, until: float) -> None:
        """Let time pass, tick by tick."""
        while self.pool.deadline() <= until:
            self.now = max(self.now, self.pool.deadline())
            assert self.pool.on_tick(self.now) == []
            self.pool.check()
        self.now = max(self.now, until)

    def holds(self, *numbers: int) -> list[bool]:
        return [self.pool.pages.find(key(number)) is not None for number in numbers]


def test_a_mirrored_page_is_published_and_answered_at_once() -> None:
    """The words first, then the records; no directory owner is waited for."""
    rig = Rig()
    assert rig.reserve(1, 2) == bytes((RESERVED, RESERVED))

    words, directory, publisher, answer = rig.commit(2)

    assert isinstance(words, StoreWords)
    assert isinstance(directory, NotifyDirectory)
    assert isinstance(publisher, NotifyPublisher)
    assert directory.fact is publisher.fact
    assert (answer.to, answer.message.request) == (CLIENT, 6)
    assert answer.message.states == bytes((COMMITTED, COMMITTED))
    reported = np.frombuffer(answer.message.records, RECORD)
    assert reported.tobytes() == directory.fact.records.tobytes()
    assert rig.pool.figures()["pool_bytes_mirrored"] == 2 * GRANULE


def test_with_a_disk_the_disk_learns_of_it_as_of_any_page() -> None:
    """It may have the page already, and shows it; else its record would be lost by the eviction."""
    rig = Rig(has_disk=True)
    rig.reserve(1)

    assert NotifyDisk in [type(effect) for effect in rig.commit(1)]


def test_mirrored_pages_have_their_share_and_what_is_free() -> None:
    """Half of eight; with no share there is none."""
    rig = Rig()
    assert rig.mirror(1, 2, 3, 4, 5) == bytes((COMMITTED,)) * 4 + bytes((REFUSED_FULL,))
    assert Rig(share=0.0).mirror(1) == bytes((REFUSED_FULL,))


def test_what_was_stored_or_read_lately_stays() -> None:
    """In a full pool a mirrored page waits until a page was not touched for a while."""
    rig = Rig()
    rig.store(*range(8))
    assert rig.mirror(20) == bytes((REFUSED_FULL,))
    rig.now += LATELY_S / 2
    assert rig.mirror(20) == bytes((REFUSED_FULL,))
    rig.store(0, 1)  # they are here already: touched
    rig.now += LATELY_S / 2

    assert rig.mirror(20, 21) == bytes((COMMITTED, COMMITTED))

    assert rig.holds(0, 1) == [True, True]
    assert sum(rig.holds(*range(8))) == 6


def test_a_page_that_a_client_sets_here_is_no_mirror_any_more() -> None:
    """Another mirror of it changes nothing."""
    rig = Rig()
    rig.mirror(1)
    assert rig.reserve(1) == bytes((HERE,))
    assert rig.pool.figures()["pool_bytes_mirrored"] == GRANULE

    rig.store(1)

    assert rig.pool.figures()["pool_bytes_mirrored"] == 0
    assert rig.holds(1) == [True]


@pytest.mark.parametrize("kind", ["remove", "clear"])
def test_what_was_removed_after_the_question_does_not_come_back(kind: str) -> None:
    """The client had read it before: no get finds it after the removal."""
    rig = Rig()
    rig.reserve(1)
    rig.say(Clear(8, 1) if kind == "clear" else Remove(8, 1, key(1)), NODE)

    (answer,) = rig.commit(1)

    assert answer.message.states == bytes((ABORTED,))
    assert rig.holds(1) == [False]
    assert rig.pool.figures()["pool_bytes_reserved"] == 0


def test_what_another_member_may_still_have_does_not_come_back() -> None:
    """The node itself has removed; the holder has until the timeout of the removal is over."""
    rig = Rig()
    rig.say(Remove(8, 1, key(1), 2.0), NODE)
    rig.now += 1.9
    assert rig.mirror(1) == bytes((ABORTED,))
    rig.now += 0.6

    assert rig.mirror(1) == bytes((COMMITTED,))


def test_a_removal_concerns_its_namespace() -> None:
    """Pages of others are mirrored as ever."""
    rig = Rig()
    rig.reserve(1, namespace=2)
    rig.say(Clear(8, 1, 2.0), NODE)

    assert rig.commit(1)[-1].message.states == bytes((COMMITTED,))
    assert rig.mirror(2, namespace=2) == bytes((COMMITTED,))


def test_removals_of_the_past_are_not_forgotten_for_want_of_room() -> None:
    """With too many namespaces the oldest count for all."""
    mirrors = Mirrors(8)
    mirrors.removed(0, 5.0, 100.0)
    for namespace in range(1, NAMESPACES_MAX + 1):
        mirrors.removed(namespace, 0.0, 100.0)

    assert mirrors.is_void(0, 105.9)
    assert mirrors.is_void(5000, 105.9)
    assert not mirrors.is_void(5000, 106.1)


@pytest.mark.parametrize(
    ("removed", "kept"), [(5, tag_of(6, 7)), (tag_of(5, 7), tag_of(5, 8))], ids=["name", "geometry"]
)
def test_a_removal_voids_the_geometry_or_all_of_a_name_and_no_other(
    removed: int, kept: int
) -> None:
    """A namespace is its space and the engine's geometry; a space tag stands for all of a name."""
    mirrors = Mirrors(8)
    mirrors.removed(removed, 5.0, 100.0)

    assert mirrors.is_void(tag_of(5, 7), 101.0)
    assert not mirrors.is_void(kept, 101.0)


def test_a_shorter_removal_does_not_end_a_longer_one() -> None:
    """Both are under way."""
    mirrors = Mirrors(8)
    mirrors.removed(1, 5.0, 100.0)
    mirrors.removed(1, 0.1, 101.0)

    assert mirrors.is_void(1, 105.9)


def test_a_new_node_mirrors_nothing_at_first() -> None:
    """Removals that do not know it yet are under way elsewhere."""
    rig = Rig()
    rig.say(PoolGrew(8 * GRANULE), NODE)
    assert rig.mirror(1) == bytes((ABORTED,))
    rig.now += NEWCOMER_S + 0.01
    rig.say(PoolGrew(8 * GRANULE), NODE)

    assert rig.mirror(1) == bytes((COMMITTED,))


def test_another_client_that_was_faster_keeps_its_page() -> None:
    """The slot comes back."""
    rig = Rig()
    rig.reserve(1)
    first = rig.sequence
    rig.sequence = 0
    lengths = np.full(1, GRANULE, "<u8").tobytes()
    rig.say(Reserve(5, 1, 1, key(1), lengths), OTHER)
    rig.say(Commit(6, 1, b"\1", bytes(8), 0.1), OTHER)

    (answer,) = rig.say(Commit(6, first, b"\1", bytes(8), 0.1))

    assert answer.message.states == bytes((HERE,))
    assert len(answer.message.records) == RECORD.itemsize
    assert rig.pool.figures()["pool_bytes_mirrored"] == 0


def test_a_removal_without_timeout_voids_what_was_asked_for_before_it() -> None:
    """Also where a sender claims that it waits for less than no time."""
    mirrors = Mirrors(8)
    mirrors.removed(1, -5.0, 100.0)

    assert mirrors.is_void(1, 99.0)
    assert not mirrors.is_void(1, 100.5)


def test_what_was_touched_lately_is_known_within_the_slack_of_a_look() -> None:
    """What was hot an hour ago is not."""
    mirrors = Mirrors(8)

    touches = [mirrors.begin(100.0 + step * 0.05, step) for step in range(2000)]

    for step, untouched_since in enumerate(touches):
        began = step - LATELY_S / 0.05
        slack = LATELY_S * LOOK_FRACTION / 0.05 + 1
        assert untouched_since == -1 or began - slack <= untouched_since <= began
    assert touches[-1] > 1700


def test_a_client_mirrors_no_more_at_once_than_it_may_write() -> None:
    """Clients that stop keep what they have reserved."""
    rig = Rig(share=1.0, uncommitted_max=2)

    assert rig.reserve(*range(4)) == bytes((RESERVED, RESERVED, REFUSED_FULL, REFUSED_FULL))


def taken(effects: list[Any]) -> bytes:
    """Return the states that the placement actor learns, of a Commit by way of the publisher."""
    last = effects[-1]
    assert isinstance(last, (NotifyPlacement, NotifyPublisher))
    assert isinstance(last.fact, (Granted, PagesCommitted))
    return last.fact.states


class Taker(Rig):
    """A pool, and a node that hands pages over to it."""

    def offer(self, *numbers: int, namespace: int = 1, at: float = inf) -> bytes:
        self.sequence += 1
        lengths = np.full(len(numbers), GRANULE, "<u8").tobytes()
        keys = b"".join(map(key, numbers))
        return taken(
            self.say(
                TakeOver(Reserve(0, self.sequence, namespace, keys, lengths), offered_at=at), INSIDE
            )
        )

    def arrive(self, count: int) -> list[Any]:
        written, checksums = b"\1" * count, bytes(8 * count)
        return self.say(TakenOver(Commit(0, self.sequence, written, checksums, 0.0)), INSIDE)

    def give(self, *, again: bool = True) -> PagesToGive:
        (reported,) = self.say(RequestGive(again), INSIDE)
        assert isinstance(reported, NotifyPlacement)
        assert isinstance(reported.fact, PagesToGive)
        return reported.fact


def test_a_page_that_is_taken_over_is_published_as_any_other() -> None:
    """First its word, then its records; it counts as no mirror."""
    rig = Taker()

    assert rig.offer(1, 2) == bytes((RESERVED,)) * 2
    words, directory, answer = rig.arrive(2)

    assert isinstance(words, StoreWords)
    assert isinstance(directory, NotifyDirectory)
    assert taken([answer]) == bytes((COMMITTED,)) * 2
    assert rig.holds(1, 2) == [True, True]
    assert rig.pool.figures()["pool_bytes_mirrored"] == 0


def test_only_free_room_is_taken() -> None:
    """Nothing is evicted for a page of another node, however cold it is."""
    rig = Taker()
    rig.store(*range(6))
    rig.now += 1000.0

    assert rig.offer(10, 11, 12) == bytes((RESERVED, RESERVED, REFUSED_FULL))
    rig.arrive(3)

    assert rig.holds(*range(6), 10, 11, 12) == [True] * 8 + [False]


def test_a_mirror_of_what_is_handed_over_becomes_a_page_of_its_own() -> None:
    """Its holder leaves, so it is no copy any more."""
    rig = Taker()
    assert rig.mirror(1) == bytes((COMMITTED,))
    assert rig.pool.figures()["pool_bytes_mirrored"] == GRANULE

    assert rig.offer(1) == bytes((HERE,))

    assert rig.pool.figures()["pool_bytes_mirrored"] == 0


def test_what_is_removed_while_it_is_read_is_not_committed() -> None:
    """By key or with its namespace; a page of another namespace is."""
    for removal in (Remove(9, 1, key(1), 0.5), Clear(9, 1, 0.5)):
        rig = Taker()
        rig.offer(1)
        rig.say(removal, NODE)
        assert taken(rig.arrive(1)) == bytes((ABORTED,))
        assert rig.holds(1) == [False]
        # The slot is free again, and of another namespace nothing was removed.
        assert rig.offer(2, namespace=5) == bytes((RESERVED,))
        assert taken(rig.arrive(1)) == bytes((COMMITTED,))


def test_what_is_removed_while_its_offer_waits_is_not_taken() -> None:
    """However long it waits: its node may have been paused, and not have removed it."""
    for removal in (Remove(9, 1, key(1), 0.5), Clear(9, 1, 0.5)):
        rig = Taker()
        arrived_at = rig.now
        rig.now += 1.0
        rig.say(removal, NODE)
        rig.now += 60.0

        assert rig.offer(1, at=arrived_at) == bytes((REFUSED_FULL,))
        assert rig.offer(1, at=rig.now) == bytes((RESERVED,))


def test_nothing_is_read_that_could_not_be_committed() -> None:
    """While others may still remove it, and as long as a node is too young to have learned of
    it.
    """
    rig = Taker()
    rig.say(Clear(9, 1, 2.0), NODE)
    assert rig.offer(1) == bytes((REFUSED_FULL,))
    rig.now += 3.0
    assert rig.offer(1) == bytes((RESERVED,))

    young = Taker()
    young.say(PoolGrew(8 * GRANULE), INSIDE)
    assert young.offer(1) == bytes((REFUSED_FULL,))
    young.now += NEWCOMER_S + 0.1
    assert young.offer(1) == bytes((RESERVED,))


def test_a_drained_pool_takes_no_pages() -> None:
    """Not from clients, nor as mirrors or from other nodes; until the drain is taken back."""
    rig = Taker()
    rig.store(1)
    rig.say(DrainChanged(is_draining=True), INSIDE)

    assert rig.reserve(2, kind=Reserve) == bytes((REFUSED_DRAINING,))
    assert rig.reserve(2, kind=ReserveMirror) == bytes((REFUSED_DRAINING,))
    assert rig.offer(2) == bytes((REFUSED_DRAINING,))
    assert rig.holds(1) == [True]

    rig.say(DrainChanged(is_draining=False), INSIDE)
    rig.store(2)
    assert rig.holds(1, 2) == [True, True]


def test_slots_ahead_store_nothing_in_a_drained_pool() -> None:
    """A client that has them from before learns it from its Commit; a set under way is stored."""
    rig = Taker(pages=32)
    lengths = np.full(1, GRANULE, "<u8").tobytes()
    rig.say(Reserve(5, 50, 1, b"", lengths))
    rig.say(Reserve(5, 51, 1, key(1), lengths))
    assert rig.give().unfinished == 1, "slots ahead are no set under way"
    rig.say(DrainChanged(is_draining=True), INSIDE)

    ahead = rig.say(Commit(6, 50, b"\1", bytes(8), 0.1, key(2)), CLIENT)[-1]
    begun = rig.say(Commit(6, 51, b"\1", bytes(8), 0.1), CLIENT)

    assert ahead.fact.states == bytes((REFUSED_DRAINING,))
    assert any(isinstance(effect, StoreWords) for effect in begun)
    assert rig.holds(1, 2) == [True, False]
    assert rig.give().unfinished == 0
    assert rig.pool.figures()["pool_bytes_reserved"] == 0


def test_pages_are_given_hottest_first_and_by_namespace() -> None:
    """Without mirrors; what is evicted meanwhile is passed over.

    Of pages touched within a second those stored first are the hottest.
    """
    rig = Taker()
    rig.mirror(7)
    for number in (1, 2, 3):
        rig.store(number)

    given = rig.give()

    (group,) = given.groups
    assert [bytes(name) for name in group.records["key"].tolist()] == [key(1), key(2), key(3)]
    assert (given.left, given.left_bytes, group.namespace) == (0, 0, 1)
    assert rig.give(again=False).groups == ()
    rig.say(Remove(9, 1, key(3)), NODE)
    assert [len(group.records) for group in rig.give().groups] == [2]


def test_what_is_still_to_be_given_is_reported_in_pages_and_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bytes are those of the slots, of each size; mirrors are not among them."""
    monkeypatch.setattr(answers, "PORTION_PAGES", 1)
    rig = Taker()
    rig.mirror(7)
    rig.store(1, 2)
    lengths = np.full(1, 2 * GRANULE - 5, "<u8").tobytes()
    rig.say(Reserve(5, 90, 1, key(3), lengths))
    rig.say(Commit(6, 90, b"\1", bytes(8), 0.1))

    reported = [rig.give(again=at == 0) for at in range(4)]

    assert [portion.left for portion in reported] == [2, 1, 0, 0]
    assert [portion.left_bytes // GRANULE for portion in reported] == [2, 1, 0, 0]


def test_a_page_is_removed_retained_and_cleared_whatever_tag_it_was_handed_over_under() -> None:
    """A get finds it by key and space; a tag that the offerer made up hides it from no client."""
    made_up, true = tag_of(5, 0xBADBAD), tag_of(5, 7)
    for removal in (Remove(9, true, key(1), 0.5), Clear(9, true, 0.5)):
        rig = Taker()
        rig.offer(1, 2, namespace=made_up)
        rig.arrive(2)

        (retained,) = rig.say(Retain(8, true, key(1), 60.0, 0.5), NODE)
        assert retained.message.states == bytes((RETAINED,))
        (*_, answer) = rig.say(removal, NODE)

        is_clear = isinstance(removal, Clear)
        assert answer.fact.removed.count == 1 + is_clear
        assert rig.holds(1, 2) == [False, not is_clear]


def test_a_removal_voids_what_is_handed_over_under_any_tag_of_its_name() -> None:
    """Also while it is read: the pool cannot know of which geometry the page is."""
    for removal in (Remove(9, tag_of(5, 7), key(1), 0.5), Clear(9, tag_of(5, 7), 0.5)):
        rig = Taker()
        rig.offer(1, namespace=tag_of(5, 0xBADBAD))
        rig.say(removal, NODE)

        assert taken(rig.arrive(1)) == bytes((ABORTED,))


def test_pages_from_other_nodes_are_dropped_and_those_set_here_stay() -> None:
    """A copy stays one when a client sets the page: its bytes are still the other node's."""
    rig = Taker()
    own = tag_of(1, 7)
    rig.store(1, namespace=own)
    rig.offer(2, namespace=own)
    rig.arrive(1)
    assert rig.mirror(3, namespace=own) == bytes((COMMITTED,))
    rig.store(3, namespace=own)
    rig.offer(4, namespace=own)

    (*_, answer) = rig.say(Clear(9, COPIES, 0.5), NODE)

    assert answer.fact.removed.count == 2
    assert rig.holds(1, 2, 3) == [True, False, False]
    # What is on its way is void, too, as is what is asked for in that time.
    assert taken(rig.arrive(1)) == bytes((ABORTED,))
    assert rig.offer(5, namespace=own) == bytes((REFUSED_FULL,))
    rig.now += 1.0
    assert rig.offer(5, namespace=own) == bytes((RESERVED,))


PAGES = 64
MOST = PAGES // 4


def keys(numbers: Any) -> bytes:
    return b"".join(map(key, numbers))


def retained(rig: Rig) -> int:
    """Return how many pages are retained; `Rig.say` has the pool assert what it keeps of them."""
    return rig.pool.figures()["pool_bytes_retained"] // GRANULE


def test_a_retained_page_stays_until_its_time_and_then_goes() -> None:
    rig = Rig(pages=PAGES)
    rig.store(*range(PAGES))
    assert rig.retain(0, 1, seconds=60) == [RETAINED, RETAINED]

    rig.store(*range(100, 200))
    assert rig.holds(0, 1, 2) == [True, True, False]
    rig.wait(159.9)
    rig.store(*range(200, 300))
    assert rig.holds(0, 1) == [True, True]

    rig.wait(160.0)
    assert rig.pool.deadline() == math.inf
    rig.store(*range(300, 400))
    assert rig.holds(0, 1) == [False, False]


def test_of_a_chain_that_lapses_the_tail_goes_first() -> None:
    rig = Rig(pages=PAGES)
    rig.store(*range(8))
    rig.retain(*range(8))
    rig.wait(1000.0)

    rig.store(*range(100, 100 + PAGES - 4))

    assert rig.holds(*range(8)) == [True] * 4 + [False] * 4


def test_pages_that_are_not_here_or_of_another_namespace_are_reported() -> None:
    rig = Rig(pages=PAGES)
    rig.store(1)

    assert rig.retain(1, 2) == [RETAINED, NOT_HERE]
    assert rig.retain(1, namespace=2) == [NOT_HERE]


def test_more_than_may_be_retained_is_reported_and_the_first_ones_stay() -> None:
    rig = Rig(pages=PAGES)
    rig.store(*range(PAGES))

    assert rig.retain(*range(20)) == [RETAINED] * MOST + [OVER_QUOTA] * (20 - MOST)

    assert rig.pool.figures()["pool_bytes_retained"] == MOST * GRANULE
    rig.say(Remove(8, 1, key(0)), NODE)
    assert rig.pool.figures()["pool_bytes_retained"] == (MOST - 1) * GRANULE
    assert rig.retain(*range(1, 20))[: MOST + 1] == [RETAINED] * MOST + [OVER_QUOTA]


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, -math.inf])
def test_no_time_lets_pages_go(seconds: float) -> None:
    rig = Rig(pages=PAGES)
    rig.store(*range(PAGES))
    rig.retain(0)

    assert rig.retain(0, 1, seconds=seconds) == [RETAINED, RETAINED]

    rig.store(*range(100, 200))
    assert rig.holds(0) == [False]


@pytest.mark.parametrize("seconds", [math.inf, 1e300, RETAIN_MAX_S])
def test_no_page_is_retained_forever(seconds: float) -> None:
    rig = Rig(pages=PAGES)
    rig.store(0)

    rig.retain(0, seconds=seconds)

    assert rig.pool.deadline() == rig.now + RETAIN_MAX_S


def test_the_longest_time_holds() -> None:
    """A second client that wants a page for less time takes nothing from the first one."""
    rig = Rig(pages=PAGES)
    rig.store(*range(PAGES))
    for seconds in (10.0, 60.0, 20.0):
        rig.retain(0, seconds=seconds)

    rig.wait(159.0)
    rig.store(*range(100, 200))
    assert rig.holds(0) == [True]
    rig.wait(160.0)
    rig.store(*range(200, 300))
    assert rig.holds(0) == [False]


@pytest.mark.parametrize("message", [Remove(8, 1, keys([0, 1])), Clear(8, 1)])
def test_removals_remove_retained_pages(message: Any) -> None:
    """The word is odd, the record is withdrawn, and a page that comes again is not retained."""
    rig = Rig(pages=PAGES)
    rig.store(*range(PAGES))
    rig.retain(0, 1)

    effects = rig.say(message, NODE)

    assert [type(effect) for effect in effects[:2]] == [StoreWords, NotifyDirectory]
    assert rig.holds(0, 1) == [False, False]
    assert rig.store(0, 1) == bytes((RESERVED,)) * 2
    rig.store(*range(100, 100 + 2 * PAGES))
    assert rig.holds(0, 1) == [False, False]
    rig.wait(1000.0)


def test_a_stop_and_a_drain_see_retained_pages() -> None:
    """They are flushed to disk, and handed over."""
    rig = Rig(pages=PAGES, has_disk=True)
    rig.store(0, 1)
    rig.retain(0)

    (held,) = rig.say(RequestHeld(), NODE)
    rig.say(DrainChanged(True), NODE)
    (given,) = rig.say(RequestGive(True), NODE)

    for reported in (held, given):
        named = b"".join(group.records["key"].tobytes() for group in reported.fact.groups)
        assert key(0) in named
        assert key(1) in named


def test_ends_are_bounded_however_often_pages_are_renewed() -> None:
    rig = Rig(pages=PAGES)
    rig.store(*range(8))

    for second in range(3 * STALE_ENDS_MIN // 8):
        rig.retain(*range(8), seconds=60.0 + second)

    rig.wait(rig.now + 59.0 + 3 * STALE_ENDS_MIN // 8)
    assert retained(rig) == 0


@pytest.mark.parametrize("how", ["let go", "removed", "cleared"])
def test_ends_are_bounded_when_most_pages_are_retained_no_longer(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool asserts the bound after each message: a node that exceeds it ends."""
    monkeypatch.setattr(page_table, "STALE_ENDS_MIN", 4)
    rig = Rig(pages=PAGES)
    rig.store(*range(12))
    rig.retain(*range(12))

    if how == "let go":
        rig.retain(*range(12), seconds=0)
    elif how == "removed":
        rig.say(Remove(8, 1, keys(range(12))), NODE)
    else:
        rig.say(Clear(8, 1), NODE)

    assert retained(rig) == 0


def test_ends_are_bounded_while_renewed_pages_lapse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_table, "STALE_ENDS_MIN", 0)
    rig = Rig(pages=PAGES)
    rig.store(*range(8))
    rig.retain(*range(4), seconds=10)
    rig.retain(*range(4, 8), seconds=20)
    rig.retain(*range(4, 8), seconds=30)

    rig.wait(rig.now + 10)

    assert retained(rig) == 4


def test_many_pages_lapse_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tick is bounded; the next one is due later: a node whose tick is due at once ends."""
    assert LAPSES_MAX > 1
    monkeypatch.setattr(page_table, "LAPSES_MAX", 3)
    rig = Rig(pages=PAGES)
    rig.store(*range(8))
    rig.retain(*range(8))
    rig.now += 60.0

    rig.pool.on_tick(rig.now)

    assert retained(rig) == 5
    assert rig.now < rig.pool.deadline() < rig.now + 0.01
    rig.wait(rig.now + 0.01)
    assert retained(rig) == 0


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_pages_stay_as_a_slow_model_prescribes(seed: int) -> None:
    """The model keeps the end of each page, and knows nothing of slots, extents and heaps."""
    rng = random.Random(seed)
    rig = Rig(pages=PAGES)
    ends: dict[int, float] = {}
    for _ in range(80):
        step, number = rng.random(), rng.randrange(150)
        if step < 0.5:
            rig.store(*range(number, number + rng.randrange(1, 12)))
        elif step < 0.75:
            seconds = rng.choice((0.0, 1.0, 5.0, 5.0, 20.0))
            numbers = range(number, number + 4)
            before = rig.holds(*numbers)
            states = rig.retain(*numbers, seconds=seconds)
            assert [state != NOT_HERE for state in states] == before
            for one, state in zip(numbers, states, strict=True):
                if state == RETAINED and seconds:
                    ends[one] = max(rig.now + seconds, ends.get(one, 0.0))
                elif state == RETAINED:
                    ends.pop(one, None)
        elif step < 0.85:
            rig.say(Remove(8, 1, key(number)), NODE)
            ends.pop(number, None)
        else:
            rig.wait(rig.now + rng.choice((0.5, 2.0, 7.0)))
            ends = {one: end for one, end in ends.items() if end > rig.now}
        assert all(rig.holds(*ends))
        assert retained(rig) == len(ends) <= MOST
