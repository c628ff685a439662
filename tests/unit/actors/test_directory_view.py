"""The directory shard and the view: whose records it serves, and when it lets them go."""

from __future__ import annotations

import math
from functools import partial

import pytest

from peercache.actors.directory import actor as directory
from peercache.actors.mailboxes import RecordsChanged, ViewChanged
from peercache.model.member import DEAD, LEFT
from peercache.wire.messages.directory import (
    Acknowledged,
    Put,
    Repair,
    SummaryDiffers,
    SummaryMatches,
)
from tests.unit.actors.lone_shard import (
    ME,
    A,
    B,
    C,
    delete,
    heard,
    names_and_holders,
    put,
    refused,
    shard_of,
    summary_of,
)
from tests.unit.actors.record_cluster import (
    NO_DROPS,
    held_of,
    key_of,
    located,
    member,
    records_of,
    view,
)


@pytest.mark.parametrize("state", [DEAD, LEFT])
def test_records_of_an_ended_holder_are_never_served(state: int) -> None:
    """From the view that has it dead or left, before anything is swept."""
    shard = shard_of(A, B)
    heard(shard, A, put(1, A, [1], 10))
    heard(shard, B, put(1, B, [1], 10))

    heard(shard, ME, view(ME, member(A, state), B))

    assert names_and_holders(located(shard, [1]), [1]) == [(1, B)]


def test_messages_of_a_dead_holder_are_ignored() -> None:
    """What was queued for us before it died cannot bring its records back."""
    shard = shard_of(A)
    heard(shard, ME, view(ME, member(A, DEAD)))

    assert heard(shard, A, put(1, A, [1], 10)) == []
    assert heard(shard, A, summary_of(1)) == []
    assert len(located(shard, [1])) == 0
    assert refused(shard, "not_a_member") == 1


def test_sweeping_is_bounded_and_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick takes so many keys and no more; in the end nothing of the dead is left."""
    monkeypatch.setattr(directory, "SWEEP_KEYS_MAX", 10)
    shard = shard_of(A, B)
    one_bucket = [name for name in range(10**4) if key_of(name)[0] == key_of(3)[0]][:15]
    heard(shard, A, put(1, A, one_bucket + list(range(10**5, 10**5 + 10)), 10))
    heard(shard, B, put(1, B, [3], 10))
    heard(shard, ME, view(ME, member(A, DEAD), B))

    left, now = [], 0.0
    while shard.deadline() < math.inf:
        now = shard.deadline()
        shard.on_tick(now)
        shard.check()
        assert shard.deadline() > now
        left.append(shard._table.figures().records - len(held_of(shard, B)))

    assert left == [15, 5, 0]
    assert list(held_of(shard, B)) == [key_of(3)]


def test_refuted_holder_is_repaired_by_its_next_summary() -> None:
    """Its records were dropped with it: its summary differs, its repair is served, keys and all."""
    shard = shard_of(A)
    held = records_of(A, [1, 2], 10)
    heard(shard, A, Put(1, held.tobytes()))
    heard(shard, ME, view(ME, member(A, DEAD)))
    heard(shard, ME, view(ME, member(A, counter=1)))

    (answer,) = heard(shard, A, summary_of(1, held))
    assert isinstance(answer, SummaryDiffers)
    heard(shard, A, Repair(2, bytes(range(256)), held.tobytes()))
    for _ in range(3):
        shard.on_tick(shard.deadline())

    assert names_and_holders(located(shard, [1, 2]), [1, 2]) == [(1, A), (2, A)]
    assert heard(shard, A, summary_of(2, held)) == [SummaryMatches(2)]


def test_refuted_holders_old_messages_stay_late() -> None:
    """The numbers of its stream outlive its records: what was late before is late still."""
    shard = shard_of(A)
    heard(shard, A, put(1, A, [1], 10))
    heard(shard, A, delete(2, [1], [10]))
    heard(shard, ME, view(ME, member(A, DEAD)))
    heard(shard, ME, view(ME, member(A, counter=1)))

    heard(shard, A, put(1, A, [1], 10))

    assert len(located(shard, [1])) == 0


def test_new_incarnation_begins_a_new_stream() -> None:
    """Numbers start again with a node; the records of its former self are not served."""
    shard = shard_of(A)
    heard(shard, A, put(50, A, [1, 2], 10))
    heard(shard, ME, view(ME, member(A, DEAD), B))

    answers = heard(shard, B, put(1, B, [1], 4))

    assert answers == [Acknowledged(1)]
    assert names_and_holders(located(shard, [1, 2]), [1, 2]) == [(1, B)]


def test_unknown_holder_is_served_once_the_view_has_it() -> None:
    """Its records may be here before the view is: they are kept, and not served."""
    shard = shard_of()
    heard(shard, A, put(1, A, [1], 10))
    before = len(located(shard, [1]))

    heard(shard, ME, view(ME, A))

    assert (before, len(located(shard, [1]))) == (0, 1)


def test_what_is_not_served_yet_is_not_acknowledged() -> None:
    """Its holder would count it as published, and no answer names it."""
    shard = shard_of()
    summary = summary_of(1, records_of(A, [1], 10))

    early = [*heard(shard, A, put(1, A, [1], 10)), *heard(shard, A, summary)]
    heard(shard, ME, view(ME, A))
    late = heard(shard, A, summary)

    assert early == []
    assert late == [SummaryMatches(1)]


def test_unknown_holders_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invented holders do not fill this node, nor do many records for one."""
    monkeypatch.setattr(directory, "UNKNOWN_HOLDERS_MAX", 2)
    monkeypatch.setattr(directory, "UNKNOWN_RECORDS_MAX", 3)
    shard = shard_of()

    heard(shard, A, put(1, A, [1, 2, 3], 10))
    too_many = heard(shard, A, put(2, A, [4], 20))
    heard(shard, B, put(1, B, [1], 10))
    one_more = heard(shard, C, put(1, C, [1], 10))

    assert too_many == one_more == []
    assert (len(held_of(shard, A)), len(held_of(shard, C))) == (3, 0)
    assert (refused(shard, "too_many"), refused(shard, "not_a_member")) == (1, 1)


def test_unknown_holder_is_given_up_in_time() -> None:
    """What no view ever names does not stay."""
    shard = shard_of()
    heard(shard, A, put(1, A, [1], 10), now=5.0)

    assert shard.deadline() == 5.0 + directory.UNKNOWN_S
    shard.on_tick(shard.deadline())
    shard.on_tick(shard.deadline())
    shard.check()

    assert held_of(shard, A) == {}
    assert shard._table.figures().records == 0
    assert shard.deadline() == math.inf


def test_member_that_the_view_forgets_is_let_go() -> None:
    """Views forget their dead some day; nothing of them stays, not even a number."""
    shard = shard_of(A)
    heard(shard, A, put(3, A, [1], 10))

    heard(shard, ME, view(ME))

    assert len(located(shard, [1])) == 0
    assert shard._ended == {}


def test_count_of_records_is_told() -> None:
    """The gauge follows what is held, the own pool and the dead included rightly."""
    shard = shard_of(A)
    heard(shard, ME, RecordsChanged(records_of(ME, [1], 10), NO_DROPS))
    heard(shard, A, put(1, A, [1, 2, 3], 10))
    heard(shard, A, delete(2, [3], [99]))
    assert shard.metrics is not None
    gauge = partial(shard.metrics.registry.get_sample_value, "peercache_directory_records")

    before = gauge()
    heard(shard, ME, view(ME, member(A, DEAD)))

    assert (before, gauge()) == (3, 1)


def test_view_without_members_ends_all_others() -> None:
    """An empty view is a view too."""
    shard = shard_of(A)
    heard(shard, A, put(1, A, [1], 10))

    heard(shard, ME, ViewChanged(()))

    assert list(shard._held) == [ME]
