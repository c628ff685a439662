"""Hypothesis against membership: one node under arbitrary messages, and clusters under faults."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from peercache.actors.effects import Effect, Send, SendTo
from peercache.actors.membership.actor import Membership
from peercache.actors.membership.gossip import SHARES_PER_BEAT
from peercache.actors.origin import Origin
from peercache.model.member import ALIVE, DEAD, LEFT, SUSPECT, Member
from peercache.model.view import is_newer
from peercache.wire.codec import decode, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.membership import (
    CompareView,
    Heartbeat,
    HeartbeatSeen,
    Join,
    RequestView,
    ShareView,
)
from tests.examples import examples
from tests.unit.actors.membership_cluster import (
    DEAD_S,
    HEAL_S,
    HEARTBEAT_S,
    SUSPECT_S,
    Cluster,
    member,
)

ME = 3
OTHERS = [1, 2, 4, 5, 6]

incarnations = st.sampled_from([ME, *OTHERS])
senders = st.sampled_from([*OTHERS, 77])
entries = st.builds(
    member,
    incarnation=incarnations,
    control=st.sampled_from(["", "", "", "host-001:31998", "host-003:31998"]),
    counter=st.integers(0, 3),
    state=st.sampled_from([ALIVE, ALIVE, SUSPECT, DEAD, LEFT]),
    head_rank=st.sampled_from([255, 0, 1]),
)
digests = st.sampled_from([b"", b"another"])


class MembershipMachine(RuleBasedStateMachine):
    """One node; the model is what a node must never do, whatever it hears."""

    @initialize(seed=st.integers(0, 2**16), discovery=st.booleans())
    def start(self, seed: int, discovery: bool) -> None:
        self.actor = Membership(
            me=member(ME),
            discovery_addr=("host-001:31998", "elsewhere:1") if discovery else (),
            max_masters=2,
            heartbeat_s=HEARTBEAT_S,
            suspect_s=SUSPECT_S,
            dead_s=DEAD_S,
            rng=random.Random(seed),
        )
        self.now = 10.0
        self.has_left = False
        self.shares: dict[int, int] = {}
        self.shares_since = self.now
        self.known: dict[int, Member] = {ME: member(ME)}
        self.takes(self.actor.start(self.now))

    def takes(self, effects: list[Effect]) -> None:
        """Every message fits the wire, and no member gets more views than allowed."""
        if self.now - self.shares_since >= HEARTBEAT_S:
            self.shares.clear()
            self.shares_since = self.now
        for effect in effects:
            if isinstance(effect, Send | SendTo):
                envelope = Envelope(ME, 0, effect.message)
                assert decode(encode(envelope, cluster="c"), cluster="c") == envelope
            if isinstance(effect, Send) and effect.message.__class__ is ShareView:
                to = effect.to.identity if isinstance(effect.to, Origin) else effect.to
                if effect.message.request == 0:
                    self.shares[to] = self.shares.get(to, 0) + 1

    def hears(self, sender: int, message: object) -> None:
        self.takes(self.actor.on_message(Origin(sender, 9), message, self.now))

    @rule(sender=senders, entry=entries, digest=digests)
    def heartbeat(self, sender: int, entry: Member, digest: bytes) -> None:
        self.hears(sender, Heartbeat(entry, digest))

    @rule(sender=senders, entry=entries)
    def join(self, sender: int, entry: Member) -> None:
        self.hears(sender, Join(entry))

    @rule(sender=senders, view=st.lists(entries, max_size=6))
    def view(self, sender: int, view: list[Member]) -> None:
        self.hears(sender, ShareView(0, tuple(view)))

    @rule(sender=senders, digest=digests)
    def answer(self, sender: int, digest: bytes) -> None:
        self.hears(sender, HeartbeatSeen(digest))

    @rule(sender=senders)
    def question(self, sender: int) -> None:
        self.hears(sender, RequestView(1, b""))

    @rule(sender=senders, buckets=st.sampled_from([b"", b"odd", bytes(8), bytes(32)]))
    def comparison(self, sender: int, buckets: bytes) -> None:
        self.hears(sender, CompareView(buckets))

    @rule(late_s=st.sampled_from([0.0, 0.0, 0.0, 0.1, 4.0, 400.0]))
    def tick(self, late_s: float) -> None:
        if self.has_left:
            return
        self.now = max(self.now, self.actor.deadline()) + late_s
        self.takes(self.actor.on_tick(self.now))
        assert self.actor.deadline() > self.now

    @rule()
    def many_ticks(self) -> None:
        for _ in range(40):
            self.tick(0.0)

    @rule(sure=st.integers(0, 9))
    def leave(self, sure: int) -> None:
        if sure == 0:
            before = self.shares.copy()
            self.takes(self.actor.leave(self.now))
            self.shares = before  # a goodbye is said once, beside that limit
            self.has_left = True

    @invariant()
    def holds(self) -> None:
        self.actor.check()
        me = self.actor.me
        assert self.actor.member(ME) == me
        assert me.state == (LEFT if self.has_left else ALIVE)
        assert me.counter >= self.known[ME].counter
        assert self.has_left or me in self.actor.view.live()
        assert self.actor.masters() == self.actor.view.masters(2)
        for entry in self.actor.view.members():
            before = self.known.get(entry.incarnation)
            # Also one that was forgotten meanwhile is never older than it was.
            if before is not None and before != entry:
                assert is_newer(entry, before) or entry.state in (DEAD, LEFT)
            self.known[entry.incarnation] = entry
        self.places_are_those_of_the_view()
        # The window of the actor may lie across two of ours.
        assert all(count <= 2 * SHARES_PER_BEAT for count in self.shares.values())

    def places_are_those_of_the_view(self) -> None:
        """The oracle: count them again."""
        others = [entry for entry in self.actor.view.live() if entry.incarnation != ME]
        alive = [entry for entry in others if entry.state == ALIVE]
        places = self.actor._places
        live_at: dict[str, set[int]] = {}
        for entry in others:
            live_at.setdefault(entry.control, set()).add(entry.incarnation)
        assert places.live_at == live_at
        assert places.reached == Counter(entry.control for entry in alive)
        assert places.ranks == Counter(entry.head_rank for entry in alive)
        followed = others if self.actor.me in self.actor.masters() else self.actor.masters()
        judged = {entry.incarnation for entry in followed if entry.incarnation != ME}
        assert self.has_left or set(self.actor._detector._silent_since) == judged


TestMembershipMachine = MembershipMachine.TestCase
TestMembershipMachine.settings = settings(max_examples=examples(60), stateful_step_count=40)


NAMES = [f"n{number:03d}:31998" for number in range(5)]
names = st.sampled_from(NAMES)
faults = st.one_of(
    st.tuples(st.just("partition"), st.sets(names)),
    st.tuples(st.just("cut"), st.sets(st.tuples(names, names), max_size=8)),
    st.tuples(st.just("kill"), names),
    st.tuples(st.just("leave"), names),
    st.tuples(st.just("restart"), names),
    st.tuples(st.just("pause"), names),
    st.tuples(st.just("heal"), st.none()),
)


def commit(cluster: Cluster, kind: str, what: object) -> None:
    """Do one thing to a cluster, if it can be done."""
    process = cluster.processes.get(str(what))
    if kind == "partition":
        side = sorted(what)  # type: ignore[call-overload]
        cluster.partition(side, [name for name in NAMES if name not in side])
    elif kind == "cut":
        cluster.cut(*sorted(what))  # type: ignore[call-overload]
    elif kind == "heal":
        cluster.heal()
    elif kind == "restart":
        cluster.start(str(what), discovery=NAMES[:2])
    elif process is None or process.is_paused or len(cluster.processes) == 1:
        return
    elif kind == "kill":
        cluster.kill(str(what))
    elif kind == "leave":
        cluster.leave(str(what))
    elif kind == "pause":
        cluster.pause(str(what))


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**16),
    loss=st.sampled_from([0.0, 0.0, 0.2]),
    script=st.lists(st.tuples(faults, st.sampled_from([0.2, 2.0, 5.0, 9.0, 30.0])), max_size=7),
)
def test_whatever_happens_views_are_equal_within_ten_seconds_of_its_end(
    seed: int, loss: float, script: list[tuple[tuple[str, object], float]]
) -> None:
    """Safety under faults is checked at every step; then they stop, and all agree and stay so."""
    cluster = Cluster(seed, loss=loss)
    for name in NAMES:
        cluster.start(name, discovery=NAMES[:2])
    cluster.run(3.0)

    for (kind, what), seconds in script:
        commit(cluster, kind, what)
        cluster.run(seconds)
    cluster.heal()
    cluster.loss = 0.0
    for name, process in list(cluster.processes.items()):
        if process.is_paused:
            cluster.go_on(name)
    for head in NAMES[:2]:
        if head not in cluster.processes:
            cluster.start(head, discovery=NAMES[:2])

    cluster.seconds_until(cluster.agrees, at_most=HEAL_S)
    cluster.run(3.0)
    assert cluster.agrees(), cluster.report()
