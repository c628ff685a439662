"""The disk tier beside its pool: spilling, demoting, promoting, removing, restarting, failing."""

from __future__ import annotations

import numpy as np
import pytest

from peercache.actors.disk.actor import REOPEN_S
from peercache.actors.promote.promotions import WantedPage
from peercache.actors.storage_port import (
    DISK_CHANGED,
    DISK_DAMAGED,
    DISK_FAILED,
    DISK_FULL,
    DISK_LATE,
    DISK_UNTRIED,
    LateEnded,
    Load,
    Spill,
)
from peercache.wire.codec import MESSAGE_BYTES_MAX, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.pool import Removed
from peercache.wire.messages.promote import LATER, LOST, PROMOTED, Promoted
from tests.unit.actors.disk_world import CLIENT, GRANULE, LENGTH, DiskWorld, key, keys

POOL = 8
"""Pages that the pool holds."""


def filled(**options: object) -> DiskWorld:
    """Return a world whose first eight pages are on disk only."""
    world = DiskWorld(**options)  # type: ignore[arg-type]
    world.set(*range(POOL))
    world.finish()
    world.set(*range(100, 100 + POOL))
    return world


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


def test_page_stored_anew_with_another_length_replaces_the_one_on_disk() -> None:
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


# --- promoting ------------------------------------------------------------------------------------


def test_promoted_page_is_read_under_a_fresh_record() -> None:
    """The page is in memory again, byte for byte, under a number that was never used."""
    world = filled()
    before = world.records[key(3)]

    world.ask(3)
    world.finish()

    assert world.promoted() == ([PROMOTED], [key(3)])
    assert world.records[key(3)]["generation"] > before["generation"]
    assert world.where(3) == "memory"
    assert world.count("pages_promoted_total") == 1
    world.check_records()


def test_two_askers_of_one_page_share_a_load() -> None:
    """The second asker waits for the load that the first began."""
    world = filled()

    world.ask(3, asker=8)
    world.ask(3, asker=9)
    loads = [w for w in world.working.values() if isinstance(w.effect, Load)]
    world.finish()

    assert len(loads) == 1
    answered = [a for a in world.answers if isinstance(a, Promoted)]
    assert sorted(a.request for a in answered) == [8, 9]
    assert all(a.states == bytes([PROMOTED]) for a in answered)


def test_question_larger_than_a_quarter_of_the_pool_is_answered_in_portions() -> None:
    """The first pages are promoted, the others are to be asked for again."""
    world = filled()

    world.ask(*range(POOL))
    world.finish()

    states, found = world.promoted()
    assert states == [PROMOTED] * 2 + [LATER] * 6
    assert found == [key(0), key(1)]


def test_whole_batch_comes_in_portions_that_the_reader_takes_one_after_the_other() -> None:
    """A batch of all that is on disk is read in full, though the pool holds half of it."""
    world = filled(slabs=8)
    world.finish()
    wanted, read = list(range(POOL)), []

    while wanted:
        world.ask(*wanted)
        world.finish()
        states, found = world.promoted()
        read += [n for n, state in zip(wanted, states, strict=True) if state == PROMOTED]
        assert len(found) == states.count(PROMOTED) > 0
        wanted = [n for n, state in zip(wanted, states, strict=True) if state == LATER]
        world.now += 0.01

    assert read == list(range(POOL))


def test_portion_for_one_reader_is_not_evicted_by_those_of_others() -> None:
    """Half of the pool may be promoted and unread; the rest waits until it may have been read."""
    world = filled(slabs=8)
    for asker in range(4):
        world.ask(2 * asker, 2 * asker + 1, asker=10 + asker, patience_s=5.0)
    world.finish()
    first = [a.request for a in world.answers if isinstance(a, Promoted)]

    world.wait(0.3)
    world.finish()

    assert first == [10, 11, 12]
    assert world.promoted()[0] == [PROMOTED, PROMOTED]
    assert [a.request for a in world.answers if isinstance(a, Promoted)] == [10, 11, 12, 13]


def test_patience_ends_a_question_that_the_disk_does_not_answer() -> None:
    """The asker hears in time that it may ask again."""
    world = filled()
    world.ask(3, patience_s=0.1)

    world.wait(0.11)

    assert world.promoted() == ([LATER], [])


def test_question_with_nothing_to_tell_is_not_answered_at_once() -> None:
    """A reader that asks again and again in vain is paced by its patience."""
    world = filled()
    for loading in range(POOL):
        world.ask(loading, asker=20 + loading)
    count = len(world.answers)

    queued = WantedPage(LENGTH, 1)
    for number in range(10**6, 10**6 + 65536):
        world.promote.promotions._wanted[key(number)] = queued
    world.ask(7, asker=99, patience_s=0.1)
    early = len(world.answers)
    world.wait(0.11)

    assert early == count
    assert world.answers[-1] in [Promoted(n, bytes([LATER]), b"") for n in range(20, 100)]


def test_page_that_is_nowhere_is_lost_at_once() -> None:
    """There is nothing to wait for."""
    world = filled()

    world.ask(999, 3)
    world.finish()

    assert world.promoted() == ([LOST, PROMOTED], [key(3)])


def test_question_of_any_size_is_answered_within_what_a_message_holds() -> None:
    """Of a question as large as a message may be, the first two thousand keys are looked at."""
    world = filled()

    world.ask(*[101] * 16_000)

    answer = world.answers[-1]
    assert isinstance(answer, Promoted)
    assert len(answer.states) == 16_000
    assert len(answer.records) == 2048 * 56
    assert len(encode(Envelope(1, 2, answer), cluster="c")) <= MESSAGE_BYTES_MAX
    assert answer.states[-1] == LATER


def test_page_in_memory_needs_no_load() -> None:
    """It is answered with its record, whatever the disk does."""
    world = filled()

    world.ask(101)

    assert world.promoted() == ([PROMOTED], [key(101)])
    assert not [w for w in world.working.values() if isinstance(w.effect, Load)]


def test_question_without_patience_is_a_wish_that_the_rate_bounds() -> None:
    """There is no answer; at most so many bytes a second are loaded."""
    world = filled(wish_rate=2 * LENGTH)

    world.ask(0, 1, 2, 3, 4, patience_s=0.0)
    world.ask(5, 6, patience_s=0.0)
    world.finish()

    assert not [a for a in world.answers if isinstance(a, Promoted)]
    assert world.places(*range(7)).count("memory") == 2


def test_pool_without_room_lets_a_load_wait() -> None:
    """While every slot is reserved nothing can be loaded; when one is free it is."""
    world = filled()
    world.tell("pool", _reserve(POOL), CLIENT)
    world.ask(3, patience_s=1.0)
    assert not [w for w in world.working.values() if isinstance(w.effect, Load)]

    world.tell("pool", _abort(1000), CLIENT)
    world.wait(0.05)
    world.finish()

    assert world.promoted()[0] == [PROMOTED]


def _reserve(count: int, sequence: int = 1000) -> object:
    from peercache.wire.messages.pool import Reserve

    names = keys(*range(sequence * 10, sequence * 10 + count))
    return Reserve(1, sequence, 1, names, np.full(count, GRANULE, "<u8").tobytes())


def _abort(sequence: int) -> object:
    from peercache.wire.messages.pool import Abort

    return Abort(sequence)


@pytest.mark.parametrize("outcome", [DISK_DAMAGED, DISK_FAILED])
def test_damaged_page_is_dropped_everywhere(outcome: int) -> None:
    """A miss, a counter, no record, no entry, no slot: and the node goes on."""
    world = filled()
    world.ask(3)
    job = next(j for j, w in world.working.items() if isinstance(w.effect, Load))

    world.answer(job, outcome)
    world.finish()

    assert world.promoted() == ([LOST], [])
    assert world.where(3) == ""
    assert world.pool.figures()["pool_bytes_reserved"] == 0
    reason = "damaged" if outcome == DISK_DAMAGED else "failed"
    assert world.count("disk_pages_lost_total", reason=reason) == 1
    world.check_records()


def test_flipped_byte_on_disk_is_a_lost_page() -> None:
    """The store's checksum finds it, and no reader ever gets it."""
    world = filled()
    next(s for s in world.image.slots.values() if s.key == key(3)).data[100] ^= 1

    world.ask(3)
    world.finish()

    assert world.promoted() == ([LOST], [])
    assert world.where(3) == ""


def test_slot_of_a_late_load_stays_reserved_until_it_has_ended() -> None:
    """A read that is stuck may still write into its slot, so it is not reused."""
    world = filled()
    world.ask(3)
    job = next(j for j, w in world.working.items() if isinstance(w.effect, Load))

    world.answer(job, DISK_LATE)
    world.wait(100.0)
    reserved = world.pool.figures()["pool_bytes_reserved"]
    world.set(*range(200, 200 + POOL - 1))
    world.late_ends(job)

    assert reserved == GRANULE
    assert world.pool.figures()["pool_bytes_reserved"] == 0
    for record in world.records.values():
        if world.where(int.from_bytes(record["key"].tobytes(), "big")) == "memory":
            world.read(record)


# --- removing -------------------------------------------------------------------------------------


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
    """They are answered for at once, and go from disk as soon as it is known what lies there."""
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


def test_clear_empties_one_namespace_on_disk() -> None:
    """Others' pages stay."""
    world = DiskWorld()
    world.set(1, 2)
    world.set(3, namespace=9)
    world.finish()

    world.clear(1)
    world.finish()

    assert world.answers[-1] == Removed(8, 2)
    assert world.tier.figures()["disk_pages"] == 1


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


def test_late_end_of_a_removed_write_leaves_the_page_that_was_set_since_known() -> None:
    """The first write of a key ends after the second: what it tells is not of the second page."""
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


def test_page_removed_before_its_commit_was_heard_does_not_come_back() -> None:
    """The tier takes back what the pool committed after a client had removed it."""
    world = filled()
    world.ask(3)
    job = next(j for j, w in world.working.items() if isinstance(w.effect, Load))
    while job in world.working and any(world.working[job].pages[1:]):
        world.step(job)
    # The removal reaches the pool just before the commit does.
    from peercache.wire.messages.pool import Remove

    world.post("pool", Remove(7, 1, keys(3)), CLIENT)
    for _ in range(3):
        if job in world.working:
            world.step(job)
    world.finish()

    assert world.where(3) == ""


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
    world.tell("pool", _reserve(77), CLIENT)
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
