"""The ring actor follows the view, as a walk around the circle does, and speaks of changes only."""

from __future__ import annotations

import hashlib
import math
import time

import attrs
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from peercache.actors.effects import BuildRing, Effect, NotifyDirectory, NotifyPublisher
from peercache.actors.mailboxes import RingBuilt, RingChanged, ViewChanged
from peercache.actors.origin import Origin
from peercache.actors.ring.actor import RingActor
from peercache.model.hash_ring import HashRing
from peercache.model.keys import KEY
from peercache.model.member import ALIVE, DEAD, LEFT, SUSPECT, Member
from tests.examples import examples
from tests.unit.actors.record_cluster import member, view


def ring_actor() -> RingActor:
    return RingActor(virtual_nodes=16, replicas=2)


def shown(actor: RingActor, seen: ViewChanged) -> list[HashRing]:
    """Show a view; return the rings that were sent to the publisher and the directory."""
    effects = actor.on_message(Origin(1), seen, 0.0)
    actor.check()
    rings: dict[type, list[HashRing]] = {NotifyPublisher: [], NotifyDirectory: []}
    for effect in effects:
        assert isinstance(effect, (NotifyPublisher, NotifyDirectory))
        assert isinstance(effect.fact, RingChanged)
        assert isinstance(effect.fact.ring, HashRing)
        rings[type(effect)].append(effect.fact.ring)
    assert rings[NotifyPublisher] == rings[NotifyDirectory]
    return rings[NotifyPublisher]


def test_ring_begins_without_members() -> None:
    """Before the first view there are no owners, and nothing is due."""
    actor = ring_actor()

    assert actor.current.members == ()
    assert actor.deadline() == math.inf
    assert actor.on_tick(1.0) == []


def test_ring_changes_with_the_host_of_a_member() -> None:
    """The owners depend on hosts, so one member's other host is another ring."""
    actor = RingActor(virtual_nodes=16, replicas="auto")
    elsewhere = attrs.evolve(member(3, counter=1), boot_id="another boot")
    shown(actor, view(1, 2, 3))

    (ring,) = shown(actor, view(1, 2, elsewhere))

    assert ring.members == (1, 2, 3)
    assert ring.hosts == ("boot", "boot", "another boot")


def test_the_ring_of_a_thousand_members_stops_no_loop() -> None:
    """It is made outside the loop; the old one serves meanwhile, and later views wait."""
    actor = RingActor(virtual_nodes=160, replicas=2)
    shown(actor, view(1, 2))
    old = actor.current
    thousand, more = view(*range(1, 1001)), view(*range(1, 1003))

    spent: list[float] = []
    for seen in (thousand, view(*range(1, 1002)), more):
        began = time.thread_time()
        effects = actor.on_message(Origin(1), seen, 0.0)
        spent.append(time.thread_time() - began)
        actor.check()
        assert actor.current is old
        assert len(effects) == (seen is thousand), "one ring at a time"
    assert max(spent) < 0.010

    first = HashRing(dict.fromkeys(range(1, 1001), "boot"), virtual_nodes=160, replicas=2)
    reported, _, last = actor.on_message(Origin(0), RingBuilt(first), 0.0)
    assert isinstance(reported, NotifyPublisher)
    assert isinstance(last, BuildRing)
    assert last.members == tuple(range(1, 1003))
    assert actor.current is first
    reported, _ = actor.on_message(Origin(0), RingBuilt(last.build()), 0.0)
    actor.check()
    assert actor.current.members == last.members


def test_a_view_that_returns_while_a_ring_is_made_brings_the_old_ring_back() -> None:
    """What comes last is the ring of the last view, also where that is the one from before."""
    actor = RingActor(virtual_nodes=16, replicas=2, tokens_at_once_max=32)
    shown(actor, view(1, 2))
    (build,) = actor.on_message(Origin(1), view(1, 2, 3), 0.0)
    assert isinstance(build, BuildRing)
    assert actor.on_message(Origin(1), view(1, 2), 0.0) == []

    actor.on_message(Origin(0), RingBuilt(build.build()), 0.0)
    actor.check()

    assert actor.current.members == (1, 2)


TOKENS = 16
REPLICAS = 2
KEYS = np.frombuffer(
    b"".join(hashlib.blake2b(bytes([i]), digest_size=16).digest() for i in range(40)), KEY
)


def tokens_of(incarnation: int) -> list[int]:
    """Return a member's places by the definition: eight little-endian words of each hash."""
    seed = incarnation.to_bytes(8, "little")
    hashed = b"".join(hashlib.blake2b(seed + i.to_bytes(4, "little")).digest() for i in (0, 1))
    return [int.from_bytes(hashed[at : at + 8], "little") for at in range(0, 8 * TOKENS, 8)]


def walk(live: list[int], key: bytes) -> list[int]:
    """Return the owners of a key: go clockwise from it, and take each new member."""
    circle = sorted((token, who) for who in live for token in tokens_of(who))
    point = int.from_bytes(key[:8], "little")
    ahead = [who for token, who in circle if token >= point]
    behind = [who for token, who in circle if token < point]
    return list(dict.fromkeys(ahead + behind))[:REPLICAS]


class RingMachine(RuleBasedStateMachine):
    """Views come and go; the ring is that of the last one, and is reported once a change.

    Rings of more than three members are made outside the loop, and come later or never.
    """

    def __init__(self) -> None:
        super().__init__()
        self.actor = RingActor(
            virtual_nodes=TOKENS, replicas=REPLICAS, tokens_at_once_max=3 * TOKENS
        )
        self.states: dict[int, int] = {}
        self.reported: HashRing | None = None
        self.building: BuildRing | None = None

    @rule(who=st.integers(1, 6), state=st.sampled_from([ALIVE, SUSPECT, DEAD, LEFT]))
    def someone_changes(self, who: int, state: int) -> None:
        """A member comes, is doubted, dies, leaves or returns."""
        self.states[who] = state
        self.show([member(one, how) for one, how in self.states.items()])

    @rule()
    def the_same_again(self) -> None:
        """A view that changes nothing is no news, in whatever order it names the members."""
        entries = [member(one, how) for one, how in reversed(self.states.items())]
        assert self.show(entries) == []

    @precondition(lambda self: self.building)
    @rule()
    def a_ring_is_there(self) -> None:
        """The thread has made the ring of an earlier view, perhaps the last one."""
        assert self.building is not None
        built, self.building = self.building.build(), None
        self.take(self.actor.on_message(Origin(0), RingBuilt(built), 0.0))

    @rule()
    def every_member_is_forgotten(self) -> None:
        """An empty view is a ring without members."""
        self.states.clear()
        self.show([])

    def show(self, entries: list[Member]) -> list[object]:
        return self.take(self.actor.on_message(Origin(1), ViewChanged(tuple(entries)), 0.0))

    def take(self, effects: list[Effect]) -> list[object]:
        self.actor.check()
        for effect in effects:
            if isinstance(effect, BuildRing):
                assert self.building is None, "two rings are being made at once"
                assert len(effect.members) > 3, "a small ring is made at once"
                self.building = effect
                continue
            assert isinstance(effect, (NotifyPublisher, NotifyDirectory))
            assert isinstance(effect.fact, RingChanged)
            assert isinstance(effect.fact.ring, HashRing)
            self.reported = effect.fact.ring
        return list(effects)

    def live(self) -> list[int]:
        return sorted(who for who, state in self.states.items() if state in (ALIVE, SUSPECT))

    @invariant()
    def owners_are_those_of_the_walk(self) -> None:
        """Every reader of the ring computes the same owners as the slow way."""
        assert self.reported is None or self.reported is self.actor.current
        members = list(self.actor.current.members)
        owners = self.actor.current.owners(KEYS).tolist()
        assert owners == [walk(members, key) for key in KEYS.tolist()]

    @invariant()
    def the_ring_is_that_of_the_last_view(self) -> None:
        """What is not being made is there."""
        assert self.building or list(self.actor.current.members) == self.live()


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=examples(60), stateful_step_count=30)
