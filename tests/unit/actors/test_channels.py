"""The channel pool: its machine against a slow oracle, and the rules one by one."""

from __future__ import annotations

from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from peercache.actors.channels.actor import IDLE_S, ChannelPool, Lease
from tests.examples import examples

PEERS = st.integers(1, 3)
MAX = 3


class ChannelMachine(RuleBasedStateMachine):
    """Any order of leases, returns, failures, deaths and ticks keeps the pool's promises."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ChannelPool(max_channels_per_peer=MAX)
        self.now = 0.0
        self.leases: list[Lease] = []
        self.condemned: set[int] = set()
        self.idle: dict[int, tuple[int, float]] = {}  # channel: peer, since
        self.gone: set[int] = set()

    def count(self, peer: int) -> int:
        """Return how many channels the peer has, by the oracle."""
        idle = sum(owner == peer for owner, _ in self.idle.values())
        return idle + sum(lease.peer == peer for lease in self.leases)

    def close_all(self, closing: list[int], expected: set[int]) -> None:
        """The pool says exactly these channels are to be closed, each once."""
        assert sorted(closing) == sorted(expected)
        for channel in closing:
            self.idle.pop(channel, None)
        self.gone |= expected

    @rule(peer=PEERS)
    def lease(self, peer: int) -> None:
        """A free channel, the youngest, is reused before a new one is made."""
        idle = [(since, ch) for ch, (owner, since) in self.idle.items() if owner == peer]
        before = self.count(peer)
        lease = self.pool.lease(peer)
        if lease is None:
            assert not idle
            assert before == MAX
            return
        assert lease.channel not in self.gone
        assert lease.channel not in [other.channel for other in self.leases]
        assert lease.is_new == (not idle)
        if idle:
            assert self.idle[lease.channel][1] == max(idle)[0]
            del self.idle[lease.channel]
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), works=st.booleans())
    def end(self, data: st.DataObject, works: bool) -> None:
        """A channel that works comes back, one that failed never does."""
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        if not works:
            self.pool.destroy(lease)
            self.gone.add(lease.channel)
        elif lease.channel in self.condemned:
            self.close_all(self.pool.give_back(lease, self.now), {lease.channel})
        else:
            assert self.pool.give_back(lease, self.now) == []
            self.idle[lease.channel] = (lease.peer, self.now)

    @rule(peer=PEERS, dead=st.booleans())
    def give_up(self, peer: int, dead: bool) -> None:
        """Idle channels of a peer close at once; those in use too, later, if it is dead."""
        if dead:
            self.condemned |= {lease.channel for lease in self.leases if lease.peer == peer}
        idle = {channel for channel, (owner, _) in self.idle.items() if owner == peer}
        self.close_all(self.pool.forget(peer) if dead else self.pool.retire_idle(peer), idle)

    @rule(seconds=st.sampled_from([0.0, 1.0, IDLE_S / 2, IDLE_S]))
    def wait(self, seconds: float) -> None:
        """A tick closes what was idle too long, and nothing else."""
        self.now += seconds
        old = {ch for ch, (_, since) in self.idle.items() if since + IDLE_S <= self.now}
        assert (self.pool.deadline() <= self.now) == bool(old)
        self.close_all(self.pool.on_tick(self.now), old)
        assert self.pool.deadline() > self.now

    @invariant()
    def holds(self) -> None:
        """The pool agrees with the oracle after every step."""
        self.pool.check()
        assert self.pool.in_use() == len(self.leases)


TestChannelMachine = ChannelMachine.TestCase
TestChannelMachine.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_peer_has_no_more_channels_than_allowed() -> None:
    """The one that would be too many is not leased, until another has ended."""
    pool = ChannelPool(max_channels_per_peer=2)
    first, second = pool.lease(1), pool.lease(1)
    assert first is not None
    assert second is not None

    third = pool.lease(1)
    pool.destroy(first)
    fourth = pool.lease(1)

    assert third is None
    assert fourth == Lease(1, 3, is_new=True)


def test_limit_counts_each_peer_alone() -> None:
    """A peer whose channels are all in use does not keep us from another."""
    pool = ChannelPool(max_channels_per_peer=1)
    pool.lease(1)

    lease = pool.lease(2)

    assert lease == Lease(2, 2, is_new=True)


def test_failed_channel_is_never_leased_again() -> None:
    """What comes after a failure is a new channel, under a new number."""
    pool = ChannelPool(max_channels_per_peer=1)
    failed = pool.lease(1)
    assert failed is not None

    pool.destroy(failed)
    after = pool.lease(1)

    assert after == Lease(1, 2, is_new=True)


def test_channel_in_use_when_its_peer_died_is_closed_when_it_returns() -> None:
    """A read in flight is not disturbed; its channel does not outlive it."""
    pool = ChannelPool(max_channels_per_peer=2)
    lease = pool.lease(1)
    assert lease is not None

    at_once = pool.forget(1)
    later = pool.give_back(lease, 1.0)

    assert at_once == []
    assert later == [lease.channel]


def test_idle_channel_is_closed_in_its_time() -> None:
    """Not before idle_s, and then by the tick that deadline() names."""
    pool = ChannelPool(max_channels_per_peer=1)
    lease = pool.lease(1)
    assert lease is not None
    pool.give_back(lease, 5.0)

    early = pool.on_tick(5.0 + IDLE_S - 0.001)
    due = pool.deadline()
    closed = pool.on_tick(due)

    assert early == []
    assert due == 5.0 + IDLE_S
    assert closed == [lease.channel]
    assert pool.deadline() == inf


def test_closed_pool_leases_nothing() -> None:
    """After close there is no way to a channel, and what is in use ends with its read."""
    pool = ChannelPool(max_channels_per_peer=2)
    idle, used = pool.lease(1), pool.lease(1)
    assert idle is not None
    assert used is not None
    pool.give_back(idle, 0.0)

    at_once = pool.close()
    refused = pool.lease(1)
    later = pool.give_back(used, 1.0)

    assert at_once == [idle.channel]
    assert refused is None
    assert later == [used.channel]
    pool.check()
