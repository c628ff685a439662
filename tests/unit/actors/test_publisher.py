"""The publisher: every owner comes to know what this node holds, and nothing that it does not."""

from __future__ import annotations

import random

import numpy as np
import pytest

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.effects import Effect, Send, TellPool
from peercache.actors.mailboxes import (
    PagesCommitted,
    RecordsChanged,
    Republish,
    ReserveAhead,
    RingChanged,
)
from peercache.actors.origin import Origin
from peercache.actors.publisher import actor as publisher_module
from peercache.actors.publisher import pending as waiting
from peercache.actors.publisher import streams
from peercache.actors.publisher.actor import ASK_AGAIN_S, SLICE_S, Publisher
from peercache.model.hash_ring import HashRing
from peercache.model.member import DEAD
from peercache.model.records import Records, from_bytes
from peercache.observability.metrics import Metrics
from peercache.wire.envelope import Message
from peercache.wire.messages.directory import (
    Acknowledged,
    Delete,
    Doubted,
    Put,
    Repair,
    StreamSummary,
    SummaryDiffers,
    SummaryMatches,
)
from peercache.wire.messages.pool import Committed, Reserve
from tests.unit.actors.record_cluster import (
    NO_DROPS,
    NO_RECORDS,
    Cluster,
    drops_of,
    held_of,
    key_of,
    located,
    member,
    records_of,
    view,
)

ME, A, B, C = 5, 11, 12, 13
CLIENT = Origin(99, 7)


def ring_of(*members: int, replicas: int = 2) -> HashRing:
    return HashRing(members, virtual_nodes=16, replicas=replicas)


def publisher_in(ring: HashRing, *, rate: float = 50_000.0, summary_s: float = 2.0) -> Publisher:
    made = Publisher(
        incarnation=ME,
        republish_rate=rate,
        summary_s=summary_s,
        rng=random.Random(1),
        metrics=Metrics(),
    )
    heard(made, ME, RingChanged(ring), 0.0)
    return made


def heard(made: Publisher, sender: int, message: object, now: float) -> list[Effect]:
    effects = made.on_message(Origin(sender), message, now)
    made.check()
    return effects


def ticked(made: Publisher, now: float) -> list[Effect]:
    effects = made.on_tick(now)
    made.check()
    assert made.deadline() > now
    return effects


def commit_of(records: Records, *, request: int = 1, patience_s: float = 1.0) -> PagesCommitted:
    return PagesCommitted(CLIENT, request, 3, b"s", records, NO_RECORDS, patience_s)


def sent(effects: list[Effect], kind: type[Message]) -> list[tuple[int, Message]]:
    """Return (target, message) of the messages of a kind, in order."""
    found = []
    for effect in effects:
        assert isinstance(effect, Send)
        target = effect.to.identity if isinstance(effect.to, Origin) else effect.to
        if isinstance(effect.message, kind):
            found.append((target, effect.message))
    return found


def answers(effects: list[Effect]) -> list[Committed]:
    return [m for _, m in sent(effects, Committed) if isinstance(m, Committed)]


def puts(effects: list[Effect]) -> dict[int, list[bytes]]:
    """Return the keys put to each owner, in order of sending."""
    told: dict[int, list[bytes]] = {}
    for owner, message in sent(effects, Put):
        assert isinstance(message, Put)
        records = from_bytes(message.records)
        told.setdefault(owner, []).extend(bytes(record["key"]) for record in records)
    return told


def acknowledge(made: Publisher, effects: list[Effect], now: float) -> list[Effect]:
    """Acknowledge every put, delete and repair of these effects; return what follows."""
    more: list[Effect] = []
    for effect in effects:
        if isinstance(effect, Send) and isinstance(effect.message, Put | Delete | Repair):
            assert isinstance(effect.to, int)
            more += heard(made, effect.to, Acknowledged(effect.message.number), now)
    return more


def keys(*names: int) -> list[bytes]:
    return [key_of(name) for name in names]


def owned_by(ring: HashRing, owner: int, names: range) -> list[int]:
    owners = ring.owners(records_of(1, list(names), 2)["key"])
    return [name for name, mine in zip(names, owners.tolist(), strict=True) if owner in mine]


# --- commits ------------------------------------------------------------------------------------


def test_commit_puts_one_batch_to_each_owner() -> None:
    """Each owner gets exactly its keys, in one message, numbered from 1."""
    ring = ring_of(ME, A, B, C)
    made = publisher_in(ring)

    effects = heard(made, ME, commit_of(records_of(ME, list(range(100)), 2)), 0.0)

    told = puts(effects)
    assert set(told) == {A, B, C}
    for owner, theirs in told.items():
        assert theirs == keys(*owned_by(ring, owner, range(100)))
    assert [m.number for _, m in sent(effects, Put) if isinstance(m, Put)] == [1, 1, 1]


def test_commit_is_answered_when_each_record_has_one_owner() -> None:
    """One acknowledgement a record is enough; the answer carries what the client needs."""
    made = publisher_in(ring_of(A, B))
    records, here = records_of(ME, [1, 2], 2), records_of(ME, [9], 50)
    effects = heard(made, ME, PagesCommitted(CLIENT, 4, 3, b"abc", records, here, 1.0), 0.0)

    first = heard(made, A, Acknowledged(1), 0.0)

    packed = records.tobytes() + here.tobytes()
    assert answers(effects) == []
    assert first == [Send(CLIENT, Committed(4, 3, b"abc", packed, 3))]


def test_commit_counts_our_own_shard_as_an_owner() -> None:
    """Our shard hears the pool directly: a record that we own ourselves is published at once."""
    made = publisher_in(ring_of(ME, A, B, replicas=3))

    effects = heard(made, ME, commit_of(records_of(ME, [1, 2], 2)), 0.0)

    assert [a.published for a in answers(effects)] == [2]
    assert set(puts(effects)) == {A, B}


def test_commit_waits_for_every_record() -> None:
    """An acknowledgement from one owner does not speak for records that it does not own."""
    ring = ring_of(A, B, C)
    made = publisher_in(ring)
    heard(made, ME, commit_of(records_of(ME, list(range(50)), 2)), 0.0)

    first = heard(made, A, Acknowledged(1), 0.0)
    second = heard(made, B, Acknowledged(1), 0.0)

    assert answers(first) == []
    assert [a.published for a in answers(second)] == [50]


def test_commit_is_answered_once() -> None:
    """Later owners, repeated acknowledgements and the end of patience say nothing more."""
    made = publisher_in(ring_of(A, B))
    heard(made, ME, commit_of(records_of(ME, [1], 2)), 0.0)
    told = answers(heard(made, A, Acknowledged(1), 0.0))

    told += answers(heard(made, A, Acknowledged(1), 0.1))
    told += answers(heard(made, B, Acknowledged(1), 0.2))
    told += answers(heard(made, B, SummaryMatches(1), 0.3))
    told += answers(ticked(made, 5.0))

    assert len(told) == 1


def test_commit_is_answered_when_patience_is_over() -> None:
    """What is acknowledged by then counts, and the pages that were here already."""
    ring = ring_of(A, B, C)
    made = publisher_in(ring)
    names = range(50)
    commit = PagesCommitted(
        CLIENT, 1, 1, b"", records_of(ME, list(names), 2), records_of(ME, [99], 500), 0.2
    )
    heard(made, ME, commit, 10.0)
    heard(made, A, Acknowledged(1), 10.1)

    early = ticked(made, 10.19)
    late = ticked(made, 10.2)

    assert answers(early) == []
    assert [a.published for a in answers(late)] == [len(owned_by(ring, A, names)) + 1]


@pytest.mark.parametrize("heard_at", [10.1, 10.3])
def test_pool_hears_what_else_a_commit_asked_for_after_its_answer(heard_at: float) -> None:
    """Be it answered because owners know, or because its patience is over; once, either way."""
    made = publisher_in(ring_of(A, B))
    then = ReserveAhead(CLIENT, Reserve(0, 7, 1, b"", bytes(8)))
    records = records_of(ME, [1, 2, 3], 2)
    commit = PagesCommitted(CLIENT, 1, 1, b"", records, NO_RECORDS, 0.2, then=(then,))
    effects = heard(made, ME, commit, 10.0)
    told = [TellPool(then)]
    at_once = [effect for effect in effects if isinstance(effect, TellPool)]

    if heard_at > 10.2:
        effects = ticked(made, 10.2)
    for owner in (A, B):
        effects += heard(made, owner, Acknowledged(1), heard_at)

    assert at_once == []
    assert [effect for effect in effects if isinstance(effect, TellPool)] == told
    answered = next(effect for effect in effects if answers([effect]))
    assert effects.index(answered) < effects.index(told[0])


def test_commit_without_new_records_is_answered_at_once() -> None:
    """Pages that were here already are published already."""
    made = publisher_in(ring_of(A, B))
    commit = PagesCommitted(CLIENT, 1, 1, b"", NO_RECORDS, records_of(ME, [1], 2), 1.0)

    effects = heard(made, ME, commit, 0.0)

    assert [a.published for a in answers(effects)] == [1]


def test_commit_of_a_lone_node_is_answered_at_once() -> None:
    """The only owner waits for no acknowledgement, and sends nothing."""
    made = publisher_in(ring_of(ME))

    effects = heard(made, ME, commit_of(records_of(ME, [1, 2], 2)), 0.0)

    assert [a.published for a in answers(effects)] == [2]
    assert len(effects) == 1


def test_commit_without_patience_is_answered_at_once() -> None:
    """With what its own directory knows: no turn of the loop, and no tick, goes by before."""
    ring = ring_of(ME, A, B)
    made = publisher_in(ring)
    names = range(50)

    effects = heard(made, ME, commit_of(records_of(ME, list(names), 2), patience_s=0.0), 3.0)

    assert [a.published for a in answers(effects)] == [len(owned_by(ring, ME, names))]
    assert answers(ticked(made, made.deadline())) == []


def test_commit_before_there_is_a_ring_waits_for_its_patience() -> None:
    """Without owners nothing is published; once they are known they are told."""
    made = Publisher(incarnation=ME, republish_rate=1e4, summary_s=2.0, rng=random.Random(1))
    heard(made, ME, commit_of(records_of(ME, [1], 2), patience_s=0.5), 0.0)

    late = ticked(made, 0.5)
    told = heard(made, ME, RingChanged(ring_of(ME, A)), 0.6)

    assert [a.published for a in answers(late)] == [0]
    assert puts(told) == {A: keys(1)}


def test_commits_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is answered as unpublished at once; its records are sent all the same."""
    monkeypatch.setattr(waiting, "WAITERS_MAX", 2)
    made = publisher_in(ring_of(A, B))
    for request in (1, 2):
        heard(made, ME, commit_of(records_of(ME, [request], 2), request=request), 0.0)

    effects = heard(made, ME, commit_of(records_of(ME, [3], 2), request=3), 0.0)

    assert [(a.request, a.published) for a in answers(effects)] == [(3, 0)]
    assert set(puts(effects)) == {A, B}


def test_puts_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large batch goes in several messages, each of which must be acknowledged."""
    monkeypatch.setattr(publisher_module, "RECORDS_A_MESSAGE_MAX", 10)
    made = publisher_in(ring_of(A))

    effects = heard(made, ME, commit_of(records_of(ME, list(range(25)), 2)), 0.0)
    two = heard(made, A, Acknowledged(3), 0.0) + heard(made, A, Acknowledged(1), 0.0)
    third = heard(made, A, Acknowledged(2), 0.0)

    sizes = [len(m.records) // 56 for _, m in sent(effects, Put) if isinstance(m, Put)]
    assert sizes == [10, 10, 5]
    assert answers(two) == []
    assert [a.published for a in answers(third)] == [25]


# --- changes of the pool ------------------------------------------------------------------------


def test_drops_go_as_one_delete_for_each_owner() -> None:
    """An eviction of many pages is one message an owner, never one a page."""
    ring = ring_of(ME, A, B)
    made = publisher_in(ring)
    heard(made, ME, commit_of(records_of(ME, list(range(40)), 2)), 0.0)
    drops = drops_of(list(range(40)), [2 + 2 * n for n in range(40)])

    effects = heard(made, ME, RecordsChanged(NO_RECORDS, drops), 0.0)

    deleted = {owner: m for owner, m in sent(effects, Delete) if isinstance(m, Delete)}
    assert len(effects) == len(deleted) == 2
    for owner, message in deleted.items():
        assert len(message.drops) // 24 == len(owned_by(ring, owner, range(40)))


def test_drop_that_is_older_than_the_record_ends_nothing() -> None:
    """A page committed anew is another record than the one that was dropped."""
    made = publisher_in(ring_of(ME, A))
    heard(made, ME, commit_of(records_of(ME, [1], 20)), 0.0)

    assert heard(made, ME, RecordsChanged(NO_RECORDS, drops_of([1], [18])), 0.0) == []


def test_page_named_twice_in_one_change_ends_with_the_newest() -> None:
    """Evicted, committed and evicted again within one batch: the digest still fits."""
    cluster = Cluster()
    for incarnation in (ME, A):
        cluster.add(incarnation)
    cluster.show_all()
    cluster.run(0.1)
    records = records_of(ME, [1, 1, 2], [2, 6, 4])
    drops = drops_of([1, 1], [2, 4])

    for actor in ("directory", "publisher"):
        cluster.tell(ME, actor, RecordsChanged(records, drops))
    seen = cluster.run(6.0)

    held = held_of(cluster.nodes[A].shard, ME)
    assert {k: int(from_bytes(r)["generation"][0]) for k, r in held.items()} == {
        key_of(1): 6,
        key_of(2): 4,
    }
    assert not any(isinstance(m, Repair) for m in seen)


def test_changed_record_replaces_the_old_one_in_the_digest() -> None:
    """A demoted page has a new record: its owners take it without any repair."""
    cluster = two_nodes()
    cluster.commit(ME, [1, 2])
    cluster.run(0.1)

    cluster.commit(ME, [2])
    seen = cluster.run(6.0)

    cluster.assert_whole()
    assert not any(isinstance(m, Repair) for m in seen)


# --- what is lost -------------------------------------------------------------------------------


def two_nodes() -> Cluster:
    cluster = Cluster()
    for incarnation in (ME, A):
        cluster.add(incarnation)
    cluster.show_all()
    cluster.run(0.1)
    return cluster


def test_lost_put_is_repaired_and_its_commit_answered() -> None:
    """A page is hidden for a quarter of a second, and only its bucket is sent anew."""
    made = publisher_in(ring_of(A))
    shard = DirectoryShard(incarnation=A)
    shard.on_message(Origin(A), view(ME, A), 0.0)
    first = heard(made, ME, commit_of(records_of(ME, list(range(100)), 2)), 0.0)
    lost = heard(made, ME, commit_of(records_of(ME, [200], 900), request=2), 0.0)
    for _, message in sent(first, Put):
        shard.on_message(Origin(ME), message, 0.0)
    acknowledge(made, first, 0.0)
    assert len(sent(lost, Put)) == 1

    ((_, summary),) = sent(ticked(made, ASK_AGAIN_S), StreamSummary)
    (differs,) = shard.on_message(Origin(ME), summary, 0.0)
    assert isinstance(differs, Send)
    ((_, repair),) = sent(heard(made, A, differs.message, 0.3), Repair)
    assert isinstance(repair, Repair)
    shard.on_message(Origin(ME), repair, 0.3)
    done = heard(made, A, Acknowledged(repair.number), 0.3)

    assert repair.buckets == bytes([key_of(200)[0]])
    assert len(located(shard, [200])) == 1
    assert [(a.request, a.published) for a in answers(done)] == [(2, 1)]
    assert made.metrics is not None
    assert made.metrics.repairs._value.get() == 1


def test_lost_delete_is_repaired() -> None:
    """A lie about a page lives no longer than until the next summary."""
    cluster = two_nodes()
    cluster.commit(ME, [1, 2, 3])
    cluster.run(0.1)

    cluster.drop(ME, [2])
    cluster.flying.clear()
    cluster.run(ASK_AGAIN_S + 0.05)

    cluster.assert_whole()
    assert len(located(cluster.nodes[A].shard, [2])) == 0


def test_lost_acknowledgement_is_made_good_by_the_summary() -> None:
    """A matching summary answers the commit as well: everything before it is in force."""
    made = publisher_in(ring_of(A))
    heard(made, ME, commit_of(records_of(ME, [1], 2)), 0.0)
    heard(made, ME, commit_of(records_of(ME, [2], 4), request=2), 0.0)

    effects = heard(made, A, SummaryMatches(2), 0.1)

    assert [a.request for a in answers(effects)] == [1, 2]


def test_acknowledgement_speaks_for_its_own_message_only() -> None:
    """An earlier message may be lost though a later one arrived."""
    made = publisher_in(ring_of(A))
    heard(made, ME, commit_of(records_of(ME, [1], 2)), 0.0)
    heard(made, ME, commit_of(records_of(ME, [2], 4), request=2), 0.0)

    effects = heard(made, A, Acknowledged(2), 0.1)

    assert [a.request for a in answers(effects)] == [2]


def test_summary_that_differs_is_repaired_once() -> None:
    """Only the answer to the last summary counts, and its repetition calls no second repair."""
    made = publisher_in(ring_of(A))
    heard(made, ME, commit_of(records_of(ME, [1], 2)), 0.0)
    ((_, summary),) = sent(ticked(made, ASK_AGAIN_S), StreamSummary)
    assert isinstance(summary, StreamSummary)
    nothing = SummaryDiffers(summary.number, bytes(2048))

    stale = heard(made, A, SummaryDiffers(summary.number - 1, bytes(2048)), 0.3)
    first = heard(made, A, nothing, 0.3)
    again = heard(made, A, nothing, 0.3)

    assert stale == again == []
    assert len(sent(first, Repair)) == 1


def test_summary_that_differs_is_judged_by_what_was_asked() -> None:
    """A commit between question and answer is no difference."""
    made = publisher_in(ring_of(A))
    acknowledge(made, heard(made, ME, commit_of(records_of(ME, [1, 2], 2)), 0.0), 0.0)
    ((_, summary),) = sent(ticked(made, 4.0), StreamSummary)
    assert isinstance(summary, StreamSummary)
    without_2 = publisher_in(ring_of(A))
    heard(without_2, ME, commit_of(records_of(ME, [1], 2)), 0.0)
    theirs = without_2._streams[A].content.buckets.tobytes()
    heard(made, ME, commit_of(records_of(ME, list(range(100, 140)), 20)), 4.0)

    ((_, repair),) = sent(heard(made, A, SummaryDiffers(summary.number, theirs), 4.0), Repair)

    assert isinstance(repair, Repair)
    assert repair.buckets == bytes([key_of(2)[0]])


def test_malformed_digests_are_ignored_and_counted() -> None:
    """A peer that sends half a digest gets no repair, and no exception."""
    made = publisher_in(ring_of(A))
    heard(made, ME, commit_of(records_of(ME, [1], 2)), 0.0)
    ticked(made, ASK_AGAIN_S)

    assert heard(made, A, SummaryDiffers(1, bytes(1000)), 0.3) == []
    assert made.metrics is not None
    assert made.metrics.messages_dropped.labels("malformed")._value.get() == 1


def test_answers_of_strangers_are_ignored() -> None:
    """Who is no owner of ours has nothing to acknowledge."""
    made = publisher_in(ring_of(A))
    heard(made, ME, commit_of(records_of(ME, [1], 2)), 0.0)

    assert heard(made, C, Acknowledged(1), 0.0) == []
    assert heard(made, C, SummaryMatches(1), 0.0) == []


def test_answers_to_what_was_never_sent_are_ignored() -> None:
    """A number above the last one settles nothing."""
    made = publisher_in(ring_of(A))
    heard(made, ME, commit_of(records_of(ME, [1], 2)), 0.0)

    assert heard(made, A, Acknowledged(10**6), 0.0) == []
    assert heard(made, A, SummaryMatches(10**6), 0.0) == []


def test_unacknowledged_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an owner that never answers only so much is remembered; a match settles the rest."""
    monkeypatch.setattr(streams, "PENDING_MAX", 3)
    made = publisher_in(ring_of(A))
    for at in range(10):
        heard(made, ME, commit_of(records_of(ME, [at], 2 + 2 * at)), 0.0)
    stream = made._streams[A]

    assert len(stream.pending) == 3
    heard(made, A, SummaryMatches(10), 0.1)
    assert (stream.state(made._table.live_rows()) == streams.CONFIRMED).all()


def test_quiet_cluster_exchanges_only_summaries() -> None:
    """What the digests cover is what was sent: nothing is repaired where nothing was lost."""
    cluster = Cluster(replicas=2)
    for incarnation in range(1, 5):
        cluster.add(incarnation)
    cluster.show_all()
    for incarnation in cluster.nodes:
        cluster.commit(incarnation, list(range(incarnation, incarnation + 60)))
        cluster.drop(incarnation, list(range(incarnation, incarnation + 9)))
    cluster.run(0.1)

    quiet = cluster.run(20.0)

    assert {type(message) for message in quiet} == {StreamSummary, SummaryMatches}
    assert len(quiet) <= 2 * 4 * 3 * 12  # each of 12 streams asks about every 2 s
    cluster.assert_whole()


# --- the ring turns -----------------------------------------------------------------------------


def test_join_republishes_exactly_the_keys_whose_owners_changed() -> None:
    """Only the newcomer is told anything, and only of what it owns now, newest first."""
    before, after = ring_of(A, B), ring_of(A, B, C)
    made = publisher_in(before)
    names = range(200)
    acknowledge(made, heard(made, ME, commit_of(records_of(ME, list(names), 2)), 0.0), 0.0)

    effects = heard(made, ME, RingChanged(after), 1.0)

    theirs = owned_by(after, C, names)
    assert 0 < len(theirs) < 200
    assert puts(effects) == {C: keys(*reversed(theirs))}
    assert sent(effects, Delete) == []


def test_former_owner_is_left_only_after_the_new_one_acknowledged() -> None:
    """The holder decides when a hand-over is over; its withdrawal carries the generation."""
    before, after = ring_of(A, B), ring_of(A, B, C)
    made = publisher_in(before)
    acknowledge(made, heard(made, ME, commit_of(records_of(ME, list(range(50)), 2)), 0.0), 0.0)
    moved = heard(made, ME, RingChanged(after), 1.0)
    waiting_on = ticked(made, 1.2)

    effects = acknowledge(made, moved, 1.3)

    assert sent(moved, Delete) == sent(waiting_on, Delete) == []
    withdrawn: dict[int, dict[bytes, int]] = {}
    for owner, message in sent(effects, Delete):
        assert isinstance(message, Delete)
        for drop in np.frombuffer(message.drops, NO_DROPS.dtype):
            withdrawn.setdefault(owner, {})[bytes(drop["key"])] = int(drop["generation"])
    for owner in (A, B):
        left = set(owned_by(before, owner, range(50))) - set(owned_by(after, owner, range(50)))
        assert withdrawn[owner] == {key_of(name): 2 + 2 * name for name in left}


def test_hand_over_keeps_to_its_rate() -> None:
    """So many records a second, the hottest at once and the rest in slices."""
    made = publisher_in(ring_of(ME), rate=1000.0)
    heard(made, ME, commit_of(records_of(ME, list(range(500)), 2)), 0.0)

    slices = [puts(heard(made, ME, RingChanged(ring_of(ME, A)), 1.0)).get(A, [])]
    now = 1.0
    while len(made._queue):
        now = made.deadline()
        slices.append(puts(ticked(made, now)).get(A, []))

    sizes = [len(keys_sent) for keys_sent in slices]
    assert max(sizes) <= 1000 * SLICE_S + 1
    assert 0.4 <= now - 1.0 <= 0.6
    assert [key for part in slices for key in part] == keys(*reversed(range(500)))


def test_page_dropped_during_a_hand_over_is_not_published_again() -> None:
    """It is pending in the queue when it is removed: it is never published."""
    made = publisher_in(ring_of(ME), rate=20.0)
    heard(made, ME, commit_of(records_of(ME, list(range(20)), 2)), 0.0)
    heard(made, ME, RingChanged(ring_of(ME, A)), 1.0)
    drops = drops_of(list(range(10)), [2 + 2 * n for n in range(10)])

    heard(made, ME, RecordsChanged(NO_RECORDS, drops), 1.0)
    told: list[bytes] = []
    for step in range(60):
        told += puts(ticked(made, 1.1 + 0.05 * step)).get(A, [])

    assert set(told) == set(keys(*range(10, 19)))


def test_page_committed_during_a_hand_over_ends_at_its_owners_only() -> None:
    """Old and new owners take a record that changes meanwhile, and the old ones are left."""
    cluster = Cluster(replicas=1)
    for incarnation in (ME, A):
        cluster.add(incarnation)
    cluster.show_all()
    cluster.commit(ME, list(range(60)))
    cluster.run(0.1)
    cluster.add(B)
    cluster.show_all()

    cluster.commit(ME, list(range(0, 60, 2)))
    cluster.drop(ME, list(range(0, 60, 5)))
    seen = cluster.run(8.0)

    cluster.assert_whole()
    assert not any(isinstance(message, Repair) for message in seen)


def test_acknowledgement_of_an_older_record_ends_no_hand_over() -> None:
    """The new owner has the record that was, not the one that is: the former owner stays."""
    after = ring_of(A, B, replicas=1)
    name = owned_by(after, B, range(50))[0]
    made = publisher_in(ring_of(A, replicas=1))
    acknowledge(made, heard(made, ME, commit_of(records_of(ME, [name], 2)), 0.0), 0.0)
    heard(made, ME, RingChanged(after), 1.0)
    heard(made, ME, commit_of(records_of(ME, [name], 4), request=2), 1.0)

    older = heard(made, B, Acknowledged(1), 1.1)
    newer = heard(made, B, Acknowledged(2), 1.2)

    assert sent(older, Delete) == []
    assert [owner for owner, _ in sent(newer, Delete)] == [A]


def test_stale_records_do_not_come_back_after_join_evict_and_leave() -> None:
    """The historical fault: a former owner must not serve what was evicted while it owned nothing.

    1. A page is published to its owners. 2. A node joins and takes it over. 3. The page is evicted.
    4. The newcomer leaves: the former owner owns the key again, and knows nothing of the page.
    """
    cluster = Cluster(replicas=1)
    for incarnation in (ME, A):
        cluster.add(incarnation)
    cluster.show_all()
    cluster.commit(ME, list(range(80)))
    cluster.run(0.1)
    cluster.add(B)
    cluster.show_all()
    cluster.run(1.0)
    moved = [n for n in range(80) if key_of(n) in cluster.expected(B, ME)]
    assert moved

    cluster.drop(ME, moved)
    cluster.run(0.1)
    cluster.kill(B)
    cluster.show_all()
    cluster.run(0.1)

    for node in cluster.nodes.values():
        assert len(located(node.shard, moved)) == 0
    cluster.assert_whole()


def test_owner_that_comes_back_is_not_spoken_to_in_old_numbers() -> None:
    """Wrongly believed dead, it remembers our stream: the new one goes on above the old numbers."""
    made = publisher_in(ring_of(ME, A))
    for at in range(5):
        heard(made, ME, commit_of(records_of(ME, [at], 2 + 2 * at)), 0.0)
    heard(made, ME, RingChanged(ring_of(ME)), 1.0)

    effects = heard(made, ME, RingChanged(ring_of(ME, A)), 2.0)

    numbers = [m.number for _, m in sent(effects, Put) if isinstance(m, Put)]
    assert numbers == [6]
    assert puts(effects) == {A: keys(4, 3, 2, 1, 0)}


def test_owner_of_nothing_is_still_asked() -> None:
    """It may hold what it once owned: an empty summary finds that."""
    made = publisher_in(ring_of(ME, A, B))

    ((first, summary), (second, _)) = sent(ticked(made, 10.0), StreamSummary)

    assert (first, second) == (A, B)
    assert summary == StreamSummary(0, 0, 0)


def test_summaries_of_many_streams_do_not_come_in_step() -> None:
    """Each is due at a time of its own."""
    made = publisher_in(ring_of(ME, *range(100, 120)))

    due = {stream.summary_at for stream in made._streams.values()}

    assert len(due) == 20
    assert all(1.0 <= at <= 3.0 for at in due)


# --- those who were found dead ------------------------------------------------------------------


def test_republish_asks_until_every_owner_has_answered() -> None:
    """An owner that has this node dead does not answer yet: it is asked again every 0.25 s."""
    made = publisher_in(ring_of(A, B), summary_s=100.0)
    heard(made, ME, Republish(), 1.0)

    first = [owner for owner, _ in sent(ticked(made, made.deadline()), StreamSummary)]
    heard(made, B, SummaryMatches(0), 1.1)
    second = [owner for owner, _ in sent(ticked(made, made.deadline()), StreamSummary)]
    heard(made, A, SummaryMatches(0), 1.3)
    third = sent(ticked(made, made.deadline()), StreamSummary)

    assert (first, second, third) == ([A, B], [A], [])


def test_node_that_was_found_dead_is_found_again() -> None:
    """Its peer drops all of its records, hears that it lives, and has all of them again."""
    cluster = two_nodes()
    cluster.commit(ME, list(range(50)))
    cluster.run(0.1)
    cluster.show(A, view(member(ME, DEAD), A))
    assert held_of(cluster.nodes[A].shard, ME) == {}

    cluster.tell(ME, "publisher", Republish())
    cluster.run(0.5)
    cluster.show(A, view(ME, A))
    cluster.run(0.6)

    cluster.assert_whole()
    assert len(located(cluster.nodes[A].shard, list(range(50)))) == 50


def test_owner_that_lost_everything_gets_the_hottest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large shard is filled by generation and at the rate of a hand-over, not by bucket."""
    monkeypatch.setattr(publisher_module, "RECORDS_A_MESSAGE_MAX", 100)
    made = publisher_in(ring_of(A), rate=1000.0)
    acknowledge(made, heard(made, ME, commit_of(records_of(ME, list(range(300)), 2)), 0.0), 0.0)
    ((_, summary),) = sent(ticked(made, 5.0), StreamSummary)
    assert isinstance(summary, StreamSummary)

    effects = heard(made, A, SummaryDiffers(summary.number, bytes(2048)), 5.0)

    assert puts(effects) == {A: keys(*range(299, 249, -1))}
    assert sent(effects, Repair) == []


def test_large_repair_is_cut_and_keeps_to_the_rate() -> None:
    """Buckets go in groups, as many as the rate allows, and no summary asks in between."""
    made = publisher_in(ring_of(A), rate=1000.0)
    acknowledge(made, heard(made, ME, commit_of(records_of(ME, list(range(400)), 2)), 0.0), 0.0)
    ((_, summary),) = sent(ticked(made, 5.0), StreamSummary)
    assert isinstance(summary, StreamSummary)

    effects = heard(made, A, SummaryDiffers(summary.number, bytes([1]) * 2048), 5.0)
    first = sent(effects, Repair)
    now = 5.0
    while made._streams[A].repairing:
        now = made.deadline()
        effects += ticked(made, now)

    assert 1 <= len(first) <= 2
    repairs = [m for _, m in sent(effects, Repair) if isinstance(m, Repair)]
    asked = [m.number for _, m in sent(effects, StreamSummary) if isinstance(m, StreamSummary)]
    assert set(asked) <= {repairs[-1].number}
    assert sorted(b"".join(m.buckets for m in repairs)) == list(range(256))
    assert sum(len(m.records) // 56 for m in repairs) == 400
    assert 0.3 <= now - 5.0 <= 0.8


def test_a_bucket_larger_than_a_message_is_replaced_and_the_rest_is_put(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No message is too large, and the owner ends up with all of the bucket."""
    monkeypatch.setattr(streams, "RECORDS_A_MESSAGE_MAX", 4)
    monkeypatch.setattr(publisher_module, "RECORDS_A_MESSAGE_MAX", 4)
    made = publisher_in(ring_of(ME, A), summary_s=1.0)
    names = [name for name in range(9000) if key_of(name)[0] == key_of(1)[0]][:10]
    held = records_of(ME, names, 10)
    heard(made, ME, RecordsChanged(held, NO_DROPS), 0.0)
    shard = DirectoryShard(incarnation=A)
    shard.on_message(Origin(A), view(A, ME), 0.0)
    shard.on_message(Origin(ME), Put(1, held[:1].tobytes()), 0.0)
    ((_, summary),) = sent(ticked(made, 10.0), StreamSummary)
    (differs,) = shard.on_message(Origin(ME), summary, 10.0)  # type: ignore[arg-type]
    assert isinstance(differs, Send)

    effects = heard(made, A, differs.message, 10.1)

    messages = [effect.message for effect in effects if isinstance(effect, Send)]
    assert [type(message) for message in messages] == [Repair, Put, Put]
    for message in messages:
        shard.on_message(Origin(ME), message, 10.2)  # type: ignore[arg-type]
    assert len(located(shard, names)) == 10


def test_a_doubted_record_that_is_gone_is_withdrawn_and_a_true_one_stays() -> None:
    """A reader's dispute reaches the holder, and only the holder knows."""
    made = publisher_in(ring_of(ME, A))
    old, true = records_of(ME, [1, 2], 10), records_of(ME, [3], 10)
    heard(made, ME, RecordsChanged(np.concatenate([old, true]), NO_DROPS), 0.0)
    heard(made, ME, RecordsChanged(records_of(ME, [2], 20), drops_of([1], [10])), 0.0)
    lie = records_of(ME, [3], 99)

    everything = np.concatenate([old, true, lie]).tobytes()
    ((owner, delete),) = sent(heard(made, A, Doubted(everything), 1.0), Delete)

    assert owner == A
    assert isinstance(delete, Delete)
    assert delete.drops == drops_of([1, 2], [10, 12]).tobytes()
    assert heard(made, A, Doubted(true.tobytes()), 1.0) == []
    assert heard(made, 999, Doubted(old.tobytes()), 1.0) == []
    assert heard(made, A, Doubted(records_of(B, [1], 10).tobytes()), 1.0) == []
