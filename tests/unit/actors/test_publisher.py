"""The publisher: every owner comes to know what this node holds, and nothing that it does not."""

from __future__ import annotations

import attrs
import pytest

from peercache.actors.effects import Effect, NotifyDirectory, NotifyPool
from peercache.actors.mailboxes import (
    CommitAnswered,
    PagesCommitted,
    RecordsChanged,
    RemovalDone,
    ReserveAhead,
    RingChanged,
)
from peercache.actors.publisher import actor as publisher
from peercache.actors.publisher import waiters
from peercache.actors.publisher.streams import ASK_FIRST_S
from peercache.model.hash_ring import HashRing
from peercache.model.records import Records, from_bytes
from peercache.wire.messages.directory import (
    Acknowledged,
    Delete,
    HandedOver,
    Put,
    Repair,
    RequestSummary,
    SummaryMatches,
)
from peercache.wire.messages.pool import Committed, Removed, Reserve
from tests.unit.actors.lone_publisher import (
    CLIENT,
    ME,
    SUMMARIES,
    A,
    B,
    C,
    LonePublisher,
    acknowledge,
    answers,
    commit_of,
    keys,
    owned_by,
    publisher_in,
    puts,
    ring_of,
    sent,
    take,
    ticked,
    two_nodes,
)
from tests.unit.actors.record_cluster import (
    NO_DROPS,
    NO_RECORDS,
    cluster_of,
    drops_of,
    held_of,
    key_of,
    records_of,
)

# --- commits ------------------------------------------------------------------------------------


def published(made: LonePublisher, records: Records) -> None:
    """Let every owner know these records."""
    acknowledge(made, take(made, ME, RecordsChanged(records, NO_DROPS), 0.0), 0.0)


def test_commit_puts_one_batch_to_each_owner() -> None:
    """Each owner gets exactly its keys, in one message, numbered from 1."""
    ring = ring_of(ME, A, B, C)
    made = publisher_in(ring)

    effects = take(made, ME, commit_of(records_of(ME, list(range(100)), 2)), 0.0)

    reported = puts(effects)
    assert set(reported) == {A, B, C}
    for owner, theirs in reported.items():
        assert theirs == keys(*owned_by(ring, owner, range(100)))
    assert [m.number for _, m in sent(effects, Put) if isinstance(m, Put)] == [1, 1, 1]


def test_commit_is_answered_when_all_owners_know_its_records() -> None:
    """One acknowledgement is not enough; the answer carries what the client needs."""
    made = publisher_in(ring_of(A, B))
    records, here = records_of(ME, [1, 2], 2), records_of(ME, [9], 50)
    published(made, here)
    effects = take(made, ME, PagesCommitted(CLIENT, 4, 3, b"abc", records, here, 1.0), 0.0)

    first = take(made, A, Acknowledged(2), 0.0)
    second = take(made, B, Acknowledged(2), 0.0)

    packed = records.tobytes() + here.tobytes()
    assert answers(effects) == answers(first) == []
    answer = Committed(4, 3, b"abc", packed, 3)
    assert second == [NotifyDirectory(CommitAnswered(CLIENT, answer))]


def test_our_own_shard_is_no_owner_that_has_acknowledged() -> None:
    """Other hosts must know: a page that this host alone can find is not published."""
    made = publisher_in(ring_of(ME, A, B, replicas=3))

    effects = take(made, ME, commit_of(records_of(ME, [1, 2], 2)), 0.0)
    first = take(made, A, Acknowledged(1), 0.0)
    second = take(made, B, Acknowledged(1), 0.0)

    assert answers(effects) == answers(first) == []
    assert [a.published for a in answers(second)] == [2]
    assert set(puts(effects)) == {A, B}


def test_an_owner_that_misses_one_timeout_is_waited_for_no_longer_until_it_knows_all() -> None:
    """A stopped owner costs one timeout once; what it does not know counts as unpublished."""
    made = publisher_in(ring_of(A, B))
    patient = attrs.evolve(commit_of(records_of(ME, [1], 2)), timeout_s=0.1)
    take(made, ME, patient, 0.0)
    take(made, A, Acknowledged(1), 0.01)
    (late,) = answers(ticked(made, 0.1))

    take(made, ME, commit_of(records_of(ME, [2], 4), request=2), 0.2)
    (quick,) = answers(take(made, A, Acknowledged(2), 0.21))
    summaries = [(o, m) for o, m in sent(ticked(made, 4.0), SUMMARIES) if o == B]
    ((_, summary),) = summaries
    take(made, B, SummaryMatches(summary.number), 4.0)
    take(made, ME, commit_of(records_of(ME, [3], 6), request=3), 4.1)
    waits = answers(take(made, A, Acknowledged(made.numbers[A]), 4.1))
    (whole,) = answers(take(made, B, Acknowledged(made.numbers[B]), 4.2))

    assert [a.published for a in (late, quick, whole)] == [0, 0, 1]
    assert waits == []


def test_timeout_that_was_short_shows_nothing_about_an_owner() -> None:
    """A commit whose deadline is near is answered; the next one waits for the owner as ever."""
    made = publisher_in(ring_of(A))
    take(made, ME, attrs.evolve(commit_of(records_of(ME, [1], 2)), timeout_s=0.01), 0.0)
    ticked(made, 0.01)

    effects = take(made, ME, commit_of(records_of(ME, [2], 4), request=2), 0.02)

    assert answers(effects) == []
    assert [a.request for a in answers(take(made, A, Acknowledged(2), 0.03))] == [2]


def test_commits_that_wait_for_an_owner_end_with_it() -> None:
    """A member that leaves the ring acknowledges nothing more."""
    made = publisher_in(ring_of(A, B))
    take(made, ME, commit_of(records_of(ME, [1], 2)), 0.0)
    take(made, A, Acknowledged(1), 0.0)

    effects = take(made, ME, RingChanged(ring_of(A)), 0.1)

    assert [a.published for a in answers(effects)] == [0]


def test_commit_is_answered_once() -> None:
    """Later owners, repeated acknowledgements and the end of timeout say nothing more."""
    made = publisher_in(ring_of(A, B))
    take(made, ME, commit_of(records_of(ME, [1], 2)), 0.0)
    reported = answers(take(made, A, Acknowledged(1), 0.0))

    reported += answers(take(made, B, Acknowledged(1), 0.1))
    reported += answers(take(made, A, Acknowledged(1), 0.2))
    reported += answers(take(made, B, SummaryMatches(1), 0.3))
    reported += answers(ticked(made, 5.0))

    assert len(reported) == 1


def test_commit_is_answered_when_timeout_is_over() -> None:
    """What is acknowledged by then counts, and the pages that were here already."""
    ring = ring_of(A, B, C)
    made = publisher_in(ring)
    names = range(50)
    here = records_of(ME, [99], 500)
    published(made, here)
    commit = PagesCommitted(CLIENT, 1, 1, b"", records_of(ME, list(names), 2), here, 0.2)
    reported = sent(take(made, ME, commit, 10.0), Put)
    for owner, message in reported:
        if owner != C and isinstance(message, Put):
            take(made, owner, Acknowledged(message.number), 10.1)

    early = ticked(made, 10.19)
    late = ticked(made, 10.2)

    assert answers(early) == []
    assert [a.published for a in answers(late)] == [50 - len(owned_by(ring, C, names)) + 1]


@pytest.mark.parametrize("received_at", [10.1, 10.3])
def test_pool_receives_the_rest_of_a_commit_after_its_answer(received_at: float) -> None:
    """Be it answered because owners know, or because its timeout is over; once, either way."""
    made = publisher_in(ring_of(A, B))
    then = ReserveAhead(CLIENT, Reserve(0, 7, 1, b"", bytes(8)))
    records = records_of(ME, [1, 2, 3], 2)
    commit = PagesCommitted(CLIENT, 1, 1, b"", records, NO_RECORDS, 0.2, then=(then,))
    effects = take(made, ME, commit, 10.0)
    reported = [NotifyPool(then)]
    at_once = [effect for effect in effects if isinstance(effect, NotifyPool)]

    if received_at > 10.2:
        effects = ticked(made, 10.2)
    for owner in (A, B):
        effects += take(made, owner, Acknowledged(1), received_at)

    assert at_once == []
    assert [effect for effect in effects if isinstance(effect, NotifyPool)] == reported
    answered = next(effect for effect in effects if answers([effect]))
    assert effects.index(answered) < effects.index(reported[0])


def test_commit_of_pages_that_are_published_already_is_answered_at_once() -> None:
    """A set that finds its pages here waits for no owner that knows them."""
    made = publisher_in(ring_of(A, B))
    here = records_of(ME, [1], 2)
    published(made, here)
    commit = PagesCommitted(CLIENT, 1, 1, b"", NO_RECORDS, here, 1.0)

    effects = take(made, ME, commit, 0.0)

    assert [a.published for a in answers(effects)] == [1]


@pytest.mark.parametrize("is_acknowledged", [True, False])
def test_commit_of_pages_that_are_not_published_yet_waits_with_the_first_one(
    is_acknowledged: bool,
) -> None:
    """Each is answered at its own deadline, and by what the owners know: however often asked."""
    made = publisher_in(ring_of(A, B))
    records = records_of(ME, [1, 2], 2)
    first = commit_of(records, timeout_s=0.1)
    again = PagesCommitted(CLIENT, 2, 3, b"s", NO_RECORDS, records, 0.1)
    take(made, ME, first, 0.0)
    take(made, A, Acknowledged(1), 0.01)

    at_once = answers(take(made, ME, again, 0.05))
    if is_acknowledged:
        reported = answers(take(made, B, Acknowledged(1), 0.06))
    else:
        reported = answers(ticked(made, 0.1)) + answers(ticked(made, 0.15))

    assert at_once == []
    assert sorted((a.request, a.published) for a in reported) == [
        (request, 2 if is_acknowledged else 0) for request in (1, 2)
    ]


def test_commit_of_pages_that_a_lagging_owner_lacks_counts_them_as_unpublished() -> None:
    """It does not wait for that owner, and reports it."""
    made = publisher_in(ring_of(A, B))
    records = records_of(ME, [1, 2], 2)
    take(made, ME, commit_of(records, timeout_s=0.1), 0.0)
    take(made, A, Acknowledged(1), 0.01)
    ticked(made, 0.1)

    again = take(made, ME, PagesCommitted(CLIENT, 2, 3, b"s", NO_RECORDS, records, 0.1), 0.2)
    take(made, B, Acknowledged(1), 0.3)
    later = take(made, ME, PagesCommitted(CLIENT, 3, 3, b"s", NO_RECORDS, records, 0.1), 0.4)

    assert [a.published for a in answers(again)] == [0]
    assert [a.published for a in answers(later)] == [2]


def test_commit_does_not_wait_for_a_page_that_is_gone_meanwhile() -> None:
    """An eviction ends the wait of those that joined, and its slot's next page starts none."""
    made = publisher_in(ring_of(A))
    records = records_of(ME, [1], 2)
    take(made, ME, commit_of(records, timeout_s=0.0), 0.0)
    waits = take(made, ME, PagesCommitted(CLIENT, 2, 3, b"s", NO_RECORDS, records, 5.0), 0.1)
    take(made, ME, RecordsChanged(NO_RECORDS, drops_of([1], [2])), 0.2)
    take(made, ME, RecordsChanged(records_of(ME, [2], 4), NO_DROPS), 0.2)

    reported = take(made, A, Acknowledged(2), 0.3)

    assert answers(waits) == []
    assert [a.request for a in answers(reported)] == [2]


def test_pages_that_were_here_before_the_first_view_are_not_published() -> None:
    """Without a ring no owner is known, for a repeated Commit as for the first."""
    made = publisher_in(HashRing([], virtual_nodes=1, replicas=1))
    records = records_of(ME, [1], 2)
    take(made, ME, commit_of(records, timeout_s=0.1), 0.0)

    waits = take(made, ME, PagesCommitted(CLIENT, 2, 3, b"s", NO_RECORDS, records, 0.1), 0.0)

    assert answers(waits) == []
    assert [a.published for a in answers(ticked(made, 0.1))] == [0, 0]


def test_commit_of_a_lone_node_is_answered_at_once() -> None:
    """The only owner waits for no acknowledgement, and sends nothing."""
    made = publisher_in(ring_of(ME))

    effects = take(made, ME, commit_of(records_of(ME, [1, 2], 2)), 0.0)

    assert [a.published for a in answers(effects)] == [2]
    assert len(effects) == 1


def test_commit_without_timeout_is_answered_at_once() -> None:
    """Nothing is published yet: no turn of the loop, and no tick, goes by before."""
    ring = ring_of(ME, A, B)
    made = publisher_in(ring)
    names = range(50)

    effects = take(made, ME, commit_of(records_of(ME, list(names), 2), timeout_s=0.0), 3.0)

    assert [a.published for a in answers(effects)] == [0]
    assert answers(ticked(made, made.deadline())) == []


def test_commit_before_there_is_a_ring_waits_for_its_timeout() -> None:
    """Without owners nothing is published; once they are known they are notified."""
    made = publisher_in(HashRing([], virtual_nodes=1, replicas=1))
    take(made, ME, commit_of(records_of(ME, [1], 2), timeout_s=0.5), 0.0)

    late = ticked(made, 0.5)
    reported = take(made, ME, RingChanged(ring_of(ME, A)), 0.6)

    assert [a.published for a in answers(late)] == [0]
    assert puts(reported) == {A: keys(1)}


def test_commits_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is answered as unpublished at once; its records are sent all the same."""
    monkeypatch.setattr(waiters, "WAITERS_MAX", 2)
    made = publisher_in(ring_of(A, B))
    for request in (1, 2):
        take(made, ME, commit_of(records_of(ME, [request], 2), request=request), 0.0)

    effects = take(made, ME, commit_of(records_of(ME, [3], 2), request=3), 0.0)

    assert [(a.request, a.published) for a in answers(effects)] == [(3, 0)]
    assert set(puts(effects)) == {A, B}


def test_a_commit_that_waits_keeps_its_timeout_however_many_are_answered_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The timeouts of those are forgotten, and its own is not."""
    monkeypatch.setattr(waiters, "WAITERS_MAX", 4)
    made = publisher_in(ring_of(A))
    take(made, ME, commit_of(records_of(ME, [100], 900), request=9, timeout_s=50.0), 0.0)
    for at in range(20):
        take(made, ME, commit_of(records_of(ME, [at], 2 + 2 * at), timeout_s=50.0), 0.0)
        take(made, A, Acknowledged(made.numbers[A]), 0.0)

    answered = answers(ticked(made, 50.0))

    assert [(a.request, a.published) for a in answered] == [(9, 0)]


def test_a_commit_keeps_its_timeout_if_those_of_answered_ones_are_forgotten_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it is never answered if its owner has died."""
    monkeypatch.setattr(waiters, "WAITERS_MAX", 4)
    made = publisher_in(ring_of(A))
    for at in range(8):
        take(made, ME, commit_of(records_of(ME, [at], 2 + 2 * at), timeout_s=50.0), 0.0)
        take(made, A, Acknowledged(made.numbers[A]), 0.0)
    take(made, ME, commit_of(records_of(ME, [100], 900), request=9, timeout_s=50.0), 0.0)

    answered = answers(ticked(made, 50.0))

    assert [(a.request, a.published) for a in answered] == [(9, 0)]


def test_puts_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large batch goes in several messages, each of which must be acknowledged."""
    monkeypatch.setattr(publisher, "RECORDS_A_MESSAGE_MAX", 10)
    made = publisher_in(ring_of(A))

    effects = take(made, ME, commit_of(records_of(ME, list(range(25)), 2)), 0.0)
    two = take(made, A, Acknowledged(3), 0.0) + take(made, A, Acknowledged(1), 0.0)
    third = take(made, A, Acknowledged(2), 0.0)

    sizes = [len(m.records) // 56 for _, m in sent(effects, Put) if isinstance(m, Put)]
    assert sizes == [10, 10, 5]
    assert answers(two) == []
    assert [a.published for a in answers(third)] == [25]


# --- changes of the pool ------------------------------------------------------------------------


def test_drops_go_as_one_delete_for_each_owner() -> None:
    """An eviction of many pages is one message an owner, never one a page."""
    ring = ring_of(ME, A, B)
    made = publisher_in(ring)
    take(made, ME, commit_of(records_of(ME, list(range(40)), 2)), 0.0)
    drops = drops_of(list(range(40)), [2 + 2 * n for n in range(40)])

    effects = take(made, ME, RecordsChanged(NO_RECORDS, drops), 0.0)

    deleted = {owner: m for owner, m in sent(effects, Delete) if isinstance(m, Delete)}
    assert len(effects) == len(deleted) == 2
    for owner, message in deleted.items():
        assert len(message.drops) // 24 == len(owned_by(ring, owner, range(40)))


def test_drop_that_is_older_than_the_record_ends_nothing() -> None:
    """A page committed again is another record than the one that was dropped."""
    made = publisher_in(ring_of(ME, A))
    take(made, ME, commit_of(records_of(ME, [1], 20)), 0.0)

    assert take(made, ME, RecordsChanged(NO_RECORDS, drops_of([1], [18])), 0.0) == []


def test_page_named_twice_in_one_change_ends_with_the_newest() -> None:
    """Evicted, committed and evicted again within one batch: the digest still fits."""
    cluster = cluster_of(ME, A)
    cluster.run(0.1)
    records = records_of(ME, [1, 1, 2], [2, 6, 4])
    drops = drops_of([1, 1], [2, 4])

    for actor in ("directory", "publisher"):
        cluster.notify(ME, actor, RecordsChanged(records, drops))
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


# --- commits --------------------------------------------------------------------------------------


def test_a_lagging_owners_word_does_not_stand_for_another_owners() -> None:
    """It is late, and speaks for itself: the answer waits for those that were awaited."""
    made = publisher_in(ring_of(A, B, C, replicas=3))
    patient = attrs.evolve(commit_of(records_of(ME, [1], 2)), timeout_s=0.1)
    take(made, ME, patient, 0.0)
    for owner in (A, B):
        take(made, owner, Acknowledged(1), 0.01)
    assert [a.published for a in answers(ticked(made, 0.1))] == [0]
    assert made.actor.lagging() == {C}

    take(made, ME, commit_of(records_of(ME, [2], 4), request=2), 0.2)
    seen = [answers(take(made, owner, Acknowledged(2), 0.21)) for owner in (C, A)]
    (last,) = answers(take(made, B, Acknowledged(2), 0.22))

    assert seen == [[], []]
    assert (last.request, last.published) == (2, 1)


def test_an_owner_that_is_lagging_is_waited_for_by_no_commit() -> None:
    """Also not by those that have timeout left: a stopped owner costs one timeout."""
    made = publisher_in(ring_of(A, B))
    take(made, ME, commit_of(records_of(ME, [1], 2), timeout_s=0.1), 0.0)
    take(made, ME, commit_of(records_of(ME, [2], 4), request=2, timeout_s=50.0), 0.05)
    for number in (1, 2):
        assert answers(take(made, A, Acknowledged(number), 0.06)) == []

    reported = answers(ticked(made, 0.1))

    assert [(a.request, a.published) for a in reported] == [(1, 0), (2, 0)]


def test_no_commit_waits_for_more_than_a_minute() -> None:
    """Whatever its client states: a timeout without end would be a waiter forever."""
    made = publisher_in(ring_of(A))
    take(made, ME, commit_of(records_of(ME, [1], 2), timeout_s=1e9), 0.0)

    early = answers(ticked(made, waiters.TIMEOUT_MAX_S - 0.1))
    (late,) = answers(ticked(made, waiters.TIMEOUT_MAX_S))

    assert early == []
    assert late.published == 0


# --- owners ---------------------------------------------------------------------------------------


def test_a_page_that_came_and_went_within_a_batch_is_held_by_no_owner() -> None:
    """Its drop is of the same generation: it ends the record, whichever is named first."""
    made = publisher_in(ring_of(A))

    changed = RecordsChanged(records_of(ME, [1, 2], [10, 12]), drops_of([1], [10]))
    effects = take(made, ME, changed, 0.0)
    numbers = [m.number for _, m in sent(effects, (Put, Delete))]  # type: ignore[attr-defined]
    ((_, summary),) = sent(ticked(made, made.deadline()), SUMMARIES)

    assert isinstance(summary, HandedOver)
    assert numbers == [1, 2], "a message that is overtaken is not applied"
    assert summary.count == 1


def test_an_owner_that_wants_a_summary_gets_it_soon() -> None:
    """Not with the next regular one: it has no authority until then."""
    made = publisher_in(ring_of(A), summary_s=100.0)
    ((_, first),) = sent(ticked(made, made.deadline()), SUMMARIES)
    assert isinstance(first, HandedOver)
    take(made, A, SummaryMatches(first.number), 1.0)
    assert ticked(made, 1.5) == []
    assert made.deadline() > 10.0

    take(made, A, RequestSummary(), 2.0)

    assert made.deadline() <= 2.0 + ASK_FIRST_S
    ((_, again),) = sent(ticked(made, 2.0 + ASK_FIRST_S), SUMMARIES)
    assert isinstance(again, HandedOver)


# --- removals -------------------------------------------------------------------------------------


def removed_from(made: LonePublisher, *, timeout_s: float) -> list[Effect]:
    """Remove a page that both owners know, at 1 s."""
    records = records_of(ME, [1], 2)
    acknowledge(made, take(made, ME, RecordsChanged(records, NO_DROPS), 0.0), 0.0)
    take(made, ME, RecordsChanged(NO_RECORDS, drops_of([1], [2])), 1.0)
    return take(made, ME, RemovalDone(CLIENT, Removed(9, 1), timeout_s), 1.0)


def test_removal_is_answered_when_all_owners_know_it() -> None:
    """A lookup that begins afterwards finds nothing."""
    made = publisher_in(ring_of(A, B))

    at_once = removed_from(made, timeout_s=1.0)
    first = take(made, A, Acknowledged(2), 1.01)
    second = take(made, B, Acknowledged(2), 1.02)

    assert at_once == first == []
    assert second == [NotifyDirectory(RemovalDone(CLIENT, Removed(9, 1)))]


def test_removal_names_the_owners_that_may_not_know_it_in_time() -> None:
    """It waits for a part of its timeout: the answer has to come back."""
    made = publisher_in(ring_of(A, B))
    removed_from(made, timeout_s=1.0)
    take(made, A, Acknowledged(2), 1.01)

    early, late = (ticked(made, at) for at in (1.2, 1.25))

    answer = NotifyDirectory(RemovalDone(CLIENT, Removed(9, 1, (B,))))
    assert answer not in early
    assert answer in late


def test_removal_waits_for_no_owner_that_is_lagging() -> None:
    """A stopped owner would cost each of them its timeout; it is named."""
    made = publisher_in(ring_of(A))
    take(made, ME, commit_of(records_of(ME, [1], 2), timeout_s=0.1), 0.0)
    ticked(made, 0.1)

    reported = take(made, ME, RemovalDone(CLIENT, Removed(9, 1), 1.0), 1.0)

    assert reported == [NotifyDirectory(RemovalDone(CLIENT, Removed(9, 1, (A,))))]


def test_removal_without_timeout_or_owners_is_answered_at_once() -> None:
    """Of a node that is alone, and for a client that does not wait."""
    alone = removed_from(publisher_in(ring_of(ME)), timeout_s=1.0)
    hasty = removed_from(publisher_in(ring_of(A)), timeout_s=0.0)

    assert alone == [NotifyDirectory(RemovalDone(CLIENT, Removed(9, 1)))]
    assert hasty == [NotifyDirectory(RemovalDone(CLIENT, Removed(9, 1, (A,))))]
