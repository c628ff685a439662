"""The own pool's records in a shard without memory for them: nothing is absent for certain."""

from __future__ import annotations

import math

import pytest

from peercache.actors.directory import actor as directory
from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.directory.holdings import RETRIED_MAX, RETRY_S
from peercache.actors.mailboxes import RecordsChanged, RingChanged
from peercache.model.records import from_bytes
from peercache.wire.messages.directory import Located, Lookup
from tests.unit.actors.lone_publisher import ring_of
from tests.unit.actors.lone_shard import ME, heard, refused, shard_of
from tests.unit.actors.record_cluster import NO_DROPS, NO_RECORDS, drops_of, key_of, records_of

ROWS = 5000
FULL = list(range(ROWS))


@pytest.fixture
def shard(monkeypatch: pytest.MonkeyPatch) -> DirectoryShard:
    """A lone shard that has authority, and whose table is full."""
    monkeypatch.setattr(directory, "ROWS_MAX", ROWS)
    shard = shard_of()
    heard(shard, ME, RingChanged(ring_of(ME)))
    heard(shard, ME, RecordsChanged(records_of(ME, FULL, [10] * ROWS), NO_DROPS))
    assert shard.record_count == ROWS
    assert has_authority(shard, 0.0)
    return shard


def has_authority(shard: DirectoryShard, now: float) -> bool:
    """Return what readers of the table see, after checking that answers say the same."""
    (answer,) = heard(shard, 77, Lookup(1, key_of(9)), now)
    assert isinstance(answer, Located)
    word = shard.table.authority
    assert answer.behind == (word is None)
    return word is not None


def generation_of(shard: DirectoryShard, name: int, now: float) -> list[int]:
    (answer,) = heard(shard, 77, Lookup(1, key_of(name)), now)
    assert isinstance(answer, Located)
    generations: list[int] = from_bytes(answer.records)["generation"].tolist()
    return generations


def store(shard: DirectoryShard, names: list[int], generation: int, now: float) -> None:
    stored = records_of(ME, names, [generation] * len(names))
    heard(shard, ME, RecordsChanged(stored, NO_DROPS), now)


def drop(shard: DirectoryShard, names: list[int], generation: int, now: float) -> None:
    drops = drops_of(names, [generation] * len(names))
    heard(shard, ME, RecordsChanged(NO_RECORDS, drops), now)


def tick(shard: DirectoryShard, until: float) -> None:
    while shard.deadline() <= until:
        shard.on_tick(shard.deadline())
        shard.check()


def test_a_page_of_the_own_pool_that_found_no_memory_is_not_absent(shard: DirectoryShard) -> None:
    """Readers of the table ask other owners until it is there."""
    store(shard, [9001, 9002], 12, 0.0)
    tick(shard, RETRY_S + 0.01)
    full = has_authority(shard, RETRY_S + 0.01), generation_of(shard, 9001, RETRY_S + 0.01)
    drop(shard, [1, 2], 10, 0.3)
    room = has_authority(shard, 0.3)
    tick(shard, 0.3 + RETRY_S)

    assert full == (False, [])
    assert refused(shard, "too_many") == 2
    assert not room
    assert has_authority(shard, 0.3 + RETRY_S)
    assert generation_of(shard, 9001, 0.3 + RETRY_S) == [12]
    assert shard.record_count == ROWS


def test_a_page_that_left_the_pool_is_missed_no_more(shard: DirectoryShard) -> None:
    """A drop that is older than the page ends nothing."""
    store(shard, [9001], 12, 0.0)
    drop(shard, [9001], 11, 0.0)
    older = has_authority(shard, 0.0)
    drop(shard, [9001], 12, 0.0)

    assert not older
    assert has_authority(shard, 0.0)
    drop(shard, [1], 10, 0.0)
    tick(shard, 2 * RETRY_S)
    assert generation_of(shard, 9001, 2 * RETRY_S) == []


def test_of_a_page_stored_again_only_the_newer_record_comes_in(shard: DirectoryShard) -> None:
    """Whether that found memory at once or not."""
    store(shard, [9001], 12, 0.0)
    store(shard, [9001], 14, 0.0)
    store(shard, [9002], 12, 0.0)
    drop(shard, [1, 2], 10, 0.0)
    store(shard, [9002], 16, 0.0)
    tick(shard, 2 * RETRY_S)

    assert has_authority(shard, 2 * RETRY_S)
    assert generation_of(shard, 9001, 2 * RETRY_S) == [14]
    assert generation_of(shard, 9002, 2 * RETRY_S) == [16]


def test_an_older_record_of_one_change_does_not_replace_a_newer_one(shard: DirectoryShard) -> None:
    """A page may change twice in a batch, and the pool names the records in no order."""
    store(shard, [9001, 9001], 14, 0.0)
    changed = records_of(ME, [9001, 9001], [18, 16])
    heard(shard, ME, RecordsChanged(changed, NO_DROPS), 0.0)
    drop(shard, [9001], 16, 0.0)
    still_missed = not has_authority(shard, 0.0)
    drop(shard, [1], 10, 0.0)
    tick(shard, 2 * RETRY_S)

    assert still_missed
    assert generation_of(shard, 9001, 2 * RETRY_S) == [18]


def test_many_pages_come_in_by_parts(shard: DirectoryShard) -> None:
    """No tick is long, and authority waits for the last of them."""
    names = [10_000 + at for at in range(2 * RETRIED_MAX)]
    store(shard, names, 12, 0.0)
    drop(shard, FULL[: len(names)], 10, 0.0)
    tick(shard, RETRY_S)
    half = shard.record_count - (ROWS - len(names)), has_authority(shard, RETRY_S)
    tick(shard, 2 * RETRY_S)

    assert half == (RETRIED_MAX, False)
    assert has_authority(shard, 2 * RETRY_S)
    assert shard.record_count == ROWS


def test_sets_that_go_on_put_nothing_off(shard: DirectoryShard) -> None:
    """Each of them is refused, and the first one's pages are put again in time."""
    for at in range(5):
        store(shard, [9001 + at], 12, at * RETRY_S / 5)

    assert shard._own.retry_at == RETRY_S


def test_a_lone_shard_without_a_ring_puts_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first ring nothing else is due."""
    monkeypatch.setattr(directory, "ROWS_MAX", ROWS)
    shard = shard_of()
    store(shard, FULL, 10, 0.0)
    tick(shard, 1.0)
    store(shard, [9001], 12, 1.0)
    drop(shard, [1], 10, 1.0)

    assert shard.deadline() == 1.0 + RETRY_S
    tick(shard, 1.0 + RETRY_S)
    assert generation_of(shard, 9001, 2.0) == [12]
    assert shard._own.retry_at == math.inf
