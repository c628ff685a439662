"""What a directory shard is careful about, one line of it at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from peercache.actors.directory import actor as directory
from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.directory.holdings import TICK_S
from peercache.actors.directory.table import DirectoryTable
from peercache.actors.effects import Send
from peercache.actors.mailboxes import RecordsChanged
from peercache.actors.origin import Origin
from peercache.model.member import SUSPECT
from peercache.model.reads import TICK_AGE_MAX_S
from peercache.observability.metrics import Metrics
from peercache.wire.messages.directory import (
    Acknowledged,
    HandedOver,
    Put,
    Repair,
    ReportStale,
    RequestSummary,
    StreamSummary,
    SummaryDiffers,
)
from tests.unit.actors.lone_shard import ME, A, B, C, delete, heard, put, refused, shard_of
from tests.unit.actors.lone_shard import summary_of as summary_made_of
from tests.unit.actors.record_cluster import (
    NO_DROPS,
    held_of,
    key_of,
    located,
    member,
    records_of,
    view,
)
from tests.unit.actors.test_directory_authority import (
    RING,
    has_authority,
    hear,
    shard_in_sync,
    summary_of,
    tick,
)

# --- doubts ---------------------------------------------------------------------------------------


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


def test_a_count_that_differs_is_a_difference_though_the_digest_is_equal() -> None:
    """Two equal records have no digest together: XOR takes both away."""
    shard = shard_in_sync()
    hear(shard, A, Put(1, records_of(A, [1], 10).tobytes()), 0.01)
    right = summary_of(1, records_of(A, [1], 10))

    (answer,) = hear(shard, A, StreamSummary(1, 3, right.digest), 0.01)

    assert isinstance(answer, Send)
    assert isinstance(answer.message, SummaryDiffers)
    assert not has_authority(shard, 0.01)


def test_nothing_is_known_of_a_holder_that_the_view_has_forgotten() -> None:
    """A node that restarts for years fills no memory with numbers of its former selves."""
    shard = shard_in_sync()
    tick(shard, 1.0)
    late = 1.0 + TICK_AGE_MAX_S + TICK_S
    shard.on_tick(late)
    assert set(shard.authority._least) == {ME, A, B}

    hear(shard, ME, view(ME, A), late)

    assert set(shard.authority._least) == {ME, A}


def test_a_false_number_alone_asks_for_no_number() -> None:
    """The process has not stood still: any hand-over after it counts."""
    shard = shard_in_sync()
    tick(shard, 0.5)
    hear(shard, A, Put(2**50, b""), 0.5)
    hear(shard, A, StreamSummary(3, 0, 0), 0.5)

    asked = [message for peer, message in tick(shard, 2.0) if peer == A]
    hear(shard, A, HandedOver(4, 0, 0, RING.version), 2.0)

    assert asked
    assert set(asked) == {RequestSummary()}
    assert has_authority(shard, 2.0)


def test_summaries_that_are_behind_are_counted_from_the_last_true_one() -> None:
    """Two that were overtaken, minutes apart, say nothing of the number held."""
    shard = shard_of(A)
    held = records_of(A, [1], 10)
    heard(shard, A, Put(7, held.tobytes()))

    first = heard(shard, A, summary_made_of(6), 1.0)
    heard(shard, A, summary_made_of(7, held), 2.0)
    second = heard(shard, A, summary_made_of(6), 60.0)

    assert first == second == []
    assert heard(shard, A, put(7, A, [2], 12), 60.0) == [Acknowledged(7)]
    assert len(located(shard, [2])) == 0


# --- holders --------------------------------------------------------------------------------------


def test_a_suspects_pages_are_found() -> None:
    """Suspicion is often wrong, and the pages are still there."""
    shard = shard_of(A)
    heard(shard, A, put(1, A, [1], 10))

    heard(shard, ME, view(ME, member(A, SUSPECT)))

    assert len(located(shard, [1])) == 1
    assert heard(shard, A, put(2, A, [2], 12)) == [Acknowledged(2)]
    assert len(located(shard, [1, 2])) == 2


def test_a_view_that_does_not_know_a_newcomer_does_not_end_it() -> None:
    """Its records were here before the view was, and the next view may know it."""
    shard = shard_of(A)
    heard(shard, C, put(1, C, [1], 10))

    heard(shard, ME, view(ME, A, B))
    kept = len(held_of(shard, C))
    heard(shard, ME, view(ME, A, B, C))

    assert kept == 1
    assert len(located(shard, [1])) == 1


def test_a_dispute_about_a_holder_that_no_view_knows_asks_no_node() -> None:
    """An inventor of holders does not have this node write to them."""
    shard = shard_of(A)
    heard(shard, C, put(1, C, [1], 10))

    assert shard.on_message(Origin(77), ReportStale(records_of(C, [1], 10).tobytes()), 0.0) == []


def test_a_holder_for_which_there_is_no_entry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has so many and no more."""
    shard = shard_of(A)
    monkeypatch.setattr(DirectoryTable, "begin", lambda *_, **__: None)

    answers = heard(shard, A, put(1, A, [1, 2], 10))

    assert answers == heard(shard, A, summary_made_of(1)) == []
    assert refused(shard, "not_a_member") == 2
    assert held_of(shard, A) == {}


# --- room -----------------------------------------------------------------------------------------


def shard_for(records_max: int, *members: int) -> DirectoryShard:
    shard = DirectoryShard(incarnation=ME, metrics=Metrics(), records_max=records_max)
    heard(shard, ME, view(ME, *members))
    for holder in members:
        heard(shard, holder, Put(1, b""))
    return shard


def test_a_holder_whose_share_is_full_withdraws() -> None:
    """A delete needs no room: it makes some."""
    shard = shard_for(8, A)
    heard(shard, A, put(2, A, [1, 2, 3, 4], 10))
    full = heard(shard, A, put(3, A, [5], 20))

    answers = heard(shard, A, delete(4, [1, 2, 3, 4], [10, 12, 14, 16]))

    assert (full, answers) == ([], [Acknowledged(4)])
    assert heard(shard, A, put(5, A, [5], 20)) == [Acknowledged(5)]


def test_the_own_pool_takes_no_room_of_others() -> None:
    """It is bounded by its own memory."""
    shard = shard_for(8, A)
    own = records_of(ME, list(range(100, 200)), 10)
    heard(shard, ME, RecordsChanged(own, NO_DROPS))

    assert heard(shard, A, put(2, A, [1, 2, 3, 4], 10)) == [Acknowledged(2)]


def test_all_shares_together_are_no_more_than_there_may_be() -> None:
    """Each has twice an even one; only so many members may have all of it."""
    members = range(100, 108)
    shard = shard_for(80, *members)

    answers = [
        heard(shard, holder, put(2, holder, list(range(17)), 10 + 40 * at))
        for at, holder in enumerate(members)
    ]

    assert answers == [[Acknowledged(2)]] * 4 + [[]] * 4
    assert shard.record_count == 4 * 17
    assert refused(shard, "too_many") == 4 * 17


def test_a_repair_that_brings_no_more_is_taken_though_the_share_is_less_by_now() -> None:
    """With each new member the share is smaller; what is there may get right all the same."""
    shard = shard_for(40, A)
    names = list(range(20))
    heard(shard, A, put(2, A, names, 10))
    heard(shard, ME, view(ME, A, *range(100, 120)))
    for holder in range(100, 120):
        heard(shard, holder, Put(1, b""))
    buckets = bytes(sorted({key_of(name)[0] for name in names}))

    answers = heard(shard, A, Repair(3, buckets, records_of(A, names, 60).tobytes()))

    assert shard._share_of(A) < 20
    assert answers == [Acknowledged(3)]
    assert np.array_equal(
        located(shard, names)["generation"], records_of(A, names, 60)["generation"]
    )


def test_a_part_of_a_sweep_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until nothing is left: then the entry is free, and nothing is due."""
    monkeypatch.setattr(directory, "SWEEP_KEYS_MAX", 2)
    shard = shard_of(A)
    heard(shard, A, put(1, A, [1, 2, 3, 4, 5], 10))
    heard(shard, ME, view(ME))

    parts = []
    while shard.deadline() < math.inf:
        shard.on_tick(shard.deadline())
        parts.append(shard.table.figures().records)

    assert parts == [3, 1, 0]
