"""The publisher when messages, owners or members are lost: every owner comes to know the truth."""

from __future__ import annotations

import numpy as np
import pytest

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.effects import Effect, Send
from peercache.actors.mailboxes import RecordsChanged, Republish
from peercache.actors.origin import Origin
from peercache.actors.publisher import actor as publisher_module
from peercache.actors.publisher import streams
from peercache.actors.publisher.streams import ASK_FIRST_S, NUMBER_MAX
from peercache.actors.publisher.waiters import LAGGING_S
from peercache.model.member import DEAD
from peercache.model.records import NUMBERS_AHEAD_MAX
from peercache.paths.write import PUBLISH_TIMEOUT_S
from peercache.wire.messages.directory import (
    Acknowledged,
    Delete,
    HandedOver,
    Put,
    Repair,
    RequestFreshSummary,
    StreamSummary,
    SummaryDiffers,
    SummaryMatches,
    VerifyRecords,
)
from tests.unit.actors.lone_publisher import (
    ME,
    SUMMARIES,
    A,
    B,
    C,
    acknowledge,
    answers,
    commit_of,
    heard,
    keys,
    publisher_in,
    puts,
    ring_of,
    sent,
    ticked,
    two_nodes,
)
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

# --- what is lost -------------------------------------------------------------------------------


def test_lost_put_is_repaired_and_its_commit_answered() -> None:
    """It is sent again well within a commit's timeout, and nothing else is."""
    made = publisher_in(ring_of(A))
    shard = DirectoryShard(incarnation=A)
    shard.on_message(Origin(A), view(ME, A), 0.0)
    first = heard(made, ME, commit_of(records_of(ME, list(range(100)), 2)), 0.0)
    lost = heard(made, ME, commit_of(records_of(ME, [200], 900), request=2), 0.0)
    for _, message in sent(first, Put):
        shard.on_message(Origin(ME), message, 0.0)
    acknowledge(made, first, 0.0)
    assert len(sent(lost, Put)) == 1

    ((_, summary),) = sent(ticked(made, ASK_FIRST_S), SUMMARIES)
    (differs,) = shard.on_message(Origin(ME), summary, 0.0)
    assert isinstance(differs, Send)
    (again,) = heard(made, A, differs.message, ASK_FIRST_S)
    assert isinstance(again, Send)
    assert isinstance(again.message, Put)
    (acknowledged,) = shard.on_message(Origin(ME), again.message, ASK_FIRST_S)
    assert isinstance(acknowledged, Send)
    done = heard(made, A, acknowledged.message, ASK_FIRST_S)

    assert ASK_FIRST_S < LAGGING_S / 2 < PUBLISH_TIMEOUT_S / 2
    assert puts([again]) == {A: keys(200)}
    assert len(located(shard, [200])) == 1
    assert [(a.request, a.published) for a in answers(done)] == [(2, 1)]


def test_put_that_is_lost_twice_is_repaired_by_buckets() -> None:
    """What is sent again and still missing is sought where the digests differ."""
    made = publisher_in(ring_of(A))
    heard(made, ME, commit_of(records_of(ME, [200], 900)), 0.0)
    effects: list[Effect] = []
    for at in (0.1, 0.4):
        ((_, summary),) = sent(ticked(made, at), SUMMARIES)
        assert isinstance(summary, (StreamSummary, HandedOver))
        effects += heard(made, A, SummaryDiffers(summary.number, bytes(2048)), at)

    ((_, repair),) = sent(effects, Repair)
    assert isinstance(repair, Repair)
    done = heard(made, A, Acknowledged(repair.number), 0.4)

    assert repair.buckets == bytes([key_of(200)[0]])
    assert puts(effects) == {A: keys(200)}
    assert [a.published for a in answers(done)] == [1]
    assert made.metrics is not None
    assert made.metrics.repairs._value.get() == 1


def test_a_page_that_is_gone_is_not_sent_again_and_its_commit_is_answered() -> None:
    """Its Put was lost, and then it was evicted: no owner can know it, and none needs to."""
    made = publisher_in(ring_of(A))
    heard(made, ME, commit_of(records_of(ME, [1, 2], 10)), 0.0)
    heard(made, ME, RecordsChanged(NO_RECORDS, drops_of([1], [10])), 0.01)
    ((_, summary),) = sent(ticked(made, 0.1), SUMMARIES)
    assert isinstance(summary, (StreamSummary, HandedOver))

    effects = heard(made, A, SummaryDiffers(summary.number, bytes(2048)), 0.1)
    done = heard(made, A, Acknowledged(made._streams[A].number), 0.1)

    assert puts(effects) == {A: keys(2)}
    assert [a.published for a in answers(effects) + answers(done)] == [2]


def test_lost_delete_is_repaired() -> None:
    """A lie about a page lives no longer than until the next summary."""
    cluster = two_nodes()
    cluster.commit(ME, [1, 2, 3])
    cluster.run(0.1)

    cluster.drop(ME, [2])
    cluster.flying.clear()
    cluster.run(ASK_FIRST_S + 0.05)

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
    acknowledge(made, heard(made, ME, commit_of(records_of(ME, [1], 2)), 0.0), 0.0)
    ((_, summary),) = sent(ticked(made, 4.0), SUMMARIES)
    assert isinstance(summary, SUMMARIES)
    nothing = SummaryDiffers(summary.number, bytes(2048))

    stale = heard(made, A, SummaryDiffers(summary.number - 1, bytes(2048)), 4.1)
    first = heard(made, A, nothing, 4.1)
    again = heard(made, A, nothing, 4.1)

    assert stale == again == []
    assert len(sent(first, Repair)) == 1


def test_summary_that_differs_is_judged_by_what_was_asked() -> None:
    """A commit between question and answer is no difference."""
    made = publisher_in(ring_of(A))
    acknowledge(made, heard(made, ME, commit_of(records_of(ME, [1, 2], 2)), 0.0), 0.0)
    ((_, summary),) = sent(ticked(made, 4.0), SUMMARIES)
    assert isinstance(summary, SUMMARIES)
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
    ticked(made, ASK_FIRST_S)

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
    assert (stream.state(np.flatnonzero(made._table.live)) == streams.CONFIRMED).all()


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


# --- those who were found dead ------------------------------------------------------------------


def test_republish_asks_until_every_owner_has_answered() -> None:
    """An owner that has this node dead does not answer yet: it is asked again every 0.25 s."""
    made = publisher_in(ring_of(A, B), summary_s=100.0)
    heard(made, ME, Republish(), 1.0)

    first = [owner for owner, _ in sent(ticked(made, made.deadline()), SUMMARIES)]
    heard(made, B, SummaryMatches(0), 1.1)
    second = [owner for owner, _ in sent(ticked(made, made.deadline()), SUMMARIES)]
    heard(made, A, SummaryMatches(0), 1.3)
    third = sent(ticked(made, made.deadline()), SUMMARIES)

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
    ((_, summary),) = sent(ticked(made, 5.0), SUMMARIES)
    assert isinstance(summary, SUMMARIES)

    effects = heard(made, A, SummaryDiffers(summary.number, bytes(2048)), 5.0)

    assert puts(effects) == {A: keys(*range(299, 249, -1))}
    assert sent(effects, Repair) == []


def test_large_repair_is_cut_and_keeps_to_the_rate() -> None:
    """Buckets go in groups, as many as the rate allows, and no summary asks in between."""
    made = publisher_in(ring_of(A), rate=1000.0)
    acknowledge(made, heard(made, ME, commit_of(records_of(ME, list(range(400)), 2)), 0.0), 0.0)
    ((_, summary),) = sent(ticked(made, 5.0), SUMMARIES)
    assert isinstance(summary, SUMMARIES)

    effects = heard(made, A, SummaryDiffers(summary.number, bytes([1]) * 2048), 5.0)
    first = sent(effects, Repair)
    now = 5.0
    while made._streams[A].repairing:
        now = made.deadline()
        effects += ticked(made, now)

    assert 1 <= len(first) <= 2
    repairs = [m for _, m in sent(effects, Repair) if isinstance(m, Repair)]
    asked = [m.number for _, m in sent(effects, SUMMARIES) if isinstance(m, SUMMARIES)]
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
    heard(made, A, Acknowledged(made._streams[A].number), 0.0)
    made._streams[A].pending.clear()
    ((_, summary),) = sent(ticked(made, 10.0), SUMMARIES)
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
    ((owner, delete),) = sent(heard(made, A, VerifyRecords(everything), 1.0), Delete)

    assert owner == A
    assert isinstance(delete, Delete)
    assert delete.drops == drops_of([1, 2], [10, 12]).tobytes()
    assert heard(made, A, VerifyRecords(true.tobytes()), 1.0) == []
    assert heard(made, 999, VerifyRecords(old.tobytes()), 1.0) == []
    assert heard(made, A, VerifyRecords(records_of(B, [1], 10).tobytes()), 1.0) == []


def test_an_owner_that_stood_still_gets_a_hand_over_of_the_number_that_it_asks_for() -> None:
    """The answer to an earlier question does not stand for it, and later messages follow it."""
    made = publisher_in(ring_of(A))
    heard(made, ME, commit_of(records_of(ME, [1], 10)), 0.0)
    ((_, first),) = sent(ticked(made, 0.1), SUMMARIES)
    assert isinstance(first, HandedOver)
    heard(made, A, RequestFreshSummary(1000), 0.11)
    heard(made, A, SummaryMatches(first.number), 0.12)

    ((_, summary),) = sent(ticked(made, made.deadline()), SUMMARIES)
    assert isinstance(summary, HandedOver)
    heard(made, A, SummaryMatches(summary.number), 0.5)
    effects = heard(made, ME, commit_of(records_of(ME, [2], 20)), 0.6)

    assert (summary.number, summary.count) == (1000, 1)
    assert [m.number for _, m in sent(effects, Put) if isinstance(m, Put)] == [1001]
    assert made._streams[A].complete == ring_of(A).version


@pytest.mark.parametrize("number", [NUMBERS_AHEAD_MAX + 100, 2**64 - 1])
def test_a_number_that_no_owner_asks_for_is_passed_over(number: int) -> None:
    """A liar cannot use up the numbers of a stream; it is answered as any owner in doubt."""
    made = publisher_in(ring_of(A))

    heard(made, A, RequestFreshSummary(number), 0.1)
    ((_, summary),) = sent(ticked(made, made.deadline()), SUMMARIES)

    assert isinstance(summary, HandedOver)
    assert summary.number < 100


def test_numbers_are_left_however_often_an_owner_asks_for_higher_ones() -> None:
    """By as much as it may each time."""
    made = publisher_in(ring_of(A))
    stream = made._streams[A]
    stream.number = NUMBER_MAX - 10

    heard(made, A, RequestFreshSummary(NUMBER_MAX), 0.1)
    heard(made, A, RequestFreshSummary(NUMBER_MAX + 1), 0.1)

    assert stream.number == NUMBER_MAX
