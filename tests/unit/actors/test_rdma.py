"""The rdma actor: the queue pairs that clients have to a node."""

from __future__ import annotations

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from peercache.actors.effects import Effect, Send
from peercache.actors.mailboxes import ClientsConnected, PoolGrew
from peercache.actors.origin import Origin
from peercache.actors.ports import (
    DropPair,
    OpenPair,
    PairOpened,
    RdmaAbsent,
    RdmaFact,
    RdmaServes,
    ServeMemory,
)
from peercache.actors.rdma.actor import (
    CHANNELS_MAX,
    LEFT_S,
    PENDING_MAX,
    SILENT_S,
    RdmaActor,
)
from peercache.wire.messages.session import (
    BUSY,
    NO_RDMA,
    TOO_MANY,
    ChannelOpened,
    ChannelsHeld,
    OpenChannel,
    Refused,
)
from tests.contracts.fake_queue_pairs import FakeQueuePairs
from tests.examples import examples

ALICE, BOB = Origin(1, 11), Origin(2, 22)


def wanted(channel: int, request: int = 5) -> OpenChannel:
    """Return a question for a channel."""
    return OpenChannel(request, channel, 0, "Ethernet", 100, 1, 0, bytes(16), 5, 16)


def opened(channel: int) -> ChannelOpened:
    """Return the answer of a node that made a queue pair."""
    return ChannelOpened(5, channel, 200, 2, 0, bytes(16), 5, 16, 0, 4096, 0, 4096, b"")


def serving(channels_a_client_max: int = 4) -> RdmaActor:
    """Return an actor whose node has devices."""
    actor = RdmaActor(channels_a_client_max=channels_a_client_max)
    actor.on_message(Origin(0), RdmaServes(), 0.0)
    return actor


def ask(actor: RdmaActor, who: Origin, channel: int, now: float = 0.0) -> list[Effect]:
    """Ask for a channel."""
    effects = actor.on_message(who, wanted(channel), now)
    actor.check()
    return effects


def test_node_without_devices_refuses_with_the_reason() -> None:
    """Every refusal has its reason, before and after the search for devices."""
    actor = RdmaActor(channels_a_client_max=4)

    early = ask(actor, ALICE, 1)
    actor.on_message(Origin(0), RdmaAbsent("pyverbs cannot be imported"), 0.0)
    late = ask(actor, ALICE, 1)

    assert early == [Send(ALICE, Refused(5, NO_RDMA, "it is still starting"))]
    assert late == [Send(ALICE, Refused(5, NO_RDMA, "pyverbs cannot be imported"))]


def test_channel_is_opened_by_the_port_and_the_answer_passed_on() -> None:
    """The actor itself makes no queue pair."""
    actor = serving()

    asked = ask(actor, ALICE, 1)
    answered = actor.on_message(Origin(0), PairOpened(ALICE, 1, is_open=True, answer=opened(1)), 0)

    assert asked == [OpenPair(ALICE, wanted(1))]
    assert answered == [Send(ALICE, opened(1))]
    assert actor.figures()["rdma_channels"] == 1


def test_same_channel_asked_for_again_counts_once() -> None:
    """A client repeats a question to learn of newly registered memory."""
    actor = serving(channels_a_client_max=1)

    first, second = ask(actor, ALICE, 1), ask(actor, ALICE, 1)

    assert first == second
    assert actor.figures()["rdma_channels"] == 1


def test_channel_that_could_not_be_made_is_forgotten() -> None:
    """Its place is free again."""
    actor = serving(channels_a_client_max=1)
    ask(actor, ALICE, 1)
    refusal = Refused(5, "no_path", "no host answers")

    passed_on = actor.on_message(
        Origin(0), PairOpened(ALICE, 1, is_open=False, answer=refusal), 0.0
    )

    assert passed_on == [Send(ALICE, refusal)]
    assert actor.figures()["rdma_channels"] == 0
    assert actor.deadline() == float("inf")


def test_client_has_a_bounded_number_of_channels() -> None:
    """One that leaks them is refused; another is served."""
    actor = serving(channels_a_client_max=2)
    for channel in (1, 2):
        ask(actor, ALICE, channel)

    (refused,) = ask(actor, ALICE, 3)
    (served,) = ask(actor, BOB, 1)

    assert isinstance(refused, Send)
    assert isinstance(refused.message, Refused)
    assert refused.message.reason == TOO_MANY
    assert isinstance(served, OpenPair)


def test_node_has_a_bounded_number_of_channels() -> None:
    """However many clients there are."""
    actor = serving(channels_a_client_max=CHANNELS_MAX)
    for channel in range(CHANNELS_MAX):
        actor.on_message(ALICE, wanted(channel), 0.0)
        actor.on_message(
            Origin(0), PairOpened(ALICE, channel, is_open=True, answer=opened(channel)), 0.0
        )

    (refused,) = ask(actor, BOB, 1)

    assert isinstance(refused, Send)


def test_questions_that_wait_are_bounded() -> None:
    """The same channel asked for over and over is work, too; it goes on once some is done."""
    actor = serving()
    for _ in range(PENDING_MAX):
        ask(actor, ALICE, 1)

    (refused,) = ask(actor, ALICE, 1)
    actor.on_message(Origin(0), PairOpened(ALICE, 1, is_open=True, answer=opened(1)), 0.0)
    (served,) = ask(actor, ALICE, 1)

    assert isinstance(refused, Send)
    assert isinstance(refused.message, Refused)
    assert refused.message.reason == BUSY
    assert isinstance(served, OpenPair)


def test_channel_that_is_not_listed_any_more_is_dropped() -> None:
    """One newer than the list is not: it was asked for after the list was made."""
    actor = serving()
    for channel in (1, 2, 3):
        ask(actor, ALICE, channel)

    effects = actor.on_message(ALICE, ChannelsHeld(newest=2, channels=(2,)), 1.0)

    assert effects == [DropPair(1, 1)]
    assert actor.figures()["rdma_channels"] == 2


def test_client_that_is_silent_loses_its_channels_and_no_other_does() -> None:
    """A dead process reports nothing; one-sided reads do not show."""
    actor = serving()
    ask(actor, ALICE, 1, now=0.0)
    ask(actor, BOB, 1, now=0.0)
    actor.on_message(BOB, ChannelsHeld(newest=1, channels=(1,)), 10.0)

    assert actor.deadline() == SILENT_S
    effects = actor.on_tick(SILENT_S)

    assert effects == [DropPair(1, 1)]
    assert actor.deadline() == 10.0 + SILENT_S


def test_populated_memory_is_served_as_soon_as_the_devices_are_open() -> None:
    """The pool may grow before the devices are open, and after."""
    actor = RdmaActor(channels_a_client_max=4)

    early = actor.on_message(Origin(0), PoolGrew(4096), 0.0)
    serves = actor.on_message(Origin(0), RdmaServes(), 0.0)
    later = actor.on_message(Origin(0), PoolGrew(8192), 0.0)

    assert early == []
    assert serves == [ServeMemory(4096)]
    assert later == [ServeMemory(8192)]


def test_devices_that_are_gone_take_every_channel_along() -> None:
    """Pending questions are never answered; new ones are refused with the reason."""
    actor = serving()
    ask(actor, ALICE, 1)

    actor.on_message(Origin(0), RdmaAbsent("the device was removed"), 0.0)
    refused = ask(actor, BOB, 1)

    assert refused == [Send(BOB, Refused(5, NO_RDMA, "the device was removed"))]
    assert actor.figures()["rdma_channels"] == 0
    assert actor.deadline() == float("inf")


def test_queue_pairs_of_a_client_end_soon_after_its_last_connection() -> None:
    """It exited, or its certificate was revoked: the queue pairs are no right of their own."""
    actor = serving()
    for who in (ALICE, BOB):
        ask(actor, who, 1)
        actor.on_message(Origin(0), PairOpened(who, 1, is_open=True, answer=opened(1)), 0.0)
    both = ClientsConnected(frozenset({ALICE.identity, BOB.identity}))
    only_bob = ClientsConnected(frozenset({BOB.identity}))

    while_connected = actor.on_message(Origin(0), both, 10.0)
    early = actor.on_message(Origin(0), only_bob, 10.0 + LEFT_S - 0.1)
    effects = actor.on_message(Origin(0), only_bob, 10.0 + LEFT_S)
    actor.check()

    assert (while_connected, early) == ([], [])
    assert effects == [DropPair(ALICE.identity, 1)]
    assert actor.figures()["rdma_clients"] == 1


def test_connection_that_is_made_again_keeps_the_queue_pairs() -> None:
    """Reads go on over them meanwhile."""
    actor = serving()
    ask(actor, ALICE, 1)
    none, back = ClientsConnected(frozenset()), ClientsConnected(frozenset({ALICE.identity}))

    reported = [
        actor.on_message(Origin(0), message, now)
        for message, now in ((none, 1.0), (none, 4.0), (back, 5.0), (none, 9.0))
    ]

    assert reported == [[], [], [], []]


class RdmaActorMachine(RuleBasedStateMachine):
    """The actor lists exactly the queue pairs of its port, once the port has done its effects."""

    def __init__(self) -> None:
        """Start with open devices."""
        super().__init__()
        self.actor = RdmaActor(channels_a_client_max=3)
        self.now = 0.0
        self.pairs = FakeQueuePairs(self.hear)
        self.asked = self.answered = 0
        self.pairs.step()

    def hear(self, fact: RdmaFact) -> None:
        """Hand a fact of the port to the actor."""
        self.do(self.actor.on_message(Origin(0), fact, self.now))

    @rule(
        who=st.sampled_from([ALICE, BOB]),
        channel=st.integers(1, 6),
        end=st.integers(1, 2),
        is_valid=st.booleans(),
    )
    def open(self, who: Origin, channel: int, end: int, *, is_valid: bool) -> None:
        """Ask for a channel, from one of two ends, or with nonsense."""
        self.asked += 1
        question = attrs.evolve(wanted(channel), qp_num=end, mtu=5 if is_valid else 9)
        self.do(self.actor.on_message(who, question, self.now))

    @rule(
        who=st.sampled_from([ALICE, BOB]), held=st.sets(st.integers(1, 6)), newest=st.integers(0, 6)
    )
    def hold(self, who: Origin, held: set[int], newest: int) -> None:
        """List channels."""
        self.do(self.actor.on_message(who, ChannelsHeld(newest, tuple(held)), self.now))

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        """Let time go by."""
        self.now += seconds
        if self.actor.deadline() <= self.now:
            self.do(self.actor.on_tick(self.now))
            assert self.actor.deadline() > self.now

    @rule(who=st.sets(st.sampled_from([ALICE.identity, BOB.identity])))
    def connected(self, who: set[int]) -> None:
        """Report which clients have a connection."""
        self.do(self.actor.on_message(Origin(0), ClientsConnected(frozenset(who)), self.now))

    @rule(steps=st.integers(1, 4))
    def perform(self, steps: int) -> None:
        """Let the port do some of its effects."""
        for _ in range(steps):
            self.pairs.step()

    def do(self, effects: list[Effect]) -> None:
        """Do what the actor emits."""
        for effect in effects:
            if isinstance(effect, Send):
                self.answered += 1
            else:
                assert isinstance(effect, (OpenPair, DropPair))
                self.pairs.perform(effect)

    @invariant()
    def lists_what_there_is(self) -> None:
        """No queue pair is forgotten, none is imagined, and every question has one answer."""
        self.actor.check()
        if not self.pairs.pending:
            assert self.actor.figures()["rdma_channels"] == len(set(self.pairs.live))
            assert self.asked == self.answered


TestRdmaActorMachine = RdmaActorMachine.TestCase
TestRdmaActorMachine.settings = settings(max_examples=examples(100), stateful_step_count=30)
