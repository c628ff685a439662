"""A ring change of a holder with many records: looked at in slices, handed over hottest first."""

from __future__ import annotations

import numpy as np
import pytest

from peercache.actors.effects import Effect, Send
from peercache.actors.mailboxes import RecordsChanged, RingChanged
from peercache.actors.origin import Origin
from peercache.actors.publisher import actor as publisher
from peercache.actors.publisher import streams
from peercache.actors.publisher.actor import Publisher
from peercache.actors.publisher.streams import ABSENT, RecordTable, RingHandover
from peercache.wire.messages.directory import Delete, Put, SummaryMatches
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
from tests.unit.actors.record_cluster import NO_RECORDS, drops_of, key_of, records_of


def in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows stand for a million."""
    monkeypatch.setattr(streams, "LOOKED_AT_MAX", 64)
    monkeypatch.setattr(streams, "BIN_ROWS", 50)
    monkeypatch.setattr(publisher, "HAND_OVER_ROWS_MAX", 64)


def held_by(made: Publisher, owner: int) -> set[bytes]:
    """Return the keys in the stream to an owner."""
    table = made._table
    rows = np.flatnonzero(table.live)
    state = made._streams[owner].state(rows)
    return {bytes(key) for key in table.records["key"][rows[state != ABSENT]]}


def acknowledged(made: Publisher, effects: list[Effect], now: float) -> list[Effect]:
    """Acknowledge all, and what follows from it; return what followed."""
    followed: list[Effect] = []
    while effects := acknowledge(made, effects, now):
        followed += effects
    return followed


def finished(made: Publisher, effects: list[Effect], now: float) -> list[Effect]:
    """Acknowledge all until nothing is left to hand over; return all that was sent."""
    seen = [*effects, *acknowledged(made, effects, now)]
    for _ in range(2000):
        if not (made._turning.is_looking or len(made._turning)):
            return seen
        now = max(made.deadline(), now + 0.001)
        effects = ticked(made, now)
        seen += [*effects, *acknowledged(made, effects, now)]
        if made._turning.is_looking:
            assert made.deadline() <= now + publisher.STEP_S
    raise AssertionError("a hand-over without end")


def test_no_step_looks_at_more_than_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that a step looks at and the rows that it hands over are bounded."""
    in_slices(monkeypatch)
    made = publisher_in(ring_of(A, B))
    acknowledged(made, heard(made, ME, commit_of(records_of(ME, list(range(900)), 2)), 0.0), 0.0)
    looked: list[int] = []
    owners = made._ring.__class__.owners

    def counting(ring: object, asked: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        looked.append(len(asked))
        return owners(ring, asked)  # type: ignore[arg-type]

    monkeypatch.setattr(made._ring.__class__, "owners", counting)
    effects = heard(made, ME, RingChanged(ring_of(A, B, C)), 1.0)
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
    heard(made, ME, commit_of(records_of(ME, names, generations)), 0.0)

    told = puts(finished(made, heard(made, ME, RingChanged(ring_of(ME, A)), 1.0), 1.0))

    assert told == {A: keys(*reversed(range(700)))}


def test_a_ring_that_turns_while_rows_are_looked_at_leaves_no_row_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some rows were told by the first ring, some by the second; all end at the third's owners."""
    in_slices(monkeypatch)
    made = publisher_in(ring_of(A, B))
    acknowledged(made, heard(made, ME, commit_of(records_of(ME, list(range(900)), 2)), 0.0), 0.0)

    first = heard(made, ME, RingChanged(ring_of(A, B, C)), 1.0)
    acknowledged(made, first, 1.0)
    assert made._turning.is_looking
    last = ring_of(A, C, 14)
    finished(made, heard(made, ME, RingChanged(last), 1.01), 1.01)

    for owner in (A, C, 14):
        assert held_by(made, owner) == set(keys(*owned_by(last, owner, range(900))))
    assert not made._table.moving.any()


def test_a_page_dropped_while_it_moves_is_withdrawn_from_former_owners_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the former rings remembered, and with too many of them to remember."""
    for rings_max in (16, 0):
        in_slices(monkeypatch)
        monkeypatch.setattr(streams, "RINGS_MAX", rings_max)
        before, after = ring_of(A, B, C, replicas=1), ring_of(B, C, A, 14, replicas=1)
        made = publisher_in(before)
        commit = heard(made, ME, commit_of(records_of(ME, list(range(300)), 2)), 0.0)
        acknowledged(made, commit, 0.0)
        moved = owned_by(after, 14, range(300))
        heard(made, ME, RingChanged(after), 1.0)  # The new owner never acknowledges.
        assert (made._turning.former is None) == (rings_max == 0)

        drops = drops_of(moved, [2 + 2 * name for name in moved])
        effects = heard(made, ME, RecordsChanged(NO_RECORDS, drops), 1.0)

        told = {owner for owner, _ in sent(effects, Delete)}
        assert told >= {
            owner for owner in (A, B, C) if set(owned_by(before, owner, range(300))) & set(moved)
        }
        for owner in (A, B, C, 14):
            assert not held_by(made, owner) & set(keys(*moved))


def test_former_rings_are_forgotten_when_all_rows_have_arrived() -> None:
    """Else each drop would ask the owners of every ring that there ever was."""
    made = publisher_in(ring_of(A, B))
    acknowledged(made, heard(made, ME, commit_of(records_of(ME, list(range(50)), 2)), 0.0), 0.0)

    effects = heard(made, ME, RingChanged(ring_of(A, B, C)), 1.0)
    assert made._turning.former
    finished(made, effects, 1.0)
    ticked(made, 1.5)

    assert made._turning.former == []


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
                    heard(made, int(effect.to), SummaryMatches(effect.message.number), now)  # type: ignore[arg-type]
        rates[others] = asked / 50.0
    assert 3.5 < rates[8] < 4.5
    assert 7.0 < rates[200] < 9.0


def test_a_lost_message_is_asked_about_soon_however_many_streams_there_are() -> None:
    """The rarer regular summaries are not what finds it."""
    made = publisher_in(ring_of(ME, *range(100, 500)))
    for at in range(60):
        ticked(made, 10.0 + at)
    effects = heard(made, ME, commit_of(records_of(ME, [1], 2)), 100.0)
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
    acknowledged(made, heard(made, ME, commit_of(records_of(ME, list(range(300)), 2)), 0.0), 0.0)
    heard(made, ME, RingChanged(ring_of(A, C, replicas=1)), 1.0)
    heard(made, ME, RingChanged(ring_of(A, B, C, replicas=1)), 1.0)
    assert made._turning.is_looking
    assert made.deadline() <= 1.0 + publisher.STEP_S
    held = made._table.find(keys(*range(300)))
    unseen = [n for n in range(300) if held[n] >= 64 and key_of(n) in held_by(made, A)]
    moved = [n for n in unseen if n not in owned_by(made._ring, A, range(300))]
    assert moved

    drops = drops_of(moved, [2 + 2 * name for name in moved])
    effects = heard(made, ME, RecordsChanged(NO_RECORDS, drops), 1.0)

    assert A in {owner for owner, _ in sent(effects, Delete)}
    assert not held_by(made, A) & set(keys(*moved))
