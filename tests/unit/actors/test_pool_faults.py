"""The ways in which others have returned wrong bytes, or lost memory, as stories of this pool.

Each of these fails when the line that prevents it is taken out.
"""

from __future__ import annotations

import pytest

from peercache.actors.pool.reservations import ENDED_MAX
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    REFUSED_FULL,
    REFUSED_TOO_LARGE,
    RESERVED,
    Reserve,
)
from peercache.wire.messages.session import Refused
from tests.unit.actors.pool_world import GRANULE, World, count_of, key, packed

ALICE, BOB = 101, 102
PAGE = 4 * GRANULE


def test_paused_client_keeps_its_slot_however_long_it_takes() -> None:
    """A reservation outlives a lost pipe, a thousand sets of others and any time.

    1. Alice reserves and is stopped; 2. Bob turns the pool over; 3. Alice wakes up and writes.
    """
    world = World(granules=64)
    world.reserve(ALICE, [1], PAGE)

    for number in range(1000):
        world.store(BOB, [1000 + number], PAGE)
        world.pool.on_tick(3600.0 * number)
    world.write(ALICE, 1)
    done = world.commit(ALICE, 1)

    assert done.states == bytes((COMMITTED,))
    assert world.is_readable(world.record(1))


def test_client_that_dies_between_reserve_and_commit_gives_its_slots_back() -> None:
    """Its slots come back, unread; what it had committed stays."""
    world = World(granules=64)
    world.store(ALICE, [1], PAGE)
    world.reserve(ALICE, range(10, 18), PAGE)
    world.write(ALICE, 2, pages=[0, 1])

    world.exit(ALICE)

    assert world.figure("pool_bytes_reserved") == 0
    assert world.figure("pool_clients") == 0
    assert world.holds(1, 10, 11) == [True, False, False]


def test_what_a_dead_client_had_sent_reserves_nothing() -> None:
    """A Reserve that was on its way when the process exited would never be freed again."""
    world = World(granules=64)
    world.store(ALICE, [1], PAGE)
    world.exit(ALICE)

    late = world.reserve(ALICE, [2], PAGE)
    done = world.commit(ALICE, 2)

    assert isinstance(late, Refused)
    assert late.reason == "gone"
    assert done.states == bytes((ABORTED,))
    assert world.figure("pool_bytes_reserved") == 0


def test_lost_granted_is_freed_when_the_client_no_longer_lists_it() -> None:
    """1. A Granted is lost; 2. the client gives up, and lists what it still means to write."""
    world = World(granules=64)
    world.reserve(ALICE, [1], PAGE)
    world.reserve(ALICE, [2], PAGE)
    world.reserve(ALICE, [3], PAGE)

    world.list_live(ALICE, 2, [1])

    assert world.figure("pool_bytes_reserved") == 2 * PAGE
    assert world.commit(ALICE, 1).states == bytes((COMMITTED,))
    assert world.commit(ALICE, 2).states == bytes((ABORTED,))
    assert world.commit(ALICE, 3).states == bytes((COMMITTED,))


def test_late_duplicate_of_a_forgotten_reserve_leaks_nothing() -> None:
    """Also when so much has happened since that its outcome is forgotten."""
    world = World(granules=64)
    message = Reserve(5, 1, 1, key(1), packed([PAGE]))
    world.reserve_again(ALICE, message)
    world.sequences[ALICE] = 1
    world.abort(ALICE, 1)
    for _ in range(ENDED_MAX + 1):
        world.reserve(ALICE, [2], PAGE)
        world.abort(ALICE, world.sequences[ALICE])

    answer = world.reserve_again(ALICE, message)

    assert answer.states == bytes((REFUSED_FULL,))
    assert world.figure("pool_bytes_reserved") == 0


@pytest.mark.parametrize("how", ["not listed", "listed before", "aborted"])
def test_reserve_that_arrives_after_the_client_gave_it_up_leaks_nothing(how: str) -> None:
    """1. A Reserve is delayed; 2. an Abort, or a list that does not name it, overtakes it.

    What a newer list has closed stays closed, in whatever order lists arrive.
    """
    world = World(granules=64)
    world.reserve(ALICE, [1], PAGE)
    if how == "aborted":
        world.abort(ALICE, 2)
    else:
        world.list_live(ALICE, 3, [1])
    if how == "listed before":
        world.list_live(ALICE, 1, [1])

    late = world.reserve(ALICE, [2], PAGE, sequence=2)

    assert late.states == bytes((REFUSED_FULL,))
    assert world.figure("pool_bytes_reserved") == PAGE


def test_reserve_that_is_listed_before_it_arrives_is_granted() -> None:
    """The list may overtake the Reserve: what it names is awaited, not over."""
    world = World(granules=64)
    world.reserve(ALICE, [1], PAGE)
    world.list_live(ALICE, 3, [1, 2, 3])

    answers = [world.reserve(ALICE, [9 + s], PAGE, sequence=s) for s in (3, 2)]

    assert [answer.states for answer in answers] == [bytes((RESERVED,))] * 2


def test_list_that_was_overtaken_ends_nothing_newer() -> None:
    """An old list says nothing about what came after it."""
    world = World(granules=64)
    world.reserve(ALICE, [1], PAGE)
    world.reserve(ALICE, [2], PAGE)
    world.list_live(ALICE, 3, [1, 2, 3])

    world.list_live(ALICE, 1, [1])
    awaited = world.reserve(ALICE, [3], PAGE, sequence=3)

    assert awaited.states == bytes((RESERVED,))
    assert world.commit(ALICE, 2).states == bytes((COMMITTED,))


def test_one_odd_page_in_a_full_pool_evicts_an_extent_at_most() -> None:
    """A page of another size costs one extent, here 4 of 256 units, and not everything."""
    world = World(granules=1024)
    pages = range(1024 // 4)
    for start in range(0, len(pages), 64):
        world.store(ALICE, pages[start : start + 64], PAGE)
    assert world.figure("pool_pages") == 256

    states = world.store(BOB, [9999], 5 * GRANULE)

    evicted = 256 - sum(world.holds(*pages))
    assert states == bytes((COMMITTED,))
    # 5 of 8 granules would waste 3/8; 4 units of 4 hold 3 slots and waste 1/16.
    assert evicted == 4


def test_odd_page_does_not_fail_for_ever() -> None:
    """Each of many sizes that come once finds room in a full pool."""
    world = World(granules=512)
    for start in range(0, 128, 32):
        world.store(ALICE, range(start, start + 32), PAGE)

    states = [world.store(BOB, [1000 + n], n * GRANULE) for n in range(1, 200, 7)]

    assert set(states) == {bytes((COMMITTED,))}


def test_page_larger_than_the_pool_is_refused_and_evicts_nothing() -> None:
    """It can never fit, so no page is evicted for it."""
    world = World(granules=16, uncommitted_max=16 * GRANULE)
    world.store(ALICE, range(4), PAGE)

    granted = world.reserve(BOB, [99], 17 * GRANULE)

    assert granted.states == bytes((REFUSED_TOO_LARGE,))
    assert world.figure("pool_pages") == 4


def test_eviction_of_a_batch_is_withdrawn_in_one_message() -> None:
    """However many pages go for a batch, directory and publisher are told once."""
    world = World(granules=256)
    world.store(ALICE, range(32), PAGE)
    world.store(ALICE, range(32, 64), PAGE)
    world.drop_batches.clear()

    granted = world.reserve(BOB, range(100, 132), PAGE)

    assert count_of(granted.states, RESERVED) == 32
    assert [len(drops) for drops in world.drop_batches] == [32]


@pytest.mark.parametrize("granules", [1, 2, 3, 5])
def test_smallest_pools_work(granules: int) -> None:
    """A pool of a few granules stores and turns over like any other."""
    world = World(granules=granules, uncommitted_max=granules * GRANULE)

    states = [world.store(ALICE, [number], GRANULE) for number in range(20)]

    assert set(states) == {bytes((COMMITTED,))}
    assert world.figure("pool_pages") == granules
