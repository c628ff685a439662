"""Mirrored pages in the pool: no client waits for owners, and nothing removed comes back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from peercache.actors.effects import (
    Send,
    StoreWords,
    TellDirectory,
    TellDisk,
    TellPublisher,
)
from peercache.actors.mailboxes import PoolGrew
from peercache.actors.origin import Origin
from peercache.actors.pool.actor import Pool
from peercache.actors.pool.reservations import LATELY_S, NAMESPACES_MAX, NEWCOMER_S, Mirrors
from peercache.model.ids import Incarnation
from peercache.model.keys import tag_of
from peercache.model.records import RECORD
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    HERE,
    REFUSED_FULL,
    RESERVED,
    Clear,
    Commit,
    Committed,
    Granted,
    Remove,
    Reserve,
    ReserveMirror,
)

GRANULE = 4096
CLIENT, OTHER, NODE = Origin(1, 3), Origin(2, 3), Origin(9)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Rig:
    """A pool of eight pages, half of which may be mirrored, and a clock."""

    def __init__(self, *, share: float = 0.5, has_disk: bool = False) -> None:
        self.pool = Pool(
            incarnation=Incarnation(77),
            granule=GRANULE,
            page_bytes=8 * GRANULE,
            usable_bytes=8 * GRANULE,
            client_uncommitted_max=8 * GRANULE,
            rng=random.Random(1),
            mirror_share=share,
            has_disk=has_disk,
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

    def store(self, *numbers: int, namespace: int = 1) -> None:
        """Store pages of the node's own."""
        self.reserve(*numbers, kind=Reserve, namespace=namespace)
        self.commit(len(numbers))

    def holds(self, *numbers: int) -> list[bool]:
        return [self.pool.pages.find(key(number)) is not None for number in numbers]


def test_a_mirrored_page_is_published_and_answered_at_once() -> None:
    """The words first, then the records; no directory owner is waited for."""
    rig = Rig()
    assert rig.reserve(1, 2) == bytes((RESERVED, RESERVED))

    words, directory, publisher, answer = rig.commit(2)

    assert isinstance(words, StoreWords)
    assert isinstance(directory, TellDirectory)
    assert isinstance(publisher, TellPublisher)
    assert directory.fact is publisher.fact
    assert (answer.to, answer.message.request) == (CLIENT, 6)
    assert answer.message.states == bytes((COMMITTED, COMMITTED))
    told = np.frombuffer(answer.message.records, RECORD)
    assert told.tobytes() == directory.fact.records.tobytes()
    assert rig.pool.figures()["pool_bytes_mirrored"] == 2 * GRANULE


def test_with_a_disk_the_disk_hears_of_it_as_of_any_page() -> None:
    """It may have the page already, and tells so; else its record would be lost by the eviction."""
    rig = Rig(has_disk=True)
    rig.reserve(1)

    assert [type(effect) for effect in rig.commit(1)][3] is TellDisk


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
    assert len(mirrors._void_until) == NAMESPACES_MAX


def test_the_removal_of_a_name_voids_all_its_geometries() -> None:
    """A space tag stands for every namespace of that name, and for no other."""
    mirrors = Mirrors(8)
    mirrors.removed(5, 5.0, 100.0)

    assert mirrors.is_void(tag_of(5, 7), 101.0)
    assert not mirrors.is_void(tag_of(6, 7), 101.0)


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
