"""The publisher while the ring turns: pages are handed over, and former owners are left in time."""

from __future__ import annotations

import numpy as np
import pytest

from peercache.actors.mailboxes import RecordsChanged, RingChanged
from peercache.actors.publisher.actor import SLICE_S
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
    acknowledge,
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
from tests.unit.actors.record_cluster import (
    NO_DROPS,
    NO_RECORDS,
    Cluster,
    drops_of,
    key_of,
    located,
    records_of,
)


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
    while len(made._turning):
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
    """Wrongly believed dead, it remembers our stream: the new one goes on above the old numbers.

    With a gap, which puts this holder in doubt until all is handed over: other pages were stored.
    """
    made = publisher_in(ring_of(ME, A))
    for at in range(5):
        heard(made, ME, commit_of(records_of(ME, [at], 2 + 2 * at)), 0.0)
    heard(made, ME, RingChanged(ring_of(ME)), 1.0)

    effects = heard(made, ME, RingChanged(ring_of(ME, A)), 2.0)

    numbers = [m.number for _, m in sent(effects, Put) if isinstance(m, Put)]
    assert numbers == [7]
    assert puts(effects) == {A: keys(4, 3, 2, 1, 0)}


def test_an_owner_that_differed_is_told_again_that_all_is_handed_over() -> None:
    """It believes no summary alone after that."""
    made = publisher_in(ring_of(ME, A))
    ((_, first),) = sent(ticked(made, 10.0), SUMMARIES)
    assert isinstance(first, HandedOver)
    heard(made, A, SummaryMatches(first.number), 10.0)
    ((_, regular),) = sent(ticked(made, 20.0), SUMMARIES)

    assert isinstance(regular, StreamSummary)
    heard(made, A, SummaryDiffers(regular.number, bytes([1]) * 8 * BUCKETS), 20.0)
    again = [m for at in (21.0, 22.0, 23.0) for _, m in sent(ticked(made, at), SUMMARIES)]

    assert {type(message) for message in again} == {HandedOver}


def test_owner_of_nothing_is_still_asked() -> None:
    """It may hold what it once owned: an empty summary finds that."""
    made = publisher_in(ring_of(ME, A, B))

    ((first, summary), (second, _)) = sent(ticked(made, 10.0), SUMMARIES)

    assert (first, second) == (A, B)
    assert summary == HandedOver(0, 0, 0, made._ring.version)


def test_summaries_of_many_streams_do_not_come_in_step() -> None:
    """Each is due at a time of its own."""
    made = publisher_in(ring_of(ME, *range(100, 120)))

    due = {stream.summary_at for stream in made._streams.values()}

    assert len(due) == 20
    assert all(1.0 <= at <= 3.0 for at in due)


def story() -> list[object]:
    """Return all that a publisher says whose pages every node owns, from commit to commit."""
    made = publisher_in(ring_of(ME, A, B, replicas=4), former_s=60.0)
    said: list[object] = []
    said += heard(made, ME, commit_of(records_of(ME, list(range(40)), 2)), 0.0)
    said += heard(made, A, Acknowledged(1), 0.001)
    said += heard(made, B, Acknowledged(1), 0.002)
    # Some are known already, and some go.
    said += heard(made, ME, commit_of(records_of(ME, list(range(30, 50)), 200)), 0.003)
    drops = drops_of(list(range(5)), [400] * 5)
    said += heard(made, ME, RecordsChanged(records_of(ME, [60], 300), drops), 0.004)
    # While the ring turns, a message to B is lost.
    said += heard(made, ME, RingChanged(ring_of(ME, A, B, C, replicas=4)), 0.005)
    said += heard(made, ME, commit_of(records_of(ME, list(range(70, 90)), 500)), 0.006)
    said += heard(made, ME, RecordsChanged(NO_RECORDS, drops_of([70, 71], [600] * 2)), 0.007)
    for now in (0.05, 0.1, 0.2):
        said += ticked(made, now)
    asked = {to: message.number for to, message in sent(said, SUMMARIES)}
    said += heard(made, B, SummaryDiffers(asked[B], bytes(8 * BUCKETS)), 0.201)
    said += acknowledge(made, said, 0.202)
    said += ticked(made, 1.5)
    for stream in made._streams.values():
        rows = np.flatnonzero(made._table.live)
        said.append((stream.owner, stream.state(rows).tobytes(), stream.content.digest()))
        said.append((made._table.moving.tobytes(), stream.content.count))
    return said


def test_where_every_node_owns_every_page_the_short_way_says_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same messages in the same order, and the same books: it leaves out what all share."""
    short = story()
    monkeypatch.setattr(HashRing, "is_everywhere", False)

    assert story() == short


def test_where_every_node_owns_every_page_no_key_is_looked_for_on_the_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither when it comes, nor when it goes."""
    made = publisher_in(ring_of(ME, A, B, replicas=3))
    monkeypatch.delattr(HashRing, "owners")

    came = heard(made, ME, commit_of(records_of(ME, [1, 2], 2)), 0.0)
    went = heard(made, ME, RecordsChanged(NO_RECORDS, drops_of([1], [2])), 0.1)

    assert puts(came) == {A: keys(1, 2), B: keys(1, 2)}
    assert [owner for owner, _ in sent(went, Delete)] == [A, B]
