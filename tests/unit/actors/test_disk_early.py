"""Removals from before the disk is open: all of them go from it, and cheaply, once it is."""

from __future__ import annotations

import numpy as np

from peercache.actors.disk.open_index import KEYS_MAX, NAMESPACES_MAX
from peercache.actors.effects import Effect, TellPool
from peercache.actors.mailboxes import PagesRemoved, RequestHeld
from peercache.actors.ports import DISK_ENTRY, DiskEnded, DiskOpened, Forget
from peercache.wire.messages.pool import Clear, Remove
from tests.unit.actors.disk_world import CLIENT, SLAB, DiskWorld, key, keys

MANY = 40_000
"""Messages: more than fit when each took some bytes beside its keys."""


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
    """Open the disk; return what the tier says in that step."""
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
    assert [type(effect) for effect in effects] == [Forget, TellPool]
    assert effects[-1] == TellPool(RequestHeld())
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
    world.tell("disk", DiskEnded("unusable"))

    hear(world, Remove(7, 1, keys(2)))
    hear(world, Clear(8, 9))

    kept = world.tier._early
    assert (len(kept._keys), len(kept._namespaces)) == (0, 0)


def test_what_is_written_now_is_newer_than_a_slot_that_no_index_tells_of() -> None:
    """A page that was evicted from disk lies there until its slot is written to again."""
    before = DiskWorld()
    before.set(*range(20))
    before.finish()
    world = DiskWorld(image=before.image, is_open=False)
    highest = max(slot.sequence for slot in world.image.slots.values())
    told = [entry for entry in world.image.entries() if int(entry["sequence"]) < highest]
    fact = DiskOpened(world.slabs * SLAB, SLAB, np.array(told, DISK_ENTRY), 1_000_001)
    world.perform(world.tier.on_message(CLIENT, fact, world.now))

    world.set(100)
    world.finish()

    written = {
        int.from_bytes(slot.key, "big"): slot.sequence for slot in world.image.slots.values()
    }
    assert written[100] > highest
