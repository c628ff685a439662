"""The publisher while the ring turns: pages are handed over, and former owners are left in time."""

from __future__ import annotations

import numpy as np
import pytest

from peercache.actors.effects import Effect, Send
from peercache.actors.mailboxes import RecordsChanged, RingChanged
from peercache.actors.origin import Origin
from peercache.actors.publisher import actor as publisher
from peercache.actors.publisher import streams
from peercache.actors.publisher.actor import FORMER_MIN_S, FORMER_RINGS_MAX, SLICE_S
from peercache.actors.publisher.streams import RINGS_MAX, RecordTable, RingHandover
from peercache.model.hash_ring import HashRing
from peercache.model.records import BUCKETS
from peercache.wire.messages.directory import (
    Acknowledged,
    Delete,
    HandedOver,
    Put,
    Repair,
    StreamSummary,
    SummaryDiffers,
    SummaryMatches,
)
from tests.unit.actors.lone_publisher import (
    ME,
    SUMMARIES,
    A,
    B,
    C,
    LonePublisher,
    acknowledge,
    acknowledged,
    check_books,
    commit_of,
    held_by,
    keys,
    owned_by,
    publisher_in,
    puts,
    ring_of,
    sent,
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
)


def test_join_republishes_exactly_the_keys_whose_owners_changed() -> None:
    """Only the newcomer is notified of anything, and only of what it owns now, newest first."""
    before, after = ring_of(A, B), ring_of(A, B, C)
    made = publisher_in(before)
    names = range(200)
    acknowledge(made, take(made, ME, commit_of(records_of(ME, list(names), 2)), 0.0), 0.0)

    effects = take(made, ME, RingChanged(after), 1.0)

    theirs = owned_by(after, C, names)
    assert 0 < len(theirs) < 200
    assert puts(effects) == {C: keys(*reversed(theirs))}
    assert sent(effects, Delete) == []


def test_former_owner_is_left_only_after_the_new_one_acknowledged() -> None:
    """The holder decides when a hand-over is over; its withdrawal carries the generation."""
    before, after = ring_of(A, B), ring_of(A, B, C)
    made = publisher_in(before)
    acknowledge(made, take(made, ME, commit_of(records_of(ME, list(range(50)), 2)), 0.0), 0.0)
    moved = take(made, ME, RingChanged(after), 1.0)
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
    take(made, ME, commit_of(records_of(ME, list(range(500)), 2)), 0.0)

    slices = [puts(take(made, ME, RingChanged(ring_of(ME, A)), 1.0)).get(A, [])]
    now = 1.0
    while A not in made.handed_over:
        now = made.deadline()
        slices.append(puts(ticked(made, now)).get(A, []))

    sizes = [len(keys_sent) for keys_sent in slices]
    assert max(sizes) <= 1000 * SLICE_S + 1
    assert 0.4 <= now - 1.0 <= 0.6
    assert [key for part in slices for key in part] == keys(*reversed(range(500)))


def test_page_dropped_during_a_hand_over_is_not_published_again() -> None:
    """It is pending in the queue when it is removed: it is never published."""
    made = publisher_in(ring_of(ME), rate=20.0)
    take(made, ME, commit_of(records_of(ME, list(range(20)), 2)), 0.0)
    take(made, ME, RingChanged(ring_of(ME, A)), 1.0)
    drops = drops_of(list(range(10)), [2 + 2 * n for n in range(10)])

    take(made, ME, RecordsChanged(NO_RECORDS, drops), 1.0)
    reported: list[bytes] = []
    for step in range(60):
        reported += puts(ticked(made, 1.1 + 0.05 * step)).get(A, [])

    assert set(reported) == set(keys(*range(10, 19)))


def test_page_committed_during_a_hand_over_ends_at_its_owners_only() -> None:
    """Old and new owners take a record that changes meanwhile, and the old ones are left."""
    cluster = cluster_of(ME, A, replicas=1)
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
    acknowledge(made, take(made, ME, commit_of(records_of(ME, [name], 2)), 0.0), 0.0)
    take(made, ME, RingChanged(after), 1.0)
    take(made, ME, commit_of(records_of(ME, [name], 4), request=2), 1.0)

    older = take(made, B, Acknowledged(1), 1.1)
    newer = take(made, B, Acknowledged(2), 1.2)

    assert sent(older, Delete) == []
    assert [owner for owner, _ in sent(newer, Delete)] == [A]


def test_stale_records_do_not_come_back_after_join_evict_and_leave() -> None:
    """The historical fault: a former owner must not serve what was evicted while it owned nothing.

    1. A page is published to its owners. 2. A node joins and takes it over. 3. The page is evicted.
    4. The newcomer leaves: the former owner owns the key again, and knows nothing of the page.
    """
    cluster = cluster_of(ME, A, replicas=1)
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
    """Wrongly believed dead, it remembers our stream: the new one goes on above the old numbers.

    With a gap, which puts this holder in doubt until all is handed over: other pages were stored.
    """
    made = publisher_in(ring_of(ME, A))
    for at in range(5):
        take(made, ME, commit_of(records_of(ME, [at], 2 + 2 * at)), 0.0)
    take(made, ME, RingChanged(ring_of(ME)), 1.0)

    effects = take(made, ME, RingChanged(ring_of(ME, A)), 2.0)

    numbers = [m.number for _, m in sent(effects, Put) if isinstance(m, Put)]
    assert numbers == [7]
    assert puts(effects) == {A: keys(4, 3, 2, 1, 0)}


def test_an_owner_that_differed_is_notified_again_that_all_is_handed_over() -> None:
    """It believes no summary alone after that."""
    made = publisher_in(ring_of(ME, A))
    ((_, first),) = sent(ticked(made, 10.0), SUMMARIES)
    assert isinstance(first, HandedOver)
    take(made, A, SummaryMatches(first.number), 10.0)
    ((_, regular),) = sent(ticked(made, 20.0), SUMMARIES)

    assert isinstance(regular, StreamSummary)
    take(made, A, SummaryDiffers(regular.number, bytes([1]) * 8 * BUCKETS), 20.0)
    again = [m for at in (21.0, 22.0, 23.0) for _, m in sent(ticked(made, at), SUMMARIES)]

    assert {type(message) for message in again} == {HandedOver}


def test_owner_of_nothing_is_still_asked() -> None:
    """It may hold what it once owned: an empty summary finds that."""
    ring = ring_of(ME, A, B)
    made = publisher_in(ring)

    ((first, summary), (second, _)) = sent(ticked(made, 10.0), SUMMARIES)

    assert (first, second) == (A, B)
    assert summary == HandedOver(0, 0, 0, ring.version)


def test_summaries_of_many_streams_do_not_come_in_step() -> None:
    """Each is due at a time of its own."""
    made = publisher_in(ring_of(ME, *range(100, 120)))
    asked_at: dict[int, list[float]] = {}
    while (now := made.deadline()) < 4.0:
        for owner, summary in sent(ticked(made, now), SUMMARIES):
            asked_at.setdefault(owner, []).append(now)
            take(made, owner, SummaryMatches(summary.number), now)  # type: ignore[attr-defined]

    pauses = {round(second - first, 6) for first, second, *_ in asked_at.values()}

    assert len(pauses) == 20
    assert all(2.25 <= pause <= 2.75 for pause in pauses)


def story() -> list[object]:
    """Return all that a publisher emits whose pages every node owns, from commit to commit."""
    made = publisher_in(ring_of(ME, A, B, replicas=4), former_s=60.0)
    said: list[object] = []
    said += take(made, ME, commit_of(records_of(ME, list(range(40)), 2)), 0.0)
    said += take(made, A, Acknowledged(1), 0.001)
    said += take(made, B, Acknowledged(1), 0.002)
    # Some are known already, and some go.
    said += take(made, ME, commit_of(records_of(ME, list(range(30, 50)), 200)), 0.003)
    drops = drops_of(list(range(5)), [400] * 5)
    said += take(made, ME, RecordsChanged(records_of(ME, [60], 300), drops), 0.004)
    # While the ring turns, a message to B is lost.
    said += take(made, ME, RingChanged(ring_of(ME, A, B, C, replicas=4)), 0.005)
    said += take(made, ME, commit_of(records_of(ME, list(range(70, 90)), 500)), 0.006)
    said += take(made, ME, RecordsChanged(NO_RECORDS, drops_of([70, 71], [600] * 2)), 0.007)
    for now in (0.05, 0.1, 0.2):
        said += ticked(made, now)
    asked = {to: message.number for to, message in sent(said, SUMMARIES)}
    said += take(made, B, SummaryDiffers(asked[B], bytes(8 * BUCKETS)), 0.201)
    said += acknowledge(made, said, 0.202)
    said += ticked(made, 1.5)
    # What each owner is asked about, and what former owners are notified to drop in the end.
    check_books(made, 2.0)
    for now in (2.5, 4.0, 61.0, 62.0):
        said += acknowledge(made, ticked(made, now), now)
        said += [{owner: dict(held) for owner, held in made.held.items()}, dict(made.numbers)]
    return said


def test_where_every_node_owns_every_page_the_short_way_emits_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same messages in the same order: it leaves out what all share."""
    short = story()
    monkeypatch.setattr(HashRing, "is_everywhere", False)

    assert story() == short


def test_where_every_node_owns_every_page_no_key_is_looked_for_on_the_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither when it comes, nor when it goes."""
    made = publisher_in(ring_of(ME, A, B, replicas=3))
    monkeypatch.delattr(HashRing, "owners")

    came = take(made, ME, commit_of(records_of(ME, [1, 2], 2)), 0.0)
    went = take(made, ME, RecordsChanged(NO_RECORDS, drops_of([1], [2])), 0.1)

    assert puts(came) == {A: keys(1, 2), B: keys(1, 2)}
    assert [owner for owner, _ in sent(went, Delete)] == [A, B]


def in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows stand for a million."""
    monkeypatch.setattr(streams, "LOOKED_AT_MAX", 64)
    monkeypatch.setattr(streams, "BIN_ROWS", 50)
    monkeypatch.setattr(publisher, "HAND_OVER_ROWS_MAX", 64)


def finished(made: LonePublisher, effects: list[Effect], now: float) -> list[Effect]:
    """Acknowledge all until each owner learns that it has everything; return all that was sent."""
    seen = [*effects, *acknowledged(made, effects, now)]
    for _ in range(2000):
        if made.handed_over == set(made.owners()):
            return seen
        now = max(made.deadline(), now + 0.001)
        effects = ticked(made, now)
        seen += [*effects, *acknowledged(made, effects, now)]
    raise AssertionError("a hand-over without end")


def test_no_step_looks_at_more_than_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that a step looks at and the rows that it hands over are bounded."""
    in_slices(monkeypatch)
    made = publisher_in(ring_of(A, B))
    acknowledged(made, take(made, ME, commit_of(records_of(ME, list(range(900)), 2)), 0.0), 0.0)
    looked: list[int] = []
    owners = HashRing.owners

    def counting(ring: object, asked: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        looked.append(len(asked))
        return owners(ring, asked)  # type: ignore[arg-type]

    monkeypatch.setattr(HashRing, "owners", counting)
    effects = take(made, ME, RingChanged(ring_of(A, B, C)), 1.0)
    finished(made, effects, 1.0)

    assert sum(looked) > 900
    assert max(looked) <= 64


def test_rows_are_handed_over_hottest_first_though_looked_at_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is sent before all was looked at: the hottest row may be the last one."""
    in_slices(monkeypatch)
    made = publisher_in(ring_of(ME))
    names = np.random.default_rng(3).permutation(700).tolist()
    generations = [2 + 2 * name for name in names]
    take(made, ME, commit_of(records_of(ME, names, generations)), 0.0)

    reported = puts(finished(made, take(made, ME, RingChanged(ring_of(ME, A)), 1.0), 1.0))

    assert reported == {A: keys(*reversed(range(700)))}


def test_a_ring_that_turns_while_rows_are_looked_at_leaves_no_row_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some rows were sent by the first ring, some by the second; all end at the third's owners."""
    in_slices(monkeypatch)
    made = publisher_in(ring_of(A, B))
    acknowledged(made, take(made, ME, commit_of(records_of(ME, list(range(900)), 2)), 0.0), 0.0)

    first = take(made, ME, RingChanged(ring_of(A, B, C)), 1.0)
    acknowledged(made, first, 1.0)
    assert not puts(first), "the rows are still looked at"
    last = ring_of(A, C, 14)
    finished(made, take(made, ME, RingChanged(last), 1.01), 1.01)

    for owner in (A, C, 14):
        assert held_by(made, owner) == set(keys(*owned_by(last, owner, range(900))))


def test_a_page_dropped_while_it_moves_is_withdrawn_from_former_owners_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the former rings remembered, and with too many of them to remember."""
    for rings_max in (16, 0):
        in_slices(monkeypatch)
        monkeypatch.setattr(streams, "RINGS_MAX", rings_max)
        before, after = ring_of(A, B, C, replicas=1), ring_of(B, C, A, 14, replicas=1)
        made = publisher_in(before)
        commit = take(made, ME, commit_of(records_of(ME, list(range(300)), 2)), 0.0)
        acknowledged(made, commit, 0.0)
        moved = owned_by(after, 14, range(300))
        take(made, ME, RingChanged(after), 1.0)  # The new owner never acknowledges.

        drops = drops_of(moved, [2 + 2 * name for name in moved])
        effects = take(made, ME, RecordsChanged(NO_RECORDS, drops), 1.0)

        reported = {owner for owner, _ in sent(effects, Delete)}
        assert reported >= {
            owner for owner in (A, B, C) if set(owned_by(before, owner, range(300))) & set(moved)
        }
        for owner in (A, B, C, 14):
            assert not held_by(made, owner) & set(keys(*moved))


def test_bins_are_parted_by_heat_and_what_is_on_disk_is_coldest() -> None:
    table = RecordTable()
    records = records_of(ME, list(range(100)), 2)
    records["flags"][50:] = 0  # On disk only.
    table.store(keys(*range(100)), np.full(100, -1), records)
    turn = RingHandover(table)
    turn.begin(None)
    while turn.is_looking:
        turn.look(ring_of(A))

    taken = table.records["generation"][turn.take(100)]

    assert taken.tolist() == [*range(100, 0, -2), *range(200, 100, -2)]
    assert len(turn) == 0
    assert len(turn.take(1)) == 0


def test_summaries_of_many_streams_do_not_grow_with_the_cluster() -> None:
    """Eight owners are asked every two seconds each; of two hundred, eight in a second."""
    rates: dict[int, float] = {}
    for others in (8, 200):
        made = publisher_in(ring_of(ME, *range(100, 100 + others)))
        asked, now = 0, 0.0
        while now < 90.0:
            now = max(now, made.deadline()) + 1e-6
            for effect in ticked(made, now):
                assert isinstance(effect, Send)
                if isinstance(effect.message, SUMMARIES):
                    asked += now > 40.0
                    take(made, int(effect.to), SummaryMatches(effect.message.number), now)  # type: ignore[arg-type]
        rates[others] = asked / 50.0
    assert 3.5 < rates[8] < 4.5
    assert 7.0 < rates[200] < 9.0


def test_a_lost_message_is_asked_about_soon_however_many_streams_there_are() -> None:
    """The rarer regular summaries are not what finds it."""
    made = publisher_in(ring_of(ME, *range(100, 500)))
    for at in range(60):
        ticked(made, 10.0 + at)
    effects = take(made, ME, commit_of(records_of(ME, [1], 2)), 100.0)
    lost = {owner for owner, _ in sent(effects, Put)}
    assert lost

    asked: set[int] = set()
    now = 100.0
    while now < 100.3:
        now = max(now, made.deadline())
        asked |= (
            {owner for owner, _ in sent(ticked(made, now), SUMMARIES)} if now < 100.3 else set()
        )

    assert lost <= asked
    assert Origin(ME).identity not in asked


def test_a_page_dropped_before_it_was_looked_at_is_withdrawn_from_former_owners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its owners are others already, though no step has found that out; the next one is soon."""
    in_slices(monkeypatch)
    made = publisher_in(ring_of(A, B, replicas=1))
    acknowledged(made, take(made, ME, commit_of(records_of(ME, list(range(300)), 2)), 0.0), 0.0)
    take(made, ME, RingChanged(ring_of(A, C, replicas=1)), 1.0)
    last = ring_of(A, B, C, replicas=1)
    assert not puts(take(made, ME, RingChanged(last), 1.0)), "the rows are still looked at"
    assert made.deadline() <= 1.0 + publisher.STEP_S
    unseen = [n for n in range(64, 300) if key_of(n) in held_by(made, A)]
    moved = [n for n in unseen if n not in owned_by(last, A, range(300))]
    assert moved

    drops = drops_of(moved, [2 + 2 * name for name in moved])
    effects = take(made, ME, RecordsChanged(NO_RECORDS, drops), 1.0)

    assert A in {owner for owner, _ in sent(effects, Delete)}
    assert not held_by(made, A) & set(keys(*moved))


def test_no_summary_reports_handed_over_while_rows_wait() -> None:
    """It may come between two slices, and what it covers is what was sent: not all."""
    made = publisher_in(ring_of(ME), rate=1000.0, summary_s=0.05)
    take(made, ME, commit_of(records_of(ME, list(range(500)), 2)), 0.0)
    said = take(made, ME, RingChanged(ring_of(ME, A)), 1.0)
    acknowledge(made, said, 1.0)

    while A not in made.handed_over:
        now = made.deadline()
        effects = ticked(made, now)
        said += effects
        acknowledge(made, effects, now)
        for owner, message in sent(effects, SUMMARIES):
            take(made, owner, SummaryMatches(message.number), now)  # type: ignore[attr-defined]

    kinds = [type(effect.message) for effect in said if isinstance(effect, Send)]
    before_all_was_put = kinds[: len(kinds) - kinds[::-1].index(Put)]
    assert before_all_was_put.count(StreamSummary) > 3
    assert HandedOver not in before_all_was_put
    assert held_by(made, A) == set(keys(*range(500)))


def test_former_owners_are_not_left_before_all_rows_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their time may be over while a large holder still looks: it would begin again with the rows
    that move already, and forget the others.
    """
    in_slices(monkeypatch)
    ring = ring_of(A, B, C)
    made = publisher_in(ring_of(A, B), former_s=0.01)
    acknowledged(made, take(made, ME, commit_of(records_of(ME, list(range(900)), 2)), 0.0), 0.0)

    effects = take(made, ME, RingChanged(ring), 1.0)
    effects += ticked(made, 1.02)
    assert not puts(effects), "the rows are still looked at"
    finished(made, effects, 1.02)

    for owner in (A, B, C):
        assert held_by(made, owner) == set(keys(*owned_by(ring, owner, range(900))))


def test_a_page_that_goes_before_it_is_handed_over_is_in_no_digest() -> None:
    """Its new owner was never notified of it, and is not notified that it has gone."""
    made = publisher_in(ring_of(A, replicas=1), rate=20.0)
    commit = take(made, ME, commit_of(records_of(ME, list(range(100)), 2)), 0.0)
    acknowledged(made, commit, 0.0)
    first = take(made, ME, RingChanged(ring_of(A, B, replicas=1)), 1.0)
    assert len(puts(first)[B]) < 10

    gone = drops_of(list(range(90)), [2 + 2 * name for name in range(90)])
    effects = take(made, ME, RecordsChanged(NO_RECORDS, gone), 1.0)

    check_books(made, 1.0)
    withdrawn = sum(len(m.drops) // 24 for o, m in sent(effects, Delete) if o == B)  # type: ignore[attr-defined]
    assert withdrawn <= len(puts(first)[B])


def test_a_page_stored_again_is_put_to_each_owner_once() -> None:
    """To those that have the older record, and to those that own the new one."""
    made = publisher_in(ring_of(A, B))
    take(made, ME, commit_of(records_of(ME, [1], 2)), 0.0)

    effects = take(made, ME, commit_of(records_of(ME, [1], 4), request=2), 0.1)

    assert puts(effects) == {A: keys(1), B: keys(1)}
    check_books(made, 0.2)


def withdrawn_until(made: LonePublisher, now: float, until: float) -> int:
    """Tick until then, answering as owners do; return how many records were withdrawn."""
    count = 0
    while (now := max(made.deadline(), now + 0.001)) < until:
        effects = ticked(made, now)
        for owner, message in sent(effects, SUMMARIES):
            effects += take(made, owner, SummaryMatches(message.number), now)  # type: ignore[attr-defined]
        effects += acknowledged(made, effects, now)
        count += sum(len(m.drops) // 24 for _, m in sent(effects, Delete))  # type: ignore[attr-defined]
    return count


def test_former_owners_keep_records_for_their_whole_time() -> None:
    """A host that comes back within it costs no second hand-over; a late change prolongs it."""
    names = list(range(100))
    made = publisher_in(ring_of(A, B, replicas=1), summary_s=20.0, former_s=600.0)
    acknowledged(made, take(made, ME, commit_of(records_of(ME, names, 2)), 0.0), 0.0)

    acknowledged(made, take(made, ME, RingChanged(ring_of(A, B, C, replicas=1)), 1.0), 1.0)
    first = withdrawn_until(made, 1.0, 595.0)
    acknowledged(made, take(made, ME, RingChanged(ring_of(A, B, C, 14, replicas=1)), 595.0), 595.0)
    second = withdrawn_until(made, 595.0, 595.0 + FORMER_MIN_S)
    last = withdrawn_until(made, 595.0 + FORMER_MIN_S, 640.0)

    assert (first, second) == (0, 0)
    assert last > 30
    check_books(made, 640.0)


def test_a_page_stored_after_a_change_is_reported_to_former_owners() -> None:
    """Also where there was none before: a reader with an older view asks them."""
    before, after = ring_of(A, B, replicas=1), ring_of(A, B, C, replicas=1)
    made = publisher_in(before, former_s=600.0)
    take(made, ME, RingChanged(after), 1.0)
    withdrawn_until(made, 1.0, 5.0)

    reported = puts(take(made, ME, commit_of(records_of(ME, list(range(100)), 2)), 5.0))

    for owner in (A, B, C):
        owned = {*owned_by(before, owner, range(100)), *owned_by(after, owner, range(100))}
        assert sorted(reported[owner]) == sorted(keys(*owned))


@pytest.mark.parametrize("changes", [2, FORMER_RINGS_MAX, RINGS_MAX + 2])
def test_a_page_stored_after_many_changes_is_sent_to_the_last_former_owners(changes: int) -> None:
    """Whether or not any row moves: an owner that is some changes behind may have authority."""
    rings = [ring_of(A, B, *range(20, 20 + more), replicas=1) for more in range(changes + 1)]
    made = publisher_in(rings[0], former_s=600.0)
    for at, ring in enumerate(rings[1:]):
        take(made, ME, RingChanged(ring), 1.0 + at / 10)
        ticked(made, 1.05 + at / 10)

    names = range(100)
    sent_to = puts(take(made, ME, commit_of(records_of(ME, list(names), 2)), 5.0))
    take(
        made, ME, RecordsChanged(NO_RECORDS, drops_of(list(names), [2 + 2 * n for n in names])), 6.0
    )

    for owner in (A, B):
        owned = {
            name for ring in rings[-1 - FORMER_RINGS_MAX :] for name in owned_by(ring, owner, names)
        }
        assert sorted(sent_to[owner]) == sorted(keys(*owned))
        assert held_by(made, owner) == set(), "it was not withdrawn from all of them"
