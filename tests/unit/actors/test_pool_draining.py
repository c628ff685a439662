"""The pool of a node that is drained, and of one that takes pages over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from peercache.actors.effects import StoreWords, TellDirectory, TellHandover, TellPublisher
from peercache.actors.mailboxes import (
    DrainChanged,
    PagesToGive,
    PoolGrew,
    RequestGive,
    TakenOver,
    TakeOver,
)
from peercache.actors.origin import Origin
from peercache.actors.pool import answers
from peercache.actors.pool.reservations import NEWCOMER_S
from peercache.model.keys import COPIES, tag_of
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    HERE,
    REFUSED_DRAINING,
    REFUSED_FULL,
    RESERVED,
    RETAINED,
    Clear,
    Commit,
    Committed,
    Granted,
    Remove,
    Reserve,
    ReserveMirror,
    Retain,
)
from tests.unit.actors.test_pool_mirrors import CLIENT, GRANULE, NODE, Rig, key

INSIDE = Origin(0)


def taken(effects: list[Any]) -> bytes:
    """Return the states that the handover actor is told."""
    told = effects[-1]
    assert isinstance(told, TellHandover)
    assert isinstance(told.fact, (Granted, Committed))
    return told.fact.states


class Taker(Rig):
    """A pool, and a node that hands pages over to it."""

    def offer(self, *numbers: int, namespace: int = 1) -> bytes:
        self.sequence += 1
        lengths = np.full(len(numbers), GRANULE, "<u8").tobytes()
        keys = b"".join(map(key, numbers))
        return taken(
            self.say(TakeOver(Reserve(0, self.sequence, namespace, keys, lengths)), INSIDE)
        )

    def arrive(self, count: int) -> list[Any]:
        written, checksums = b"\1" * count, bytes(8 * count)
        return self.say(TakenOver(Commit(0, self.sequence, written, checksums, 0.0)), INSIDE)

    def give(self, *, again: bool = True) -> PagesToGive:
        (told,) = self.say(RequestGive(again), INSIDE)
        assert isinstance(told, TellHandover)
        assert isinstance(told.fact, PagesToGive)
        return told.fact


def test_a_page_that_is_taken_over_is_published_as_any_other() -> None:
    """First its word, then its records; it counts as no mirror."""
    rig = Taker()

    assert rig.offer(1, 2) == bytes((RESERVED,)) * 2
    words, directory, publisher, answer = rig.arrive(2)

    assert isinstance(words, StoreWords)
    assert isinstance(directory, TellDirectory)
    assert isinstance(publisher, TellPublisher)
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


def test_nothing_is_read_that_could_not_be_committed() -> None:
    """While others may still remove it, and as long as a node is too young to have heard of it."""
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
    rig = Taker()
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


def test_what_is_still_to_be_given_is_told_in_pages_and_bytes(
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

    told = [rig.give(again=at == 0) for at in range(4)]

    assert [portion.left for portion in told] == [2, 1, 0, 0]
    assert [portion.left_bytes // GRANULE for portion in told] == [2, 1, 0, 0]


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
