"""What the publisher is careful about, one line of it at a time."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from peercache.actors.effects import Effect, TellDirectory
from peercache.actors.mailboxes import RecordsChanged, RemovalDone, Republish, RingChanged
from peercache.actors.publisher import actor as publisher
from peercache.actors.publisher import streams
from peercache.actors.publisher import waiters as pending
from peercache.actors.publisher.actor import FORMER_MIN_S, Publisher
from peercache.actors.publisher.streams import ABSENT, ASK_FIRST_S, CONFIRMED, SENT
from peercache.model.records import Content
from peercache.wire.messages.directory import (
    Acknowledged,
    Delete,
    HandedOver,
    Put,
    Repair,
    RequestSummary,
    SummaryDiffers,
    SummaryMatches,
)
from peercache.wire.messages.pool import Removed
from tests.record_digests import flip
from tests.unit.actors.lone_publisher import (
    CLIENT,
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
    owned_by,
    publisher_in,
    puts,
    ring_of,
    sent,
    ticked,
)
from tests.unit.actors.record_cluster import NO_DROPS, NO_RECORDS, drops_of, records_of
from tests.unit.actors.test_publisher_turning import acknowledged, finished, held_by, in_slices

# --- commits --------------------------------------------------------------------------------------


def test_a_lagging_owners_word_does_not_stand_for_another_owners() -> None:
    """It is late, and speaks for itself: the answer waits for those that were awaited."""
    made = publisher_in(ring_of(A, B, C, replicas=3))
    patient = attrs.evolve(commit_of(records_of(ME, [1], 2)), timeout_s=0.1)
    heard(made, ME, patient, 0.0)
    for owner in (A, B):
        heard(made, owner, Acknowledged(1), 0.01)
    assert [a.published for a in answers(ticked(made, 0.1))] == [0]
    assert made.lagging() == {C}

    heard(made, ME, commit_of(records_of(ME, [2], 4), request=2), 0.2)
    seen = [answers(heard(made, owner, Acknowledged(2), 0.21)) for owner in (C, A)]
    (last,) = answers(heard(made, B, Acknowledged(2), 0.22))

    assert seen == [[], []]
    assert (last.request, last.published) == (2, 1)


def test_an_owner_that_is_lagging_is_waited_for_by_no_commit() -> None:
    """Also not by those that have timeout left: a stopped owner costs one timeout."""
    made = publisher_in(ring_of(A, B))
    heard(made, ME, commit_of(records_of(ME, [1], 2), timeout_s=0.1), 0.0)
    heard(made, ME, commit_of(records_of(ME, [2], 4), request=2, timeout_s=50.0), 0.05)
    for number in (1, 2):
        assert answers(heard(made, A, Acknowledged(number), 0.06)) == []

    told = answers(ticked(made, 0.1))

    assert [(a.request, a.published) for a in told] == [(1, 0), (2, 0)]


def test_no_commit_waits_for_more_than_a_minute() -> None:
    """Whatever its client says: a timeout without end would be a waiter for ever."""
    made = publisher_in(ring_of(A))
    heard(made, ME, commit_of(records_of(ME, [1], 2), timeout_s=1e9), 0.0)

    early = answers(ticked(made, pending.TIMEOUT_MAX_S - 0.1))
    (late,) = answers(ticked(made, pending.TIMEOUT_MAX_S))

    assert early == []
    assert late.published == 0


def test_timeout_of_answered_commits_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million sets a minute leave no million of entries."""
    monkeypatch.setattr(pending, "WAITERS_MAX", 4)
    made = publisher_in(ring_of(A))
    for at in range(100):
        heard(made, ME, commit_of(records_of(ME, [at], 2 + 2 * at), timeout_s=50.0), 0.0)
        heard(made, A, Acknowledged(made._streams[A].number), 0.0)

    assert len(made._waiting) == 0
    assert len(made._waiting._timeout) <= 2 * 4 + 1


# --- owners ---------------------------------------------------------------------------------------


def test_a_page_that_came_and_went_within_a_batch_is_held_by_no_owner() -> None:
    """Its drop is of the same generation: it ends the record, whichever is named first."""
    made = publisher_in(ring_of(A))

    changed = RecordsChanged(records_of(ME, [1, 2], [10, 12]), drops_of([1], [10]))
    effects = heard(made, ME, changed, 0.0)
    numbers = [m.number for _, m in sent(effects, (Put, Delete))]  # type: ignore[attr-defined]
    ((_, summary),) = sent(ticked(made, made.deadline()), SUMMARIES)

    assert isinstance(summary, HandedOver)
    assert numbers == [1, 2], "a message that is overtaken is not applied"
    assert summary.count == 1
    assert made._streams[A].content.count == 1


def test_an_owner_that_wants_a_summary_gets_it_soon() -> None:
    """Not with the next regular one: it has no authority until then."""
    made = publisher_in(ring_of(A), summary_s=100.0)
    ((_, first),) = sent(ticked(made, made.deadline()), SUMMARIES)
    assert isinstance(first, HandedOver)
    heard(made, A, SummaryMatches(first.number), 1.0)
    assert ticked(made, 1.5) == []
    assert made.deadline() > 10.0

    heard(made, A, RequestSummary(), 2.0)

    assert made.deadline() <= 2.0 + ASK_FIRST_S
    ((_, again),) = sent(ticked(made, 2.0 + ASK_FIRST_S), SUMMARIES)
    assert isinstance(again, HandedOver)


def test_a_node_that_was_found_dead_asks_every_owner_soon() -> None:
    """They may have dropped its records, and told it nothing."""
    made = publisher_in(ring_of(A, B), summary_s=100.0)
    for owner, message in sent(ticked(made, made.deadline() + 0.01), SUMMARIES):
        heard(made, owner, SummaryMatches(message.number), 1.0)  # type: ignore[attr-defined]
    assert ticked(made, 1.5) == []
    assert made.deadline() > 10.0

    heard(made, ME, Republish(), 2.0)

    assert made.deadline() == 2.0
    assert [owner for owner, _ in sent(ticked(made, 2.0), SUMMARIES)] == [A, B]


# --- hand-overs -----------------------------------------------------------------------------------


def test_no_summary_says_handed_over_while_rows_wait() -> None:
    """It may come between two slices, and what it covers is what was sent: not all."""
    made = publisher_in(ring_of(ME), rate=1000.0, summary_s=0.05)
    heard(made, ME, commit_of(records_of(ME, list(range(500)), 2)), 0.0)
    acknowledge(made, heard(made, ME, RingChanged(ring_of(ME, A)), 1.0), 1.0)

    early, late, now = [], [], 1.0
    for _ in range(1000):
        if late:
            break
        now = made.deadline()
        effects = ticked(made, now)
        told = sent(effects, SUMMARIES)
        if len(made._turning):
            early += told
        else:
            late += sent(effects, HandedOver)
        acknowledge(made, effects, now)
        for owner, message in told:
            heard(made, owner, SummaryMatches(message.number), now)  # type: ignore[attr-defined]

    assert len(early) > 3
    assert not any(isinstance(message, HandedOver) for _, message in early)
    assert [owner for owner, _ in late] == [A]


def test_former_owners_are_not_left_before_all_rows_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their time may be over while a large holder still looks: it would begin again with the rows
    that move already, and forget the others.
    """
    in_slices(monkeypatch)
    ring = ring_of(A, B, C)
    made = publisher_in(ring_of(A, B), former_s=0.01)
    acknowledged(made, heard(made, ME, commit_of(records_of(ME, list(range(900)), 2)), 0.0), 0.0)

    effects = heard(made, ME, RingChanged(ring), 1.0)
    effects += ticked(made, 1.02)
    assert made._turning.is_looking
    finished(made, effects, 1.02)

    for owner in (A, B, C):
        assert held_by(made, owner) == set(keys(*owned_by(ring, owner, range(900))))


def check_books(made: Publisher) -> None:
    """Fail unless each stream's digest covers exactly the rows that its owner was told of."""
    table = made._table
    rows = np.flatnonzero(table.live)
    for stream in made._streams.values():
        told = rows[stream.state(rows) != ABSENT]
        content = Content()
        flip(content, table.records[told])
        assert stream.content.count == len(told)
        assert stream.content.digest() == content.digest()


def test_a_page_that_goes_before_it_is_handed_over_is_in_no_digest() -> None:
    """Its new owner was never told of it, and is not told that it has gone."""
    made = publisher_in(ring_of(A, replicas=1), rate=20.0)
    commit = heard(made, ME, commit_of(records_of(ME, list(range(100)), 2)), 0.0)
    acknowledged(made, commit, 0.0)
    first = heard(made, ME, RingChanged(ring_of(A, B, replicas=1)), 1.0)
    assert len(puts(first)[B]) < 10

    gone = drops_of(list(range(90)), [2 + 2 * name for name in range(90)])
    effects = heard(made, ME, RecordsChanged(NO_RECORDS, gone), 1.0)

    check_books(made)
    withdrawn = sum(len(m.drops) // 24 for o, m in sent(effects, Delete) if o == B)  # type: ignore[attr-defined]
    assert withdrawn <= len(puts(first)[B])


def test_a_page_stored_again_is_put_to_each_owner_once() -> None:
    """To those that have the older record, and to those that own the new one."""
    made = publisher_in(ring_of(A, B))
    heard(made, ME, commit_of(records_of(ME, [1], 2)), 0.0)

    effects = heard(made, ME, commit_of(records_of(ME, [1], 4), request=2), 0.1)

    assert puts(effects) == {A: keys(1), B: keys(1)}
    check_books(made)


def withdrawn_until(made: Publisher, now: float, until: float) -> int:
    """Tick until then, answering as owners do; return how many records were withdrawn."""
    count = 0
    while (now := max(made.deadline(), now + 0.001)) < until:
        effects = ticked(made, now)
        for owner, message in sent(effects, SUMMARIES):
            effects += heard(made, owner, SummaryMatches(message.number), now)  # type: ignore[attr-defined]
        effects += acknowledged(made, effects, now)
        count += sum(len(m.drops) // 24 for _, m in sent(effects, Delete))  # type: ignore[attr-defined]
    return count


def test_former_owners_keep_records_for_their_whole_time() -> None:
    """A host that comes back within it costs no second hand-over; a late change prolongs it."""
    names = list(range(100))
    made = publisher_in(ring_of(A, B, replicas=1), summary_s=20.0, former_s=600.0)
    acknowledged(made, heard(made, ME, commit_of(records_of(ME, names, 2)), 0.0), 0.0)

    acknowledged(made, heard(made, ME, RingChanged(ring_of(A, B, C, replicas=1)), 1.0), 1.0)
    first = withdrawn_until(made, 1.0, 595.0)
    acknowledged(made, heard(made, ME, RingChanged(ring_of(A, B, C, 14, replicas=1)), 595.0), 595.0)
    second = withdrawn_until(made, 595.0, 595.0 + FORMER_MIN_S)
    last = withdrawn_until(made, 595.0 + FORMER_MIN_S, 640.0)

    assert (first, second) == (0, 0)
    assert last > 30
    check_books(made)


def test_a_page_stored_after_a_change_is_told_to_former_owners() -> None:
    """Also where there was none before: a reader with an older view asks them."""
    before, after = ring_of(A, B, replicas=1), ring_of(A, B, C, replicas=1)
    made = publisher_in(before, former_s=600.0)
    heard(made, ME, RingChanged(after), 1.0)
    withdrawn_until(made, 1.0, 5.0)

    told = puts(heard(made, ME, commit_of(records_of(ME, list(range(100)), 2)), 5.0))

    for owner in (A, B, C):
        owned = {*owned_by(before, owner, range(100)), *owned_by(after, owner, range(100))}
        assert sorted(told[owner]) == sorted(keys(*owned))


# --- an owner that has lost everything ------------------------------------------------------------


def test_an_owner_that_lost_everything_is_published_to_again_before_it_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it holds matches an empty stream: it must not hear that this is all. Commits do not wait
    for it until it has everything.
    """
    monkeypatch.setattr(publisher, "RECORDS_A_MESSAGE_MAX", 100)
    made = publisher_in(ring_of(A), rate=1000.0, summary_s=0.05)
    acknowledged(made, heard(made, ME, commit_of(records_of(ME, list(range(300)), 2)), 0.0), 0.0)
    ticked(made, 5.0)
    heard(made, ME, commit_of(records_of(ME, [900], 2000), request=7, timeout_s=50.0), 5.0)
    for _ in range(2):  # What it has not acknowledged is put again once, first.
        asked = made._streams[A].summary(5.0, 6.0)
        effects = heard(made, A, SummaryDiffers(asked.number, bytes(2048)), 5.0)
    answered = [(a.request, a.published) for a in answers(effects)]
    lagging = made.lagging()
    assert min(made._streams[A].pending) > asked.number, "what was sent before is awaited still"
    heard(made, ME, commit_of(records_of(ME, [901], 2002), request=8, timeout_s=50.0), 5.0)
    now, seen = 5.0, []
    while made._turning.is_looking or len(made._turning):
        now = max(made.deadline(), now + 0.001)
        seen += [type(message) for _, message in sent(ticked(made, now), SUMMARIES)]

    assert answered == [(7, 0)]
    assert lagging == {A}
    assert HandedOver not in seen[:-1]
    assert len(seen) > 1
    assert held_by(made, A) == set(keys(*range(300), 900, 901))
    check_books(made)


def test_a_repair_does_not_speak_for_messages_of_other_buckets() -> None:
    """One of those is lost still: its commit waits, and is not told that its page is known."""
    made = publisher_in(ring_of(A))
    name = next(other for other in range(2, 99) if keys(other)[0][0] != keys(1)[0][0])
    heard(made, ME, commit_of(records_of(ME, [1], 2), timeout_s=50.0), 0.0)
    heard(made, ME, commit_of(records_of(ME, [name], 4), request=2, timeout_s=50.0), 0.0)
    stream = made._streams[A]
    stream._differing[keys(name)[0][0]] = True
    (repair,) = stream.repair(100, 0.1)

    told = answers(heard(made, A, Acknowledged(repair.number), 0.2))

    assert [(a.request, a.published) for a in told] == [(2, 1)]
    assert [a.request for a in answers(heard(made, A, Acknowledged(1), 0.3))] == [1]


def test_a_summary_that_matches_does_not_speak_for_later_messages() -> None:
    """What was sent after it may be lost."""
    made = publisher_in(ring_of(A))
    heard(made, ME, commit_of(records_of(ME, [1], 2), timeout_s=50.0), 0.0)
    ((_, summary),) = sent(ticked(made, made.deadline()), SUMMARIES)
    heard(made, ME, commit_of(records_of(ME, [2], 4), request=2, timeout_s=50.0), 0.1)

    told = answers(heard(made, A, SummaryMatches(summary.number), 0.2))  # type: ignore[attr-defined]

    assert [(a.request, a.published) for a in told] == [(1, 1)]
    rows = made._table.find(keys(1, 2))
    assert made._streams[A].state(rows).tolist() == [CONFIRMED, SENT]


# --- answers that are late ------------------------------------------------------------------------


def test_a_hand_over_has_a_number_of_its_own() -> None:
    """The answer to a summary of before does not stand for it."""
    stream = publisher_in(ring_of(A))._streams[A]

    first, second = stream.summary(1.0, 2.0), stream.summary(1.0, 2.0, b"ring")

    assert second.number == first.number + 1


def test_rows_of_a_repair_are_not_known_before_it_is_acknowledged() -> None:
    """Their former owners keep them until then."""
    made = publisher_in(ring_of(A))
    acknowledged(made, heard(made, ME, commit_of(records_of(ME, [1], 2)), 0.0), 0.0)
    stream, rows = made._streams[A], made._table.find(keys(1))
    before = stream.state(rows).tolist()
    stream._differing[keys(1)[0][0]] = True
    (repair,) = stream.repair(100, 0.1)
    during = stream.state(rows).tolist()
    heard(made, A, Acknowledged(repair.number), 0.2)

    assert (before, during, stream.state(rows).tolist()) == ([CONFIRMED], [SENT], [CONFIRMED])


def test_only_the_answer_to_the_last_summary_sends_again_and_only_once() -> None:
    """An earlier one speaks of what has been acknowledged since, or is on its way."""
    made = publisher_in(ring_of(A))
    stream = made._streams[A]
    heard(made, ME, commit_of(records_of(ME, [1], 2), timeout_s=50.0), 0.0)
    first = stream.summary(1.0, 9.0)
    heard(made, ME, commit_of(records_of(ME, [2], 4), request=2, timeout_s=50.0), 1.0)
    second = stream.summary(1.0, 9.0)

    late = heard(made, A, SummaryDiffers(first.number, bytes(2048)), 1.1)
    right = heard(made, A, SummaryDiffers(second.number, bytes(2048)), 1.2)
    again = heard(made, A, SummaryDiffers(second.number, bytes(2048)), 1.3)

    assert (late, again) == ([], [])
    assert puts(right) == {A: keys(1, 2)}


def test_much_that_is_lost_is_repaired_by_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a rate, and not all at once."""
    monkeypatch.setattr(streams, "SENT_AGAIN_MAX", 2)
    made = publisher_in(ring_of(A))
    for at in range(3):
        heard(made, ME, commit_of(records_of(ME, [at], 2 + 2 * at), request=at), 0.0)
    asked = made._streams[A].summary(1.0, 9.0)

    effects = heard(made, A, SummaryDiffers(asked.number, bytes(2048)), 1.1)

    assert puts(effects) == {}
    assert [owner for owner, _ in sent(effects, Repair)] == [A]


def test_a_late_acknowledgement_brings_no_withdrawn_row_back_into_the_books() -> None:
    """Another page has the row by then."""
    made = publisher_in(ring_of(A))
    heard(made, ME, commit_of(records_of(ME, [1], 2)), 0.0)
    heard(made, ME, RecordsChanged(NO_RECORDS, drops_of([1], [2])), 0.1)
    heard(made, A, Acknowledged(1), 0.2)

    heard(made, ME, commit_of(records_of(ME, [2], 4), request=2), 0.3)

    check_books(made)
    assert made._streams[A].content.count == 1


# --- removals -------------------------------------------------------------------------------------


def removed_from(made: Publisher, *, timeout_s: float) -> list[Effect]:
    """Remove a page that both owners know, at 1 s."""
    records = records_of(ME, [1], 2)
    acknowledge(made, heard(made, ME, RecordsChanged(records, NO_DROPS), 0.0), 0.0)
    heard(made, ME, RecordsChanged(NO_RECORDS, drops_of([1], [2])), 1.0)
    return heard(made, ME, RemovalDone(CLIENT, Removed(9, 1), timeout_s), 1.0)


def test_removal_is_answered_when_all_owners_know_it() -> None:
    """A lookup that begins afterwards finds nothing."""
    made = publisher_in(ring_of(A, B))

    at_once = removed_from(made, timeout_s=1.0)
    first = heard(made, A, Acknowledged(2), 1.01)
    second = heard(made, B, Acknowledged(2), 1.02)

    assert at_once == first == []
    assert second == [TellDirectory(RemovalDone(CLIENT, Removed(9, 1)))]


def test_removal_names_the_owners_that_may_not_know_it_in_time() -> None:
    """It waits for a part of its timeout: the answer has to come back."""
    made = publisher_in(ring_of(A, B))
    removed_from(made, timeout_s=1.0)
    heard(made, A, Acknowledged(2), 1.01)

    early, late = (ticked(made, at) for at in (1.2, 1.25))

    answer = TellDirectory(RemovalDone(CLIENT, Removed(9, 1, (B,))))
    assert answer not in early
    assert answer in late


def test_removal_waits_for_no_owner_that_is_lagging() -> None:
    """A stopped owner would cost each of them its timeout; it is named."""
    made = publisher_in(ring_of(A))
    heard(made, ME, commit_of(records_of(ME, [1], 2), timeout_s=0.1), 0.0)
    ticked(made, 0.1)

    told = heard(made, ME, RemovalDone(CLIENT, Removed(9, 1), 1.0), 1.0)

    assert told == [TellDirectory(RemovalDone(CLIENT, Removed(9, 1, (A,))))]


def test_removal_without_timeout_or_owners_is_answered_at_once() -> None:
    """Of a node that is alone, and for a client that does not wait."""
    alone = removed_from(publisher_in(ring_of(ME)), timeout_s=1.0)
    hasty = removed_from(publisher_in(ring_of(A)), timeout_s=0.0)

    assert alone == [TellDirectory(RemovalDone(CLIENT, Removed(9, 1)))]
    assert hasty == [TellDirectory(RemovalDone(CLIENT, Removed(9, 1, (A,))))]
