"""Flush: what is only in memory is written before a stop, and once the disk is open."""

from __future__ import annotations

import pytest

from peercache.actors.disk.actor import REOPEN_S
from peercache.actors.mailboxes import RequestFlush
from peercache.actors.ports import DISK_CHANGED, DISK_FAILED, DISK_FULL
from tests.unit.actors.disk_world import LENGTH, DiskWorld

POOL = 8


def written(world: DiskWorld) -> int:
    """Let the store do all it has; return the pages on disk."""
    world.finish()
    return world.tier.figures()["disk_pages"]


def test_flush_writes_every_page_that_is_only_in_memory() -> None:
    """With `on_evict` nothing else would: a restart would keep none of them."""
    world = DiskWorld(on_evict=True)
    world.set(*range(4))
    world.set(4, namespace=2)
    assert written(world) == 0

    world.tell("disk", RequestFlush())

    assert world.tier.flush_left() == 5
    assert written(world) == 5
    assert world.tier.flush_left() == 0


def test_flush_writes_nothing_twice() -> None:
    """A page that is on disk already costs no write."""
    world = DiskWorld()
    world.set(1, 2)
    written(world)

    world.tell("disk", RequestFlush())

    assert world.tier.flush_left() == 0
    assert world.count("pages_spilled_total") == 2


def test_flush_goes_on_beyond_the_bound_of_the_queue() -> None:
    """The queue holds one page at a time here; the others wait, and none is dropped."""
    world = DiskWorld(on_evict=True, queue_bytes=LENGTH + 1)
    world.set(*range(POOL - 1))

    world.tell("disk", RequestFlush())

    assert world.tier.flush_left() == POOL - 1
    assert written(world) == POOL - 1


def test_flush_ends_where_no_page_fits_the_queue() -> None:
    """A page larger than the queue is dropped and counted, and holds up nothing."""
    world = DiskWorld(on_evict=True, queue_bytes=LENGTH - 1)
    world.set(1, 2, 3)

    world.tell("disk", RequestFlush())

    assert world.tier.flush_left() == 0
    assert world.count("spills_dropped_total", reason="queue_full") == 3


def test_hottest_pages_are_written_first() -> None:
    """Time may not suffice for all."""
    world = DiskWorld(on_evict=True, queue_bytes=LENGTH + 1)
    world.set(*range(4))

    world.tell("disk", RequestFlush())
    job = min(world.working)
    first = world.working[job].effect
    key = first.records["key"][0].tobytes()  # type: ignore[union-attr]

    # A batch is touched in reverse: its first page is the hottest.
    assert int.from_bytes(key, "big") in (0, 3)
    assert world.pool.pages.find(key) is not None
    held = [slot for slots in world.pool._slots.coldest_first() for slot in slots]
    assert world.pool.pages.in_slots(held)[-1].key == key


def test_page_that_is_stored_while_the_node_stops_is_written_too() -> None:
    """Clients go on until they hear of the stop."""
    world = DiskWorld(on_evict=True)
    world.tell("disk", RequestFlush())
    world.set(1, 2)

    assert world.tier.flush_left() == 2
    assert written(world) == 2
    world.check_records()


def test_flush_ends_with_the_disk_and_with_a_disk_that_fails() -> None:
    """What cannot be written is waited for no longer."""
    ended, failing = DiskWorld(on_evict=True), DiskWorld(on_evict=True)
    for world in (ended, failing):
        world.set(1, 2)
        world.tell("disk", RequestFlush())

    ended.end()
    for job in list(failing.working):
        failing.answer(job, DISK_FAILED)

    assert ended.tier.flush_left() == failing.tier.flush_left() == 0


@pytest.mark.parametrize(
    ("outcome", "says"), [(DISK_FULL, "is full"), (DISK_FAILED, "writes to it fail")]
)
def test_trouble_of_the_disk_is_told_until_it_takes_pages_again(outcome: int, says: str) -> None:
    """The health of the node shows it; the outcome of a page that changed is no trouble."""
    world = DiskWorld()
    world.set(1)
    (job,) = world.working
    world.answer(job, outcome)
    assert says in world.tier.trouble

    world.set(2)
    (job,) = world.working
    world.answer(job, DISK_CHANGED)
    assert says in world.tier.trouble

    world.wait(2 * REOPEN_S)
    world.set(3)
    world.finish()
    assert world.tier.trouble == ""


@pytest.mark.parametrize("on_evict", [False, True])
def test_pages_stored_before_the_disk_was_open_are_written_with_through(*, on_evict: bool) -> None:
    """They would be lost by the first restart, although `through` was asked for."""
    world = DiskWorld(is_open=False, on_evict=on_evict)
    world.set(1, 2, 3)
    world.open()

    assert written(world) == (0 if on_evict else 3)
    assert world.tier.flush_left() is None
