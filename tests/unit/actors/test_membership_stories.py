"""Stories of whole clusters, written by hand and by Hypothesis; one node under arbitrary messages.

Virtual time, real codec, seeded network. HEAL_S is the promise; most stories need far less.
"""

from __future__ import annotations

import random
from collections import Counter

import attrs
import pytest
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
    cluster_of,
    member,
)

HEAD = "n000:31998"


def addresses(cluster: Cluster) -> list[str]:
    return list(cluster.processes)


def masters(cluster: Cluster, address: str) -> list[str]:
    return [m.control for m in cluster.processes[address].actor.masters()]


@pytest.mark.parametrize("seed", range(5))
def test_new_cluster_agrees_within_two_seconds(seed: int) -> None:
    """Ten nodes that know only the head all know each other soon."""
    cluster = Cluster(seed)
    for number in range(10):
        cluster.start(f"n{number:03d}:31998", discovery=[HEAD])

    assert cluster.seconds_until(cluster.agrees, at_most=2.0) > 0
    assert masters(cluster, "n009:31998") == [f"n{number:03d}:31998" for number in range(3)]


def test_first_node_alone_serves_and_is_joined_later() -> None:
    """1. B starts, and gets no answer. 2. It serves alone. 3. A comes: they meet."""
    cluster = Cluster(2)
    lonely = cluster.start("b:1", discovery=["a:1"])
    cluster.run(60.0)

    alone = [m.control for m in lonely.actor.masters()]
    cluster.start("a:1", discovery=["a:1"])
    took_s = cluster.seconds_until(cluster.agrees, at_most=5.0)

    assert alone == ["b:1"]
    assert took_s < 4.0
    assert masters(cluster, "b:1") == ["a:1", "b:1"]


def test_node_that_no_other_reaches_knows_members_and_has_not_joined() -> None:
    """1. Its address is wrong: it finds the head, which finds it not. 2. It gets a right one."""
    cluster = cluster_of(2)
    lost = cluster.start("lost:1", discovery=[HEAD], control="nowhere:1")

    for _ in range(30):
        cluster.run(1.0)
        assert not lost.actor.is_joined
    assert len(lost.actor.view.live()) > 1
    assert cluster.states(HEAD, lost) is None

    moved = lost.actor.move(cluster.now, control="lost:1", data="lost:2", head_rank=255)
    cluster.perform(lost, moved)
    cluster.seconds_until(lambda: lost.actor.is_joined, at_most=5.0)
    assert cluster.states(HEAD, lost) == ALIVE


def test_head_is_pinned_and_a_dead_master_is_replaced_by_itself() -> None:
    """1. The head dies: the next host name takes over. 2. It comes back: it is first again."""
    cluster = cluster_of(6)

    cluster.kill(HEAD)
    cluster.seconds_until(cluster.agrees, at_most=DEAD_S + 4.0)
    without_head = masters(cluster, "n005:31998")
    cluster.start(HEAD, discovery=[HEAD])
    cluster.seconds_until(cluster.agrees, at_most=HEAL_S)

    assert without_head == ["n001:31998", "n002:31998", "n003:31998"]
    assert masters(cluster, "n005:31998") == [HEAD, "n001:31998", "n002:31998"]


def test_dead_head_stops_no_node_with_another_address() -> None:
    """Any live node answers a newcomer, also one that is neither head nor master."""
    cluster = cluster_of(6)
    cluster.kill(HEAD)

    newcomer = cluster.start("z:1", discovery=[HEAD, "n005:31998"])
    cluster.run(2.0)

    assert len(newcomer.actor.view.live()) >= 6
    cluster.seconds_until(cluster.agrees, at_most=DEAD_S + 2.0)


def test_outage_of_all_masters_leaves_every_other_in_every_view() -> None:
    """1. All three masters die at once. 2. No other member is ever dead in any view."""
    cluster = cluster_of(8)
    for address in masters(cluster, HEAD):
        cluster.kill(address)
    survivors = {process.incarnation for process in cluster.processes.values()}

    cluster.forget_views()
    cluster.seconds_until(cluster.agrees, at_most=DEAD_S + 4.0)

    for view in cluster.announced():
        assert {m.incarnation for m in view.members if m.state == ALIVE} >= survivors


@pytest.mark.parametrize(
    ("seed", "seconds"),
    [
        *[(seed, [4.0, 30.0][seed % 2]) for seed in range(8)],
        pytest.param(8, 1000.0, marks=pytest.mark.slow),
    ],
)
def test_healed_partition_ends_in_equal_views(seed: int, seconds: float) -> None:
    """Two sides, the head on one of them, apart for a while or for long (and even forgotten)."""
    cluster = cluster_of(7, seed=seed)
    half = addresses(cluster)[:3]

    cluster.partition(half, addresses(cluster)[3:])
    cluster.run(seconds)
    cluster.heal()

    assert cluster.seconds_until(cluster.agrees, at_most=HEAL_S) <= 5.0


@pytest.mark.parametrize("seed", range(8))
def test_healed_partition_takes_no_member_of_the_own_side(seed: int) -> None:
    """While two sides report to each other whom they held dead, each node keeps its own side.

    A master of the other side reports it before it has learned who lives on this one, and is not
    believed then. Each node publishes its records once more, as the other side has dropped them,
    and messages per node and second stay in proportion to the cluster.
    """
    cluster = cluster_of(10, seed=seed)
    started = cluster.now
    half = addresses(cluster)[:5]
    cluster.partition(half, addresses(cluster)[5:])
    cluster.run(30.0)
    running = list(cluster.processes.items())
    sides = {
        address: {p.incarnation for other, p in running if (other in half) == (address in half)}
        for address in addresses(cluster)
    }

    cluster.forget_views()
    cluster.heal()
    cluster.seconds_until(cluster.agrees, at_most=HEAL_S)

    for address, process in cluster.processes.items():
        for view in process.views:
            gone = {m.incarnation for m in view.members if m.state in (DEAD, LEFT)}
            assert not gone & sides[address], f"{address} lost a member of its own side"
    assert {process.republished for process in cluster.processes.values()} == {1}
    cluster.run(5.0)
    # A master answers 9 heartbeats a second, each perhaps with a view, and forwards claims.
    assert cluster.busiest_second(since=started) <= 8 * 10


@pytest.mark.parametrize("victim", ["n001:31998", "n009:31998"])
def test_a_member_that_ends_as_a_partition_heals_is_gone_from_every_view(victim: str) -> None:
    """A master that comes back is right about this one, and is believed a moment later."""
    cluster = cluster_of(10, seed=3)
    half = addresses(cluster)[:5]
    cluster.partition(half, addresses(cluster)[5:])
    cluster.run(30.0)

    cluster.kill(victim)
    cluster.heal()

    assert cluster.seconds_until(cluster.agrees, at_most=HEAL_S + DEAD_S) <= HEAL_S


def test_node_cut_off_for_long_kills_no_member_when_it_comes_back() -> None:
    """1. N is cut off, and ends three masters after the other. 2. It heals with a view of the dead.
    3. No node but N ever holds another one dead.
    """
    cluster = cluster_of(10, seed=5)
    lost = "n009:31998"
    cluster.partition([lost], [a for a in addresses(cluster) if a != lost])
    cluster.run(60.0)
    held_dead = len(cluster.processes[lost].actor.view) - len(
        cluster.processes[lost].actor.view.live()
    )

    cluster.forget_views()
    cluster.heal()
    cluster.seconds_until(cluster.agrees, at_most=HEAL_S)

    assert held_dead == 9
    lost_one = cluster.processes[lost].incarnation
    for view in cluster.announced(but=lost):
        assert {m.incarnation for m in view.members if m.state == DEAD} <= {lost_one}


def test_one_broken_link_ends_no_member() -> None:
    """A member that one master does not hear is suspect there, and refutes through the others."""
    cluster = cluster_of(6, seed=6)
    member, master = "n005:31998", "n001:31998"
    cluster.forget_views()

    cluster.cut((member, master), (master, member))
    cluster.run(120.0)

    for view in cluster.announced():
        assert all(m.state not in (DEAD, LEFT) for m in view.members)
    assert all(process.republished == 0 for process in cluster.processes.values())


def test_goodbye_is_known_to_all_within_a_second() -> None:
    """A graceful stop waits for no timeout."""
    cluster = cluster_of(6)

    gone = cluster.leave("n004:31998")
    cluster.run(1.0)

    assert {cluster.states(address, gone) for address in addresses(cluster)} == {LEFT}


def test_lost_goodbye_costs_no_more_than_a_crash() -> None:
    """No node receives it; silence ends the member."""
    cluster = cluster_of(6)
    cluster.cut(*[("n004:31998", target) for target in addresses(cluster)])

    gone = cluster.leave("n004:31998")
    cluster.heal()
    cluster.run(DEAD_S + 3.0)

    assert {cluster.states(address, gone) for address in addresses(cluster)} == {DEAD}
    assert cluster.agrees()


def test_goodbye_received_by_one_master_reaches_all() -> None:
    """Views that differ are shared: one that received it is enough."""
    cluster = cluster_of(6)
    others = [address for address in addresses(cluster) if address != "n001:31998"]
    cluster.cut(*[("n004:31998", target) for target in others])

    gone = cluster.leave("n004:31998")
    cluster.heal()
    cluster.run(2.5)

    assert {cluster.states(address, gone) for address in addresses(cluster)} == {LEFT}


@pytest.mark.parametrize("state", [DEAD, LEFT])
def test_member_that_one_node_alone_holds_ended_comes_back_to_it(state: int) -> None:
    """A master that is wrong, or dies while it sends, reaches one node; others learn nothing.

    The masters do not believe that node about others, so they cannot notify the member either.
    """
    cluster = cluster_of(6)
    master, misled, ended = (
        cluster.processes[address] for address in (HEAD, "n004:31998", "n005:31998")
    )
    cluster.run(2 * SUSPECT_S)  # What was active lately is not dead, whatever a master reports.
    entry = misled.actor.member(ended.incarnation)
    assert entry is not None
    slander = attrs.evolve(entry, state=state, counter=entry.counter + 1)

    reported_by = Origin(master.incarnation)
    cluster.hand_over(misled, reported_by, ShareView(0, (master.actor.me, slander)))
    reported = cluster.states("n004:31998", ended)
    healed_s = cluster.seconds_until(cluster.agrees, at_most=HEAL_S)

    assert reported == state
    assert healed_s <= HEAL_S
    assert {cluster.states(address, ended) for address in addresses(cluster)} == {ALIVE}


def test_member_that_one_node_alone_holds_alive_ends_there_too() -> None:
    """It refuted to that node, no master learned of it, and then it was gone."""
    cluster = cluster_of(6)
    misled = cluster.processes["n004:31998"]
    ended = cluster.kill("n005:31998")
    cluster.run(DEAD_S + 2.0)
    assert cluster.agrees()
    entry = misled.actor.member(ended.incarnation)
    assert entry is not None
    refuted = attrs.evolve(entry, state=ALIVE, counter=entry.counter + 1)

    cluster.hand_over(misled, Origin(ended.incarnation), ShareView(0, (refuted,)))
    held = cluster.states("n004:31998", ended)
    healed_s = cluster.seconds_until(cluster.agrees, at_most=HEAL_S)

    assert held == ALIVE
    assert healed_s <= HEAL_S
    assert {cluster.states(address, ended) for address in addresses(cluster)} == {DEAD}


@pytest.mark.parametrize("address", [HEAD, "n004:31998"])
def test_paused_node_wakes_accuses_no_member_and_is_alive_again(address: str) -> None:
    """1. SIGSTOP for a minute: the others end it. 2. It goes on, with all that was queued."""
    cluster = cluster_of(6, seed=7)
    cluster.pause(address)
    cluster.run(60.0)
    paused = cluster.processes[address]
    was = {cluster.states(other, paused) for other in addresses(cluster) if other != address}

    cluster.forget_views()
    cluster.go_on(address)
    took_s = cluster.seconds_until(cluster.agrees, at_most=HEAL_S)

    assert was == {DEAD}
    assert took_s <= 4.0
    assert paused.republished == 1
    for view in cluster.announced():
        ended = {m.incarnation for m in view.members if m.state != ALIVE}
        assert ended <= {paused.incarnation}


def test_restart_at_the_same_address_ends_the_old_incarnation_at_once() -> None:
    """The successor's Join is enough; no silence has to pass."""
    cluster = cluster_of(6, seed=8)
    old = cluster.processes["n004:31998"]

    cluster.start("n004:31998", discovery=[HEAD])
    took_s = cluster.seconds_until(cluster.agrees, at_most=5.0)

    assert took_s <= 2.5
    assert cluster.states(HEAD, old) == DEAD


def test_restarted_only_head_is_found_again() -> None:
    """It knows no member; the others redial it as soon as they suspect it."""
    cluster = cluster_of(6, seed=9)

    cluster.start(HEAD, discovery=[HEAD])
    took_s = cluster.seconds_until(cluster.agrees, at_most=HEAL_S)

    assert took_s <= SUSPECT_S + 3.0


def test_lossy_network_converges_and_stays_together() -> None:
    """With one message in ten lost no member dies, and views are equal soon after it stops."""
    cluster = cluster_of(6, seed=12)
    cluster.loss = 0.1
    cluster.forget_views()

    cluster.run(300.0)
    cluster.loss = 0.0
    cluster.seconds_until(cluster.agrees, at_most=HEAL_S)

    for view in cluster.announced():
        assert all(m.state not in (DEAD, LEFT) for m in view.members)


def test_cluster_at_rest_sends_heartbeats_and_answers_only() -> None:
    """Each node to each of three masters and back, once a second: no views, no calls."""
    cluster = cluster_of(12, seed=13)
    cluster.run(10.0)
    cluster.sent.clear()

    cluster.run(10.0)

    # 3 masters beat at 2 others, 9 members at 3; each heartbeat has one answer.
    assert sum(cluster.sent.values()) == 10 * 2 * (3 * 2 + 9 * 3)


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
    """One node; the model is what a node must never do, whatever it receives."""

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

    def take(self, sender: int, message: object) -> None:
        self.takes(self.actor.on_message(Origin(sender, 9), message, self.now))

    @rule(sender=senders, entry=entries, digest=digests)
    def heartbeat(self, sender: int, entry: Member, digest: bytes) -> None:
        self.take(sender, Heartbeat(entry, digest))

    @rule(sender=senders, entry=entries)
    def join(self, sender: int, entry: Member) -> None:
        self.take(sender, Join(entry))

    @rule(sender=senders, view=st.lists(entries, max_size=6))
    def view(self, sender: int, view: list[Member]) -> None:
        self.take(sender, ShareView(0, tuple(view)))

    @rule(sender=senders, digest=digests)
    def answer(self, sender: int, digest: bytes) -> None:
        self.take(sender, HeartbeatSeen(digest))

    @rule(sender=senders)
    def question(self, sender: int) -> None:
        self.take(sender, RequestView(1, b""))

    @rule(sender=senders, buckets=st.sampled_from([b"", b"odd", bytes(8), bytes(32)]))
    def comparison(self, sender: int, buckets: bytes) -> None:
        self.take(sender, CompareView(buckets))

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
            self.shares = before  # a goodbye is sent once, in addition to that limit
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
