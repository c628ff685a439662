"""Pages on their way from the disk back into the pool, and the readers that wait for them."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from peercache.actors.disk.index import DiskIndex
from peercache.actors.disk.open_index import DiskLoads, OpenIndex
from peercache.actors.effects import Effect, NotifyPool, NotifyPromote
from peercache.actors.mailboxes import PagesLoaded, PromoteAnswered, RequestLoad
from peercache.actors.origin import Origin
from peercache.actors.ports import (
    DISK_DAMAGED,
    DISK_DONE,
    DISK_FAILED,
    DISK_LATE,
    DISK_REPLACED,
    DISK_UNTRIED,
    Load,
    LoadDone,
)
from peercache.actors.promote import actor as promote
from peercache.actors.promote.actor import (
    READ_WITHIN_S,
    WAITERS_MAX,
    UnreadPages,
    Waiter,
    Waiters,
)
from peercache.wire.codec import MESSAGE_BYTES_MAX, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.pool import LATER, LOST, PROMOTED, Promoted
from tests.unit.actors.disk_world import CLIENT, GRANULE, LENGTH, POOL, abort, filled, key, reserve

REASONS = {DISK_DAMAGED: "damaged", DISK_FAILED: "failed", DISK_REPLACED: "overwritten"}


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


def test_page_that_was_written_here_is_promoted_without_its_header() -> None:
    """The node knows its checksum since then."""
    world = filled()
    for slot in world.image.slots.values():
        slot.key = key(POOL + 1)

    world.ask(3)
    world.finish()

    assert world.promoted() == ([PROMOTED], [key(3)])
    assert world.where(3) == "memory"


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
        world.ask(2 * asker, 2 * asker + 1, asker=10 + asker, timeout_s=5.0)
    world.finish()
    first = [a.request for a in world.answers if isinstance(a, Promoted)]

    world.wait(0.3)
    world.finish()

    assert first == [10, 11, 12]
    assert world.promoted()[0] == [PROMOTED, PROMOTED]
    assert [a.request for a in world.answers if isinstance(a, Promoted)] == [10, 11, 12, 13]


def test_timeout_ends_a_question_that_the_disk_does_not_answer() -> None:
    """The asker learns in time that it may ask again."""
    world = filled()
    world.ask(3, timeout_s=0.1)

    world.wait(0.11)

    assert world.promoted() == ([LATER], [])


def test_question_with_nothing_to_report_is_not_answered_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader that asks again and again in vain is paced by its timeout."""
    world = filled()
    for loading in range(POOL):
        world.ask(loading, asker=20 + loading)
    count = len(world.answers)

    monkeypatch.setattr(promote, "WANTED_MAX", 0)
    world.ask(7, asker=99, timeout_s=0.1)
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


def test_question_without_timeout_is_a_wish_that_the_rate_bounds() -> None:
    """There is no answer; at most so many bytes a second are loaded."""
    world = filled(wish_rate=2 * LENGTH)

    world.ask(0, 1, 2, 3, 4, timeout_s=0.0)
    world.ask(5, 6, timeout_s=0.0)
    world.finish()

    assert not [a for a in world.answers if isinstance(a, Promoted)]
    assert world.places(*range(7)).count("memory") == 2


def test_pool_without_room_lets_a_load_wait() -> None:
    """While every slot is reserved nothing can be loaded; when one is free it is."""
    world = filled()
    world.notify("pool", reserve(POOL), CLIENT)
    world.ask(3, timeout_s=1.0)
    assert not [w for w in world.working.values() if isinstance(w.effect, Load)]

    world.notify("pool", abort(1000), CLIENT)
    world.wait(0.05)
    world.finish()

    assert world.promoted()[0] == [PROMOTED]


@pytest.mark.parametrize("outcome", REASONS)
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
    reason = REASONS[outcome]
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


class Disk:
    """Loads of an index that holds two pages."""

    def __init__(self) -> None:
        self.open_index = OpenIndex()
        self.index = self.open_index.index = DiskIndex(capacity_bytes=2**20, slab_bytes=2**18)
        ones, lengths = np.ones(2, np.uint64), np.full(2, LENGTH, np.uint64)
        begun = self.index.begin(key(1) + key(2), ones, lengths, ones, 1)
        self.index.finish(begun.entries)
        self.loads = DiskLoads(self.open_index)
        self.answered = 0

    def begin(self, *numbers: int, length: int = LENGTH) -> list[Effect]:
        """Ask for pages, whose slots are at 100, 200, …"""
        lengths = np.full(len(numbers), length, np.int64)
        offsets = np.arange(1, len(numbers) + 1, dtype=np.uint64) * np.uint64(100)
        return self.loads.begin(
            RequestLoad(7, b"".join(map(key, numbers)), 1, lengths, offsets, 9.0), 1.0
        )

    def done(self, *outcomes: int) -> list[Effect]:
        """Answer the oldest job."""
        checksums = np.arange(1, len(outcomes) + 1, dtype=np.uint64) * np.uint64(11)
        self.answered += 1
        return self.loads.done(LoadDone(self.answered, bytes(outcomes), checksums))

    def remove(self, number: int) -> None:
        self.index.remove(self.index.find(key(number)))


def reported(effects: list[Effect]) -> tuple[list[int], list[int]]:
    """Return the outcomes and the checksums that the promote actor is notified."""
    (effect,) = effects
    assert isinstance(effect, NotifyPromote)
    assert isinstance(effect.fact, PagesLoaded)
    return list(effect.fact.outcomes), effect.fact.checksums.tolist()


def test_a_page_that_is_removed_while_it_is_loaded_is_not_reported_as_loaded() -> None:
    disk = Disk()
    (load,) = disk.begin(1, 2)
    assert isinstance(load, Load)
    disk.remove(1)

    assert reported(disk.done(DISK_DONE, DISK_DONE)) == ([DISK_UNTRIED, DISK_DONE], [11, 22])
    assert len(disk.loads) == 0


def test_only_checksums_that_loads_have_found_are_known() -> None:
    """Those of pages that were here at the start; a page that is stored again has none."""
    disk = Disk()
    (load,) = disk.begin(1, 2)
    disk.done(DISK_DONE, DISK_UNTRIED)
    (again,) = disk.begin(1, 2)
    disk.done(DISK_DONE, DISK_DONE)
    disk.remove(1)
    ones = np.ones(1, np.uint64)
    disk.index.finish(disk.index.begin(key(1), ones, np.full(1, LENGTH), ones, 1).entries)
    (other,) = disk.begin(1, 2)

    loads = [each for each in (load, again, other) if isinstance(each, Load)]
    assert [each.known.tolist() for each in loads if each.known is not None] == [
        [0, 0],
        [11, 0],
        [0, 22],
    ]


def test_a_page_that_went_before_its_load_is_lost_and_the_others_keep_their_slots() -> None:
    disk = Disk()
    disk.remove(1)

    (load,) = disk.begin(1, 2)

    assert isinstance(load, Load)
    assert (load.keys, load.offsets.tolist()) == (key(2), [200])
    assert reported(disk.done(DISK_DONE)) == ([DISK_DAMAGED, DISK_DONE], [0, 11])


def test_pages_of_which_none_can_be_loaded_are_answered_at_once() -> None:
    """One that was stored in another length may be asked for again."""
    disk = Disk()

    assert reported(disk.begin(1, length=LENGTH + 1)) == ([DISK_UNTRIED], [0])
    assert reported(disk.begin(3)) == ([DISK_DAMAGED], [0])
    disk.open_index.index = None
    assert reported(disk.begin(1)) == ([DISK_UNTRIED], [0])
    assert len(disk.loads) == 0


def test_pages_of_a_disk_that_ended_meanwhile_are_not_loaded() -> None:
    """The pool may have been notified since that they are not on disk."""
    disk = Disk()
    disk.begin(1, 2)
    disk.open_index.index = None

    outcomes, _ = reported(disk.done(DISK_DONE, DISK_DAMAGED))

    assert outcomes == [DISK_UNTRIED, DISK_DAMAGED]
    assert len(disk.loads) == 0


KEY_A, KEY_B = b"A" * 16, b"B" * 16


def admit(waiters: Waiters, reader: int, *keys: bytes, until: float) -> list[Effect]:
    """Let a reader wait for all of these pages."""
    states = bytearray((LATER,)) * len(keys)
    waiter = Waiter(Origin(reader), reader, list(keys), states, 0.0, until)
    return waiters.admit(waiter, list(range(len(keys))))


def answers(effects: list[Effect]) -> list[tuple[int, bytes]]:
    """Return which readers are answered, and with what."""
    found = []
    for effect in effects:
        assert isinstance(effect, NotifyPool)
        assert isinstance(effect.fact, PromoteAnswered)
        found.append((effect.fact.request, effect.fact.states))
    return found


def test_a_reader_that_gives_up_leaves_the_page_to_the_others() -> None:
    waiters = Waiters()
    admit(waiters, 1, KEY_A, KEY_B, until=1.0)
    admit(waiters, 2, KEY_A, until=2.0)
    waiters.now = 1.0

    assert answers(waiters.expire()) == [(1, bytes((LATER, LATER)))]

    assert (waiters.want(KEY_A), waiters.want(KEY_B)) == (True, False)
    assert waiters.wanted_keys() == [KEY_A]
    assert waiters.identities(KEY_A) == {2: None}
    assert answers(waiters.settle(KEY_A, PROMOTED)) == [(2, bytes((PROMOTED,)))]
    assert len(waiters) == 0


def test_a_page_that_all_have_given_up_is_wanted_no_more() -> None:
    """Also one that a question names twice."""
    waiters = Waiters()
    for reader in range(100):
        admit(waiters, reader, KEY_A, KEY_B, KEY_A, until=1.0)
    waiters.now = 1.0

    assert len(waiters.expire()) == 100

    assert waiters.wanted_keys() == []
    assert waiters.deadline() > 1.0


def test_a_question_that_names_a_page_twice_is_answered_once() -> None:
    waiters = Waiters()
    admit(waiters, 1, KEY_A, KEY_B, KEY_A, until=1.0)

    assert waiters.settle(KEY_A, PROMOTED) == []
    assert answers(waiters.settle(KEY_B, LOST)) == [(1, bytes((PROMOTED, LOST, PROMOTED)))]
    assert waiters.settle(KEY_A, LOST) == []


def test_waiters_are_bounded() -> None:
    waiters = Waiters()
    for reader in range(WAITERS_MAX):
        assert admit(waiters, reader, KEY_A, until=1.0) == []

    assert answers(admit(waiters, WAITERS_MAX, KEY_A, until=1.0)) == [
        (WAITERS_MAX, bytes((LATER,)))
    ]


def test_pages_promoted_for_two_readers_are_read_when_both_have() -> None:
    """The first of them asks for more: the second may still be reading."""
    unread = UnreadPages()
    unread.add(1.0, 100, {7: None, 8: None})

    unread.read_by(7)
    once = unread.size
    unread.read_by(7)
    unread.read_by(8)

    assert (once, unread.size) == (100, 0)


def test_pages_that_are_not_read_lose_their_protection() -> None:
    """A reader that died, or a wish, holds nothing for long; what was read is not counted twice."""
    unread = UnreadPages()
    unread.add(1.0, 100, {})
    unread.add(2.0, 10, {7: None})
    unread.read_by(7)
    due = unread.deadline()

    unread.expire(1.0 + READ_WITHIN_S)
    left = unread.size
    unread.expire(3.0)

    assert due == 1.0 + READ_WITHIN_S
    assert (left, unread.size) == (0, 0)
    assert unread.deadline() == inf
