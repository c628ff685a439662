"""How long a shard says that it is behind, and which holders it asks: its authority's books."""

from __future__ import annotations

from itertools import pairwise

import pytest

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.directory.holdings import (
    BEHIND_S,
    HEARD_MAX_S,
    HEARD_MEMBER_S,
    WANTED_MAX_S,
)
from peercache.actors.mailboxes import RingChanged
from peercache.model.member import DEAD, SUSPECT
from peercache.model.records import DOUBTED_NUMBERS
from peercache.wire.messages.directory import HandedOver, Put, StreamSummary
from tests.unit.actors.lone_publisher import ring_of
from tests.unit.actors.record_cluster import member, records_of, view
from tests.unit.actors.test_directory_authority import (
    ME,
    RING,
    A,
    B,
    has_authority,
    hear,
    shard_in_sync,
    summary_of,
    tick,
)


def shard_on(*members: int) -> DirectoryShard:
    """Return a shard that has just come to a ring of these members, and has heard of none."""
    shard = DirectoryShard(incarnation=ME)
    hear(shard, ME, view(*members), 0.0)
    hear(shard, ME, RingChanged(ring_of(*members)), 0.0)
    return shard


def wanted_of(shard: DirectoryShard, until: float) -> list[int]:
    """Return who is asked until then, in order."""
    return [peer for peer, _ in tick(shard, until)]


def test_a_holder_that_leaves_the_ring_unheard_is_waited_for_no_more() -> None:
    """It has died before it said a word: nothing is lacking, and there is nothing to ask."""
    shard, ring = shard_on(ME, A, B), ring_of(ME, A)
    tick(shard, 0.1)

    hear(shard, ME, view(ME, A, member(B, DEAD)), 0.1)
    hear(shard, ME, RingChanged(ring), 0.1)
    hear(shard, A, HandedOver(0, 0, 0, ring.version), 0.1)

    assert shard.authority.ring == ring.version
    assert not shard.authority.is_behind(0.1)
    assert wanted_of(shard, 3.0) == []


def test_a_holder_that_differs_again_and_again_is_one_delay() -> None:
    """Its first difference counts: it must not double all questions for ever."""
    shard = shard_in_sync()
    told = records_of(A, [1], 10)

    for second in range(int(BEHIND_S) + 2):
        behind = shard.authority.is_behind(float(second))
        hear(shard, A, summary_of(0, told), float(second))

    assert not shard.authority.is_behind(BEHIND_S + 1.0)
    assert behind is False
    assert shard.authority.ring == b""


def test_a_stranger_that_differs_again_and_again_is_one_delay() -> None:
    """Also one that the ring has not, or not yet."""
    shard = shard_in_sync()
    hear(shard, ME, view(ME, A, B, 55), 0.0)

    for second in range(int(BEHIND_S) + 2):
        hear(shard, 55, summary_of(0, records_of(55, [1], 10)), float(second))
        if second == 1:
            early = shard.authority.is_behind(1.0)

    assert early
    assert not shard.authority.is_behind(BEHIND_S + 1.0)


def test_a_holder_that_matches_without_handing_over_is_one_delay() -> None:
    """Its summaries match, one after the other, and its hand-over takes for ever."""
    shard, ring = shard_in_sync(), ring_of(ME, A)
    hear(shard, ME, RingChanged(ring), 0.0)
    assert shard.authority.is_behind(0.0)

    for second in range(int(BEHIND_S) + 2):
        hear(shard, A, StreamSummary(0, 0, 0), float(second))

    assert not shard.authority.is_behind(BEHIND_S + 1.0)
    assert shard.authority.ring == b""


def test_a_holder_that_is_whole_tells_by_itself() -> None:
    """A new ring is no reason to ask all its members for what they are about to say."""
    shard = shard_in_sync()

    hear(shard, ME, RingChanged(ring_of(ME, A, B, 99)), 0.01)

    assert set(wanted_of(shard, 1.0)) == {99}


def test_a_holder_of_which_nothing_was_heard_is_asked() -> None:
    """Its word that it has handed over may be lost."""
    assert set(wanted_of(shard_on(ME, A), 1.0)) == {A}


def test_pauses_between_questions_have_a_bound() -> None:
    """A holder that comes back after an hour is not in doubt for another one."""
    shard = shard_on(ME, A)
    asked_at = []
    while shard.deadline() <= 30.0:
        at = shard.deadline()
        if shard.on_tick(at):
            asked_at.append(at)

    pauses = [later - earlier for earlier, later in pairwise(asked_at)]
    assert len(pauses) > 5
    assert max(pauses) == pytest.approx(WANTED_MAX_S, abs=0.1)


def test_in_a_large_cluster_summaries_may_be_rarer() -> None:
    """A node sends so many a second, and no more: each member waits longer for its turn."""
    members = [ME, *range(100, 130)]
    shard, ring = shard_on(*members), ring_of(*members)
    for holder in members[1:]:
        hear(shard, holder, HandedOver(0, 0, 0, ring.version), 0.0)
    heard_s = HEARD_MEMBER_S * (len(members) - 1)
    assert heard_s > HEARD_MAX_S + 2.0

    tick(shard, heard_s - 1.0)
    in_time = shard.authority.ring
    tick(shard, heard_s + 2.0)

    assert (in_time, shard.authority.ring) == (ring.version, b"")


def test_a_suspect_that_hands_over_is_in_doubt_as_long_as_it_is_suspected() -> None:
    """What it stores meanwhile it may not tell: others have it end at any moment."""
    shard = shard_in_sync()
    hear(shard, ME, view(ME, A, member(B, SUSPECT)), 0.01)

    hear(shard, B, HandedOver(0, 0, 0, RING.version), 0.02)

    assert not has_authority(shard, 0.02)


def test_how_many_are_in_doubt_is_told() -> None:
    """As the metric `directory_holders_doubted` has it."""
    shard = shard_in_sync()
    before = shard.authority.doubted

    hear(shard, A, Put(7, records_of(A, [1], 10).tobytes()), 0.01)

    assert (before, shard.authority.doubted) == (0, 1)


def test_as_many_records_with_another_content_differ() -> None:
    """A page that was lost and one that came too late: the count is right."""
    shard = shard_in_sync()
    hear(shard, A, Put(1, records_of(A, [1], 10).tobytes()), 0.01)
    before = has_authority(shard, 0.01)

    hear(shard, A, summary_of(1, records_of(A, [2], 10)), 0.01)

    assert (before, has_authority(shard, 0.01)) == (True, False)


def test_a_batch_without_memory_ends_authority(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has none left, or the table is full: what is refused is lacking."""
    monkeypatch.setattr("peercache.actors.directory.actor.ROWS_MAX", 4200)
    shard = shard_in_sync()
    before = has_authority(shard, 0.01)

    hear(shard, A, Put(1, records_of(A, list(range(4300)), [10] * 4300).tobytes()), 0.01)

    assert (before, has_authority(shard, 0.01)) == (True, False)


def test_a_stall_is_noticed_once() -> None:
    """What holders answer before the next tick counts."""
    shard = shard_in_sync()
    tick(shard, 1.0)

    stalled = has_authority(shard, 3.0)
    for holder in (A, B):
        hear(shard, holder, HandedOver(DOUBTED_NUMBERS, 0, 0, RING.version), 3.0)

    assert (stalled, has_authority(shard, 3.0)) == (False, True)
