"""The directory shard: what it believes, what it serves, and what it lets go."""

from __future__ import annotations

import math

import numpy as np
import pytest

from peercache.actors.directory import actor as directory
from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.effects import Send
from peercache.actors.mailboxes import RecordsChanged
from peercache.actors.origin import Origin
from peercache.model.member import DEAD
from peercache.model.records import Records, from_bytes
from peercache.observability.metrics import Metrics
from peercache.wire.codec import MESSAGE_BYTES_MAX, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.directory import (
    Acknowledged,
    Located,
    Lookup,
    Put,
    Repair,
    ReportStale,
    SummaryMatches,
    VerifyRecords,
)
from peercache.wire.messages.session import Refused
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
    NO_RECORDS,
    drops_of,
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
    heard(shard, A, put(1, A, [1, 2, 3], 10))
    heard(shard, B, put(1, B, [2], 20))

    found = located(shard, [3, 9, 2, 1])

    assert names_and_holders(found, [1, 2, 3]) == [(3, A), (2, A), (2, B), (1, A)]


def test_lookup_repeats_its_correlation_number() -> None:
    """The asker finds its question again in the answer."""
    shard = shard_of()

    assert heard(shard, 77, Lookup(4711, key_of(1))) == [Located(4711, b"")]


def test_lookup_names_a_bounded_number_of_holders_and_spreads_askers() -> None:
    """A page that every node holds fills no answer, and its readers do not all go to one holder."""
    holders = list(range(100, 120))
    shard = shard_of(*holders)
    for holder in holders:
        heard(shard, holder, put(1, holder, [1], 10))

    seen = [located(shard, [1], asker)["holder"].tolist() for asker in range(20)]

    assert {len(told) for told in seen} == {directory.HOLDERS_TOLD_MAX}
    assert {told[0] for told in seen} == set(holders)


def test_own_pages_are_found_whichever_node_owns_the_key() -> None:
    """The pool tells its own shard directly, and its drops end what they name."""
    shard = shard_of(A)
    heard(shard, ME, RecordsChanged(records_of(ME, [1, 2], 10), NO_DROPS))
    heard(shard, ME, RecordsChanged(NO_RECORDS, drops_of([1], [10])))

    assert names_and_holders(located(shard, [1, 2]), [1, 2]) == [(2, ME)]


def test_own_pages_are_served_even_if_the_view_has_us_dead() -> None:
    """Others may be wrong about us; our own pool is not."""
    shard = shard_of(A)
    heard(shard, ME, RecordsChanged(records_of(ME, [1], 10), NO_DROPS))

    heard(shard, ME, view(member(ME, DEAD), A))

    assert len(located(shard, [1])) == 1


# --- what is believed ---------------------------------------------------------------------------


def test_forged_record_is_ignored_and_counted() -> None:
    """Only a holder speaks of its own pages: a record that names another one is not taken."""
    shard = shard_of(A, B)
    mixed = np.concatenate([records_of(A, [1], 10), records_of(B, [2], 10)])

    answers = heard(shard, A, Put(1, mixed.tobytes()))

    assert answers == [Acknowledged(1)]
    assert names_and_holders(located(shard, [1, 2]), [1, 2]) == [(1, A)]
    assert refused(shard, "forged") == 1


def test_forged_record_in_a_repair_is_ignored() -> None:
    """A repair is no way around that rule."""
    shard = shard_of(A, B)

    heard(shard, A, Repair(1, bytes(range(256)), records_of(B, [2], 10).tobytes()))

    assert len(located(shard, [2])) == 0


def test_stranger_cannot_speak_for_our_own_pool() -> None:
    """A message that claims to come from us is not from our pool, which does not use the wire."""
    shard = shard_of(A)
    heard(shard, ME, RecordsChanged(records_of(ME, [1], 10), NO_DROPS))

    heard(shard, ME, delete(1, [1], [99]))
    heard(shard, ME, put(2, ME, [2], 10))

    assert names_and_holders(located(shard, [1, 2]), [1, 2]) == [(1, ME)]


def test_put_upserts_only_what_is_newer() -> None:
    """Generations order one holder's records, whatever the order of arrival."""
    shard = shard_of(A)
    heard(shard, A, put(1, A, [1], 20))

    heard(shard, A, put(2, A, [1], 10))
    older = located(shard, [1])["generation"].tolist()
    heard(shard, A, put(3, A, [1], 30))
    newer = located(shard, [1])["generation"].tolist()

    assert (older, newer) == ([20], [30])


def test_delete_spares_what_is_newer() -> None:
    """A page committed again survives the delete of its old record."""
    shard = shard_of(A)
    heard(shard, A, put(1, A, [1, 2], 20))

    heard(shard, A, delete(2, [1, 2], [18, 22]))

    assert names_and_holders(located(shard, [1, 2]), [1, 2]) == [(1, A)]


def test_delete_of_one_holder_leaves_the_others() -> None:
    """Order exists within one holder only: no delete touches another holder's record."""
    shard = shard_of(A, B)
    heard(shard, A, put(1, A, [1], 10))
    heard(shard, B, put(1, B, [1], 10))

    heard(shard, A, delete(2, [1], [10]))

    assert names_and_holders(located(shard, [1]), [1]) == [(1, B)]


def test_key_named_twice_in_one_put_counts_once() -> None:
    """The digest covers what is held, even if a holder repeats itself."""
    shard = shard_of(A)
    newest = records_of(A, [1], 14)
    heard(shard, A, put(1, A, [1, 1, 1], 10))

    assert heard(shard, A, summary_of(1, newest)) == [SummaryMatches(1)]


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
    heard(shard, A, put(1, A, [1, 2], 10))
    heard(shard, B, put(1, B, [1], 10))
    stale = records_of(A, [1], 10)

    asked = doubted(shard, np.concatenate([stale, records_of(A, [2], 4), records_of(C, [1], 10)]))

    assert asked == [(A, stale.tobytes())]
    names = names_and_holders(located(shard, [1, 2]), [1, 2])
    assert names == [(1, A), (1, B), (2, A)]
    assert heard(shard, A, summary_of(1, records_of(A, [1], 10), records_of(A, [2], 12))) == [
        SummaryMatches(1)
    ]


def test_a_holder_is_asked_once_a_second_about_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many readers dispute it, and about a bounded number in all."""
    monkeypatch.setattr(directory, "DISPUTES_MAX", 2)
    shard = shard_of(A)
    heard(shard, A, put(1, A, [1, 2, 3], 10))
    stale = records_of(A, [1, 2, 3], 10)

    first, again = doubted(shard, stale, 1.0), doubted(shard, stale, 1.5)
    later = doubted(shard, stale[2:], 2.0)

    assert first == [(A, stale[:2].tobytes())]
    assert again == []
    assert later == [(A, stale[2:].tobytes())]
    assert shard.metrics is not None
    assert shard.metrics.records_refused.labels("disputes")._value.get() == 2


def test_dispute_cannot_drop_the_own_pools_records() -> None:
    """They come from the pool itself, which says what goes."""
    shard = shard_of(A)
    own = records_of(ME, [1], 10)
    heard(shard, ME, RecordsChanged(own, NO_DROPS))

    heard(shard, 77, ReportStale(own.tobytes()))

    assert len(located(shard, [1])) == 1


# --- bounds ---------------------------------------------------------------------------------------


def test_a_member_has_its_share_of_the_records_and_leaves_the_others_theirs() -> None:
    """A half at most, or twice an even share: what is beyond is refused and counted."""
    members = range(100, 108)
    shard = DirectoryShard(incarnation=ME, metrics=Metrics(), records_max=80)
    heard(shard, ME, view(ME, *members))
    for holder in members:
        heard(shard, holder, Put(1, b""))

    for at, name in enumerate(range(1000, 1050)):
        heard(shard, 100, put(2 + at, 100, [name], 10))
    honest = [heard(shard, holder, put(2, holder, [1, 2], 10)) for holder in members[1:]]

    assert honest == [[Acknowledged(2)]] * 7
    assert shard.record_count == 2 * 80 // 9 + 14
    assert shard.metrics is not None
    refused = shard.metrics.records_refused.labels("too_many")._value.get()
    assert refused == 50 - 2 * 80 // 9


def test_a_repair_of_a_full_share_replaces_its_buckets() -> None:
    """What it removes makes room for what it brings."""
    shard = DirectoryShard(incarnation=ME, metrics=Metrics(), records_max=8)
    heard(shard, ME, view(ME, A))
    names = [1, 2, 3, 4]
    heard(shard, A, put(1, A, names, 10))
    buckets = bytes({key_of(name)[0] for name in names})

    answers = heard(shard, A, Repair(2, buckets, records_of(A, names, 20).tobytes()))

    assert answers == [Acknowledged(2)]
    assert len(located(shard, names)) == 4


def test_what_this_host_has_no_memory_for_is_not_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its holder keeps the former owners' records; readers ask on; a smaller message comes in."""
    monkeypatch.setattr(directory, "ROWS_MAX", 5000)
    shard = shard_of(A)
    heard(shard, ME, RecordsChanged(records_of(ME, list(range(4998)), 10), NO_DROPS))

    refused_too = heard(shard, A, put(1, A, [1, 2, 3], 10))
    (answer,) = heard(shard, 77, Lookup(1, key_of(1)))
    taken = heard(shard, A, put(2, A, [1, 2], 10))

    assert refused_too == []
    assert isinstance(answer, Located)
    assert answer.behind
    assert refused(shard, "too_many") == 3
    assert taken == [Acknowledged(2)]
    assert shard.record_count == 5000


def test_ticks_complete_a_growth_of_the_table() -> None:
    """A shard that hears nothing more does not keep two indices."""
    shard = shard_of(A)
    heard(shard, A, put(1, A, list(range(3000)), 10))
    assert shard._table.is_growing

    ticks = 0
    while shard.deadline() < math.inf:
        shard.on_tick(shard.deadline())
        shard.check()
        ticks += 1

    assert ticks >= 1
    assert not shard._table.is_growing
    assert len(located(shard, [1, 2, 2999])) == 3


def test_a_question_of_too_many_keys_is_refused_with_a_sentence() -> None:
    """Its answer would not fit into a message."""
    shard = shard_of(A)

    (answer,) = heard(shard, 77, Lookup(4, bytes(16 * (directory.LOOKUP_KEYS_MAX + 1))))

    assert isinstance(answer, Refused)
    assert (answer.request, answer.reason) == (4, "malformed")
    assert str(directory.LOOKUP_KEYS_MAX) in answer.detail


def test_the_answer_to_the_longest_question_fits_into_a_message() -> None:
    """With eight holders of each page every page is named, some holders are not."""
    holders = range(100, 108)
    shard = shard_of(*holders)
    names = list(range(directory.LOOKUP_KEYS_MAX))
    for holder in holders:
        heard(shard, holder, put(1, holder, names, 10))

    (answer,) = heard(shard, 77, Lookup(1, b"".join(map(key_of, names))))

    assert isinstance(answer, Located)
    assert len(encode(Envelope(1, 2, answer), cluster="c")) <= MESSAGE_BYTES_MAX
    told = from_bytes(answer.records)
    assert len(told) == directory.LOCATED_MAX
    assert len(set(told["key"].tolist())) == len(names)
