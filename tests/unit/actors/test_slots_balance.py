"""How size classes share a pool: who gives an extent to whom, and when it stops."""

from __future__ import annotations

import pytest

from tests.unit.actors.slots_rig import Rig


@pytest.mark.parametrize(("one", "other"), [(1, 2), (4, 3), (4, 12), (4, 5)])
def test_two_classes_in_equal_use_do_not_steal_from_each_other(one: int, other: int) -> None:
    """After settling, a long alternation of two sizes moves no extent."""
    rig = Rig(1024)
    for _ in range(2000):
        rig.put(one)
        rig.put(other)
    settled = rig.slots.reclaims

    for _ in range(4000):
        rig.put(one)
        rig.put(other)

    assert rig.slots.reclaims == settled
    assert min(rig.count(one), rig.count(other)) * 5 > max(rig.count(one), rig.count(other))


@pytest.mark.parametrize("units", [2, 3, 4, 5, 7])
def test_two_classes_in_a_tiny_pool_settle(units: int) -> None:
    """Also where an extent is a large part of the pool nothing moves to and fro."""
    rig = Rig(units * 6, units_about=units)
    for _ in range(500):
        rig.put(2)
        rig.put(3)
    settled = rig.slots.reclaims

    for _ in range(2000):
        rig.put(2)
        rig.put(3)

    assert rig.slots.reclaims == settled


def test_only_a_much_colder_class_gives_an_extent() -> None:
    """A class whose pages are about as old as our own gives nothing, be its extents colder.

    Ancient pages lie beside hot ones in every extent of one class; those of the other are middling.
    """
    rig = Rig(36, units_about=9)
    ancient = [rig.put(2) for _ in range(4)]
    hot = rig.put(3)
    for _ in range(100):
        rig.slots.touch(hot)
    middling = [rig.put(1) for _ in range(8)]
    for _ in range(10):
        rig.slots.touch(hot)
    own = [rig.put(4) for _ in range(2)]
    for slot in [hot] * 20 + ancient[1::2]:
        rig.slots.touch(slot)

    rig.put(4)

    assert rig.count(1) == len(middling)
    assert rig.count(4) == len(own) + 1
    assert rig.count(2) == 2


def test_search_that_failed_is_repeated_when_units_become_free() -> None:
    """1. No two free units are neighbours; 2. two become so; 3. then no page is evicted."""
    rig = Rig(8)
    rig.put(2)
    slots = {slot.first: slot for slot in (rig.put(1) for _ in range(6))}
    rig.release(slots[3])
    rig.release(slots[5])
    rig.put(2)
    evicted_before = len(rig.evicted)
    rig.release(slots[4])

    rig.put(2)

    assert evicted_before == 1
    assert len(rig.evicted) == 1


def test_unused_class_gives_its_room() -> None:
    """A pool follows the demand: the new size gets nearly everything in the end."""
    rig = Rig(1024)
    for _ in range(256):
        rig.put(4)

    for _ in range(3000):
        rig.put(2)

    assert rig.count(4) == 0
    assert rig.count(2) == 512


def test_class_in_steady_use_keeps_its_room() -> None:
    """One that is read all the time is not robbed by one that is only written."""
    rig = Rig(1024)
    hot = [rig.put(4) for _ in range(128)]
    for _ in range(3000):
        rig.put(2)
        for slot in hot[:: len(hot) // 4]:
            rig.slots.touch(slot)
        hot = hot[1:] + hot[:1]

    assert rig.count(4) == 128


def test_many_sizes_that_come_once_cost_an_extent_each() -> None:
    """An odd size leaves the others alone beyond its extent."""
    rig = Rig(2**16)
    for _ in range(256 * 4):
        rig.put(64)

    rig.put(70)

    assert len(rig.evicted) <= 2 * 4
