"""The streams of records that a directory shard hears: their order, their gaps, and forged ones."""

from __future__ import annotations

import numpy as np

from peercache.actors.directory import actor as directory
from peercache.actors.directory import holdings
from peercache.actors.directory.actor import DirectoryShard
from peercache.model.member import DEAD
from peercache.wire.messages.directory import (
    Acknowledged,
    Delete,
    Located,
    Lookup,
    Put,
    Repair,
    SummaryDiffers,
    SummaryMatches,
)
from tests.record_digests import digest_of
from tests.unit.actors.lone_shard import (
    ME,
    A,
    B,
    delete,
    heard,
    names_and_holders,
    put,
    shard_of,
    summary_of,
)
from tests.unit.actors.record_cluster import (
    drops_of,
    held_of,
    key_of,
    located,
    member,
    records_of,
    view,
)

# --- the order of a stream ----------------------------------------------------------------------


def test_late_put_does_not_resurrect() -> None:
    """A put overtaken by the delete of its record is dropped when it arrives at last."""
    shard = shard_of(A)
    heard(shard, A, delete(2, [1], [10]))

    answers = heard(shard, A, put(1, A, [1], 10))

    assert answers == []
    assert len(located(shard, [1])) == 0


def test_repeated_message_is_acknowledged_and_not_applied() -> None:
    """A duplicate changes nothing; its holder may have missed the first acknowledgement."""
    shard = shard_of(A)
    heard(shard, A, put(1, A, [1], 10))
    heard(shard, A, delete(2, [1], [10]))

    first = heard(shard, A, put(1, A, [1], 10))
    again = heard(shard, A, delete(2, [1], [10]))

    assert (first, again) == ([], [Acknowledged(2)])
    assert len(located(shard, [1])) == 0


def test_gap_is_applied_and_told_by_the_summary() -> None:
    """A lost message holds nothing up; the summary after it differs."""
    shard = shard_of(A)
    lost, came = records_of(A, [1], 10), records_of(A, [2], 12)

    answers = heard(shard, A, Put(2, came.tobytes()))
    differs = heard(shard, A, summary_of(2, lost, came))

    assert answers == [Acknowledged(2)]
    assert len(located(shard, [2])) == 1
    (answer,) = differs
    assert isinstance(answer, SummaryDiffers)
    theirs = np.frombuffer(answer.buckets, "<u8")
    assert theirs[key_of(2)[0]] == digest_of(came)[0]
    assert np.count_nonzero(theirs) == 1


def test_summary_that_matches_ends_what_is_late() -> None:
    """Once holder and owner agree at a number, nothing numbered below may change it."""
    shard = shard_of(A)
    heard(shard, A, put(1, A, [1], 10))
    heard(shard, A, delete(2, [1], [10]))

    answers = heard(shard, A, summary_of(7))
    late = heard(shard, A, put(6, A, [3], 16))

    assert answers == [SummaryMatches(7)]
    assert late == []
    assert len(located(shard, [3])) == 0


def test_late_summary_is_not_answered() -> None:
    """A summary of the past would call a repair for what has changed since."""
    shard = shard_of(A)
    heard(shard, A, put(1, A, [1], 10))
    heard(shard, A, put(2, A, [2], 12))

    assert heard(shard, A, summary_of(1, records_of(A, [1], 10))) == []


def test_repair_replaces_exactly_its_buckets() -> None:
    """In the buckets it names, what it does not name goes; the other buckets stay."""
    shard = shard_of(A)
    by_bucket = sorted(range(200), key=lambda name: (key_of(name)[0], name))
    first, other = by_bucket[0], by_bucket[-1]
    heard(shard, A, put(1, A, [first, other], 10))
    fresh = next(n for n in range(200, 10**5) if key_of(n)[0] == key_of(first)[0])
    held = records_of(A, [fresh], 8)

    answers = heard(shard, A, Repair(2, bytes([key_of(first)[0]]), held.tobytes()))

    assert answers == [Acknowledged(2)]
    assert {name for name, _ in names_and_holders(
        located(shard, [first, other, fresh]), [first, other, fresh]
    )} == {other, fresh}  # fmt: skip
    assert heard(shard, A, summary_of(2, held, records_of(A, [other], 12))) == [SummaryMatches(2)]


def test_repair_puts_nothing_into_buckets_it_does_not_name() -> None:
    """A record outside of the named buckets is passed over."""
    shard = shard_of(A)

    heard(shard, A, Repair(1, bytes([key_of(1)[0] ^ 1]), records_of(A, [1], 10).tobytes()))

    assert held_of(shard, A) == {}


# --- streams that others have forged, and owners that are behind ----------------------------------


def test_a_number_that_no_holder_sends_does_not_end_its_stream() -> None:
    """The next summary resets it, and the holder repairs what the forged message removed."""
    shard = shard_of(A)
    held = records_of(A, [1, 2], 10)
    heard(shard, A, Put(7, held.tobytes()))
    heard(shard, A, Repair(2**64 - 1, bytes(range(256)), b""))

    (differs,) = heard(shard, A, summary_of(7, held))
    repaired = heard(shard, A, Repair(8, bytes({key_of(1)[0], key_of(2)[0]}), held.tobytes()))

    assert isinstance(differs, SummaryDiffers)
    assert repaired == [Acknowledged(8)]
    assert len(located(shard, [1, 2])) == 2


def test_a_number_slightly_too_high_is_reset_after_a_while() -> None:
    """One late summary may have been overtaken; for seconds none is."""
    shard = shard_of(A)
    held = records_of(A, [1], 10)
    heard(shard, A, Put(7, held.tobytes()))
    heard(shard, A, Delete(60, drops_of([1], [10]).tobytes()))

    late = heard(shard, A, summary_of(7, held), 1.0)
    soon = heard(shard, A, summary_of(7, held), 3.0)
    (differs,) = heard(shard, A, summary_of(7, held), 1.0 + directory.STREAM_LATE_S)

    assert late == soon == []
    assert isinstance(differs, SummaryDiffers)
    assert heard(shard, A, Put(8, held.tobytes())) == [Acknowledged(8)]


def test_a_late_summary_resets_no_number_that_the_holder_sends_on_from() -> None:
    """Each message in order shows that the number held is true."""
    shard = shard_of(A)
    held = records_of(A, [1, 2, 3], 10)
    heard(shard, A, Put(7, held[:1].tobytes()))
    heard(shard, A, summary_of(6), 1.0)
    heard(shard, A, Put(8, held[1:2].tobytes()), 3.0)

    late = heard(shard, A, summary_of(6), 4.5)

    assert late == []
    assert heard(shard, A, Put(8, held[2:].tobytes()), 4.6) == [Acknowledged(8)]
    assert len(located(shard, [3])) == 0


def is_behind(shard: DirectoryShard, now: float = 0.0) -> bool:
    """Ask for a page; return whether the shard says that it lacks records."""
    (answer,) = heard(shard, 77, Lookup(1, key_of(9)), now)
    assert isinstance(answer, Located)
    return answer.behind


def test_an_owner_that_differs_from_a_holder_says_that_it_is_behind() -> None:
    """Until a summary matches, for a bounded time, or until the holder has gone."""
    shard = shard_of(A, B)
    held = records_of(A, [1], 10)

    before = is_behind(shard)
    heard(shard, A, summary_of(1, held), 1.0)
    differing, long_after = is_behind(shard, 2.0), is_behind(shard, 1.0 + holdings.BEHIND_S)
    heard(shard, A, Put(2, held.tobytes()), 3.0)
    heard(shard, A, summary_of(2, held), 3.0)
    repaired = is_behind(shard, 3.0)
    heard(shard, B, summary_of(1, held), 4.0)
    again = is_behind(shard, 4.0)
    heard(shard, ME, view(ME, A, member(B, DEAD)), 5.0)

    assert (before, differing, long_after, repaired, again) == (False, True, False, False, True)
    assert not is_behind(shard, 5.0)


def test_an_owner_is_behind_a_member_that_was_dead_until_it_has_its_records_again() -> None:
    """It let go of them at the death."""
    shard = shard_of(A)
    held = records_of(A, [1], 10)
    heard(shard, A, Put(1, held.tobytes()))
    heard(shard, ME, view(ME, member(A, DEAD)), 1.0)
    heard(shard, ME, view(ME, A), 2.0)
    heard(shard, A, Put(2, b""), 2.0)

    behind = is_behind(shard, 2.0)
    heard(shard, A, Put(3, held.tobytes()), 2.0)
    heard(shard, A, summary_of(3, held), 2.1)

    assert (behind, is_behind(shard, 2.1)) == (True, False)
