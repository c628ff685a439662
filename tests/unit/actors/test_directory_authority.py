"""When an absent key is no page: a shard's authority, and every doubt that ends it."""

from __future__ import annotations

import attrs
import pytest

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.directory.holdings import HEARD_MAX_S, TICK_S, WANTED_FIRST_S
from peercache.actors.effects import Effect, Send
from peercache.actors.mailboxes import CommitAnswered, RecordsChanged, RingChanged
from peercache.actors.origin import Origin
from peercache.model.member import SUSPECT
from peercache.model.reads import TICK_AGE_MAX_S
from peercache.model.records import DOUBTED_NUMBERS, Records
from peercache.paths.write import PUBLISH_TIMEOUT_S
from peercache.wire.messages.directory import (
    HandedOver,
    Located,
    Lookup,
    Put,
    RequestFreshSummary,
    RequestSummary,
    StreamSummary,
    SummaryMatches,
)
from peercache.wire.messages.pool import Committed
from tests.unit.actors.lone_publisher import ring_of
from tests.unit.actors.record_cluster import (
    NO_DROPS,
    Cluster,
    key_of,
    located,
    member,
    records_of,
    view,
)

ME, A, B = 5, 11, 12
RING = ring_of(ME, A, B)
assert TICK_AGE_MAX_S < PUBLISH_TIMEOUT_S, "a stopped owner's table counts when a set gives it up"


def shard_in_sync(now: float = 0.0) -> DirectoryShard:
    """Return a shard that lacks nothing of A and B, which have no records."""
    shard = DirectoryShard(incarnation=ME)
    hear(shard, ME, view(ME, A, B), now)
    hear(shard, ME, RingChanged(RING), now)
    for holder in (A, B):
        hear(shard, holder, HandedOver(0, 0, 0, RING.version), now)
    return shard


def hear(shard: DirectoryShard, sender: int, message: object, now: float) -> list[Effect]:
    effects = shard.on_message(Origin(sender), message, now)  # type: ignore[arg-type]
    shard.check()
    return effects


def tick(shard: DirectoryShard, until: float) -> list[tuple[int, object]]:
    """Tick in time until then; return what was sent to whom."""
    sent: list[tuple[int, object]] = []
    while shard.deadline() <= until:
        for effect in shard.on_tick(shard.deadline()):
            assert isinstance(effect, Send)
            assert isinstance(effect.to, int)
            sent.append((effect.to, effect.message))
    return sent


def has_authority(shard: DirectoryShard, now: float) -> bool:
    """Return what readers of the table see, after checking that answers say the same."""
    (answer,) = hear(shard, 77, Lookup(1, key_of(9)), now)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Located)
    word = shard._table.authority
    assert word in (None, RING.version)
    assert answer.message.behind == (word is None)
    return word is not None


def summary_of(number: int, records: Records, ring: bytes = b"") -> StreamSummary | HandedOver:
    content = Cluster().add(1).publisher._table  # A table of its own digests the records.
    keys = [bytes(record["key"]) for record in records]
    rows = content.store(keys, content.find(keys), records)
    digest = 0
    for value in content.digests[rows].tolist():
        digest ^= value
    stated = (number, len(records), digest)
    return HandedOver(*stated, ring) if ring else StreamSummary(*stated)


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

    assert shard._table.authority == ring.version
    assert shard._table.figures().tick_ns == int(77.5e9)
    assert 0 < shard.deadline() - 3.1 <= TICK_S


def test_a_gap_in_the_numbers_ends_authority_until_all_is_handed_over_again() -> None:
    """A matching summary is not enough: the holder may have begun its stream again.

    Then it covers what was sent since, and a repair has removed what was told before.
    """
    shard, records = shard_in_sync(), records_of(A, [1, 2], 10)
    hear(shard, A, Put(1, records[:1].tobytes()), 0.01)
    contiguous = has_authority(shard, 0.01)

    hear(shard, A, Put(3, records[1:].tobytes()), 0.01)
    after_gap = has_authority(shard, 0.01)
    hear(shard, A, summary_of(3, records), 0.01)
    after_summary = has_authority(shard, 0.01)
    hear(shard, A, summary_of(3, records, RING.version), 0.01)

    assert (contiguous, after_gap, after_summary) == (True, False, False)
    assert has_authority(shard, 0.01)


def test_a_holder_in_doubt_is_asked_until_it_has_handed_over_again() -> None:
    """Its summary matches, and it does not know that it is in doubt."""
    shard, records = shard_in_sync(), records_of(A, [1], 10)
    hear(shard, A, Put(2, records.tobytes()), 0.01)
    hear(shard, A, summary_of(2, records), 0.02)

    asked = [peer for peer, message in tick(shard, 1.0) if message == RequestSummary()]

    assert set(asked) == {A}


def test_a_summary_that_differs_ends_authority() -> None:
    """The holder has what this shard has not."""
    shard = shard_in_sync()
    before = has_authority(shard, 0.01)

    hear(shard, A, summary_of(0, records_of(A, [1], 10)), 0.01)

    assert (before, has_authority(shard, 0.01)) == (True, False)


def test_a_refused_batch_ends_authority() -> None:
    """What there is no room for is lacking."""
    shard = shard_in_sync()
    shard.records_max = 4
    before = has_authority(shard, 0.01)

    hear(shard, A, Put(1, records_of(A, list(range(9)), 10).tobytes()), 0.01)

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
    """It waited in a socket: what the holder stored meanwhile, it told this node in vain."""
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


def test_the_answer_to_a_question_of_before_another_stall_does_not_count() -> None:
    """It may have come while this process stood still again."""
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
    """Its first hand-over may have come while this process stood still."""
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


def test_a_number_that_no_holder_sent_is_not_asked_for_for_ever() -> None:
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


def test_a_holder_that_is_not_heard_of_is_in_doubt() -> None:
    """Others reach both, but its messages do not arrive here: what it stores is not told."""
    shard = shard_in_sync()

    tick(shard, 3.0)
    hear(shard, A, StreamSummary(0, 0, 0), 3.0)
    in_time = has_authority(shard, 3.0)
    tick(shard, HEARD_MAX_S + 2.0)

    assert in_time
    assert not has_authority(shard, HEARD_MAX_S + 2.0)


def test_a_commit_is_answered_behind_the_records_of_its_pool() -> None:
    """The publisher's answer goes through this shard's mailbox, behind what the pool has told."""
    shard = shard_in_sync()
    answer = Committed(1, 2, b"s", b"", 1)

    hear(shard, ME, RecordsChanged(records_of(ME, [7], 2), NO_DROPS), 0.0)
    effects = hear(shard, ME, CommitAnswered(Origin(99, 7), answer), 0.0)

    assert effects == [Send(Origin(99, 7), answer)]
    assert len(located(shard, [7])) == 1


def test_a_newcomer_has_authority_soon_after_its_hand_over() -> None:
    """Not only with the next regular summary; and the others keep theirs but for that time."""
    cluster = Cluster(replicas=2, summary_s=100.0)
    for incarnation in (ME, A):
        cluster.add(incarnation)
    cluster.show_all()
    cluster.commit(ME, list(range(300)))
    cluster.run(1.0)
    cluster.add(B)
    cluster.show_all()

    cluster.run(0.5)

    version = cluster.nodes[B].ring.current.version
    assert {node.shard._table.authority for node in cluster.nodes.values()} == {version}
    cluster.assert_whole()


def test_a_set_that_all_owners_know_is_known_wherever_there_is_authority() -> None:
    """A Put that is lost ends no set: it is asked about, sent again, and then known."""
    cluster = Cluster(replicas=3, summary_s=100.0)
    for incarnation in (ME, A, B):
        cluster.add(incarnation)
    cluster.show_all()
    cluster.run(1.0)

    cluster.commit(ME, [1], timeout_s=0.1)
    lost = [e for e in cluster.flying if isinstance(e.message, Put) and e.target == A]
    cluster.flying = [e for e in cluster.flying if e not in lost]
    cluster.run(0.09)

    assert len(lost) == 1
    assert [answer.published for _, answer in cluster.answers] == [1]
    for node in cluster.nodes.values():
        assert node.shard._table.authority == node.ring.current.version
        assert len(located(node.shard, [1])) == 1


def test_hosts_that_go_and_come_within_ten_minutes_are_told_nothing_twice() -> None:
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
    told_ninth = sum(len(m.records) // 56 for m in seen if isinstance(m, Put))
    cluster.commit(1, list(range(200, 220)))
    cluster.run(1.0)
    cluster.kill(9)
    show_on_hosts(cluster)

    again = cluster.run(5.0)

    assert 0 < told_ninth < 200
    assert [m for m in again if isinstance(m, Put)] == []
    cluster.assert_whole()


def test_former_owners_are_left_after_ten_minutes() -> None:
    """And hear of new pages until then: a reader with an older view asks them."""
    cluster = Cluster(replicas=1, former_s=600.0, summary_s=50.0)
    for incarnation in (ME, A):
        cluster.add(incarnation)
    cluster.show_all()
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
