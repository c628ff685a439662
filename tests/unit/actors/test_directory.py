"""The directory shard: what it believes and serves, its streams, and what it lets go."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from peercache.actors.directory import actor as directory
from peercache.actors.directory import holdings
from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.directory.table import DirectoryTable
from peercache.actors.effects import Send
from peercache.actors.mailboxes import RecordsChanged, ViewChanged
from peercache.actors.origin import Origin
from peercache.model.member import DEAD, LEFT, SUSPECT
from peercache.model.records import Records, from_bytes
from peercache.observability.metrics import Metrics
from peercache.wire.codec import MESSAGE_BYTES_MAX, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.directory import (
    Acknowledged,
    Delete,
    Located,
    Lookup,
    Put,
    Repair,
    ReportStale,
    SummaryDiffers,
    SummaryMatches,
    VerifyRecords,
)
from peercache.wire.messages.session import Refused
from tests.record_digests import digest_of
from tests.unit.actors.lone_shard import (
    ME,
    A,
    B,
    C,
    delete,
    names_and_holders,
    put,
    refused,
    shard_of,
    summary_of,
    take,
)
from tests.unit.actors.record_cluster import (
    NO_DROPS,
    NO_RECORDS,
    drops_of,
    held_of,
    key_of,
    located,
    member,
    records_of,
    view,
)

# --- questions ----------------------------------------------------------------------------------


def test_lookup_answers_in_key_order_with_every_holder() -> None:
    """Present keys have their records in the order of the question; absent ones have none."""
    shard = shard_of(A, B)
    take(shard, A, put(1, A, [1, 2, 3], 10))
    take(shard, B, put(1, B, [2], 20))

    found = located(shard, [3, 9, 2, 1])

    assert names_and_holders(found, [1, 2, 3]) == [(3, A), (2, A), (2, B), (1, A)]


def test_lookup_repeats_its_correlation_number() -> None:
    """The asker finds its question again in the answer."""
    shard = shard_of()

    assert take(shard, 77, Lookup(4711, key_of(1))) == [Located(4711, b"")]


def test_lookup_names_a_bounded_number_of_holders_and_spreads_askers() -> None:
    """A page that every node holds fills no answer, and its readers do not all go to one holder."""
    holders = list(range(100, 120))
    shard = shard_of(*holders)
    for holder in holders:
        take(shard, holder, put(1, holder, [1], 10))

    seen = [located(shard, [1], asker)["holder"].tolist() for asker in range(20)]

    assert {len(reported) for reported in seen} == {directory.HOLDERS_NAMED_MAX}
    assert {reported[0] for reported in seen} == set(holders)


def test_own_pages_are_found_whichever_node_owns_the_key() -> None:
    """The pool notifies its own shard directly, and its drops end what they name."""
    shard = shard_of(A)
    take(shard, ME, RecordsChanged(records_of(ME, [1, 2], 10), NO_DROPS))
    take(shard, ME, RecordsChanged(NO_RECORDS, drops_of([1], [10])))

    assert names_and_holders(located(shard, [1, 2]), [1, 2]) == [(2, ME)]


def test_own_pages_are_served_even_if_the_view_has_us_dead() -> None:
    """Others may be wrong about us; our own pool is not."""
    shard = shard_of(A)
    take(shard, ME, RecordsChanged(records_of(ME, [1], 10), NO_DROPS))

    take(shard, ME, view(member(ME, DEAD), A))

    assert len(located(shard, [1])) == 1


# --- what is believed ---------------------------------------------------------------------------


def test_forged_record_is_ignored_and_counted() -> None:
    """Only a holder speaks of its own pages: a record that names another one is not taken."""
    shard = shard_of(A, B)
    mixed = np.concatenate([records_of(A, [1], 10), records_of(B, [2], 10)])

    answers = take(shard, A, Put(1, mixed.tobytes()))

    assert answers == [Acknowledged(1)]
    assert names_and_holders(located(shard, [1, 2]), [1, 2]) == [(1, A)]
    assert refused(shard, "forged") == 1


def test_forged_record_in_a_repair_is_ignored() -> None:
    """A repair is no way around that rule."""
    shard = shard_of(A, B)

    take(shard, A, Repair(1, bytes(range(256)), records_of(B, [2], 10).tobytes()))

    assert len(located(shard, [2])) == 0


def test_stranger_cannot_speak_for_our_own_pool() -> None:
    """A message that claims to come from us is not from our pool, which does not use the wire."""
    shard = shard_of(A)
    take(shard, ME, RecordsChanged(records_of(ME, [1], 10), NO_DROPS))

    take(shard, ME, delete(1, [1], [99]))
    take(shard, ME, put(2, ME, [2], 10))

    assert names_and_holders(located(shard, [1, 2]), [1, 2]) == [(1, ME)]


def test_put_upserts_only_what_is_newer() -> None:
    """Generations order one holder's records, whatever the order of arrival."""
    shard = shard_of(A)
    take(shard, A, put(1, A, [1], 20))

    take(shard, A, put(2, A, [1], 10))
    older = located(shard, [1])["generation"].tolist()
    take(shard, A, put(3, A, [1], 30))
    newer = located(shard, [1])["generation"].tolist()

    assert (older, newer) == ([20], [30])


def test_delete_spares_what_is_newer_and_the_records_of_others() -> None:
    """A page committed again survives; order exists within one holder only."""
    shard = shard_of(A, B)
    take(shard, A, put(1, A, [1, 2], 20))
    take(shard, B, put(1, B, [2], 20))

    take(shard, A, delete(2, [1, 2], [18, 22]))

    assert names_and_holders(located(shard, [1, 2]), [1, 2]) == [(1, A), (2, B)]


def test_key_named_twice_in_one_put_counts_once() -> None:
    """The digest covers what is held, even if a holder repeats itself."""
    shard = shard_of(A)
    newest = records_of(A, [1], 14)
    take(shard, A, put(1, A, [1, 1, 1], 10))

    assert take(shard, A, summary_of(1, newest)) == [SummaryMatches(1)]


# --- disputes -----------------------------------------------------------------------------------


def doubted(shard: DirectoryShard, failed: Records, now: float = 0.0) -> list[tuple[int, bytes]]:
    """Dispute records; return which holder is asked about what."""
    effects = shard.on_message(Origin(77, 1), ReportStale(failed.tobytes()), now)
    shard.check()
    asked = [e for e in effects if isinstance(e, Send) and isinstance(e.message, VerifyRecords)]
    assert len(asked) == len(effects)
    return [(e.to, e.message.records) for e in asked]  # type: ignore[misc, union-attr]


def test_a_dispute_asks_the_holders_and_removes_nothing() -> None:
    """A reader's word alone hides no page; a record that has changed since is not asked about."""
    shard = shard_of(A, B)
    take(shard, A, put(1, A, [1, 2], 10))
    take(shard, B, put(1, B, [1], 10))
    stale = records_of(A, [1], 10)

    asked = doubted(shard, np.concatenate([stale, records_of(A, [2], 4), records_of(C, [1], 10)]))

    assert asked == [(A, stale.tobytes())]
    names = names_and_holders(located(shard, [1, 2]), [1, 2])
    assert names == [(1, A), (1, B), (2, A)]
    assert take(shard, A, summary_of(1, records_of(A, [1], 10), records_of(A, [2], 12))) == [
        SummaryMatches(1)
    ]


def test_a_holder_is_asked_once_a_second_about_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many readers dispute it, and about a bounded number in all."""
    monkeypatch.setattr(directory, "DISPUTES_MAX", 2)
    shard = shard_of(A)
    take(shard, A, put(1, A, [1, 2, 3], 10))
    stale = records_of(A, [1, 2, 3], 10)

    first, again = doubted(shard, stale, 1.0), doubted(shard, stale, 1.5)
    later = doubted(shard, stale[2:], 2.0)

    assert first == [(A, stale[:2].tobytes())]
    assert again == []
    assert later == [(A, stale[2:].tobytes())]
    assert refused(shard, "disputes") == 2


def test_dispute_cannot_drop_the_own_pools_records() -> None:
    """They come from the pool itself, which reports what goes."""
    shard = shard_of(A)
    own = records_of(ME, [1], 10)
    take(shard, ME, RecordsChanged(own, NO_DROPS))

    take(shard, 77, ReportStale(own.tobytes()))

    assert len(located(shard, [1])) == 1


# --- bounds ---------------------------------------------------------------------------------------


def test_a_member_has_its_share_of_the_records_and_leaves_the_others_theirs() -> None:
    """A half at most, or twice an even share: what is beyond is refused and counted."""
    members = range(100, 108)
    shard = DirectoryShard(incarnation=ME, metrics=Metrics(), records_max=80)
    take(shard, ME, view(ME, *members))
    for holder in members:
        take(shard, holder, Put(1, b""))

    for at, name in enumerate(range(1000, 1050)):
        take(shard, 100, put(2 + at, 100, [name], 10))
    honest = [take(shard, holder, put(2, holder, [1, 2], 10)) for holder in members[1:]]

    assert honest == [[Acknowledged(2)]] * 7
    assert shard.record_count == 2 * 80 // 9 + 14
    assert refused(shard, "too_many") == 50 - 2 * 80 // 9


def test_a_repair_of_a_full_share_replaces_its_buckets() -> None:
    """What it removes makes room for what it brings."""
    shard = DirectoryShard(incarnation=ME, metrics=Metrics(), records_max=8)
    take(shard, ME, view(ME, A))
    names = [1, 2, 3, 4]
    take(shard, A, put(1, A, names, 10))
    buckets = bytes({key_of(name)[0] for name in names})

    answers = take(shard, A, Repair(2, buckets, records_of(A, names, 20).tobytes()))

    assert answers == [Acknowledged(2)]
    assert len(located(shard, names)) == 4


def test_what_this_host_has_no_memory_for_is_not_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its holder keeps the former owners' records; readers ask on; a smaller message comes in."""
    monkeypatch.setattr(directory, "ROWS_MAX", 5000)
    shard = shard_of(A)
    take(shard, ME, RecordsChanged(records_of(ME, list(range(4998)), 10), NO_DROPS))

    refused_too = take(shard, A, put(1, A, [1, 2, 3], 10))
    (answer,) = take(shard, 77, Lookup(1, key_of(1)))
    taken = take(shard, A, put(2, A, [1, 2], 10))

    assert refused_too == []
    assert isinstance(answer, Located)
    assert answer.behind
    assert refused(shard, "too_many") == 3
    assert taken == [Acknowledged(2)]
    assert shard.record_count == 5000


def test_ticks_complete_a_growth_of_the_table() -> None:
    """A shard that receives nothing more does not keep two indices."""
    shard = shard_of(A)
    take(shard, A, put(1, A, list(range(3000)), 10))
    assert shard.table.is_growing

    ticks = 0
    while shard.deadline() < math.inf:
        shard.on_tick(shard.deadline())
        shard.check()
        ticks += 1

    assert ticks >= 1
    assert not shard.table.is_growing
    assert len(located(shard, [1, 2, 2999])) == 3


def test_a_question_of_too_many_keys_is_refused_with_a_sentence() -> None:
    """Its answer would not fit into a message."""
    shard = shard_of(A)

    (answer,) = take(shard, 77, Lookup(4, bytes(16 * (directory.LOOKUP_KEYS_MAX + 1))))

    assert isinstance(answer, Refused)
    assert (answer.request, answer.reason) == (4, "malformed")
    assert str(directory.LOOKUP_KEYS_MAX) in answer.detail


def test_the_answer_to_the_longest_question_fits_into_a_message() -> None:
    """With eight holders of each page every page is named, some holders are not."""
    holders = range(100, 108)
    shard = shard_of(*holders)
    names = list(range(directory.LOOKUP_KEYS_MAX))
    for holder in holders:
        take(shard, holder, put(1, holder, names, 10))

    (answer,) = take(shard, 77, Lookup(1, b"".join(map(key_of, names))))

    assert isinstance(answer, Located)
    assert len(encode(Envelope(1, 2, answer), cluster="c")) <= MESSAGE_BYTES_MAX
    reported = from_bytes(answer.records)
    assert len(reported) == directory.LOCATED_MAX
    assert len(set(reported["key"].tolist())) == len(names)


# --- the order of a stream ----------------------------------------------------------------------


def test_late_put_does_not_resurrect() -> None:
    """A put overtaken by the delete of its record is dropped when it arrives at last."""
    shard = shard_of(A)
    take(shard, A, delete(2, [1], [10]))

    answers = take(shard, A, put(1, A, [1], 10))

    assert answers == []
    assert len(located(shard, [1])) == 0


def test_repeated_message_is_acknowledged_and_not_applied() -> None:
    """A duplicate changes nothing; its holder may have missed the first acknowledgement."""
    shard = shard_of(A)
    take(shard, A, put(1, A, [1], 10))
    take(shard, A, delete(2, [1], [10]))

    first = take(shard, A, put(1, A, [1], 10))
    again = take(shard, A, delete(2, [1], [10]))

    assert (first, again) == ([], [Acknowledged(2)])
    assert len(located(shard, [1])) == 0


def test_gap_is_applied_and_reported_by_the_summary() -> None:
    """A lost message holds nothing up; the summary after it differs."""
    shard = shard_of(A)
    lost, came = records_of(A, [1], 10), records_of(A, [2], 12)

    answers = take(shard, A, Put(2, came.tobytes()))
    differs = take(shard, A, summary_of(2, lost, came))

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
    take(shard, A, put(1, A, [1], 10))
    take(shard, A, delete(2, [1], [10]))

    answers = take(shard, A, summary_of(7))
    late = take(shard, A, put(6, A, [3], 16))

    assert answers == [SummaryMatches(7)]
    assert late == []
    assert len(located(shard, [3])) == 0


def test_late_summary_is_not_answered() -> None:
    """A summary of the past would call a repair for what has changed since."""
    shard = shard_of(A)
    take(shard, A, put(1, A, [1], 10))
    take(shard, A, put(2, A, [2], 12))

    assert take(shard, A, summary_of(1, records_of(A, [1], 10))) == []


def test_repair_replaces_exactly_its_buckets() -> None:
    """In the buckets it names, what it does not name goes; the other buckets stay."""
    shard = shard_of(A)
    by_bucket = sorted(range(200), key=lambda name: (key_of(name)[0], name))
    first, other = by_bucket[0], by_bucket[-1]
    take(shard, A, put(1, A, [first, other], 10))
    fresh = next(n for n in range(200, 10**5) if key_of(n)[0] == key_of(first)[0])
    held = records_of(A, [fresh], 8)

    answers = take(shard, A, Repair(2, bytes([key_of(first)[0]]), held.tobytes()))

    assert answers == [Acknowledged(2)]
    assert {name for name, _ in names_and_holders(
        located(shard, [first, other, fresh]), [first, other, fresh]
    )} == {other, fresh}  # fmt: skip
    assert take(shard, A, summary_of(2, held, records_of(A, [other], 12))) == [SummaryMatches(2)]


def test_repair_puts_nothing_into_buckets_it_does_not_name() -> None:
    """A record outside of the named buckets is passed over."""
    shard = shard_of(A)

    take(shard, A, Repair(1, bytes([key_of(1)[0] ^ 1]), records_of(A, [1], 10).tobytes()))

    assert held_of(shard, A) == {}


# --- streams that others have forged, and owners that are behind ----------------------------------


def test_a_number_that_no_holder_sends_does_not_end_its_stream() -> None:
    """The next summary resets it, and the holder repairs what the forged message removed."""
    shard = shard_of(A)
    held = records_of(A, [1, 2], 10)
    take(shard, A, Put(7, held.tobytes()))
    take(shard, A, Repair(2**64 - 1, bytes(range(256)), b""))

    (differs,) = take(shard, A, summary_of(7, held))
    repaired = take(shard, A, Repair(8, bytes({key_of(1)[0], key_of(2)[0]}), held.tobytes()))

    assert isinstance(differs, SummaryDiffers)
    assert repaired == [Acknowledged(8)]
    assert len(located(shard, [1, 2])) == 2


def test_a_number_slightly_too_high_is_reset_after_a_while() -> None:
    """One late summary may have been overtaken; for seconds none is."""
    shard = shard_of(A)
    held = records_of(A, [1], 10)
    take(shard, A, Put(7, held.tobytes()))
    take(shard, A, Delete(60, drops_of([1], [10]).tobytes()))

    late = take(shard, A, summary_of(7, held), 1.0)
    soon = take(shard, A, summary_of(7, held), 3.0)
    (differs,) = take(shard, A, summary_of(7, held), 1.0 + directory.STREAM_LATE_S)

    assert late == soon == []
    assert isinstance(differs, SummaryDiffers)
    assert take(shard, A, Put(8, held.tobytes())) == [Acknowledged(8)]


def test_a_late_summary_resets_no_number_that_the_holder_sends_on_from() -> None:
    """Each message in order shows that the number held is true."""
    shard = shard_of(A)
    held = records_of(A, [1, 2, 3], 10)
    take(shard, A, Put(7, held[:1].tobytes()))
    take(shard, A, summary_of(6), 1.0)
    take(shard, A, Put(8, held[1:2].tobytes()), 3.0)

    late = take(shard, A, summary_of(6), 4.5)

    assert late == []
    assert take(shard, A, Put(8, held[2:].tobytes()), 4.6) == [Acknowledged(8)]
    assert len(located(shard, [3])) == 0


def is_behind(shard: DirectoryShard, now: float = 0.0) -> bool:
    """Ask for a page; return whether the shard reports that it lacks records."""
    (answer,) = take(shard, 77, Lookup(1, key_of(9)), now)
    assert isinstance(answer, Located)
    return answer.behind


def test_an_owner_that_differs_from_a_holder_reports_that_it_is_behind() -> None:
    """Until a summary matches, for a bounded time, or until the holder has gone."""
    shard = shard_of(A, B)
    held = records_of(A, [1], 10)

    before = is_behind(shard)
    take(shard, A, summary_of(1, held), 1.0)
    differing, long_after = is_behind(shard, 2.0), is_behind(shard, 1.0 + holdings.BEHIND_S)
    take(shard, A, Put(2, held.tobytes()), 3.0)
    take(shard, A, summary_of(2, held), 3.0)
    repaired = is_behind(shard, 3.0)
    take(shard, B, summary_of(1, held), 4.0)
    again = is_behind(shard, 4.0)
    take(shard, ME, view(ME, A, member(B, DEAD)), 5.0)

    assert (before, differing, long_after, repaired, again) == (False, True, False, False, True)
    assert not is_behind(shard, 5.0)


def test_an_owner_is_behind_a_member_that_was_dead_until_it_has_its_records_again() -> None:
    """It let go of them at the death."""
    shard = shard_of(A)
    held = records_of(A, [1], 10)
    take(shard, A, Put(1, held.tobytes()))
    take(shard, ME, view(ME, member(A, DEAD)), 1.0)
    take(shard, ME, view(ME, A), 2.0)
    take(shard, A, Put(2, b""), 2.0)

    behind = is_behind(shard, 2.0)
    take(shard, A, Put(3, held.tobytes()), 2.0)
    take(shard, A, summary_of(3, held), 2.1)

    assert (behind, is_behind(shard, 2.1)) == (True, False)


@pytest.mark.parametrize("state", [DEAD, LEFT])
def test_records_of_an_ended_holder_are_never_served(state: int) -> None:
    """From the view that has it dead or left, before anything is swept."""
    shard = shard_of(A, B)
    take(shard, A, put(1, A, [1], 10))
    take(shard, B, put(1, B, [1], 10))

    take(shard, ME, view(ME, member(A, state), B))

    assert names_and_holders(located(shard, [1]), [1]) == [(1, B)]


def test_messages_of_a_dead_holder_are_ignored() -> None:
    """What was queued for us before it died cannot bring its records back."""
    shard = shard_of(A)
    take(shard, ME, view(ME, member(A, DEAD)))

    assert take(shard, A, put(1, A, [1], 10)) == []
    assert take(shard, A, summary_of(1)) == []
    assert len(located(shard, [1])) == 0
    assert refused(shard, "not_a_member") == 1


def test_sweeping_is_bounded_and_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick takes so many keys and no more; in the end nothing of the dead is left."""
    monkeypatch.setattr(directory, "SWEEP_KEYS_MAX", 10)
    shard = shard_of(A, B)
    one_bucket = [name for name in range(10**4) if key_of(name)[0] == key_of(3)[0]][:15]
    take(shard, A, put(1, A, one_bucket + list(range(10**5, 10**5 + 10)), 10))
    take(shard, B, put(1, B, [3], 10))
    take(shard, ME, view(ME, member(A, DEAD), B))

    left, now = [], 0.0
    while shard.deadline() < math.inf:
        now = shard.deadline()
        shard.on_tick(now)
        shard.check()
        assert shard.deadline() > now
        left.append(shard.table.figures().records - len(held_of(shard, B)))

    assert left == [15, 5, 0]
    assert list(held_of(shard, B)) == [key_of(3)]


def test_refuted_holder_is_repaired_by_its_next_summary() -> None:
    """Its records were dropped with it: its summary differs, its repair is served, keys and all."""
    shard = shard_of(A)
    held = records_of(A, [1, 2], 10)
    take(shard, A, Put(1, held.tobytes()))
    take(shard, ME, view(ME, member(A, DEAD)))
    take(shard, ME, view(ME, member(A, counter=1)))

    (answer,) = take(shard, A, summary_of(1, held))
    assert isinstance(answer, SummaryDiffers)
    take(shard, A, Repair(2, bytes(range(256)), held.tobytes()))
    for _ in range(3):
        shard.on_tick(shard.deadline())

    assert names_and_holders(located(shard, [1, 2]), [1, 2]) == [(1, A), (2, A)]
    assert take(shard, A, summary_of(2, held)) == [SummaryMatches(2)]


def test_refuted_holders_old_messages_stay_late() -> None:
    """The numbers of its stream outlive its records: what was late before is late still."""
    shard = shard_of(A)
    take(shard, A, put(1, A, [1], 10))
    take(shard, A, delete(2, [1], [10]))
    take(shard, ME, view(ME, member(A, DEAD)))
    take(shard, ME, view(ME, member(A, counter=1)))

    take(shard, A, put(1, A, [1], 10))

    assert len(located(shard, [1])) == 0


def test_new_incarnation_begins_a_new_stream() -> None:
    """Numbers start again with a node; the records of its former self are not served."""
    shard = shard_of(A)
    take(shard, A, put(50, A, [1, 2], 10))
    take(shard, ME, view(ME, member(A, DEAD), B))

    answers = take(shard, B, put(1, B, [1], 4))

    assert answers == [Acknowledged(1)]
    assert names_and_holders(located(shard, [1, 2]), [1, 2]) == [(1, B)]


def test_what_is_not_served_yet_is_not_acknowledged() -> None:
    """Its holder would count it as published, and no answer names it."""
    shard = shard_of()
    summary = summary_of(1, records_of(A, [1], 10))

    early = [*take(shard, A, put(1, A, [1], 10)), *take(shard, A, summary)]
    take(shard, ME, view(ME, A))
    late = take(shard, A, summary)

    assert early == []
    assert late == [SummaryMatches(1)]


def test_unknown_holders_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invented holders do not fill this node, nor do many records for one."""
    monkeypatch.setattr(directory, "UNKNOWN_HOLDERS_MAX", 2)
    monkeypatch.setattr(directory, "UNKNOWN_RECORDS_MAX", 3)
    shard = shard_of()

    take(shard, A, put(1, A, [1, 2, 3], 10))
    too_many = take(shard, A, put(2, A, [4], 20))
    take(shard, B, put(1, B, [1], 10))
    one_more = take(shard, C, put(1, C, [1], 10))

    assert too_many == one_more == []
    assert (len(held_of(shard, A)), len(held_of(shard, C))) == (3, 0)
    assert (refused(shard, "too_many"), refused(shard, "not_a_member")) == (1, 1)


def test_unknown_holder_is_given_up_in_time() -> None:
    """What no view ever names does not stay."""
    shard = shard_of()
    take(shard, A, put(1, A, [1], 10), now=5.0)

    assert shard.deadline() == 5.0 + directory.UNKNOWN_S
    shard.on_tick(shard.deadline())
    shard.on_tick(shard.deadline())
    shard.check()

    assert held_of(shard, A) == {}
    assert shard.table.figures().records == 0
    assert shard.deadline() == math.inf


@pytest.mark.parametrize("seen", [view(ME), ViewChanged(())], ids=["others", "no members"])
def test_member_that_the_view_forgets_is_let_go(seen: ViewChanged) -> None:
    """Views forget their dead some day; nothing of them stays, not even a number."""
    shard = shard_of(A)
    take(shard, A, put(3, A, [1], 10))

    take(shard, ME, seen)
    gone = len(located(shard, [1]))
    take(shard, ME, view(ME, A))

    assert gone == 0
    assert take(shard, A, put(1, A, [2], 10)) == [Acknowledged(1)]


def test_count_of_records_is_reported() -> None:
    """The gauge follows what is held, the own pool and the dead included rightly."""
    shard = shard_of(A)
    take(shard, ME, RecordsChanged(records_of(ME, [1], 10), NO_DROPS))
    take(shard, A, put(1, A, [1, 2, 3], 10))
    take(shard, A, delete(2, [3], [99]))
    assert shard.metrics is not None
    gauge = partial(shard.metrics.registry.get_sample_value, "peercache_directory_records")

    before = gauge()
    take(shard, ME, view(ME, member(A, DEAD)))

    assert (before, gauge()) == (3, 1)


def test_summaries_that_are_behind_are_counted_from_the_last_true_one() -> None:
    """Two that were overtaken, minutes apart, say nothing of the number held."""
    shard = shard_of(A)
    held = records_of(A, [1], 10)
    take(shard, A, Put(7, held.tobytes()))

    first = take(shard, A, summary_of(6), 1.0)
    take(shard, A, summary_of(7, held), 2.0)
    second = take(shard, A, summary_of(6), 60.0)

    assert first == second == []
    assert take(shard, A, put(7, A, [2], 12), 60.0) == [Acknowledged(7)]
    assert len(located(shard, [2])) == 0


# --- holders --------------------------------------------------------------------------------------


def test_a_suspects_pages_are_found() -> None:
    """Suspicion is often wrong, and the pages are still there."""
    shard = shard_of(A)
    take(shard, A, put(1, A, [1], 10))

    take(shard, ME, view(ME, member(A, SUSPECT)))

    assert len(located(shard, [1])) == 1
    assert take(shard, A, put(2, A, [2], 12)) == [Acknowledged(2)]
    assert len(located(shard, [1, 2])) == 2


def test_a_newcomer_is_kept_and_served_once_the_view_has_it() -> None:
    """Its records may be here before the view is, and a view without it does not end it."""
    shard = shard_of(A)
    take(shard, C, put(1, C, [1], 10))

    take(shard, ME, view(ME, A, B))
    before = len(located(shard, [1]))
    take(shard, ME, view(ME, A, B, C))

    assert (before, len(located(shard, [1]))) == (0, 1)


def test_a_dispute_about_a_holder_that_no_view_knows_asks_no_node() -> None:
    """An inventor of holders does not have this node write to them."""
    shard = shard_of(A)
    take(shard, C, put(1, C, [1], 10))

    assert shard.on_message(Origin(77), ReportStale(records_of(C, [1], 10).tobytes()), 0.0) == []


def test_a_holder_for_which_there_is_no_entry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has so many and no more."""
    shard = shard_of(A)
    monkeypatch.setattr(DirectoryTable, "begin", lambda *_, **__: None)

    answers = take(shard, A, put(1, A, [1, 2], 10))

    assert answers == take(shard, A, summary_of(1)) == []
    assert refused(shard, "not_a_member") == 2
    assert held_of(shard, A) == {}


# --- room -----------------------------------------------------------------------------------------


def shard_for(records_max: int, *members: int) -> DirectoryShard:
    shard = DirectoryShard(incarnation=ME, metrics=Metrics(), records_max=records_max)
    take(shard, ME, view(ME, *members))
    for holder in members:
        take(shard, holder, Put(1, b""))
    return shard


def test_a_holder_whose_share_is_full_withdraws() -> None:
    """A delete needs no room: it makes some."""
    shard = shard_for(8, A)
    take(shard, A, put(2, A, [1, 2, 3, 4], 10))
    full = take(shard, A, put(3, A, [5], 20))

    answers = take(shard, A, delete(4, [1, 2, 3, 4], [10, 12, 14, 16]))

    assert (full, answers) == ([], [Acknowledged(4)])
    assert take(shard, A, put(5, A, [5], 20)) == [Acknowledged(5)]


def test_the_own_pool_takes_no_room_of_others() -> None:
    """It is bounded by its own memory."""
    shard = shard_for(8, A)
    own = records_of(ME, list(range(100, 200)), 10)
    take(shard, ME, RecordsChanged(own, NO_DROPS))

    assert take(shard, A, put(2, A, [1, 2, 3, 4], 10)) == [Acknowledged(2)]


def test_all_shares_together_are_no_more_than_there_may_be() -> None:
    """Each has twice an even one; only so many members may have all of it."""
    members = range(100, 108)
    shard = shard_for(80, *members)

    answers = [
        take(shard, holder, put(2, holder, list(range(17)), 10 + 40 * at))
        for at, holder in enumerate(members)
    ]

    assert answers == [[Acknowledged(2)]] * 4 + [[]] * 4
    assert shard.record_count == 4 * 17
    assert refused(shard, "too_many") == 4 * 17


def test_a_repair_that_brings_no_more_is_taken_though_the_share_is_less_by_now() -> None:
    """With each new member the share is smaller; what is there may get right all the same."""
    shard = shard_for(40, A)
    names = list(range(20))
    take(shard, A, put(2, A, names, 10))
    take(shard, ME, view(ME, A, *range(100, 120)))
    for holder in range(100, 120):
        take(shard, holder, Put(1, b""))
    buckets = bytes(sorted({key_of(name)[0] for name in names}))

    answers = take(shard, A, Repair(3, buckets, records_of(A, names, 60).tobytes()))

    assert take(shard, A, put(4, A, list(range(30, 50)), 200)) == [], "a share of less than 20"
    assert answers == [Acknowledged(3)]
    assert np.array_equal(
        located(shard, names)["generation"], records_of(A, names, 60)["generation"]
    )
