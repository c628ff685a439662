"""The channel pool: its machine against a slow oracle, and the rules one by one."""

from __future__ import annotations

from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from peercache.actors.channels.actor import (
    IDLE_S,
    ChannelLeased,
    ChannelPool,
    ChannelsOutput,
    CloseChannel,
    CloseChannels,
    DestroyChannel,
    ForgetPeer,
    LeaseChannel,
    RetireIdle,
    ReturnChannel,
)
from tests.examples import examples

PEERS = st.integers(1, 3)
RAILS = st.integers(0, 1)
MAX = 3


def lease_of(pool: ChannelPool, peer: int, rail: int = 0, now: float = 0.0) -> ChannelLeased | None:
    """Lease a channel; None if all are in use."""
    effects = pool.on_message(LeaseChannel(peer, rail), now)
    assert len(effects) <= 1
    for effect in effects:
        assert isinstance(effect, ChannelLeased)
        return effect
    return None


def closed_by(effects: list[ChannelsOutput]) -> list[int]:
    """Return the channels that the pool has closed, which is all it emits."""
    assert all(isinstance(effect, CloseChannel) for effect in effects)
    return [effect.channel for effect in effects]


class ChannelMachine(RuleBasedStateMachine):
    """Any order of leases, returns, failures, deaths and ticks keeps the pool's promises."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ChannelPool(max_channels_per_peer=MAX)
        self.now = 0.0
        self.leases: list[ChannelLeased] = []
        self.condemned: set[int] = set()
        self.idle: dict[int, tuple[int, int, float]] = {}  # channel: peer, rail, since
        self.gone: set[int] = set()

    def count(self, peer: int, rail: int) -> int:
        """Return how many channels the peer has on a rail, by the oracle."""
        idle = sum(each[:2] == (peer, rail) for each in self.idle.values())
        return idle + sum((lease.peer, lease.rail) == (peer, rail) for lease in self.leases)

    def close_all(self, effects: list[ChannelsOutput], expected: set[int]) -> None:
        """The pool has exactly these channels closed, each once."""
        closing = closed_by(effects)
        assert sorted(closing) == sorted(expected)
        for channel in closing:
            self.idle.pop(channel, None)
        self.gone |= expected

    @rule(peer=PEERS, rail=RAILS)
    def lease(self, peer: int, rail: int) -> None:
        """A free channel, the youngest, is reused before a new one is made."""
        idle = [(each[2], ch) for ch, each in self.idle.items() if each[:2] == (peer, rail)]
        before = self.count(peer, rail)
        lease = lease_of(self.pool, peer, rail)
        if lease is None:
            assert not idle
            assert before == MAX
            return
        assert lease.channel not in self.gone
        assert lease.channel not in [other.channel for other in self.leases]
        assert lease.is_new == (not idle)
        if idle:
            assert self.idle[lease.channel][2] == max(idle)[0]
            del self.idle[lease.channel]
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), works=st.booleans())
    def end(self, data: st.DataObject, works: bool) -> None:
        """A channel that works comes back, one that failed never does."""
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        if not works:
            assert self.pool.on_message(DestroyChannel(lease), self.now) == []
            self.gone.add(lease.channel)
            return
        effects = self.pool.on_message(ReturnChannel(lease), self.now)
        self.close_all(effects, {lease.channel} & self.condemned)
        if lease.channel not in self.condemned:
            self.idle[lease.channel] = (lease.peer, lease.rail, self.now)

    @rule(peer=PEERS)
    def forget(self, peer: int) -> None:
        """The idle channels of a dead peer close at once, on every rail; those in use later."""
        self.condemned |= {lease.channel for lease in self.leases if lease.peer == peer}
        idle = {channel for channel, each in self.idle.items() if each[0] == peer}
        self.close_all(self.pool.on_message(ForgetPeer(peer), self.now), idle)

    @rule(peer=PEERS, rail=RAILS)
    def retire(self, peer: int, rail: int) -> None:
        """The idle channels of one rail close; the others stay."""
        idle = {channel for channel, each in self.idle.items() if each[:2] == (peer, rail)}
        self.close_all(self.pool.on_message(RetireIdle(peer, rail), self.now), idle)

    @rule(seconds=st.sampled_from([0.0, 1.0, IDLE_S / 2, IDLE_S]))
    def wait(self, seconds: float) -> None:
        """A tick closes the channels that were idle too long, and no others."""
        self.now += seconds
        old = {ch for ch, (_, _, since) in self.idle.items() if since + IDLE_S <= self.now}
        assert (self.pool.deadline() <= self.now) == bool(old)
        self.close_all(self.pool.on_tick(self.now), old)
        assert self.pool.deadline() > self.now

    @invariant()
    def holds(self) -> None:
        """The pool agrees with the oracle after every step."""
        self.pool.check()
        assert self.pool.in_use() == len(self.leases)
        ours = [(lease.peer, lease.channel) for lease in self.leases]
        ours += [(each[0], channel) for channel, each in self.idle.items()]
        assert sorted(self.pool.channels()) == sorted(ours)


TestChannelMachine = ChannelMachine.TestCase
TestChannelMachine.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_channel_in_use_when_its_peer_died_is_closed_when_it_returns() -> None:
    """A read in flight is not disturbed; its channel does not outlive it."""
    pool = ChannelPool(max_channels_per_peer=2)
    lease = lease_of(pool, 1)
    assert lease is not None

    at_once = pool.on_message(ForgetPeer(1), 0.0)
    later = pool.on_message(ReturnChannel(lease), 1.0)

    assert at_once == []
    assert later == [CloseChannel(lease.channel)]


def test_idle_channel_is_closed_in_its_time() -> None:
    """Not before idle_s, and then by the tick that deadline() names."""
    pool = ChannelPool(max_channels_per_peer=1)
    lease = lease_of(pool, 1)
    assert lease is not None
    pool.on_message(ReturnChannel(lease), 5.0)

    early = pool.on_tick(5.0 + IDLE_S - 0.001)
    due = pool.deadline()
    closed = pool.on_tick(due)

    assert early == []
    assert due == 5.0 + IDLE_S
    assert closed == [CloseChannel(lease.channel)]
    assert pool.deadline() == inf


def test_lease_closes_channels_that_were_idle_too_long() -> None:
    """A client that reads needs no tick of its own, and no read gets a channel that old."""
    pool = ChannelPool(max_channels_per_peer=1)
    old = lease_of(pool, 1)
    assert old is not None
    pool.on_message(ReturnChannel(old), 5.0)

    effects = pool.on_message(LeaseChannel(1), 5.0 + IDLE_S)

    assert effects == [CloseChannel(old.channel), ChannelLeased(1, 0, 2, is_new=True)]


def test_closed_pool_leases_nothing() -> None:
    """After close no channel is leased, and one in use ends with its read."""
    pool = ChannelPool(max_channels_per_peer=2)
    idle, used = lease_of(pool, 1), lease_of(pool, 1)
    assert idle is not None
    assert used is not None
    pool.on_message(ReturnChannel(idle), 0.0)

    at_once = pool.on_message(CloseChannels(), 0.0)
    refused = lease_of(pool, 1)
    later = pool.on_message(ReturnChannel(used), 1.0)

    assert at_once == [CloseChannel(idle.channel)]
    assert refused is None
    assert later == [CloseChannel(used.channel)]
    pool.check()
