"""When an absent key is no page: a shard's authority, all that ends it, and whom it asks."""

from __future__ import annotations

import math
from itertools import pairwise

import attrs
import pytest

from peercache.actors.directory import actor as directory
from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.directory.holdings import (
    BEHIND_S,
    RETRIED_MAX,
    RETRY_S,
    SUMMARY_AGE_MAX_S,
    SUMMARY_AGE_MEMBER_S,
    TICK_S,
    WANTED_FIRST_S,
    WANTED_MAX_S,
)
from peercache.actors.effects import Send
from peercache.actors.mailboxes import CommitAnswered, HeldDead, RecordsChanged, RingChanged
from peercache.actors.origin import Origin
from peercache.model.member import DEAD, SUSPECT
from peercache.model.reads import TICK_AGE_MAX_S
from peercache.model.records import DOUBTED_NUMBERS, from_bytes
from peercache.paths.write import PUBLISH_TIMEOUT_S
from peercache.wire.messages.directory import (
    HandedOver,
    Located,
    Lookup,
    Put,
    RequestFreshSummary,
    RequestSummary,
    StreamSummary,
    SummaryDiffers,
    SummaryMatches,
)
from peercache.wire.messages.pool import Committed
from tests.unit.actors.lone_publisher import ring_of
from tests.unit.actors.lone_shard import (
    ME,
    RING,
    A,
    B,
    has_authority,
    hear,
    refused,
    shard_in_sync,
    shard_of,
    summary_of,
    take,
    tick,
)
from tests.unit.actors.record_cluster import (
    NO_DROPS,
    NO_RECORDS,
    Cluster,
    cluster_of,
    drops_of,
    key_of,
    located,
    member,
    records_of,
    view,
)

assert TICK_AGE_MAX_S < PUBLISH_TIMEOUT_S, "a stopped owner's table counts when a set gives it up"


def test_authority_comes_with_the_last_holder_that_has_handed_over() -> None:
    """A matching summary alone is not enough: what is not handed over yet, no digest covers."""
    shard = DirectoryShard(incarnation=ME)
    hear(shard, ME, view(ME, A, B), 0.0)
    hear(shard, ME, RingChanged(RING), 0.0)
    seen = [has_authority(shard, 0.0)]

    for holder, message in (
        (A, HandedOver(0, 0, 0, RING.version)),
        (B, StreamSummary(0, 0, 0)),
        (B, HandedOver(0, 0, 0, b"another ")),
        (B, HandedOver(0, 0, 0, RING.version)),
    ):
        hear(shard, holder, message, 0.0)
        seen.append(has_authority(shard, 0.0))

    assert seen == [False, False, False, False, True]


def test_a_lone_node_has_authority_and_ticks() -> None:
    """There is no holder that it could lack; readers see that it is at work."""
    shard = DirectoryShard(incarnation=ME, clock=lambda: 77.5)
    ring = ring_of(ME)
    hear(shard, ME, view(ME), 3.0)
    hear(shard, ME, RingChanged(ring), 3.0)

    tick(shard, 3.1)

    assert shard.table.authority == ring.version
    assert shard.table.figures().tick_ns == int(77.5e9)
    assert 0 < shard.deadline() - 3.1 <= TICK_S


def test_a_gap_in_the_numbers_ends_authority_until_all_is_handed_over_again() -> None:
    """A matching summary is not enough: the holder may have begun its stream again.

    Then it covers what was sent since, and a repair has removed what was reported before.
    """
    shard, records = shard_in_sync(), records_of(A, [1, 2], 10)
    hear(shard, A, Put(1, records[:1].tobytes()), 0.01)
    contiguous = has_authority(shard, 0.01)

    hear(shard, A, Put(3, records[1:].tobytes()), 0.01)
    after_gap = has_authority(shard, 0.01)
    hear(shard, A, summary_of(3, records), 0.01)
    after_summary = has_authority(shard, 0.01)
    hear(shard, A, summary_of(3, records, ring=RING.version), 0.01)

    assert (contiguous, after_gap, after_summary) == (True, False, False)
    assert has_authority(shard, 0.01)


def test_a_holder_in_doubt_is_asked_until_it_has_handed_over_again() -> None:
    """Its summary matches, and it does not know that it is in doubt."""
    shard, records = shard_in_sync(), records_of(A, [1], 10)
    hear(shard, A, Put(2, records.tobytes()), 0.01)
    hear(shard, A, summary_of(2, records), 0.02)

    asked = [peer for peer, message in tick(shard, 1.0) if message == RequestSummary()]

    assert set(asked) == {A}


@pytest.mark.parametrize(
    "summary",
    [
        summary_of(1),
        summary_of(1, records_of(A, [1, 2], 10)),
        summary_of(1, records_of(A, [2], 10)),
        # Two equal records have no digest together: XOR takes both away.
        attrs.evolve(summary_of(1, records_of(A, [1], 10)), count=3),
    ],
    ids=["fewer", "more", "as many with another content", "a count alone"],
)
def test_a_summary_that_differs_ends_authority(summary: StreamSummary) -> None:
    """The holder has what this shard has not, or the other way."""
    shard = shard_in_sync()
    hear(shard, A, Put(1, records_of(A, [1], 10).tobytes()), 0.01)
    before = has_authority(shard, 0.01)

    (answer,) = take(shard, A, summary, 0.01)

    assert isinstance(answer, SummaryDiffers)
    assert (before, has_authority(shard, 0.01)) == (True, False)


@pytest.mark.parametrize(("records_max", "rows_max"), [(4, 10**6), (10**6, 4200)])
def test_a_refused_batch_ends_authority(
    records_max: int, rows_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there is no room for is lacking: its holder has its share, or the host no memory."""
    monkeypatch.setattr(directory, "ROWS_MAX", rows_max)
    shard = shard_in_sync()
    shard.records_max = records_max
    before = has_authority(shard, 0.01)

    hear(shard, A, Put(1, records_of(A, list(range(4300)), [10] * 4300).tobytes()), 0.01)

    assert (before, has_authority(shard, 0.01)) == (True, False)


def test_a_new_ring_ends_authority_until_every_holder_has_handed_over_on_it() -> None:
    """Records that come to be owned here with the ring are still on their way."""
    shard, ring = shard_in_sync(), ring_of(ME, A)

    hear(shard, ME, RingChanged(ring), 0.01)
    before = shard.authority.ring
    hear(shard, A, HandedOver(0, 0, 0, ring.version), 0.01)

    assert (before, shard.authority.ring) == (b"", ring.version)


def test_a_new_incarnation_inherits_nothing() -> None:
    """The holder at the same place, started again, must hand over for itself."""
    shard = shard_in_sync()
    again = ring_of(ME, A, 99)

    hear(shard, ME, view(ME, A, 99, member(B, 2)), 0.01)
    hear(shard, ME, RingChanged(again), 0.01)
    hear(shard, A, HandedOver(0, 0, 0, again.version), 0.01)
    before = shard.authority.ring
    hear(shard, 99, HandedOver(0, 0, 0, again.version), 0.01)

    assert (before, shard.authority.ring) == (b"", again.version)


def test_a_suspect_holder_ends_authority_until_all_is_handed_over_again() -> None:
    """It may have stored pages meanwhile, for which it waited for no answer of this node."""
    shard = shard_in_sync()

    hear(shard, ME, view(ME, A, member(B, SUSPECT)), 0.01)
    suspected = has_authority(shard, 0.01)
    hear(shard, ME, view(ME, A, B), 0.02)
    refuted = has_authority(shard, 0.02)
    hear(shard, B, HandedOver(0, 0, 0, RING.version), 0.02)

    assert (suspected, refuted, has_authority(shard, 0.02)) == (False, False, True)


@pytest.mark.parametrize("by_message", [False, True])
def test_an_own_stall_puts_everything_in_doubt_and_asks_all_holders(by_message: bool) -> None:
    """Sets may have given this owner up: before it speaks again, every holder is asked."""
    shard = shard_in_sync()
    tick(shard, 1.0)
    late = 1.0 + TICK_AGE_MAX_S + TICK_S

    if by_message:
        assert not has_authority(shard, late)
    effects = shard.on_tick(max(late, shard.deadline()))

    assert not has_authority(shard, late + 0.01)
    assert [(e.to, e.message) for e in effects if isinstance(e, Send)] == [
        (A, RequestFreshSummary(DOUBTED_NUMBERS)),
        (B, RequestFreshSummary(DOUBTED_NUMBERS)),
    ]
    for holder in (A, B):
        hear(shard, holder, HandedOver(DOUBTED_NUMBERS, 0, 0, RING.version), late + 0.02)
    assert has_authority(shard, late + 0.02)


def test_a_hand_over_of_before_an_own_stall_does_not_count() -> None:
    """It waited in a socket: what the holder stored meanwhile, it reported to this node in vain."""
    shard = shard_in_sync()
    tick(shard, 1.0)
    late = 1.0 + TICK_AGE_MAX_S + TICK_S
    shard.on_tick(late)

    answers = [hear(shard, h, HandedOver(3, 0, 0, RING.version), late) for h in (A, B)]

    assert not has_authority(shard, late)
    assert answers == [[Send(Origin(h), SummaryMatches(3))] for h in (A, B)]
    hear(shard, A, HandedOver(DOUBTED_NUMBERS + 7, 0, 0, RING.version), late)
    hear(shard, B, HandedOver(DOUBTED_NUMBERS, 0, 0, RING.version), late)
    assert has_authority(shard, late)


def test_an_owner_that_was_held_dead_has_no_authority_until_all_is_handed_over_again() -> None:
    """Holders stored pages without it, and a hand-over of before may still arrive."""
    shard = shard_in_sync()
    tick(shard, 1.0)

    hear(shard, ME, HeldDead(), 1.0)

    assert not has_authority(shard, 1.0)
    hear(shard, A, HandedOver(3, 0, 0, RING.version), 1.01)
    hear(shard, B, HandedOver(DOUBTED_NUMBERS, 0, 0, RING.version), 1.01)
    assert not has_authority(shard, 1.01)
    assert (A, RequestFreshSummary(DOUBTED_NUMBERS)) in [
        (e.to, e.message) for e in shard.on_tick(1.0 + TICK_S) if isinstance(e, Send)
    ]
    hear(shard, A, HandedOver(DOUBTED_NUMBERS, 0, 0, RING.version), 1.03)
    assert has_authority(shard, 1.03)


def test_the_answer_to_a_question_of_before_another_stall_does_not_count() -> None:
    """It may have come while this process was paused again."""
    shard = shard_in_sync()
    at = 1.0
    tick(shard, at)
    asked: list[object] = []
    for _ in range(2):
        at += TICK_AGE_MAX_S + TICK_S
        asked += [e.message for e in shard.on_tick(at) if isinstance(e, Send) and e.to == A]

    hear(shard, B, HandedOver(9 * DOUBTED_NUMBERS, 0, 0, RING.version), at)
    hear(shard, A, HandedOver(DOUBTED_NUMBERS, 0, 0, RING.version), at)
    early = has_authority(shard, at)
    hear(shard, A, HandedOver(2 * DOUBTED_NUMBERS, 0, 0, RING.version), at)

    assert asked == [RequestFreshSummary(DOUBTED_NUMBERS), RequestFreshSummary(2 * DOUBTED_NUMBERS)]
    assert (early, has_authority(shard, at)) == (False, True)


def test_after_an_own_stall_a_newcomer_is_asked_too() -> None:
    """Its first hand-over may have come while this process was paused."""
    shard, ring = shard_in_sync(), ring_of(ME, 99)
    tick(shard, 1.0)
    late = 1.0 + TICK_AGE_MAX_S + TICK_S
    shard.on_tick(late)
    hear(shard, ME, view(ME, 99), late)
    hear(shard, ME, RingChanged(ring), late)

    hear(shard, 99, HandedOver(0, 0, 0, ring.version), late)
    before = shard.authority.ring
    asked = tick(shard, late + 2 * WANTED_FIRST_S)
    hear(shard, 99, HandedOver(DOUBTED_NUMBERS, 0, 0, ring.version), late + 0.5)

    assert (before, shard.authority.ring) == (b"", ring.version)
    assert (99, RequestFreshSummary(DOUBTED_NUMBERS)) in asked


def test_a_number_that_no_holder_sent_is_not_asked_for_forever() -> None:
    """Another process raised the number of A's stream; A passes over what is so far ahead."""
    shard = shard_in_sync()
    hear(shard, A, Put(2**50, b""), 0.5)
    tick(shard, 1.0)
    late = 1.0 + TICK_AGE_MAX_S + TICK_S
    shard.on_tick(late)

    hear(shard, A, StreamSummary(3, 0, 0), late)
    asked = [message for peer, message in tick(shard, late + 1.0) if peer == A]

    assert asked[-1] == RequestFreshSummary(3 + DOUBTED_NUMBERS)


def test_a_late_tick_within_bounds_is_no_stall() -> None:
    """A busy loop must not ask the whole cluster."""
    shard = shard_in_sync()
    tick(shard, 1.0)

    effects = shard.on_tick(shard.deadline() + TICK_S)

    assert effects == []
    assert has_authority(shard, shard.deadline())


def test_a_holder_in_doubt_is_asked_less_and_less_often() -> None:
    """One that never comes into sync costs a message now and then."""
    shard = shard_in_sync()
    records = records_of(A, [1, 2], 10)
    tick(shard, 1.0)
    hear(shard, A, Put(1, records[:1].tobytes()), 1.0)
    hear(shard, A, Put(3, records[1:].tobytes()), 1.0)

    early = tick(shard, 1.0 + WANTED_FIRST_S - TICK_S)
    soon = tick(shard, 1.0 + 2 * WANTED_FIRST_S)
    later = tick(shard, 4.9)

    assert early == []
    assert soon == [(A, RequestSummary())]
    assert 2 <= len(later) <= 5
    assert {to for to, _ in later} == {A}


def test_a_holder_that_is_not_learned_of_is_in_doubt() -> None:
    """Others reach both, but its messages do not arrive here: what it stores is not reported."""
    shard = shard_in_sync()

    tick(shard, 3.0)
    hear(shard, A, StreamSummary(0, 0, 0), 3.0)
    in_time = has_authority(shard, 3.0)
    tick(shard, SUMMARY_AGE_MAX_S + 2.0)

    assert in_time
    assert not has_authority(shard, SUMMARY_AGE_MAX_S + 2.0)


def test_a_commit_is_answered_behind_the_records_of_its_pool() -> None:
    """The publisher's answer goes through this shard's mailbox, behind what the pool has sent."""
    shard = shard_in_sync()
    answer = Committed(1, 2, b"s", b"", 1)

    hear(shard, ME, RecordsChanged(records_of(ME, [7], 2), NO_DROPS), 0.0)
    effects = hear(shard, ME, CommitAnswered(Origin(99, 7), answer), 0.0)

    assert effects == [Send(Origin(99, 7), answer)]
    assert len(located(shard, [7])) == 1


def test_a_newcomer_has_authority_soon_after_its_hand_over() -> None:
    """Not only with the next regular summary; and the others keep theirs but for that time."""
    cluster = cluster_of(ME, A, replicas=2, summary_s=100.0)
    cluster.commit(ME, list(range(300)))
    cluster.run(1.0)
    cluster.add(B)
    cluster.show_all()

    cluster.run(0.5)

    version = cluster.nodes[B].ring.current.version
    assert {node.shard.table.authority for node in cluster.nodes.values()} == {version}
    cluster.assert_whole()


def test_a_set_that_all_owners_know_is_known_wherever_there_is_authority() -> None:
    """A Put that is lost ends no set: it is asked about, sent again, and then known."""
    cluster = cluster_of(ME, A, B, replicas=3, summary_s=100.0)
    cluster.run(1.0)

    cluster.commit(ME, [1], timeout_s=0.1)
    lost = [e for e in cluster.flying if isinstance(e.message, Put) and e.target == A]
    cluster.flying = [e for e in cluster.flying if e not in lost]
    cluster.run(0.09)

    assert len(lost) == 1
    assert [answer.published for _, answer in cluster.answers] == [1]
    for node in cluster.nodes.values():
        assert node.shard.table.authority == node.ring.current.version
        assert len(located(node.shard, [1])) == 1


def test_hosts_that_go_and_come_within_ten_minutes_are_notified_of_nothing_twice() -> None:
    """Eight hosts own everything, nine two each: an upgrade over the bound re-copies nothing."""
    cluster = Cluster(replicas="auto", former_s=600.0)
    for incarnation in range(1, 9):
        cluster.add(incarnation)
    show_on_hosts(cluster)
    names = list(range(200))
    cluster.commit(1, names)
    cluster.run(1.0)
    cluster.add(9)
    show_on_hosts(cluster)
    seen = cluster.run(5.0)
    reported_ninth = sum(len(m.records) // 56 for m in seen if isinstance(m, Put))
    cluster.commit(1, list(range(200, 220)))
    cluster.run(1.0)
    cluster.kill(9)
    show_on_hosts(cluster)

    again = cluster.run(5.0)

    assert 0 < reported_ninth < 200
    assert [m for m in again if isinstance(m, Put)] == []
    cluster.assert_whole()


def test_former_owners_are_left_after_ten_minutes() -> None:
    """And learn of new pages until then: a reader with an older view asks them."""
    cluster = cluster_of(ME, A, replicas=1, former_s=600.0, summary_s=50.0)
    cluster.commit(ME, list(range(100)))
    cluster.run(1.0)
    before = cluster.nodes[ME].ring.current
    cluster.add(B)
    cluster.show_all()
    cluster.run(1.0)
    cluster.commit(ME, list(range(100, 150)))
    cluster.run(1.0)
    after = cluster.nodes[ME].ring.current
    former = [
        name
        for name in range(150)
        if before.owners(records_of(1, [name], 2)["key"])[0, 0] == A
        and after.owners(records_of(1, [name], 2)["key"])[0, 0] == B
    ]
    assert any(name < 100 for name in former)
    assert any(name >= 100 for name in former)

    during = len(located(cluster.nodes[A].shard, former))
    cluster.run(600.0)

    assert during == len(former)
    assert len(located(cluster.nodes[A].shard, former)) == 0
    cluster.assert_whole()


def show_on_hosts(cluster: Cluster) -> None:
    """Show every node a view in which each is on a host of its own."""
    seen = cluster.truth()
    members = tuple(attrs.evolve(m, boot_id=f"host {m.incarnation}") for m in seen.members)
    for incarnation in list(cluster.nodes):
        cluster.show(incarnation, attrs.evolve(seen, members=members))


def shard_on(*members: int) -> DirectoryShard:
    """Return a shard that has just come to a ring of these members, and has learned of none."""
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
    """Its first difference counts: it must not double all questions forever."""
    shard = shard_in_sync()
    reported = records_of(A, [1], 10)

    for second in range(int(BEHIND_S) + 2):
        behind = shard.authority.is_behind(float(second))
        hear(shard, A, summary_of(0, reported), float(second))

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
    """Its summaries match, one after the other, and its hand-over takes forever."""
    shard, ring = shard_in_sync(), ring_of(ME, A)
    hear(shard, ME, RingChanged(ring), 0.0)
    assert shard.authority.is_behind(0.0)

    for second in range(int(BEHIND_S) + 2):
        hear(shard, A, StreamSummary(0, 0, 0), float(second))

    assert not shard.authority.is_behind(BEHIND_S + 1.0)
    assert shard.authority.ring == b""


def test_a_holder_that_is_whole_reports_by_itself() -> None:
    """A new ring is no reason to ask all its members for what they are about to say."""
    shard = shard_in_sync()

    hear(shard, ME, RingChanged(ring_of(ME, A, B, 99)), 0.01)

    assert set(wanted_of(shard, 1.0)) == {99}


def test_a_holder_that_sent_nothing_is_asked() -> None:
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
    age_s = SUMMARY_AGE_MEMBER_S * (len(members) - 1)
    assert age_s > SUMMARY_AGE_MAX_S + 2.0

    tick(shard, age_s - 1.0)
    in_time = shard.authority.ring
    tick(shard, age_s + 2.0)

    assert (in_time, shard.authority.ring) == (ring.version, b"")


def test_a_suspect_that_hands_over_is_in_doubt_as_long_as_it_is_suspected() -> None:
    """What it stores meanwhile it may not report: others have it end at any moment."""
    shard = shard_in_sync()
    hear(shard, ME, view(ME, A, member(B, SUSPECT)), 0.01)

    hear(shard, B, HandedOver(0, 0, 0, RING.version), 0.02)

    assert not has_authority(shard, 0.02)


def test_how_many_are_in_doubt_is_reported() -> None:
    """As the metric `directory_holders_doubted` has it."""
    shard = shard_in_sync()
    before = shard.authority.doubted

    hear(shard, A, Put(7, records_of(A, [1], 10).tobytes()), 0.01)

    assert (before, shard.authority.doubted) == (0, 1)


def test_a_stall_is_noticed_once() -> None:
    """What holders answer before the next tick counts."""
    shard = shard_in_sync()
    tick(shard, 1.0)

    stalled = has_authority(shard, 3.0)
    for holder in (A, B):
        hear(shard, holder, HandedOver(DOUBTED_NUMBERS, 0, 0, RING.version), 3.0)

    assert (stalled, has_authority(shard, 3.0)) == (False, True)


@pytest.mark.parametrize("by_message", [False, True])
def test_a_stall_is_as_long_as_readers_put_up_with_from_the_last_tick(by_message: bool) -> None:
    """Not from the next one: a set that waits 100 ms has not given this owner up before."""
    for more_s, is_whole in ((-0.001, True), (0.001, False)):
        shard = shard_in_sync()
        tick(shard, 1.0)
        late = shard.deadline() - TICK_S + TICK_AGE_MAX_S + more_s

        if not by_message:
            shard.on_tick(late)

        assert has_authority(shard, late) == is_whole


def test_nothing_is_known_of_a_holder_that_the_view_has_forgotten() -> None:
    """A node that restarts for years fills no memory with numbers of its former selves."""
    shard = shard_in_sync()
    at = 1.0
    tick(shard, at)
    for _ in range(2):
        at += TICK_AGE_MAX_S + TICK_S
        shard.on_tick(at)

    hear(shard, ME, view(ME, A), at)
    hear(shard, ME, view(ME, A, B), at)
    hear(shard, A, HandedOver(2 * DOUBTED_NUMBERS, 0, 0, RING.version), at)
    hear(shard, B, HandedOver(DOUBTED_NUMBERS, 0, 0, RING.version), at)

    assert has_authority(shard, at), "of a holder that is remembered twice the number is wanted"


def test_a_false_number_alone_asks_for_no_number() -> None:
    """The process has not been paused: any hand-over after it counts."""
    shard = shard_in_sync()
    tick(shard, 0.5)
    hear(shard, A, Put(2**50, b""), 0.5)
    hear(shard, A, StreamSummary(3, 0, 0), 0.5)

    asked = [message for peer, message in tick(shard, 2.0) if peer == A]
    hear(shard, A, HandedOver(4, 0, 0, RING.version), 2.0)

    assert asked
    assert set(asked) == {RequestSummary()}
    assert has_authority(shard, 2.0)


ROWS = 5000
FULL = list(range(ROWS))


@pytest.fixture
def shard(monkeypatch: pytest.MonkeyPatch) -> DirectoryShard:
    """A lone shard that has authority, and whose table is full."""
    monkeypatch.setattr(directory, "ROWS_MAX", ROWS)
    shard = shard_of()
    take(shard, ME, RingChanged(ring_of(ME)))
    take(shard, ME, RecordsChanged(records_of(ME, FULL, [10] * ROWS), NO_DROPS))
    assert shard.record_count == ROWS
    assert has_authority(shard, 0.0)
    return shard


def generation_of(shard: DirectoryShard, name: int, now: float) -> list[int]:
    (answer,) = take(shard, 77, Lookup(1, key_of(name)), now)
    assert isinstance(answer, Located)
    generations: list[int] = from_bytes(answer.records)["generation"].tolist()
    return generations


def store(shard: DirectoryShard, names: list[int], generation: int, now: float) -> None:
    stored = records_of(ME, names, [generation] * len(names))
    take(shard, ME, RecordsChanged(stored, NO_DROPS), now)


def drop(shard: DirectoryShard, names: list[int], generation: int, now: float) -> None:
    drops = drops_of(names, [generation] * len(names))
    take(shard, ME, RecordsChanged(NO_RECORDS, drops), now)


def test_a_page_of_the_own_pool_that_found_no_memory_is_not_absent(shard: DirectoryShard) -> None:
    """Readers of the table ask other owners until it is there."""
    store(shard, [9001, 9002], 12, 0.0)
    tick(shard, RETRY_S + 0.01)
    full = has_authority(shard, RETRY_S + 0.01), generation_of(shard, 9001, RETRY_S + 0.01)
    drop(shard, [1, 2], 10, 0.3)
    room = has_authority(shard, 0.3)
    tick(shard, 0.3 + RETRY_S)

    assert full == (False, [])
    assert refused(shard, "too_many") == 2
    assert not room
    assert has_authority(shard, 0.3 + RETRY_S)
    assert generation_of(shard, 9001, 0.3 + RETRY_S) == [12]
    assert shard.record_count == ROWS


def test_a_page_that_left_the_pool_is_missed_no_more(shard: DirectoryShard) -> None:
    """A drop that is older than the page ends nothing."""
    store(shard, [9001], 12, 0.0)
    drop(shard, [9001], 11, 0.0)
    older = has_authority(shard, 0.0)
    drop(shard, [9001], 12, 0.0)

    assert not older
    assert has_authority(shard, 0.0)
    drop(shard, [1], 10, 0.0)
    tick(shard, 2 * RETRY_S)
    assert generation_of(shard, 9001, 2 * RETRY_S) == []


def test_of_a_page_stored_again_only_the_newer_record_comes_in(shard: DirectoryShard) -> None:
    """Whether that found memory at once or not."""
    store(shard, [9001], 12, 0.0)
    store(shard, [9001], 14, 0.0)
    store(shard, [9002], 12, 0.0)
    drop(shard, [1, 2], 10, 0.0)
    store(shard, [9002], 16, 0.0)
    tick(shard, 2 * RETRY_S)

    assert has_authority(shard, 2 * RETRY_S)
    assert generation_of(shard, 9001, 2 * RETRY_S) == [14]
    assert generation_of(shard, 9002, 2 * RETRY_S) == [16]


def test_an_older_record_of_one_change_does_not_replace_a_newer_one(shard: DirectoryShard) -> None:
    """A page may change twice in a batch, and the pool names the records in no order."""
    store(shard, [9001, 9001], 14, 0.0)
    changed = records_of(ME, [9001, 9001], [18, 16])
    take(shard, ME, RecordsChanged(changed, NO_DROPS), 0.0)
    drop(shard, [9001], 16, 0.0)
    still_missed = not has_authority(shard, 0.0)
    drop(shard, [1], 10, 0.0)
    tick(shard, 2 * RETRY_S)

    assert still_missed
    assert generation_of(shard, 9001, 2 * RETRY_S) == [18]


def test_many_pages_come_in_by_parts(shard: DirectoryShard) -> None:
    """No tick is long, and authority waits for the last of them."""
    names = [10_000 + at for at in range(2 * RETRIED_MAX)]
    store(shard, names, 12, 0.0)
    drop(shard, FULL[: len(names)], 10, 0.0)
    tick(shard, RETRY_S)
    half = shard.record_count - (ROWS - len(names)), has_authority(shard, RETRY_S)
    tick(shard, 2 * RETRY_S)

    assert half == (RETRIED_MAX, False)
    assert has_authority(shard, 2 * RETRY_S)
    assert shard.record_count == ROWS


def test_sets_that_go_on_put_nothing_off(shard: DirectoryShard) -> None:
    """Each of them is refused, and the first one's pages are put again in time."""
    for at in range(5):
        store(shard, [9001 + at], 12, at * RETRY_S / 5)
    drop(shard, FULL[:5], 10, 0.9 * RETRY_S)

    tick(shard, RETRY_S)

    assert generation_of(shard, 9001, RETRY_S) == [12]


def test_a_lone_shard_without_a_ring_puts_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first ring nothing else is due."""
    monkeypatch.setattr(directory, "ROWS_MAX", ROWS)
    shard = shard_of()
    store(shard, FULL, 10, 0.0)
    tick(shard, 1.0)
    store(shard, [9001], 12, 1.0)
    drop(shard, [1], 10, 1.0)

    assert shard.deadline() == 1.0 + RETRY_S
    tick(shard, 1.0 + RETRY_S)
    assert generation_of(shard, 9001, 2.0) == [12]
    assert shard.deadline() == math.inf
