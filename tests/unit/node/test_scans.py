"""Scans: which pages of a namespace a node lists, part by part, while the pages change."""

from __future__ import annotations

import random

import attrs
import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.actors.disk.index import DiskIndex
from peercache.actors.disk.slabs import BLOCK_BYTES
from peercache.actors.effects import Effect, Send
from peercache.actors.origin import Origin
from peercache.model.keys import space_of, tag_of, tags_of
from peercache.model.records import IN_FILES, IN_MEMORY, changes_from_bytes
from peercache.node import questions
from peercache.node.questions import SCANS_MAX, UNREACHABLE, MemberBroker, Scans
from peercache.wire.messages.directory import SCANNED, ReportKeys, RequestKeys
from peercache.wire.messages.membership import ReportStatus
from peercache.wire.messages.pool import Reserve
from peercache.wire.messages.session import Refused
from tests.examples import examples
from tests.unit.actors.pool_world import GRANULE, World, key, packed

OWN, OTHER = 1, 2
OPERATOR = Origin(50, 9)
OURS, THEIRS = tag_of(7, 3), tag_of(8, 3)


class Scanned:
    """A pool and a disk, and scans of them."""

    def __init__(self, *, granules: int = 64, has_disk: bool = True) -> None:
        self.world = World(granules=granules)
        self.index = DiskIndex(capacity_bytes=8 * 64 * BLOCK_BYTES, slab_bytes=64 * BLOCK_BYTES)
        self.replies: list[object] = []
        self.forwarded: list[RequestKeys] = []
        self.broker = MemberBroker(self.perform)
        self.scans = Scans(
            own=OWN,
            pages=self.world.pool.pages,
            disk=lambda: self.index if has_disk else None,
            broker=self.broker,
        )

    def perform(self, effect: Effect) -> None:
        assert isinstance(effect, Send)
        if isinstance(effect.to, Origin):
            self.replies.append(effect.message)
        else:
            assert isinstance(effect.message, RequestKeys)
            self.forwarded.append(effect.message)

    def store(self, numbers: list[int], namespace: int = OURS, length: int = GRANULE) -> None:
        """Set pages."""
        sequence = self.world.sequences.get(1, 0) + 1
        self.world.sequences[1] = sequence
        keys = b"".join(map(key, numbers))
        reserve = Reserve(9, sequence, namespace, keys, packed([length] * len(numbers)))
        self.world.reserve_again(1, reserve)
        self.world.commit(1, sequence)

    def write(self, numbers: list[int], namespace: int = OURS) -> None:
        """Have pages written to the disk."""
        keys, count = b"".join(map(key, numbers)), len(numbers)
        begun = self.index.begin(
            keys, tags_of([namespace] * count), np.full(count, 5000, np.uint64),
            np.ones(count, np.uint64), 100,
        )  # fmt: skip
        self.index.finish(begun.entries[begun.entries >= 0])

    async def part(
        self, row: int = 0, newest: int = 0, *, count: int = 1000, namespace: int = OURS
    ) -> ReportKeys:
        """Return a part of a scan."""
        reply = await self.reply(RequestKeys(4, space_of(namespace), OWN, row, newest, count))
        assert isinstance(reply, ReportKeys)
        assert reply.request == 4
        return reply

    async def reply(self, asked: RequestKeys) -> object:
        """Return the answer to a request."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.broker.run)
            await trio.testing.wait_all_tasks_blocked()
            refused = self.scans.ask(OPERATOR, asked)
            assert refused is None
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        return self.replies.pop()

    async def whole(self, *, count: int, namespace: int = OURS) -> list[tuple[int, int]]:
        """Return number and tier of each page of a whole scan."""
        found: list[tuple[int, int]] = []
        row = newest = 0
        while row != SCANNED:
            reply = await self.part(row, newest, count=count, namespace=namespace)
            assert len(reply.held) <= 24 * count
            found += listed(reply)
            row, newest = reply.row, reply.newest
        return found


def listed(reply: ReportKeys) -> list[tuple[int, int]]:
    """Return number and tier of each page in a part."""
    held = changes_from_bytes(reply.held)
    numbers = [int.from_bytes(each, "big") for each in held["key"].tolist()]
    return list(zip(numbers, held["tier"].tolist(), strict=True))


async def test_pages_of_a_namespace_are_listed_part_by_part() -> None:
    """Each once, with its tier; those of another name never, geometries of the name all."""
    scanned = Scanned()
    scanned.store([1, 2, 3])
    scanned.store([4, 5], THEIRS)
    scanned.store([6], tag_of(7, 99))
    scanned.write([3, 10, 11])
    scanned.write([12], THEIRS)

    for count in (1, 2, 1000):
        found = await scanned.whole(count=count)
        assert sorted(found) == [
            (1, IN_MEMORY), (2, IN_MEMORY), (3, IN_MEMORY), (6, IN_MEMORY),
            (10, IN_FILES), (11, IN_FILES),
        ]  # fmt: skip
    assert sorted(await scanned.whole(count=9, namespace=THEIRS)) == [
        (4, IN_MEMORY), (5, IN_MEMORY), (12, IN_FILES),
    ]  # fmt: skip
    assert changes_from_bytes((await scanned.part(count=1)).held)["length"].tolist() == [GRANULE]


async def test_a_node_without_a_disk_and_one_without_pages_end_their_scans() -> None:
    scanned = Scanned(has_disk=False)

    assert await scanned.whole(count=5) == []
    scanned.store([1])
    assert await scanned.whole(count=5) == [(1, IN_MEMORY)]


async def test_a_page_that_is_loaded_behind_the_scan_is_listed() -> None:
    """It was on disk when memory was read, and is in memory when the disk is read."""
    scanned = Scanned()
    scanned.store([1, 2])
    scanned.write([9])
    reply = await scanned.part(count=1)
    assert len(listed(reply)) == 1
    # All of memory is read; then the page is loaded.
    rest = await scanned.part(reply.row, reply.newest, count=1)
    scanned.store([9])

    found = listed(await scanned.part(rest.row, rest.newest))

    assert (9, IN_FILES) in found


async def test_positions_of_another_node_list_what_is_left_and_end() -> None:
    """A cursor is what a person types: no value of it costs more than a part, or raises."""
    scanned = Scanned()
    scanned.store([1])
    scanned.write([2])

    for row in (63, 64, 10**6, 2**48, 2**48 + 1, 2**48 + 5000, 2**63, SCANNED - 1):
        reply = await scanned.part(row, newest=2**64 - 1)
        while reply.row != SCANNED:
            reply = await scanned.part(reply.row, reply.newest)


async def test_a_part_of_a_large_pool_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rare pages in much memory: an empty part states where to go on."""
    monkeypatch.setattr(questions, "TURN_PAGES", 4)
    monkeypatch.setattr(questions, "SCAN_TURNS", 2)
    scanned = Scanned()
    scanned.store(list(range(30)), THEIRS)
    scanned.store([99])

    first = await scanned.part(count=10)
    assert (first.held, 0 < first.row < 64) == (b"", True)
    assert await scanned.whole(count=10) == [(99, IN_MEMORY)]


async def test_another_member_is_asked_for_its_pages(autojump_clock: object) -> None:
    """Its answer is that of the node; without one, the operator is refused."""
    del autojump_clock
    scanned = Scanned()
    asked = RequestKeys(4, 7, OTHER, 11, 12, 13)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scanned.broker.run)
        await trio.testing.wait_all_tasks_blocked()
        assert scanned.scans.ask(OPERATOR, asked) is None
        await trio.testing.wait_all_tasks_blocked()
        [sent] = scanned.forwarded
        assert attrs.evolve(sent, request=4) == asked
        scanned.broker.take(OTHER, ReportStatus(sent.request, b""))
        assert scanned.scans.ask(OPERATOR, asked) is None
        await trio.testing.wait_all_tasks_blocked()
        scanned.broker.take(OTHER, ReportKeys(scanned.forwarded[1].request, b"", SCANNED, 5))
        assert scanned.scans.ask(OPERATOR, asked) is None
        await trio.sleep(60)
        nursery.cancel_scope.cancel()

    refused, answered, silent = scanned.replies
    assert isinstance(refused, Refused)
    assert answered == ReportKeys(4, b"", SCANNED, 5)
    assert isinstance(silent, Refused)
    assert (silent.request, silent.reason) == (4, UNREACHABLE)


async def test_few_scans_are_read_at_a_time() -> None:
    scanned = Scanned()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scanned.broker.run)
        await trio.testing.wait_all_tasks_blocked()
        asked = RequestKeys(4, 7, OTHER, 0, 0, 1)
        for _ in range(SCANS_MAX):
            assert scanned.scans.ask(OPERATOR, asked) is None
        refused = scanned.scans.ask(OPERATOR, asked)
        nursery.cancel_scope.cancel()

    assert isinstance(refused, Refused)
    assert refused.reason == "busy"


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**32), count=st.integers(1, 7))
def test_a_page_that_stays_is_listed_at_least_once(seed: int, count: int) -> None:
    """Whatever is stored, evicted, written and loaded between two parts of the scan."""
    trio.run(_scan_under_change, seed, count)


async def _scan_under_change(seed: int, count: int) -> None:
    rng, scanned = random.Random(seed), Scanned(granules=24)
    on_disk: set[int] = set()
    pool = scanned.world.pool

    def present() -> set[int]:
        here = {n for n in range(60) if pool.pages.find(key(n)) is not None}
        return here | {n for n in on_disk if scanned.index.find(key(n))[0] >= 0}

    def change() -> None:
        numbers = rng.sample(range(60), rng.randrange(1, 4))
        if rng.random() < 0.5:
            scanned.store(numbers, length=GRANULE * rng.randrange(1, 3))
        else:
            held = [n for n in numbers if pool.pages.find(key(n)) is not None]
            scanned.write(held)
            on_disk.update(held)

    for _ in range(20):
        change()
    staying, found = present(), set()
    row = newest = 0
    while row != SCANNED:
        reply = await scanned.part(row, newest, count=count)
        found |= {number for number, _ in listed(reply)}
        row, newest = reply.row, reply.newest
        for _ in range(rng.randrange(3)):
            change()
            staying &= present()

    assert staying <= found
