"""The disk tier beside its pool: spilling, demoting, promoting, removing, restarting, failing."""

from __future__ import annotations

import pytest

from peercache.actors.disk.actor import REOPEN_S
from peercache.actors.ports import (
    DISK_CHANGED,
    DISK_FAILED,
    DISK_FULL,
    DISK_LATE,
    DISK_UNTRIED,
    LateEnded,
    Load,
    Spill,
)
from peercache.wire.messages.pool import LOST, PROMOTED, Promoted
from tests.unit.actors.disk_world import (
    CLIENT,
    GRANULE,
    LENGTH,
    POOL,
    DiskWorld,
    filled,
    key,
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
    assert world.count("pages_spilled_total") == 2
    assert world.count("bytes_spilled_total") == 2 * LENGTH


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
    assert world.count("spills_dropped_total", reason="changed") == POOL


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
    assert world.count("pages_spilled_total") == 2 * POOL


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


def test_page_that_leaves_another_length_behind_is_told_as_it_is_on_disk() -> None:
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
    world.set(1)
    for _ in range(3):
        world.tier.spills._jobs[-len(world.tier.spills._jobs) - 1] = next(
            iter(world.tier.spills._jobs.values())
        )

    world.set(*range(10, 20))

    assert world.tier.figures()["disk_bytes_waiting"] == 3 * LENGTH
    assert world.count("spills_dropped_total", reason="queue_full") == 7


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
    """They are told under the new incarnation's numbers, hottest first, at a limited rate."""
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
    world.wait(1.0)
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

    assert world.count("pages_spilled_total") == world.tier.figures()["disk_pages"] == 7
    assert not world.working


def test_page_larger_than_a_slab_has_no_others_written_again() -> None:
    """It is never written, so it is nothing to try again; pages that push each other out stay."""
    world = DiskWorld(granules=100, slabs=1, on_evict=True)
    world.tell("pool", reserve(77), CLIENT)
    for numbers, length in (([*range(4)], LENGTH), ([*range(4, 8)], LENGTH), ([8], 15 * GRANULE)):
        world.set(*numbers, length=length)
        world.wait(0.2)
        world.finish()

    for _ in range(3):
        world.wait(REOPEN_S)
        world.finish()

    assert world.count("pages_spilled_total") == 8
    assert world.tier.figures()["disk_pages"] == 7
    assert world.count("spills_dropped_total", reason="too_large") == 1


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
    """Spills, loads and removals count together."""
    world = filled()
    world.ask(1)

    numbers = [w.effect.job for w in world.working.values()]

    assert len(set(numbers)) == len(numbers) == 2
    assert {type(w.effect) for w in world.working.values()} == {Load, Spill}


def test_late_end_of_an_unknown_job_is_nothing() -> None:
    """It may come after the tier has forgotten."""
    world = filled()

    world.tell("disk", LateEnded(12345, (0, 1)))

    world.check_records()


def test_page_is_not_written_before_its_commit_is_answered() -> None:
    """Writes compete for the processors with work that a caller waits for."""
    world = DiskWorld()
    world.tier.spills.delay_s = 0.02
    world.set(1)
    at_once = len(world.working)

    world.wait(0.03)

    assert (at_once, len(world.working)) == (0, 1)
