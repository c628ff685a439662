"""Pages that were not used for the time to live of their namespace: in memory, and on disk."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from peercache.actors.disk import expiry as disk_expiry
from peercache.actors.mailboxes import NamespaceNamed, PageAges, SpilledPages, TakeOver
from peercache.actors.pool import page_table
from peercache.actors.pool.size_classes import HISTORY_S, Ages
from peercache.actors.runtime import SELF
from peercache.actors.tenants import Tenants
from peercache.config.entries import parse_quotas
from peercache.model.keys import Namespace, space_of
from peercache.wire.messages.pool import REFUSED_FULL, RESERVED, Granted, Reserve
from sims.store import Image
from tests.unit.actors.disk_world import GRANULE, POOL, DiskWorld, filled, key, keys
from tests.unit.actors.slots_rig import Rig

CHAT = Namespace("chat").tag()
DAY_S = 86_400.0
START = 1_000_000
"""The wall clock when a node starts."""


def chatting(rule: str = "chat=50%,ttl=60s/0", **options: object) -> DiskWorld:
    """Return a node whose namespace `chat` has a time to live."""
    rules = parse_quotas(rule)
    return DiskWorld(granules=32, pool_quotas=rules, quotas=rules, **options)  # type: ignore[arg-type]


# --- memory --------------------------------------------------------------------------------------


def test_a_page_in_memory_expires_after_its_last_use() -> None:
    """A page that is read lives on; those of other namespaces do not expire."""
    world = chatting(is_open=False)
    world.set(1, 2, namespace=CHAT)
    world.set(3)

    world.wait(40.0)
    world.touch(2)
    world.wait(25.0)
    after_a_read = world.places(1, 2, 3)
    world.wait(40.0)

    assert after_a_read == ["", "memory", "memory"]
    assert world.places(1, 2, 3) == ["", "", "memory"]
    assert world.pool.figures()["pool_bytes_used"] == GRANULE, "its memory is free again"
    expired = {"namespace": "chat", "tier": "pool"}
    assert world.count("namespace_pages_expired_total", **expired) == 2
    assert world.count("namespace_pages_evicted_total", **expired) == 0


def test_a_page_expires_within_ten_seconds_of_its_time() -> None:
    """What is touched within five seconds counts as touched at once."""
    world = chatting(is_open=False)
    world.set(1, namespace=CHAT)

    world.wait(59.0)
    before = world.where(1)
    world.wait(11.0)

    assert (before, world.where(1)) == ("memory", "")


def test_pages_expire_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages that wait come between two of them."""
    monkeypatch.setattr(page_table, "EXPIRES_MAX", 2)
    world = chatting(is_open=False)
    world.set(*range(5), namespace=CHAT)
    pages, steps = 5, []

    while world.pool.figures()["pool_pages"]:
        world.now = world.pool.deadline()
        world.perform(world.pool.on_tick(world.now))
        steps.append(pages - world.pool.figures()["pool_pages"])
        pages = world.pool.figures()["pool_pages"]

    assert [step for step in steps if step] == [2, 2, 1]


def test_a_retained_page_expires_only_after_its_retention() -> None:
    """Then it counts as used when that ended, as for eviction."""
    world = chatting("*=50%,ttl=60s/0", is_open=False)
    world.notify("pool", NamespaceNamed("chat"))
    world.set(1, 2, namespace=CHAT)
    world.retain(1, seconds=300.0, namespace=CHAT)

    world.wait(299.0)
    retained = world.places(1, 2)
    world.wait(30.0)
    let_go = world.where(1)
    world.wait(40.0)

    assert retained == ["memory", ""]
    assert (let_go, world.where(1)) == ("memory", "")


def test_mirrored_and_moved_pages_expire_too() -> None:
    """A moved page is as old as its former holder reports; a mirrored one is used as it is made."""
    tenants = Tenants(parse_quotas("chat=50%,ttl=60s"), whole=64)
    chat = tenants.of(CHAT)
    rig = Rig(64, tenants=tenants)
    rig.slots.pass_time(100.0)
    own, moved = rig.put(1, chat), rig.put(1, chat)
    rig.slots.move_in(moved, rig.slots.ages.clock_at(60.0))
    mirror = rig.slots.take_mirror(1, most=8, untouched_since=0, evicted=[], tenant=chat)
    assert mirror is not None
    rig.slots.hold([mirror])

    rig.slots.pass_time(125.0)
    first = rig.slots.expired(125.0, 10)
    for slot in first:
        rig.slots.release(slot)
    rig.slots.pass_time(165.0)
    then = rig.slots.expired(165.0, 10)

    assert first == [moved]
    assert set(then) == {own, mirror}


def test_a_page_that_has_expired_here_is_not_taken_from_another_node() -> None:
    """Each node applies its own setting: it would be gone again within a second."""
    world = chatting(is_open=False)
    world.wait(100.0)
    ages = np.array([61.0, 59.0])
    lengths = np.full(2, GRANULE, "<u8").tobytes()
    reserve = Reserve(0, 5, space_of(CHAT), keys(1, 2), lengths)

    effects = world.pool.on_message(SELF, TakeOver(reserve, SpilledPages(ages, 0.0)), world.now)

    granted = next(e.fact for e in effects if isinstance(getattr(e, "fact", None), Granted))
    assert list(granted.states) == [REFUSED_FULL, RESERVED]


def test_the_past_is_remembered_for_a_year() -> None:
    """In marks that are the farther apart, the longer ago they are; the first one stays."""
    ages, clock, now = Ages(), 0, 0.0
    clock = ages.mark(now - 1, now, clock)
    for now in range(1, int(90 * DAY_S), 1000):
        clock = ages.mark(now - 1000, float(now), clock)

    for age in (100.0, HISTORY_S, DAY_S, 10 * DAY_S, 80 * DAY_S):
        moment = now - age
        touched = ages.clock_at(moment)
        assert age <= ages.age(touched, now) <= age * 1.01 + 1000
    # At most 17 bytes a mark.
    assert len(pickle.dumps(ages)) <= 17 * (2 * HISTORY_S + 1000)
    assert ages.clock_at(now - 89.9 * DAY_S) >= 0


# --- disk ----------------------------------------------------------------------------------------


def test_a_read_from_disk_is_a_use() -> None:
    """And so is a read in memory: the disk asks the pool before a page expires."""
    world = filled(ttl_s=60.0)
    world.finish()
    world.wait(40.0)
    world.ask(3)
    world.finish()
    world.touch(101)

    world.wait(25.0)

    assert world.places(0, 3, 101) == ["", "memory", "memory"]
    found = world.tier.index.find(keys(0, 3, 100, 101)) >= 0
    assert found.tolist() == [False, True, False, True]
    world.check_records()


def test_a_page_that_is_idle_in_memory_expires_on_disk() -> None:
    """It stays in memory, and is lost from there by its eviction."""
    world = filled(ttl_s=60.0)

    world.wait(65.0)
    in_memory = world.where(101)
    world.set(*range(200, 200 + POOL))

    assert (in_memory, world.where(101)) == ("memory", "")


def test_a_retained_page_stays_on_disk_too() -> None:
    """Its disk copy is there if the node is killed."""
    world = filled(ttl_s=60.0)
    world.finish()
    world.retain(101, seconds=100.0)

    world.wait(90.0)

    assert (world.tier.index.find(keys(100, 101)) >= 0).tolist() == [False, True]


def test_eviction_from_memory_is_no_use() -> None:
    """A page counts as used on disk when it was last used in memory."""
    world = filled(ttl_s=60.0)
    world.finish()
    world.wait(50.0)
    world.set(*range(200, 200 + POOL))
    evicted = world.where(101)

    world.wait(15.0)

    assert (evicted, world.where(101)) == ("disk", "")


def test_with_on_evict_a_page_is_as_old_on_disk_as_it_was_in_memory() -> None:
    """It is written when it is nearly evicted, and that is no use."""
    world = DiskWorld(ttl_s=60.0, on_evict=True)
    world.set(*range(5))
    world.wait(50.0)
    world.set(10, 11)
    world.wait(0.2)
    world.finish()
    world.set(*range(20, 24))
    evicted = [number for number in range(5) if world.where(number) == "disk"]

    world.wait(20.0)

    assert evicted
    assert world.places(*evicted) == [""] * len(evicted)


def test_an_expired_page_is_not_found_before_it_is_deleted() -> None:
    """Until the disk has come to its part of the index."""
    world = filled(ttl_s=60.0)
    world.finish()

    world.now += 61.0
    world.ask(3)

    assert not world.working
    assert world.promoted()[1] == []


def test_the_index_is_examined_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No turn of the actor looks at all pages, or deletes all."""
    monkeypatch.setattr(disk_expiry, "ROWS_A_LOOK", 5)
    monkeypatch.setattr(disk_expiry, "EXPIRES_MAX", 2)
    monkeypatch.setattr(disk_expiry, "COMPARES_MAX", 3)
    world = filled(ttl_s=60.0)
    world.set(200)
    world.finish()
    world.wait(30.0)
    pages = before = world.tier.figures()["disk_pages"]
    world.now += 31.0

    while world.tier.figures()["disk_pages"]:
        world.wait(0.01)
        gone = pages - world.tier.figures()["disk_pages"]
        pages -= gone
        assert gone <= 2

    assert before > POOL
    assert world.count("disk_pages_lost_total", reason="expired") == before


def test_the_time_without_a_node_counts() -> None:
    """After a restart no page is reported that has expired, and its place is freed."""
    image = Image()
    world = DiskWorld(ttl_s=60.0, image=image)
    world.set(1, 2)
    world.finish()
    world.wait(30.0)
    world.touch(2)
    for number in range(100, 100 + POOL):
        world.wait(2.0)
        world.set(number)
    world.finish()
    world.wait(11.0)

    again = DiskWorld(ttl_s=60.0, image=image, unix_s=START + 61)
    again.wait(1.0)
    found = again.places(1, 2)
    again.wait(25.0)

    assert found == ["", "disk"]
    assert again.places(1, 2) == ["", "disk"]
    again.wait(10.0)
    assert again.where(2) == ""
    again.wait(60.0)
    again.finish()
    assert not DiskWorld(image=image, unix_s=START).tier.figures()["disk_pages"], "nor its row"


def test_a_clock_that_was_set_back_makes_pages_live_longer_once() -> None:
    """What was used in the future was used now; a clock set forward makes them expire."""
    image = Image()
    world = DiskWorld(image=image)
    world.set(1)
    world.finish()
    assert DiskWorld(image=image, unix_s=START).tier.figures()["disk_pages"] == 1

    back = DiskWorld(ttl_s=60.0, image=image, unix_s=START - 36_000)
    back.wait(55.0)
    lives = back.where(1)
    back.wait(10.0)
    ahead = DiskWorld(ttl_s=60.0, image=image, unix_s=START + 36_000)

    assert (lives, back.where(1)) == ("disk", "")
    ahead.wait(1.0)
    assert ahead.where(1) == ""


def test_a_namespace_has_its_own_time_on_disk() -> None:
    """`disk_ttl` is that of all others."""
    world = chatting("chat=50%,ttl=60s/30s", ttl_s=90.0, slabs=8)
    world.set(1, 2, namespace=CHAT)
    world.set(3)
    world.finish()

    world.wait(35.0)
    on_disk = [(world.tier.index.find(key(number)) >= 0).all() for number in (1, 2, 3)]
    world.wait(30.0)
    then = world.places(1, 2, 3)
    world.wait(30.0)

    assert on_disk == [False, False, True]
    assert then == ["", "", "memory"]
    assert len(world.tier.index.find(key(3))) == 1
    assert (world.tier.index.find(key(3)) < 0).all()
    shown = {"namespace": "chat", "tier": "disk"}
    assert world.count("namespace_pages_expired_total", **shown) == 2


def test_a_pattern_applies_once_a_writer_has_its_name() -> None:
    """Until then no page on disk expires; the look goes on."""
    world = chatting("team-*=10%,ttl=60s")
    tag = Namespace("team-1").tag()
    world.set(1, namespace=tag)
    world.finish()
    world.wait(70.0)
    before = (world.tier.index.find(key(1)) >= 0).all()

    world.notify("pool", NamespaceNamed("team-1"))
    world.wait(2.0)

    assert before
    assert (world.tier.index.find(key(1)) < 0).all()


def test_a_disk_that_ends_while_pages_expire_is_asked_no_more() -> None:
    """The answer of the pool comes too late."""
    world = filled(ttl_s=60.0)
    world.finish()
    world.wait(59.0)
    world.end()
    world.notify("disk", PageAges(keys(1), np.array([np.inf])))

    assert world.tier.index is None


def test_nothing_is_due_without_a_time_to_live() -> None:
    """A pool and a disk that keep everything are not woken for it."""
    world = DiskWorld(is_open=False)

    assert world.pool.deadline() == float("inf")
