"""The publisher when messages, owners or members are lost: every owner comes to know the truth."""

from __future__ import annotations

import numpy as np
import pytest

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.effects import Effect, Send
from peercache.actors.mailboxes import (
    PagesCommitted,
    RecordsChanged,
    Republish,
)
from peercache.actors.origin import Origin
from peercache.actors.publisher import actor as publisher
from peercache.actors.publisher import streams
from peercache.actors.publisher.streams import ASK_FIRST_S
from peercache.actors.publisher.waiters import LAGGING_S
from peercache.model.records import BUCKETS, NUMBERS_AHEAD_MAX, Content, Records
from peercache.paths.write import PUBLISH_TIMEOUT_S
from peercache.wire.messages.directory import (
    Acknowledged,
    Delete,
    HandedOver,
    Put,
    Repair,
    RequestFreshSummary,
    RequestSummary,
    StreamSummary,
    SummaryDiffers,
    SummaryMatches,
    VerifyRecords,
)
from tests.record_digests import flip
from tests.unit.actors.lone_publisher import (
    CLIENT,
    ME,
    SUMMARIES,
    A,
    B,
    C,
    acknowledge,
    acknowledged,
    answers,
    check_books,
    commit_of,
    held_by,
    keys,
    publisher_in,
    put_records,
    puts,
    ring_of,
    sent,
    summary_to,
    take,
    ticked,
)
from tests.unit.actors.record_cluster import (
    NO_DROPS,
    NO_RECORDS,
    cluster_of,
    drops_of,
    key_of,
    located,
    records_of,
    view,
)


def digests_of(records: Records) -> bytes:
    """Return what an owner emits that holds these records."""
    content = Content()
    flip(content, records)
    return content.buckets.tobytes()


# --- what is lost -------------------------------------------------------------------------------


def test_lost_put_is_repaired_and_its_commit_answered() -> None:
    """It is sent again well within a commit's timeout, and nothing else is."""
    made = publisher_in(ring_of(A))
    shard = DirectoryShard(incarnation=A)
    shard.on_message(Origin(A), view(ME, A), 0.0)
    first = take(made, ME, commit_of(records_of(ME, list(range(100)), 2)), 0.0)
    lost = take(made, ME, commit_of(records_of(ME, [200], 900), request=2), 0.0)
    for _, message in sent(first, Put):
        shard.on_message(Origin(ME), message, 0.0)
    acknowledge(made, first, 0.0)
    assert len(sent(lost, Put)) == 1

    ((_, summary),) = sent(ticked(made, ASK_FIRST_S), SUMMARIES)
    (differs,) = shard.on_message(Origin(ME), summary, 0.0)
    assert isinstance(differs, Send)
    (again,) = take(made, A, differs.message, ASK_FIRST_S)
    assert isinstance(again, Send)
    assert isinstance(again.message, Put)
    (acknowledged,) = shard.on_message(Origin(ME), again.message, ASK_FIRST_S)
    assert isinstance(acknowledged, Send)
    done = take(made, A, acknowledged.message, ASK_FIRST_S)

    assert ASK_FIRST_S < LAGGING_S / 2 < PUBLISH_TIMEOUT_S / 2
    assert puts([again]) == {A: keys(200)}
    assert len(located(shard, [200])) == 1
    assert [(a.request, a.published) for a in answers(done)] == [(2, 1)]


def test_put_that_is_lost_twice_is_repaired_by_buckets() -> None:
    """What is sent again and still missing is sought where the digests differ."""
    made = publisher_in(ring_of(A))
    take(made, ME, commit_of(records_of(ME, [200], 900)), 0.0)
    effects: list[Effect] = []
    for at in (0.1, 0.4):
        ((_, summary),) = sent(ticked(made, at), SUMMARIES)
        assert isinstance(summary, (StreamSummary, HandedOver))
        effects += take(made, A, SummaryDiffers(summary.number, bytes(2048)), at)

    ((_, repair),) = sent(effects, Repair)
    assert isinstance(repair, Repair)
    done = take(made, A, Acknowledged(repair.number), 0.4)

    assert repair.buckets == bytes([key_of(200)[0]])
    assert puts(effects) == {A: keys(200)}
    assert [a.published for a in answers(done)] == [1]
    assert made.figure("repairs_total") == 1


def test_a_page_that_is_gone_is_not_sent_again_and_its_commit_is_answered() -> None:
    """Its Put was lost, and then it was evicted: no owner can know it, and none needs to."""
    made = publisher_in(ring_of(A))
    take(made, ME, commit_of(records_of(ME, [1, 2], 10)), 0.0)
    take(made, ME, RecordsChanged(NO_RECORDS, drops_of([1], [10])), 0.01)
    ((_, summary),) = sent(ticked(made, 0.1), SUMMARIES)
    assert isinstance(summary, (StreamSummary, HandedOver))

    effects = take(made, A, SummaryDiffers(summary.number, bytes(2048)), 0.1)
    done = take(made, A, Acknowledged(made.numbers[A]), 0.1)

    assert puts(effects) == {A: keys(2)}
    assert [a.published for a in answers(effects) + answers(done)] == [2]


@pytest.mark.parametrize(
    ("answer", "answered"),
    [(SummaryMatches(2), [1, 2]), (SummaryMatches(1), [1]), (Acknowledged(2), [2])],
    ids=["a lost acknowledgement", "a later message may be lost", "an earlier one may be lost"],
)
def test_a_match_speaks_for_all_before_it_and_an_acknowledgement_for_its_own_message(
    answer: SummaryMatches | Acknowledged, answered: list[int]
) -> None:
    """Everything before a summary that matches is in force; what was sent after it may be lost."""
    made = publisher_in(ring_of(A))
    take(made, ME, commit_of(records_of(ME, [1], 2)), 0.0)
    take(made, ME, commit_of(records_of(ME, [2], 4), request=2), 0.0)

    effects = take(made, A, answer, 0.1)

    assert [a.request for a in answers(effects)] == answered


def test_summary_that_differs_is_repaired_once() -> None:
    """Only the answer to the last summary counts, and its repetition calls no second repair."""
    made = publisher_in(ring_of(A))
    acknowledge(made, take(made, ME, commit_of(records_of(ME, [1], 2)), 0.0), 0.0)
    ((_, summary),) = sent(ticked(made, 4.0), SUMMARIES)
    assert isinstance(summary, SUMMARIES)
    nothing = SummaryDiffers(summary.number, bytes(2048))

    stale = take(made, A, SummaryDiffers(summary.number - 1, bytes(2048)), 4.1)
    first = take(made, A, nothing, 4.1)
    again = take(made, A, nothing, 4.1)

    assert stale == again == []
    assert len(sent(first, Repair)) == 1


def test_summary_that_differs_is_judged_by_what_was_asked() -> None:
    """A commit between question and answer is no difference."""
    made = publisher_in(ring_of(A))
    acknowledge(made, take(made, ME, commit_of(records_of(ME, [1, 2], 2)), 0.0), 0.0)
    ((_, summary),) = sent(ticked(made, 4.0), SUMMARIES)
    assert isinstance(summary, SUMMARIES)
    theirs = digests_of(records_of(ME, [1], 2))
    take(made, ME, commit_of(records_of(ME, list(range(100, 140)), 20)), 4.0)

    ((_, repair),) = sent(take(made, A, SummaryDiffers(summary.number, theirs), 4.0), Repair)

    assert isinstance(repair, Repair)
    assert repair.buckets == bytes([key_of(2)[0]])


def test_malformed_digests_are_ignored_and_counted() -> None:
    """A peer that sends half a digest gets no repair, and no exception."""
    made = publisher_in(ring_of(A))
    take(made, ME, commit_of(records_of(ME, [1], 2)), 0.0)
    ticked(made, ASK_FIRST_S)

    assert take(made, A, SummaryDiffers(1, bytes(1000)), 0.3) == []
    assert made.figure("messages_dropped_total", reason="malformed") == 1


@pytest.mark.parametrize(("sender", "number"), [(C, 1), (A, 10**6)])
def test_answers_of_strangers_and_to_what_was_never_sent_are_ignored(
    sender: int, number: int
) -> None:
    """Who is no owner has nothing to acknowledge; a number above the last settles nothing."""
    made = publisher_in(ring_of(A))
    take(made, ME, commit_of(records_of(ME, [1], 2)), 0.0)

    assert take(made, sender, Acknowledged(number), 0.0) == []
    assert take(made, sender, SummaryMatches(number), 0.0) == []


def test_unacknowledged_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an owner that never answers only so much is remembered; a match settles the rest."""
    monkeypatch.setattr(streams, "PENDING_MAX", 3)
    made = publisher_in(ring_of(A))
    for at in range(10):
        take(made, ME, commit_of(records_of(ME, [at], 2 + 2 * at), request=at), 0.0)
    here = records_of(ME, list(range(10)), 2)

    remembered = answers(take(made, A, SummaryMatches(10), 0.1))
    again = PagesCommitted(CLIENT, 99, 3, b"s", NO_RECORDS, here, 1.0)
    (settled,) = answers(take(made, ME, again, 0.2))

    assert [a.request for a in remembered] == [7, 8, 9]
    assert (settled.request, settled.published) == (99, 10)


def test_quiet_cluster_exchanges_only_summaries() -> None:
    """What the digests cover is what was sent: nothing is repaired where nothing was lost."""
    cluster = cluster_of(*range(1, 5), replicas=2)
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
    take(made, ME, Republish(), 1.0)

    first = [owner for owner, _ in sent(ticked(made, made.deadline()), SUMMARIES)]
    take(made, B, SummaryMatches(0), 1.1)
    second = [owner for owner, _ in sent(ticked(made, made.deadline()), SUMMARIES)]
    take(made, A, SummaryMatches(0), 1.3)
    third = sent(ticked(made, made.deadline()), SUMMARIES)

    assert (first, second, third) == ([A, B], [A], [])


def test_owner_that_lost_everything_gets_the_hottest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large shard is filled by generation and at the rate of a hand-over, not by bucket."""
    monkeypatch.setattr(publisher, "RECORDS_A_MESSAGE_MAX", 100)
    made = publisher_in(ring_of(A), rate=1000.0)
    acknowledge(made, take(made, ME, commit_of(records_of(ME, list(range(300)), 2)), 0.0), 0.0)
    ((_, summary),) = sent(ticked(made, 5.0), SUMMARIES)
    assert isinstance(summary, SUMMARIES)

    effects = take(made, A, SummaryDiffers(summary.number, bytes(2048)), 5.0)

    assert puts(effects) == {A: keys(*range(299, 249, -1))}
    assert sent(effects, Repair) == []


def test_large_repair_is_cut_and_keeps_to_the_rate() -> None:
    """Buckets go in groups, as many as the rate allows, and no summary asks in between."""
    made = publisher_in(ring_of(A), rate=1000.0)
    acknowledge(made, take(made, ME, commit_of(records_of(ME, list(range(400)), 2)), 0.0), 0.0)
    ((_, summary),) = sent(ticked(made, 5.0), SUMMARIES)
    assert isinstance(summary, SUMMARIES)

    effects = take(made, A, SummaryDiffers(summary.number, bytes([1]) * 2048), 5.0)
    first = sent(effects, Repair)
    now = 5.0
    while sum(len(m.buckets) for _, m in sent(effects, Repair) if isinstance(m, Repair)) < BUCKETS:
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
    monkeypatch.setattr(publisher, "RECORDS_A_MESSAGE_MAX", 4)
    made = publisher_in(ring_of(ME, A), summary_s=1.0)
    names = [name for name in range(9000) if key_of(name)[0] == key_of(1)[0]][:10]
    held = records_of(ME, names, 10)
    acknowledged(made, take(made, ME, RecordsChanged(held, NO_DROPS), 0.0), 0.0)
    shard = DirectoryShard(incarnation=A)
    shard.on_message(Origin(A), view(A, ME), 0.0)
    shard.on_message(Origin(ME), Put(1, held[:1].tobytes()), 0.0)
    ((_, summary),) = sent(ticked(made, 10.0), SUMMARIES)
    (differs,) = shard.on_message(Origin(ME), summary, 10.0)  # type: ignore[arg-type]
    assert isinstance(differs, Send)

    effects = take(made, A, differs.message, 10.1)

    messages = [effect.message for effect in effects if isinstance(effect, Send)]
    assert [type(message) for message in messages] == [Repair, Put, Put]
    for message in messages:
        shard.on_message(Origin(ME), message, 10.2)  # type: ignore[arg-type]
    assert len(located(shard, names)) == 10


def test_a_doubted_record_that_is_gone_is_withdrawn_and_a_true_one_stays() -> None:
    """A reader's dispute reaches the holder, and only the holder knows."""
    made = publisher_in(ring_of(ME, A))
    old, true = records_of(ME, [1, 2], 10), records_of(ME, [3], 10)
    take(made, ME, RecordsChanged(np.concatenate([old, true]), NO_DROPS), 0.0)
    take(made, ME, RecordsChanged(records_of(ME, [2], 20), drops_of([1], [10])), 0.0)
    lie = records_of(ME, [3], 99)

    everything = np.concatenate([old, true, lie]).tobytes()
    ((owner, delete),) = sent(take(made, A, VerifyRecords(everything), 1.0), Delete)

    assert owner == A
    assert isinstance(delete, Delete)
    assert delete.drops == drops_of([1, 2], [10, 12]).tobytes()
    assert take(made, A, VerifyRecords(true.tobytes()), 1.0) == []
    assert take(made, 999, VerifyRecords(old.tobytes()), 1.0) == []
    assert take(made, A, VerifyRecords(records_of(B, [1], 10).tobytes()), 1.0) == []


def test_an_owner_that_was_paused_gets_a_hand_over_of_the_number_that_it_asks_for() -> None:
    """The answer to an earlier question does not stand for it, and later messages follow it."""
    made = publisher_in(ring_of(A))
    take(made, ME, commit_of(records_of(ME, [1], 10)), 0.0)
    ((_, first),) = sent(ticked(made, 0.1), SUMMARIES)
    assert isinstance(first, HandedOver)
    take(made, A, RequestFreshSummary(1000), 0.11)
    take(made, A, SummaryMatches(first.number), 0.12)

    ((_, summary),) = sent(ticked(made, made.deadline()), SUMMARIES)
    assert isinstance(summary, HandedOver)
    take(made, A, SummaryMatches(summary.number), 0.5)
    effects = take(made, ME, commit_of(records_of(ME, [2], 20)), 0.6)

    assert (summary.number, summary.count) == (1000, 1)
    assert [m.number for _, m in sent(effects, Put) if isinstance(m, Put)] == [1001]
    assert isinstance(summary_to(made, A, 20.0), StreamSummary), "all is handed over"


@pytest.mark.parametrize("number", [NUMBERS_AHEAD_MAX + 100, 2**64 - 1])
def test_a_number_that_no_owner_asks_for_is_passed_over(number: int) -> None:
    """An attacker cannot use up the numbers of a stream; it is answered as any owner in doubt."""
    made = publisher_in(ring_of(A))

    take(made, A, RequestFreshSummary(number), 0.1)
    ((_, summary),) = sent(ticked(made, made.deadline()), SUMMARIES)

    assert isinstance(summary, HandedOver)
    assert summary.number < 100


def test_numbers_are_left_however_often_an_owner_asks_for_higher_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By as much as it may each time."""
    monkeypatch.setattr(streams, "NUMBER_MAX", 1000)
    made = publisher_in(ring_of(A))

    take(made, A, RequestFreshSummary(1000), 0.1)
    take(made, A, RequestFreshSummary(1001), 0.1)

    assert summary_to(made, A, made.deadline()).number == 1000


def test_an_owner_that_lost_everything_is_published_to_again_before_it_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it holds matches an empty stream: it must not learn that this is all. Commits do not
    wait for it until it has everything.
    """
    monkeypatch.setattr(publisher, "RECORDS_A_MESSAGE_MAX", 100)
    made = publisher_in(ring_of(A), rate=1000.0, summary_s=0.05)
    acknowledged(made, take(made, ME, commit_of(records_of(ME, list(range(300)), 2)), 0.0), 0.0)
    ticked(made, 5.0)
    take(made, ME, commit_of(records_of(ME, [900], 2000), request=7, timeout_s=50.0), 5.0)
    now, said = 5.0, list[list[Effect]]()
    for _ in range(2):  # What it has not acknowledged is put again once, first.
        now = max(now + 0.06, made.deadline())
        asked = summary_to(made, A, now)
        said.append(take(made, A, SummaryDiffers(asked.number, bytes(2048)), now))
    ((_, put_again),), effects = sent(said[0], Put), said[1]
    answered = [(a.request, a.published) for a in answers(effects)]
    lagging = made.actor.lagging()
    made.held[A].clear()
    made.held[A].update((bytes(r["key"]), r.tobytes()) for r in put_records(effects))
    made.handed_over.clear()
    take(made, ME, commit_of(records_of(ME, [901], 2002), request=8, timeout_s=50.0), now)
    take(made, A, Acknowledged(put_again.number), now)  # type: ignore[attr-defined]
    here = PagesCommitted(CLIENT, 9, 3, b"s", NO_RECORDS, records_of(ME, [900], 2000), 50.0)
    lost = [(a.request, a.published) for a in answers(take(made, ME, here, now))]
    seen = []
    while A not in made.handed_over:
        now = max(made.deadline(), now + 0.001)
        seen += [type(message) for _, message in sent(ticked(made, now), SUMMARIES)]

    assert answered == [(7, 0)]
    assert lost == [(9, 0)], "what was acknowledged before it lost everything counts no more"
    assert lagging == {A}
    assert len(seen) > 1
    assert held_by(made, A) == set(keys(*range(300), 900, 901))
    check_books(made, now)


def test_a_repair_does_not_speak_for_messages_of_other_buckets() -> None:
    """One of those is lost still: its commit waits, and is not notified that its page is known."""
    made = publisher_in(ring_of(A))
    name = next(other for other in range(2, 99) if keys(other)[0][0] != keys(1)[0][0])
    theirs = digests_of(records_of(ME, [1], 2))
    take(made, ME, commit_of(records_of(ME, [1], 2), timeout_s=50.0), 0.0)
    take(made, ME, commit_of(records_of(ME, [name], 4), request=2, timeout_s=50.0), 0.0)
    asked = summary_to(made, A, made.deadline())
    again = take(made, A, SummaryDiffers(asked.number, theirs), 0.2)
    first = next(m for _, m in sent(again, Put) if keys(1)[0] in m.records)  # type: ignore[attr-defined]
    asked = summary_to(made, A, made.deadline())
    ((_, repair),) = sent(take(made, A, SummaryDiffers(asked.number, theirs), 0.8), Repair)
    assert isinstance(repair, Repair)
    assert isinstance(first, Put)
    assert repair.buckets == keys(name)[0][:1]

    reported = answers(take(made, A, Acknowledged(repair.number), 0.9))

    assert [(a.request, a.published) for a in reported] == [(2, 1)]
    assert [a.request for a in answers(take(made, A, Acknowledged(first.number), 1.0))] == [1]


def test_a_hand_over_has_a_number_of_its_own() -> None:
    """The answer to a summary of before does not stand for it."""
    made = publisher_in(ring_of(A))
    take(made, A, SummaryMatches(summary_to(made, A, 1.0).number), 1.0)
    regular = summary_to(made, A, 10.0)
    take(made, A, RequestSummary(), 10.0)

    handed_over = summary_to(made, A, made.deadline())
    take(made, A, SummaryMatches(regular.number), 10.5)

    assert isinstance(regular, StreamSummary)
    assert (type(handed_over), handed_over.number) == (HandedOver, regular.number + 1)
    assert isinstance(summary_to(made, A, 20.0), HandedOver)


def test_rows_of_a_repair_are_not_known_before_it_is_acknowledged() -> None:
    """A commit of pages that are here waits for it, and former owners keep them until then."""
    made = publisher_in(ring_of(A))
    here = records_of(ME, [1], 2)
    acknowledged(made, take(made, ME, commit_of(here), 0.0), 0.0)
    asked = summary_to(made, A, 4.0)
    ((_, repair),) = sent(take(made, A, SummaryDiffers(asked.number, bytes(2048)), 4.0), Repair)
    assert isinstance(repair, Repair)

    again = PagesCommitted(CLIENT, 2, 3, b"s", NO_RECORDS, here, 50.0)
    during = answers(take(made, ME, again, 4.1) + take(made, A, Acknowledged(1), 4.1))
    (after,) = answers(take(made, A, Acknowledged(repair.number), 4.2))

    assert during == []
    assert (after.request, after.published) == (2, 1)


def test_only_the_answer_to_the_last_summary_sends_again_and_only_once() -> None:
    """An earlier one speaks of what has been acknowledged since, or is on its way."""
    made = publisher_in(ring_of(A))
    take(made, ME, commit_of(records_of(ME, [1], 2), timeout_s=50.0), 0.0)
    first = summary_to(made, A, 1.0)
    take(made, ME, commit_of(records_of(ME, [2], 4), request=2, timeout_s=50.0), 1.0)
    second = summary_to(made, A, 2.0)

    late = take(made, A, SummaryDiffers(first.number, bytes(2048)), 2.1)
    right = take(made, A, SummaryDiffers(second.number, bytes(2048)), 2.2)
    again = take(made, A, SummaryDiffers(second.number, bytes(2048)), 2.3)

    assert (late, again) == ([], [])
    assert puts(right) == {A: keys(1, 2)}


def test_much_that_is_lost_is_repaired_by_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a rate, and not all at once."""
    monkeypatch.setattr(streams, "SENT_AGAIN_MAX", 2)
    made = publisher_in(ring_of(A))
    for at in range(3):
        take(made, ME, commit_of(records_of(ME, [at], 2 + 2 * at), request=at), 0.0)
    asked = summary_to(made, A, 1.0)

    effects = take(made, A, SummaryDiffers(asked.number, bytes(2048)), 1.1)

    assert puts(effects) == {}
    assert [owner for owner, _ in sent(effects, Repair)] == [A]


def test_a_late_acknowledgement_brings_no_withdrawn_row_back_into_the_books() -> None:
    """Another page has the row by then."""
    made = publisher_in(ring_of(A))
    take(made, ME, commit_of(records_of(ME, [1], 2)), 0.0)
    take(made, ME, RecordsChanged(NO_RECORDS, drops_of([1], [2])), 0.1)
    take(made, A, Acknowledged(1), 0.2)

    take(made, ME, commit_of(records_of(ME, [2], 4), request=2), 0.3)

    assert held_by(made, A) == set(keys(2))
    check_books(made, 0.4)
