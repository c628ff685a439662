"""Overlaps: what is known of pages, from this node's shard and from those of other owners."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.directory.holdings import ShardAuthority
from peercache.actors.effects import Effect, Send
from peercache.actors.mailboxes import RecordsChanged, ViewChanged
from peercache.actors.origin import Origin
from peercache.actors.runtime import SELF
from peercache.model.hash_ring import HashRing
from peercache.model.keys import PageKeys, from_bytes
from peercache.model.member import ALIVE, SUSPECT, Member
from peercache.model.records import DROP, RECORD, RESIDENT
from peercache.node.questions import (
    BUSY,
    OVERLAPS_MAX,
    OWNER_ANSWER_S,
    ROUNDS,
    MemberBroker,
    Overlaps,
)
from peercache.wire.messages.directory import (
    OVERLAP_KEYS_MAX,
    ReportOverlap,
    RequestOverlap,
    overlap_of,
)
from peercache.wire.messages.session import Refused

OWN = 1
CLIENT = Origin(50, 9)


def member(incarnation: int, state: int = ALIVE) -> Member:
    return Member(
        incarnation, 1, state, 255, "host", f"n{incarnation}:1", "d:1", f"h{incarnation}", ""
    )


def keys_of(count: int) -> PageKeys:
    raw = np.random.default_rng(4).bytes(16 * count)
    return from_bytes(raw)


class World:
    """A node's Overlaps between other owners, which hold all pages themselves and say so."""

    def __init__(self, *others: Member, owners: int = 2) -> None:
        self.members = {each.incarnation: each for each in (member(OWN), *others)}
        self.silent: set[int] = set()
        self.replies: Callable[[Send], None] | None = None
        """What others say, instead of what correct owners would."""
        self.behind: set[int] = set()
        self.asked: list[tuple[int, RequestOverlap]] = []
        self.sent: list[ReportOverlap] = []
        self.shard = DirectoryShard(incarnation=OWN)
        self.ring = HashRing(list(self.members), virtual_nodes=8, replicas=owners)
        now = trio.current_time()
        self.shard.on_message(SELF, ViewChanged(tuple(self.members.values())), now)
        self.broker = MemberBroker(self.perform)
        self.overlaps = Overlaps(
            shard=self.shard,
            ring=lambda: self.ring,
            member_of=self.members.get,
            broker=self.broker,
        )

    def hold(self, keys: PageKeys) -> None:
        """Hold these pages in the own pool."""
        records = np.zeros(len(keys), RECORD)
        records["key"], records["holder"], records["flags"] = keys, OWN, RESIDENT
        records["generation"] = 2
        changed = RecordsChanged(records, np.zeros(0, DROP))
        self.shard.on_message(SELF, changed, trio.current_time())

    def perform(self, effect: Effect) -> None:
        assert isinstance(effect, Send)
        if self.replies is not None:
            self.replies(effect)
            return
        if isinstance(effect.to, Origin):
            assert isinstance(effect.message, ReportOverlap)
            self.sent.append(effect.message)
            return
        asked = effect.message
        assert isinstance(asked, RequestOverlap)
        self.asked.append((effect.to, asked))
        if effect.to not in self.silent:
            flags = bytes([RESIDENT]) * (len(asked.keys) // 16)
            whole = effect.to not in self.behind
            self.broker.take(effect.to, ReportOverlap(asked.request, (effect.to,), flags, whole))

    def owned_by(self, node: int, keys: PageKeys) -> list[bool]:
        owned: list[bool] = (self.ring.owners(keys) == node).any(axis=1).tolist()
        return owned


async def test_an_owner_of_all_asks_no_other() -> None:
    world = World(member(2))
    keys = keys_of(700)
    world.hold(keys[:600])

    answer = await world.overlaps.overlap(keys)

    assert not world.asked
    assert (answer.holders, answer.whole) == ((OWN,), True)
    assert answer.run().tolist() == [600]


async def test_pages_of_other_owners_are_asked_for_once() -> None:
    """And what this node holds itself is in the answer though it owns no record of it."""
    world = World(*[member(n) for n in range(2, 9)])
    keys = keys_of(200)
    world.hold(keys)

    answer = await world.overlaps.overlap(keys)

    assert answer.whole
    assert answer.pages()[answer.holders.index(OWN)] == len(keys)
    asked = b"".join(question.keys for _, question in world.asked)
    not_owned = keys[~np.array(world.owned_by(OWN, keys))]
    assert sorted(from_bytes(asked).tolist()) == sorted(not_owned.tolist())
    assert all(question.shard_only for _, question in world.asked)
    for owner, question in world.asked:
        assert all(world.owned_by(owner, from_bytes(question.keys)))


async def test_another_owner_answers_for_one_that_does_not(autojump_clock: MockClock) -> None:
    del autojump_clock
    world = World(*[member(n) for n in range(2, 9)])
    keys = keys_of(200)
    world.silent = {2, 3}

    answer = await world.overlaps.overlap(keys)

    both_silent = np.array(world.owned_by(2, keys)) & np.array(world.owned_by(3, keys))
    assert answer.whole is not bool(both_silent.any())
    anywhere = np.bitwise_or.reduce(answer.flags, axis=0).astype(bool)
    expected = ~both_silent & ~np.array(world.owned_by(OWN, keys))
    assert anywhere.tolist() == expected.tolist()


async def test_what_no_owner_is_guaranteed_is_not_whole(autojump_clock: MockClock) -> None:
    """The answer comes in time, and with what is known."""
    del autojump_clock
    world = World(member(2), member(3), owners=1)
    keys = keys_of(100)
    world.silent, world.behind = {2}, {3}
    begun = trio.current_time()

    answer = await world.overlaps.overlap(keys)

    assert trio.current_time() - begun <= ROUNDS * OWNER_ANSWER_S
    assert not answer.whole
    assert answer.holders == (3,)
    assert answer.flags[0].astype(bool).tolist() == world.owned_by(3, keys)


async def test_a_suspect_owner_is_not_waited_for() -> None:
    world = World(member(2, SUSPECT), owners=1)

    answer = await world.overlaps.overlap(keys_of(50))

    assert not world.asked
    assert not answer.whole


async def test_a_shard_that_is_behind_is_not_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lacks records of a member: another owner is asked, and where none is, it reports it."""
    world, alone = World(member(2)), World()
    keys = keys_of(10)
    monkeypatch.setattr(ShardAuthority, "is_behind", lambda self, now: True)

    answer = await world.overlaps.overlap(keys)
    assert answer.holders == (2,)
    assert answer.whole
    assert not (await alone.overlaps.overlap(keys)).whole


@pytest.mark.parametrize("shard_only", [True, False])
async def test_questions_are_answered_in_bounds(shard_only: bool) -> None:
    """A node is answered by this shard alone. Too many keys or askers are refused in words."""
    world = World(member(2), owners=1)
    keys = keys_of(20)
    asked = RequestOverlap(7, keys.tobytes(), shard_only)
    refused = world.overlaps.ask(CLIENT, asked)
    assert isinstance(refused, Refused)  # Nothing runs yet.

    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.broker.run)
        await trio.testing.wait_all_tasks_blocked()
        long = RequestOverlap(8, bytes(16 * (OVERLAP_KEYS_MAX + 1)), shard_only)
        refused = world.overlaps.ask(CLIENT, long)
        assert isinstance(refused, Refused)
        assert (refused.reason, str(OVERLAP_KEYS_MAX) in refused.detail) == ("malformed", True)

        for number in range(OVERLAPS_MAX):
            question = RequestOverlap(number, keys.tobytes(), shard_only)
            assert world.overlaps.ask(CLIENT, question) is None
        refused = world.overlaps.ask(CLIENT, asked)
        assert isinstance(refused, Refused)
        assert refused.reason == BUSY

        await trio.testing.wait_all_tasks_blocked()
        assert len(world.sent) == OVERLAPS_MAX
        assert bool(world.asked) is not shard_only
        assert world.overlaps.ask(CLIENT, asked) is None
        nursery.cancel_scope.cancel()


async def test_only_the_asked_owner_is_believed(autojump_clock: MockClock) -> None:
    """Answers of others, to no question, of the wrong size or twice change nothing."""
    del autojump_clock
    world = World(member(2), member(3), owners=1)
    keys = keys_of(60)
    forged: list[int] = []

    def forge(effect: Send) -> None:
        assert isinstance(effect.message, RequestOverlap)
        assert isinstance(effect.to, int)
        pages = len(effect.message.keys) // 16
        right, number = effect.to, effect.message.request
        world.broker.take(5 - right, ReportOverlap(number, (9,), b"\1" * pages, whole=True))
        world.broker.take(right, ReportOverlap(number + 77, (9,), b"\1" * pages, whole=True))
        world.broker.take(right, ReportOverlap(number, (9,), b"\1" * (pages + 1), whole=True))
        world.broker.take(right, ReportOverlap(number, (9,), b"\1" * pages, whole=True))
        forged.append(number)

    world.replies = forge
    answer = await world.overlaps.overlap(keys)

    assert len(forged) == 2
    assert (answer.holders, answer.whole) == ((), False)


def test_a_malformed_answer_is_none() -> None:
    right = ReportOverlap(1, (4, 5), b"\1\1\0\2", whole=True)
    assert overlap_of(right, 2).flags.tolist() == [[1, 1], [0, 2]]
    for wrong in (None, Refused(1, "busy", ""), ReportOverlap(1, (4,), b"\1", whole=True)):
        assert overlap_of(wrong, 2).flags.shape == (0, 2)
        assert not overlap_of(wrong, 2).whole
    assert not overlap_of(ReportOverlap(1, tuple(range(65)), bytes(65), whole=True), 1).holders
