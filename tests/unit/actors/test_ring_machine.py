"""The ring actor against a walk around the circle, one key and one token at a time."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from peercache.actors.effects import TellPublisher
from peercache.actors.mailboxes import RingChanged, ViewChanged
from peercache.actors.origin import Origin
from peercache.actors.ring.actor import RingActor
from peercache.model.hash_ring import HashRing
from peercache.model.keys import KEY
from peercache.model.member import ALIVE, DEAD, LEFT, SUSPECT, Member
from tests.examples import examples
from tests.unit.actors.record_cluster import member

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
    """Views come and go; the ring is that of the last one, and is told once a change."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = RingActor(virtual_nodes=TOKENS, replicas=REPLICAS)
        self.states: dict[int, int] = {}
        self.told: HashRing | None = None

    @rule(who=st.integers(1, 6), state=st.sampled_from([ALIVE, SUSPECT, DEAD, LEFT]))
    def someone_changes(self, who: int, state: int) -> None:
        """A member comes, is doubted, dies, leaves or returns."""
        before = self.live()
        self.states[who] = state
        effects = self.show([member(one, how) for one, how in self.states.items()])
        assert bool(effects) == (self.live() != before)

    @rule()
    def the_same_again(self) -> None:
        """A view that changes nothing is no news, in whatever order it names the members."""
        entries = [member(one, how) for one, how in reversed(self.states.items())]
        assert self.show(entries) == []

    @rule()
    def every_member_is_forgotten(self) -> None:
        """An empty view is a ring without members."""
        self.states.clear()
        self.show([])

    def show(self, entries: list[Member]) -> list[object]:
        effects = self.actor.on_message(Origin(1), ViewChanged(tuple(entries)), 0.0)
        self.actor.check()
        for effect in effects:
            assert isinstance(effect, TellPublisher)
            assert isinstance(effect.fact, RingChanged)
            assert isinstance(effect.fact.ring, HashRing)
            self.told = effect.fact.ring
        return list(effects)

    def live(self) -> list[int]:
        return sorted(who for who, state in self.states.items() if state in (ALIVE, SUSPECT))

    @invariant()
    def owners_are_those_of_the_walk(self) -> None:
        """Every reader of the ring computes the same owners as the slow way."""
        assert self.told is None or self.told is self.actor.current
        owners = self.actor.current.owners(KEYS).tolist()
        assert owners == [walk(self.live(), key) for key in KEYS.tolist()]


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=examples(60), stateful_step_count=30)
