"""The disk tier next to its pool: writing, removing, flushing, restarting, failing."""

from __future__ import annotations

import numpy as np
import pytest

from peercache.actors.disk.actor import REOPEN_S
from peercache.actors.disk.open_index import KEYS_MAX, NAMESPACES_MAX
from peercache.actors.disk.writes import WRITES_MAX
from peercache.actors.effects import Effect, NotifyPool
from peercache.actors.mailboxes import PagesRemoved, RequestFlush, RequestHeld
from peercache.actors.ports import (
    DISK_CHANGED,
    DISK_ENTRY,
    DISK_FAILED,
    DISK_FULL,
    DISK_LATE,
    DISK_UNTRIED,
    DiskEnded,
    DiskOpened,
    DiskRoom,
    Forget,
    Load,
    Write,
)
from peercache.model.keys import COPIES, tag_of
from peercache.wire.messages.pool import LOST, PROMOTED, Clear, Promoted, Remove, Removed
from tests.unit.actors.disk_world import (
    CLIENT,
    GRANULE,
    LENGTH,
    POOL,
    SLAB,
    DiskWorld,
    filled,
    key,
    keys,
    reserve,
)


def test_page_is_written_through_after_its_commit() -> None:
    """What a client stored is on disk a moment later, and its record stays that of the memory."""
    world = DiskWorld()

    world.set(1, 2)
    before = dict(world.records)
    world.finish()

    assert world.tier.figures()["disk_pages"] == 2
    assert world.places(1, 2) == ["memory", "memory"]
    assert world.records == before
    assert world.count("disk_pages_written_total") == 2
    assert world.count("disk_bytes_written_total") == 2 * LENGTH


def test_evicted_page_stays_known_as_on_disk() -> None:
    """Eviction turns the records of what is on disk in one message, with new numbers."""
    world = filled()

    assert world.places(*range(POOL)) == ["disk"] * POOL
    assert len({int(r["generation"]) for r in world.records.values()}) == 2 * POOL
    assert all(r["generation"] % 2 == 0 for r in world.records.values())
    world.check_records()


def test_evicted_page_that_is_not_on_disk_is_known_no_more() -> None:
    """What left memory before it was written is dropped, and the write comes to nothing."""
    world = DiskWorld()
    world.set(*range(POOL))

    world.set(*range(100, 100 + POOL))
    assert world.places(*range(POOL)) == [""] * POOL
    world.finish()

    assert world.places(*range(POOL)) == [""] * POOL
    assert world.tier.figures()["disk_pages"] == POOL
    assert world.count("disk_writes_dropped_total", reason="changed") == POOL


def test_page_evicted_while_it_is_answered_for_is_found_on_disk() -> None:
    """A page that was written whole and evicted before the answer came gets its record then."""
    world = DiskWorld()
    world.set(1)
    (job,) = world.working
    for _ in range(3):
        world.step(job)

    world.set(*range(100, 100 + POOL))
    assert world.where(1) == ""
    world.finish()

    assert world.where(1) == "disk"


def test_page_on_disk_is_not_written_again() -> None:
    """A second commit of a page that the disk has costs the disk nothing."""
    world = filled()
    world.finish()

    world.set(3)
    world.finish()

    assert world.where(3) == "memory"
    assert world.count("disk_pages_written_total") == 2 * POOL


def test_page_stored_again_with_another_length_replaces_the_one_on_disk() -> None:
    """The newest counts, in memory and on disk."""
    world = filled()
    world.finish()
    world.set(3, length=LENGTH - 8)
    world.finish()

    world.set(*range(200, 200 + POOL))

    assert world.where(3) == "disk"
    assert world.records[key(3)]["length"] == LENGTH - 8
    assert world.count("disk_pages_lost_total", reason="replaced") == 1
    world.check_records()


def test_page_that_leaves_another_length_behind_is_reported_as_it_is_on_disk() -> None:
    """A page that was being written when another length came is on disk as it was written."""
    world = DiskWorld()
    world.set(3)
    (job,) = world.working
    world.step(job)
    world.step(job)
    world.step(job)
    world.set(*range(100, 100 + POOL))
    world.set(3, length=LENGTH - 8)
    world.step(job)

    world.set(*range(200, 200 + POOL))

    assert world.where(3) == "disk"
    assert world.records[key(3)]["length"] == LENGTH
    world.check_records()


def test_queue_drops_what_a_slow_disk_cannot_take() -> None:
    """The bytes that wait are bounded; what is too much is counted and not written."""
    world = DiskWorld(granules=64, queue_bytes=3 * LENGTH)
    for number in range(WRITES_MAX):
        world.set(number)
    world.set(*range(10, 20))

    assert world.tier.figures()["disk_bytes_waiting"] == 3 * LENGTH
    assert world.count("disk_writes_dropped_total", reason="queue_full") == 7


def test_full_disk_deletes_its_coldest_pages_and_their_records() -> None:
    """Room is made by the least recently used; what was on disk only is known no more."""
    world = DiskWorld(slabs=1)
    world.set(*range(7))
    world.finish()
    world.set(*range(100, 107))
    world.finish()

    known = world.places(*range(7))

    assert world.tier.figures()["disk_pages"] == 7
    assert known.count("") == 6
    assert world.count("disk_pages_lost_total", reason="evicted") == 7
    world.check_records()


def test_figures_are_those_of_the_room_that_there_is() -> None:
    """A store larger than its file system would never be shown as full."""
    world = DiskWorld(slabs=4)
    world.set(*range(7))
    world.finish()
    used = world.tier.figures()["disk_bytes_used"]
    capacity = world.tier.figures()["disk_bytes_usable"]

    for room, usable in ((2 * used, 2 * used), (0, used), (2 * capacity, capacity)):
        world.notify("disk", DiskRoom(room))
        assert world.tier.figures()["disk_bytes_usable"] == usable
        assert world.tier.figures()["disk_bytes"] == capacity


@pytest.mark.parametrize("outcome", [DISK_CHANGED, DISK_FAILED, DISK_FULL])
def test_page_that_could_not_be_written_is_not_on_disk(outcome: int) -> None:
    """An error of any kind leaves nothing that could be believed, and takes no space."""
    world = DiskWorld()
    world.set(1)
    (job,) = world.working

    world.answer(job, outcome)

    figures = world.tier.figures()
    assert (figures["disk_pages"], figures["disk_bytes_used"]) == (0, 0)
    assert figures["disk_bytes_in_flight"] == 0
    world.set(*range(100, 100 + POOL))
    assert world.where(1) == ""


def test_place_of_a_late_write_is_not_given_out_until_it_has_ended() -> None:
    """A call that may still write keeps its place, and leaves no row behind."""
    world = DiskWorld()
    world.set(1)
    (job,) = world.working

    world.answer(job, DISK_LATE)
    held = world.tier.figures()["disk_bytes_in_flight"]
    world.late_ends(job)

    assert held > 0
    assert world.tier.figures()["disk_bytes_in_flight"] == 0
    assert world.tier.figures()["disk_pages"] == 0


def test_place_of_a_failed_write_is_used_again() -> None:
    """The call may have written all of the page: the next page overwrites it."""
    world = DiskWorld()
    world.set(1)
    (job,) = world.working
    place = int(world.working[job].effect.places[0])
    for _ in range(3):
        world.step(job)

    world.answer(job, DISK_FAILED)
    world.set(2)
    world.finish()

    assert world.image.slots[place].key == key(2)
    assert world.tier.figures()["disk_pages"] == 1


# --- beginning and end ----------------------------------------------------------------------------


def test_restart_finds_the_pages_that_were_on_disk() -> None:
    """They are reported under the new incarnation's numbers, hottest first, at a limited rate."""
    image = filled().image
    image.sync()
    world = DiskWorld(image=image, seed=2)
    before = len(world.records)

    world.wait(0.0)
    first = len(world.records)
    world.wait(1.0)

    assert (before, first) == (0, 2)
    assert world.places(*range(POOL)) == ["disk"] * POOL
    world.check_records()


def test_question_before_the_disk_is_open_is_lost() -> None:
    """The node serves from the start, without the disk."""
    world = DiskWorld(is_open=False)
    world.set(1)

    world.ask(1, 2)

    assert world.promoted() == ([PROMOTED, LOST], [key(1)])


def test_end_of_the_disk_withdraws_what_was_there_only() -> None:
    """Pages in memory stay; what is asked for is lost; nothing is written any more."""
    world = filled()

    world.end()
    world.wait(2.0)
    world.ask(3)
    answered = world.promoted()
    world.set(300)

    assert world.places(*range(POOL)) == [""] * POOL
    assert world.places(101, 106, 300) == ["memory"] * 3
    assert answered == ([LOST], [])
    assert not world.working
    assert world.count("disk_open") == 0


def test_end_of_the_disk_ends_loads_and_their_reservations() -> None:
    """Waiting readers are answered; a slot in use comes back when its read is over."""
    world = filled()
    world.ask(3)
    job = next(j for j, w in world.working.items() if isinstance(w.effect, Load))
    world.answer(job, DISK_LATE)

    world.end()
    reserved = world.pool.figures()["pool_bytes_reserved"]
    world.wait(0.2)
    world.late_ends(job)

    assert reserved == GRANULE
    assert isinstance(world.answers[-1], Promoted)
    assert world.pool.figures()["pool_bytes_reserved"] == 0


def test_old_pages_go_after_their_time_to_live() -> None:
    """With `disk_ttl` a page is deleted from disk, and known no more where it was only there."""
    world = filled(ttl_s=60.0)

    world.wait(30.0)
    young = world.tier.figures()["disk_pages"]
    world.wait(40.0)

    assert young == POOL
    assert world.tier.figures()["disk_pages"] == 0
    assert world.places(*range(POOL)) == [""] * POOL
    assert world.count("disk_pages_lost_total", reason="expired") == POOL


def test_coldest_pages_are_written_before_they_must_go() -> None:
    """With `write_policy = on_evict` nothing is written while there is room."""
    world = DiskWorld(on_evict=True)
    world.set(*range(6))
    world.wait(10.0)
    roomy = not world.working

    world.set(6, 7)
    world.wait(0.2)
    world.finish()
    world.set(*range(100, 104))

    assert roomy
    assert world.places(5, 4, 3, 2) == ["disk"] * 4


def test_coldest_pages_that_the_disk_has_no_room_for_are_written_once() -> None:
    """They push each other out; written again each time, they would wear the disk out."""
    world = DiskWorld(granules=16, slabs=1, on_evict=True)
    world.set(*range(8))
    world.set(*range(8, 16))

    for _ in range(30):
        world.wait(0.1)
        world.finish()

    assert world.count("disk_pages_written_total") == world.tier.figures()["disk_pages"] == 7
    assert not world.working


def test_page_larger_than_a_slab_has_no_others_written_again() -> None:
    """It is never written, so it is nothing to try again; pages that push each other out stay."""
    world = DiskWorld(granules=100, slabs=1, on_evict=True)
    world.notify("pool", reserve(77), CLIENT)
    for numbers, length in (([*range(4)], LENGTH), ([*range(4, 8)], LENGTH), ([8], 15 * GRANULE)):
        world.set(*numbers, length=length)
        world.wait(0.2)
        world.finish()

    for _ in range(3):
        world.wait(REOPEN_S)
        world.finish()

    assert world.count("disk_pages_written_total") == 8
    assert world.tier.figures()["disk_pages"] == 7
    assert world.count("disk_writes_dropped_total", reason="too_large") == 1


@pytest.mark.parametrize("outcome", [DISK_FULL, DISK_FAILED, DISK_UNTRIED])
def test_coldest_pages_that_could_not_be_written_are_tried_again_after_a_pause(
    outcome: int,
) -> None:
    """A disk that failed for a moment has them when they must go; none is tried without end."""
    world = DiskWorld(on_evict=True)
    world.set(*range(8))
    world.wait(0.2)
    tried = 0
    for _ in range(10):
        for job in list(world.working):
            world.answer(job, outcome)
            tried += 1
        world.wait(0.5)
    world.wait(REOPEN_S)
    world.finish()
    world.set(*range(100, 104))

    assert tried == 1
    assert world.places(7, 6, 5, 4) == ["disk"] * 4


def test_use_is_noted_for_the_order_after_a_restart() -> None:
    """What was used last is named last."""
    world = filled()
    world.finish()
    world.ask(3)
    world.finish()

    world.wait(11.0)

    entry = world.tier.index.find(key(3))
    place = world.tier.index.entries(entry)["place"][0]
    assert world.noted
    assert world.noted[-1].places[-1] == place


def test_jobs_of_one_store_have_numbers_of_their_own() -> None:
    """DiskWrites, loads and removals count together."""
    world = filled()
    world.ask(1)

    numbers = [w.effect.job for w in world.working.values()]

    assert len(set(numbers)) == len(numbers) == 2
    assert {type(w.effect) for w in world.working.values()} == {Load, Write}


def test_page_is_not_written_before_its_commit_is_answered() -> None:
    """Writes compete for the processors with work that a caller waits for."""
    world = DiskWorld()
    world.tier.writes.delay_s = 0.02
    world.set(1)
    at_once = len(world.working)

    world.wait(0.03)

    assert (at_once, len(world.working)) == (0, 1)


def test_removed_page_goes_from_disk_too() -> None:
    """It counts once, wherever it was; the answer comes when a restart cannot bring it back."""
    world = filled()
    world.remove(2, 3, 101, 999)
    waiting = not [a for a in world.answers if isinstance(a, Removed)]

    world.finish()

    assert waiting
    assert world.answers[-1] == Removed(7, 3)
    assert world.places(2, 3, 101) == ["", "", ""]
    assert key(3) not in world.image.rows.values()
    world.check_records()


def test_pages_removed_before_the_disk_is_open_do_not_come_back() -> None:
    """They are answered for at once, and go from disk as soon as it is known what is there."""
    before = filled()
    before.finish()
    world = DiskWorld(image=before.image, is_open=False)
    world.remove(2, 3)
    world.clear(9)
    answered = len(world.answers)
    world.set(3)

    world.open()
    world.wait(1.0)
    world.finish()

    assert answered == 2
    assert world.places(1, 2, 3) == ["disk", "", "memory"]
    assert key(2) not in world.image.rows.values()
    world.check_records()


def test_removal_is_answered_in_time_by_a_slow_disk() -> None:
    """The count is right; that it lasts over a restart is not waited for without end."""
    world = filled()
    world.remove(2)

    world.wait(0.2)

    assert world.answers[-1] == Removed(7, 1)


@pytest.mark.parametrize(
    ("namespaces", "cleared"),
    [((1, 1, 9), 1), ((tag_of(5, 7), tag_of(5, 8), tag_of(6, 7)), 5)],
    ids=["whole", "by its space"],
)
def test_clear_empties_one_namespace_on_disk(namespaces: tuple[int, ...], cleared: int) -> None:
    """A space tag names all geometries of a name, as in memory; others' pages stay."""
    world = DiskWorld()
    for page, namespace in enumerate(namespaces, 1):
        world.set(page, namespace=namespace)
    world.finish()

    world.clear(cleared)
    world.finish()

    assert world.answers[-1] == Removed(8, 2)
    assert world.tier.figures()["disk_pages"] == 1


def test_a_page_of_unknown_geometry_is_removed_and_cleared_with_any_of_its_name() -> None:
    """It was handed over: its key is all that shows of which geometry it is."""
    for is_open in (True, False):
        before = DiskWorld()
        before.set(1, 2, 3, namespace=5)
        before.set(4, namespace=tag_of(5, 8))
        before.finish()
        world = before if is_open else DiskWorld(image=before.image, is_open=False)

        world.remove(1, namespace=tag_of(5, 7))
        if is_open:
            world.finish()
            assert world.places(1, 2) == ["", "memory"]
        world.clear(tag_of(5, 7))
        if not is_open:
            world.open()
        world.finish()

        assert list(world.image.rows.values()) == [key(4)]


def test_pages_from_other_nodes_are_dropped_from_disk() -> None:
    """Before it is open, too: what was copied before a restart is dropped after it."""
    for is_open in (True, False):
        before = DiskWorld()
        before.set(1, 2, namespace=5)
        before.set(3, namespace=tag_of(5, 8))
        before.finish()
        world = before if is_open else DiskWorld(image=before.image, is_open=False)

        world.clear(COPIES)
        if not is_open:
            world.open()
        world.finish()

        assert list(world.image.rows.values()) == [key(3)]


def test_page_removed_while_it_is_written_does_not_come_back() -> None:
    """The write may end well, and is not published."""
    world = DiskWorld()
    world.set(1)
    (job,) = world.working
    for _ in range(3):
        world.step(job)

    world.remove(1)
    world.finish()

    assert world.where(1) == ""
    assert world.tier.figures()["disk_pages"] == 0
    assert not world.image.rows


def test_row_of_a_page_removed_while_it_is_loaded_goes_before_the_answer() -> None:
    """A graceful restart must not find the page, however long the load takes."""
    world = filled()
    world.finish()
    world.ask(3)

    world.remove(3)
    world.image.sync()

    assert key(3) not in world.image.rows.values()


def test_page_removed_while_it_is_loaded_does_not_come_back() -> None:
    """The load ends without a page."""
    world = filled()
    world.ask(3)
    job = next(j for j, w in world.working.items() if isinstance(w.effect, Load))
    world.step(job)

    world.remove(3)
    world.finish()

    assert world.where(3) == ""
    assert world.pool.figures()["pool_bytes_reserved"] == 0


def test_late_end_of_a_removed_write_leaves_the_page_that_was_set_since_known() -> None:
    """The first write of a key ends after the second: what it reports is not of the second page."""
    world = DiskWorld()
    world.set(1)
    (slow,) = world.working
    for _ in range(3):
        world.step(slow)
    world.remove(1)
    world.set(1)
    (quick,) = (job for job in world.working if job != slow)
    while quick in world.working:
        world.step(quick)
    world.set(*range(100, 100 + POOL))
    known = world.where(1)

    world.finish()

    assert known == "disk"
    assert world.where(1) == "disk"
    world.check_records()


def test_page_removed_before_its_commit_arrived_does_not_come_back() -> None:
    """The tier takes back what the pool committed after a client had removed it."""
    world = filled()
    world.ask(3)
    job = next(j for j, w in world.working.items() if isinstance(w.effect, Load))
    while job in world.working and any(world.working[job].pages[1:]):
        world.step(job)
    # The removal reaches the pool just before the commit does.
    world.post("pool", Remove(7, 1, keys(3)), CLIENT)
    for _ in range(3):
        if job in world.working:
            world.step(job)
    world.finish()

    assert world.where(3) == ""


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

    world.notify("disk", RequestFlush())

    assert world.tier.flush_left() == 5
    assert written(world) == 5
    assert world.tier.flush_left() == 0


def test_flush_writes_nothing_twice() -> None:
    """A page that is on disk already costs no write."""
    world = DiskWorld()
    world.set(1, 2)
    written(world)

    world.notify("disk", RequestFlush())

    assert world.tier.flush_left() == 0
    assert world.count("disk_pages_written_total") == 2


def test_flush_goes_on_beyond_the_bound_of_the_queue() -> None:
    """The queue holds one page at a time here; the others wait, and none is dropped."""
    world = DiskWorld(on_evict=True, queue_bytes=LENGTH + 1)
    world.set(*range(POOL - 1))

    world.notify("disk", RequestFlush())

    assert world.tier.flush_left() == POOL - 1
    assert written(world) == POOL - 1


def test_flush_ends_where_no_page_fits_the_queue() -> None:
    """A page larger than the queue is dropped and counted, and holds up nothing."""
    world = DiskWorld(on_evict=True, queue_bytes=LENGTH - 1)
    world.set(1, 2, 3)

    world.notify("disk", RequestFlush())

    assert world.tier.flush_left() == 0
    assert world.count("disk_writes_dropped_total", reason="queue_full") == 3


def test_hottest_pages_are_written_first() -> None:
    """Time may not suffice for all; the hottest is the one that a full pool keeps longest."""
    world = DiskWorld(on_evict=True, queue_bytes=LENGTH + 1)
    world.set(*range(4))

    world.notify("disk", RequestFlush())
    first = world.working[min(world.working)].effect
    world.set(*range(100, 100 + POOL - 1))

    kept = [number for number in range(4) if world.where(number) == "memory"]
    assert [key(number) for number in kept] == [first.records["key"][0].tobytes()]  # type: ignore[union-attr]


def test_page_that_is_stored_while_the_node_stops_is_written_too() -> None:
    """Clients go on until they learn of the stop."""
    world = DiskWorld(on_evict=True)
    world.notify("disk", RequestFlush())
    world.set(1, 2)

    assert world.tier.flush_left() == 2
    assert written(world) == 2
    world.check_records()


def test_flush_ends_with_the_disk_and_with_a_disk_that_fails() -> None:
    """What cannot be written is waited for no longer."""
    ended, failing = DiskWorld(on_evict=True), DiskWorld(on_evict=True)
    for world in (ended, failing):
        world.set(1, 2)
        world.notify("disk", RequestFlush())

    ended.end()
    for job in list(failing.working):
        failing.answer(job, DISK_FAILED)

    assert ended.tier.flush_left() == failing.tier.flush_left() == 0


@pytest.mark.parametrize(
    ("outcome", "reason"), [(DISK_FULL, "is full"), (DISK_FAILED, "writes to it fail")]
)
def test_trouble_of_the_disk_is_reported_until_it_takes_pages_again(
    outcome: int, reason: str
) -> None:
    """The health of the node shows it; the outcome of a page that changed is no trouble."""
    world = DiskWorld()
    world.set(1)
    (job,) = world.working
    world.answer(job, outcome)
    assert reason in world.tier.trouble

    world.set(2)
    (job,) = world.working
    world.answer(job, DISK_CHANGED)
    assert reason in world.tier.trouble

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


MANY = 40_000
"""Messages: more than fit when each took some bytes in addition to its keys."""


def restarted() -> DiskWorld:
    """Return a world that has eight pages on disk, four in each of two namespaces, not open yet."""
    before = DiskWorld()
    before.set(*range(4))
    before.set(*range(4, 8), namespace=9)
    before.finish()
    return DiskWorld(image=before.image, is_open=False)


def hear(world: DiskWorld, message: Remove | Clear) -> None:
    """Let the tier hear a removal of what is not in memory; past the pool, which takes its time."""
    world.tier.on_message(CLIENT, PagesRemoved(CLIENT, message, b""), world.now)


def opened(world: DiskWorld) -> list[Effect]:
    """Open the disk; return what the tier emits in that step."""
    fact = DiskOpened(world.slabs * SLAB, SLAB, world.image.entries(), 1_000_000)
    effects = world.tier.on_message(CLIENT, fact, world.now)
    world.perform(effects)
    world.wait(1.0)
    world.finish()
    return effects


def on_disk(world: DiskWorld) -> set[int]:
    """Return the pages that the index on disk has a row of."""
    return {int.from_bytes(key, "big") for key in world.image.rows.values()}


def test_many_removals_are_one_when_the_disk_opens() -> None:
    """However many messages they came in, the step that opens the disk has the same few effects."""
    world = restarted()
    for number in range(MANY):
        hear(world, Remove(7, 1, key(10**6 + number)))
    for _ in range(MANY):
        hear(world, Clear(8, 9))
    for number in (1, 2, 3, 2):
        hear(world, Remove(7, 1, key(number)))
    world.set(3)

    effects = opened(world)

    # Page 3 was stored again: the pool is asked for what is not on disk yet.
    assert [type(effect) for effect in effects] == [Forget, NotifyPool]
    assert effects[-1] == NotifyPool(RequestHeld())
    world.finish()
    assert on_disk(world) == {0, 3}
    assert world.places(*range(8)) == ["disk", "", "", "memory", "", "", "", ""]
    world.check_records()


def test_removals_are_kept_as_far_as_there_is_room() -> None:
    """The part of a message that fits, and what is cleared after it all the same."""
    world = restarted()
    hear(world, Remove(7, 1, b"\xff" * 16 * (KEYS_MAX - 2) + keys(1, 2, 3)))
    hear(world, Remove(7, 1, key(0)))
    hear(world, Clear(8, 9))

    opened(world)

    assert on_disk(world) == {0, 3}
    assert world.places(*range(8)) == ["disk", "", "", "disk", "", "", "", ""]
    world.check_records()


def test_namespaces_that_are_cleared_early_are_bounded() -> None:
    """A client that clears without end takes bounded memory."""
    world = restarted()
    for namespace in range(10, 10 + NAMESPACES_MAX):
        hear(world, Clear(8, namespace))
    hear(world, Clear(8, 9))

    opened(world)

    assert on_disk(world) == set(range(8))


def test_nothing_is_kept_for_a_disk_that_has_ended() -> None:
    """It is not opened again, so it would never be taken."""
    world = restarted()
    hear(world, Remove(7, 1, keys(1)))
    world.notify("disk", DiskEnded("unusable"))

    hear(world, Remove(7, 1, keys(2)))
    hear(world, Clear(8, 9))
    world.open()
    world.wait(1.0)
    world.finish()

    assert on_disk(world) == set(range(8)), "no removal is kept for it"


def test_what_is_written_now_is_newer_than_a_slot_that_no_index_names() -> None:
    """A page that was evicted from disk is there until its slot is written to again."""
    before = DiskWorld()
    before.set(*range(20))
    before.finish()
    world = DiskWorld(image=before.image, is_open=False)
    highest = max(slot.sequence for slot in world.image.slots.values())
    reported = [entry for entry in world.image.entries() if int(entry["sequence"]) < highest]
    fact = DiskOpened(world.slabs * SLAB, SLAB, np.array(reported, DISK_ENTRY), 1_000_001)
    world.perform(world.tier.on_message(CLIENT, fact, world.now))

    world.set(100)
    world.finish()

    written = {
        int.from_bytes(slot.key, "big"): slot.sequence for slot in world.image.slots.values()
    }
    assert written[100] > highest
