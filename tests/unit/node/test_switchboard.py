"""The switchboard: a message is allowed and for this node, or reaches no actor."""

from __future__ import annotations

import errno
import itertools
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import cbor2
import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peercache.actors.effects import (
    BuildRing,
    Effect,
    NotifyDirectory,
    NotifyPool,
    NotifyPublisher,
    NotifyRing,
    Send,
    SendTo,
    StoreWords,
)
from peercache.actors.mailboxes import PeerAnswered, PoolGrew, Republish, RingBuilt, ViewChanged
from peercache.actors.origin import Origin
from peercache.actors.runtime import MAILBOX_MESSAGES_MAX, SELF, run_actor
from peercache.memory.client_lock import LockProbe
from peercache.model.hash_ring import HashRing
from peercache.model.ids import name_of
from peercache.model.member import ALIVE, Member
from peercache.net.peers import Gate, Peer, Transport
from peercache.net.sockets import Dialer, Listener
from peercache.node.addresses import Reach
from peercache.node.admission import Admission
from peercache.node.switchboard import (
    LINKS_MAX,
    Envelopes,
    Inbound,
    Links,
    NodeMailboxes,
    Switchboard,
)
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics, totals_of
from peercache.trust.sharing import Sharing
from peercache.wire.codec import decode, encode
from peercache.wire.envelope import (
    ENVELOPE_VERSION,
    UNKNOWN_CLUSTER,
    WIRE_VERSION,
    Envelope,
    versions_spoken,
)
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import Located, Lookup, Put
from peercache.wire.messages.membership import Heartbeat
from peercache.wire.messages.pool import Reserve
from peercache.wire.messages.session import (
    OPERATOR,
    Hello,
    HelloRequired,
    Refused,
    ReportRevocations,
    ReportStats,
    RequestStats,
    Welcome,
)
from tests.examples import examples
from tests.pace import ends_within, until
from tests.system.nodes import capture_logs

CLUSTER = "test"
NUMBERS = itertools.count()
ME = 0x11
CLIENT = 0x77
HERE = Peer(Transport.INPROC)
SECRET = b"t" * 32
FAILS = 666
"""The number of a question whose answer fails."""


def hello(**fields: Any) -> Hello:
    fitting = Hello(9, WIRE_VERSION, WIRE_VERSION, CLUSTER, False, 16384, "", b"", "", "", "", b"")
    return attrs.evolve(fitting, **fields)


def member(incarnation: int, control: str) -> Member:
    return Member(incarnation, 1, ALIVE, 255, "h", control, control, "boot", "")


@attrs.define(eq=False)
class Board:
    """A switchboard with everything around it but the actors."""

    board: Switchboard
    inbound: Inbound
    links: Links
    admission: Admission
    mailboxes: NodeMailboxes
    metrics: Metrics
    address: str
    home: str
    stored: list[Effect]
    members: dict[int, Member]

    def dropped(self, reason: str) -> int:
        return int(totals_of(self.metrics.messages_dropped).get(reason, 0))

    def waiting(self) -> list[tuple[str, Origin, object]]:
        """Take everything out of the mailboxes."""
        found = []
        for name, mailbox in self.mailboxes.named().items():
            while (taken := mailbox.take()) is not None:
                found.append((name, *taken))
        return found


@asynccontextmanager
async def running(
    folder: Path,
    incarnation: int = ME,
    *,
    gate: Any = None,
    links_max: int = LINKS_MAX,
    revoked: ReportRevocations | None = None,
) -> AsyncIterator[Board]:
    """Run a switchboard on loopback."""

    def answer(_: Origin, message: Message) -> Message | None:
        if not isinstance(message, RequestStats):
            return None
        if message.request == FAILS:
            raise OSError(errno.EMFILE, "Too many open files")
        return ReportStats(message.request, {"pages": 3})

    token = trio.lowlevel.current_trio_token()
    gate = gate or Gate(Sharing.of(), None)
    admission = Admission(
        cluster=CLUSTER, granule=16384, home=f"ipc://{folder}/home", local_secret=SECRET,
        gate=gate, probe=lambda home, name: LockProbe(home, name, Sharing.of()),
    )  # fmt: skip
    listener = Listener(on_removed=lambda pipe: token.run_sync_soon(lambda: admission.end(pipe)))
    address = f"127.0.0.1:{listener.listen_tcp('listen', '127.0.0.1', 0)}"
    home = f"inproc://board-{next(NUMBERS)}"
    listener.listen_local(home)
    metrics, stored = Metrics(), list[Effect]()
    me = member(incarnation, address)
    members = {incarnation: me}
    mailboxes, reach = NodeMailboxes(), Reach((), clock=trio.current_time)
    envelopes = Envelopes(
        incarnation=incarnation, cluster=CLUSTER, metrics=metrics, log=get_logger()
    )
    inbound = Inbound(
        envelopes=envelopes,
        listener=listener,
        admission=admission,
        mailboxes=mailboxes,
        member_of=members.get,
        answer=answer,
        reach=reach,
        segment_bytes=4096,
        revocations=lambda: revoked,
    )
    async with trio.open_nursery() as nursery:
        links = Links(
            envelopes=envelopes,
            mailboxes=mailboxes,
            nursery=nursery,
            me=me,
            granule=16384,
            gate=gate,
            reach=reach,
            on_answer=lambda *_: None,
            links_max=links_max,
        )
        board = Switchboard(
            envelopes=envelopes,
            mailboxes=mailboxes,
            inbound=inbound,
            links=links,
            nursery=nursery,
            gate=gate,
            member_of=members.get,
            perform_local=stored.append,
        )
        nursery.start_soon(inbound.run)
        yield Board(
            board, inbound, links, admission, mailboxes, metrics, address, home, stored, members
        )
        nursery.cancel_scope.cancel()
    listener.close()


class Caller:
    """A peer that talks to a switchboard over its own connection."""

    def __init__(self, address: str, identity: int = CLIENT) -> None:
        self.identity = identity
        self.dialer = Dialer(address if "://" in address else f"tcp://{address}")

    def say(
        self, message: Message, *, target: int = ME, sender: int = 0, cluster: str = CLUSTER
    ) -> None:
        self.raw(encode(Envelope(sender or self.identity, target, message), cluster=cluster))

    def raw(self, raw: bytes) -> None:
        assert self.dialer.send(raw)

    async def hear(self) -> Message:
        """Return the next message."""
        with ends_within():
            while (raw := self.dialer.receive()) is None:
                await trio.lowlevel.wait_readable(self.dialer.receive_fd)
        return decode(raw, cluster=CLUSTER).message

    async def ask(self, message: Message, **how: Any) -> Message:
        self.say(message, **how)
        return await self.hear()

    async def greet(self, **fields: Any) -> Message:
        return await self.ask(hello(**fields), target=0)


@pytest.fixture
def calling() -> Any:
    """Return a function that connects; callers disconnect after the test."""
    callers: list[Caller] = []

    def call(board: Board, identity: int = CLIENT, *, at: str = "") -> Caller:
        callers.append(Caller(at or board.address, identity))
        return callers[-1]

    yield call
    for caller in callers:
        caller.dialer.close()


Calling = Callable[..., Caller]


async def test_a_greeted_client_is_answered(tmp_path: Path, calling: Calling) -> None:
    """Welcome names the node and its segment; what follows reaches its actor, with the way back."""
    async with running(tmp_path) as board:
        caller = calling(board)
        welcome = await caller.greet()
        caller.say(Lookup(1, bytes(16)))
        await until(lambda: len(board.mailboxes.directory) == 1)
        ((actor, origin, message),) = board.waiting()

        board.board.perform(Send(origin, Located(1, b"")))
        answer = await caller.hear()
        kind = {"kind": "Lookup"}
        counted = board.metrics.registry.get_sample_value("peercache_messages_received_total", kind)

    assert counted == 1.0
    assert welcome == Welcome(9, WIRE_VERSION, member(ME, board.address), 4096)
    assert (actor, message) == ("directory", Lookup(1, bytes(16)))
    assert origin.identity == CLIENT
    assert origin.pipe != 0
    assert answer == Located(1, b"")


async def test_an_actor_that_cannot_be_served_in_the_turn_is_woken(
    tmp_path: Path, calling: Calling
) -> None:
    """One that waits for its mailbox and handles what comes in a task of its own."""
    async with running(tmp_path) as board:
        caller = calling(board)
        await caller.greet()
        mailbox = board.mailboxes.directory
        received: list[object] = []

        async with trio.open_nursery() as nursery:

            async def work() -> None:
                await mailbox.wait()
                received.append(mailbox.take())

            nursery.start_soon(work)
            await trio.testing.wait_all_tasks_blocked()
            caller.say(Lookup(1, bytes(16)))
            await until(lambda: bool(received))

    assert len(received) == 1


async def test_a_stranger_is_dropped_counted_and_asked_to_send_hello(
    tmp_path: Path, calling: Calling
) -> None:
    """Whatever it sends; after its Hello it is answered on the same connection."""
    async with running(tmp_path) as board:
        caller = calling(board)
        answer = await caller.ask(Lookup(1, bytes(16)))
        assert board.waiting() == []
        await caller.greet()
        caller.say(Lookup(2, b""))
        await until(lambda: len(board.mailboxes.directory) == 1)

    assert answer == HelloRequired(ME)
    assert board.dropped("stranger") == 1


@pytest.mark.parametrize(
    ("wrong", "reason"), [({"target": 0x10}, "other_incarnation"), ({"sender": 0x99}, "stranger")]
)
async def test_a_message_of_or_for_another_reaches_no_actor(
    tmp_path: Path, calling: Calling, wrong: dict[str, int], reason: str
) -> None:
    """The successor at an address is another node; a connection speaks for one identity."""
    async with running(tmp_path) as board:
        caller = calling(board, at=board.home)
        await caller.greet(secret=SECRET)
        answer = await caller.ask(Reserve(1, 1, 1, b"", b""), **wrong)

        assert answer == HelloRequired(ME)
        assert board.waiting() == []
        assert board.dropped(reason) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, Reserve(5, 1, 1, b"", b"")),
        ({"secret": SECRET}, Put(1, b"")),
        ({"is_node": True}, Reserve(5, 1, 1, b"", b"")),
        ({"is_node": True}, Lookup(5, b"")),
        ({"secret": SECRET}, Heartbeat(member(2, "a:1"), b"")),
    ],
)
async def test_what_a_role_may_not_send_is_refused(
    tmp_path: Path, calling: Calling, fields: dict[str, Any], message: Message
) -> None:
    """It reaches no actor, is counted, and the answer carries the number of the question."""
    async with running(tmp_path) as board:
        caller = calling(board, at=board.home if "secret" in fields else "")
        await caller.greet(**fields)
        answer = await caller.ask(message)

        assert isinstance(answer, Refused)
        assert answer.request == getattr(message, "request", 0)
        assert type(message).__name__ in answer.detail
        assert board.waiting() == []
        assert board.dropped("not_allowed") == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"granule": 1}, "granule"),
        ({"secret": SECRET}, "transport"),
        ({"wire_oldest": 5, "wire_newest": 6}, "wire_version"),
        ({"lock": "0000000000000077.lock"}, "transport"),
    ],
)
async def test_a_hello_that_does_not_fit_is_refused_and_opens_nothing(
    tmp_path: Path, calling: Calling, fields: dict[str, Any], reason: str
) -> None:
    """The refusal carries the number of the Hello; what follows is a stranger's."""
    async with running(tmp_path) as board:
        caller = calling(board)
        refused = await caller.greet(**fields)
        then = await caller.ask(Lookup(1, b""))

        assert isinstance(refused, Refused)
        assert (refused.request, refused.reason) == (9, reason)
        assert then == HelloRequired(ME)
        assert board.waiting() == []
        assert board.dropped(reason) == 1


async def test_another_cluster_is_refused_in_words_that_name_both(
    tmp_path: Path, calling: Calling
) -> None:
    """Even from a greeted connection: every message carries its cluster."""
    async with running(tmp_path) as board:
        caller = calling(board)
        await caller.greet()
        answer = await caller.ask(Lookup(1, b""), cluster="theirs")

        assert isinstance(answer, Refused)
        assert answer.reason == "cluster"
        assert "theirs" in answer.detail
        assert "test" in answer.detail
        assert board.waiting() == []
        assert board.dropped("cluster") == 1


async def test_an_operator_asks_for_the_cluster_without_a_refused_hello(
    tmp_path: Path, calling: Calling
) -> None:
    """The answer's envelope names the cluster; nothing is logged, or counted as a refusal."""
    async with running(tmp_path) as board:
        caller = calling(board)
        with capture_logs() as logged:
            answer = await caller.ask(hello(geometry=OPERATOR), cluster=UNKNOWN_CLUSTER)

        assert isinstance(answer, Refused)
        assert CLUSTER in answer.detail
        assert [board.dropped("cluster"), board.dropped("unknown_cluster")] == [0, 1]
        assert not any("refused" in line for line in logged)


async def test_the_log_names_the_peer_of_another_cluster_and_its_address(
    tmp_path: Path, calling: Calling
) -> None:
    """Its identity, and the user at the home address."""
    async with running(tmp_path) as board:
        caller = calling(board)
        with capture_logs() as logged:
            await caller.ask(Lookup(1, b""), cluster="theirs")

        (line,) = [each for each in logged if "node.peer_refused" in each]
        assert name_of(CLIENT) in line
        assert "at the home address" in line or "127.0.0.1:" in line


async def test_another_wire_version_is_refused(tmp_path: Path, calling: Calling) -> None:
    """However the rest of the message is laid out."""
    async with running(tmp_path) as board:
        caller = calling(board)
        caller.raw(cbor2.dumps([ENVELOPE_VERSION + 6, CLUSTER, CLIENT, ME, 9, "anything"]))
        answer = await caller.hear()

        assert isinstance(answer, Refused)
        assert answer.reason == "wire_version"
        assert str(ENVELOPE_VERSION + 6) in answer.detail
        assert versions_spoken() in answer.detail


@settings(max_examples=examples(150), suppress_health_check=list(HealthCheck))
@given(st.data())
def test_garbage_reaches_no_actor_and_raises_nothing(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes of any kind, also such as begin like one of ours."""
    begin = encode(Envelope(CLIENT, ME, Lookup(1, bytes(16))), cluster=CLUSTER)
    cut = data.draw(st.integers(0, len(begin) - 1))
    raw = data.draw(
        st.one_of(st.binary(max_size=80), st.binary(max_size=9).map(begin[:cut].__add__))
    )

    async def main() -> None:
        async with running(tmp_path) as board:
            board.admission.admit(5, HERE, CLIENT, hello())
            before = sum(board.dropped(reason) for reason in REASONS)
            board.inbound.take(5, raw)
            dropped = sum(board.dropped(reason) for reason in REASONS) - before
            found = board.waiting()
            assert dropped or found
            # What got through is what it claims to be.
            assert all(isinstance(message, Lookup) for _, _, message in found)

    trio.run(main)


REASONS = (
    "malformed", "cluster", "wire_version", "stranger", "other_incarnation", "not_allowed",
    "identity", "granule", "transport", "pipe_gone",
)  # fmt: skip


async def test_a_full_mailbox_is_counted(tmp_path: Path, calling: Calling) -> None:
    """Nothing grows without bound; the asker has a deadline."""
    async with running(tmp_path) as board:
        for i in range(MAILBOX_MESSAGES_MAX):
            board.mailboxes.directory.offer(SELF, i, 1)
        caller = calling(board)
        await caller.greet()
        caller.say(Lookup(1, b""))
        await until(lambda: board.dropped("mailbox_full") == 1)

        assert len(board.mailboxes.directory) == MAILBOX_MESSAGES_MAX


async def test_the_nodes_own_questions_are_answered(tmp_path: Path, calling: Calling) -> None:
    """Figures need no actor."""
    async with running(tmp_path) as board:
        caller = calling(board)
        await caller.greet()

        assert await caller.ask(RequestStats(4)) == ReportStats(4, {"pages": 3})


async def test_an_answer_that_fails_costs_that_answer_only(
    tmp_path: Path, calling: Calling
) -> None:
    """For want of a descriptor, or by a bug: the node serves what comes next."""
    async with running(tmp_path) as board:
        caller = calling(board)
        await caller.greet()
        caller.say(RequestStats(FAILS))

        assert await caller.ask(RequestStats(5)) == ReportStats(5, {"pages": 3})
        assert board.dropped("failed") == 1


async def test_a_session_ends_with_its_connection(tmp_path: Path, calling: Calling) -> None:
    """Nothing of it is remembered."""
    async with running(tmp_path) as board:
        caller = calling(board)
        await caller.greet()
        assert len(board.admission.sessions) == 1

        caller.dialer.close()

        await until(lambda: not board.admission.sessions)


async def test_a_hello_read_after_its_connection_has_ended_opens_no_session(
    tmp_path: Path, calling: Calling
) -> None:
    """Its end has been reported already: the session would stay forever."""
    async with running(tmp_path) as board:
        raw = encode(Envelope(CLIENT, 0, hello(namespace="n", geometry="g")), cluster=CLUSTER)
        board.inbound.take(12345, raw)

        assert board.admission.sessions == {}
        assert board.dropped("pipe_gone") >= 1


async def test_nodes_talk_over_links_that_greet(tmp_path: Path) -> None:
    """A member is dialled where its entry states, and answered over our own link to it."""
    async with running(tmp_path) as here, running(tmp_path, 0x22) as there:
        here.members[0x22] = member(0x22, there.address)
        beat = Heartbeat(member(ME, here.address), b"digest")
        here.board.perform(Send(0x22, beat))
        here.board.perform(SendTo(there.address, beat))
        await until(lambda: len(there.mailboxes.membership) == 2)

        found = there.waiting()
        await here.links.flush(5.0)
        used = len(here.links)

    assert used == 1
    assert found == [("membership", Origin(ME, 0), beat)] * 2


async def test_membership_learns_that_a_dialled_address_is_the_nodes_own(tmp_path: Path) -> None:
    """Discovery gives it under whatever name: it is dialled rarely from then on."""
    async with running(tmp_path) as here:
        _, port = here.address.split(":")
        alias = f"localhost:{port}"
        here.board.perform(SendTo(alias, Heartbeat(member(ME, here.address), b"digest")))
        # The message itself comes too: membership takes none of its own.
        await until(lambda: len(here.mailboxes.membership) == 2)

        answered = PeerAnswered(alias, member(ME, here.address))
        assert ("membership", Origin(0), answered) in here.waiting()


async def test_a_node_that_is_not_known_any_more_greets_again(tmp_path: Path) -> None:
    """HelloRequired comes back on the link: it sends Hello, and is answered from then on."""
    async with running(tmp_path) as here, running(tmp_path, 0x22) as there:
        here.members[0x22] = member(0x22, there.address)
        here.board.perform(Send(0x22, Put(1, b"")))
        await until(lambda: len(there.mailboxes.directory) == 1)
        there.admission.sessions.clear()

        here.board.perform(Send(0x22, Put(2, b"")))
        await until(lambda: there.dropped("stranger") == 1 and bool(there.admission.sessions))
        here.board.perform(Send(0x22, Put(3, b"")))
        await until(lambda: len(there.mailboxes.directory) == 2)

        assert [message for _, _, message in there.waiting()] == [Put(1, b""), Put(3, b"")]


async def test_links_to_unused_addresses_are_ended(tmp_path: Path) -> None:
    """Members come and go; a garbage address ends nothing but its own link."""
    async with running(tmp_path) as here, running(tmp_path, 0x22) as there:
        here.members[0x22] = member(0x22, there.address)
        here.members[0x33] = member(0x33, "no sense at all")
        here.board.perform(Send(0x22, Put(1, b"")))
        here.board.perform(Send(0x33, Put(1, b"")))
        await until(lambda: len(there.admission.sessions) == 1)

        here.links.keep(set())

        await until(lambda: not there.admission.sessions)


async def test_effects_go_where_they_say(tmp_path: Path) -> None:
    """Facts to mailboxes, words to memory; what cannot be sent is counted, never raised."""
    words = StoreWords(np.array([1]), np.array([2], np.uint64))
    effects: list[Effect] = [
        NotifyPool(PoolGrew(1)),
        words,
        Send(0x55, Put(1, b"")),
        Send(Origin(CLIENT, 999), Located(1, b"")),
    ]
    async with running(tmp_path) as board:
        for effect in effects:
            board.board.perform(effect)

        assert board.waiting() == [("pool", SELF, PoolGrew(1))]
        assert board.stored == [words]
        assert board.dropped("unknown_member") == 1
        assert board.dropped("pipe_gone") == 1


async def test_flush_is_bounded(tmp_path: Path) -> None:
    """A goodbye to the dead does not hold a node up."""
    async with running(tmp_path) as board:
        board.members[0x22] = member(0x22, "127.0.0.1:1")
        board.board.perform(Send(0x22, Put(1, b"")))

        with ends_within():
            await board.links.flush(0.05)


async def test_a_ring_is_made_outside_the_loop(tmp_path: Path) -> None:
    """The switchboard makes it in a thread, and hands it to the ring actor."""
    threads: list[int] = []

    def build() -> HashRing:
        threads.append(threading.get_ident())
        return HashRing([1, 2, 3], virtual_nodes=16, replicas=2)

    async with running(tmp_path) as board:
        board.board.perform(BuildRing((1, 2, 3), build))
        await until(lambda: len(board.mailboxes.ring) == 1)
        ((name, _, fact),) = board.waiting()

    assert name == "ring"
    assert isinstance(fact, RingBuilt)
    assert fact.ring.members == (1, 2, 3)
    assert threads != [threading.get_ident()]


async def test_links_are_bounded(tmp_path: Path) -> None:
    """New ones are left alone for a moment; beyond twice the bound a message is dropped."""
    async with running(tmp_path, links_max=2) as board:
        for number in range(5):
            board.members[number + 50] = member(number + 50, f"127.0.0.1:{number + 1}")
            board.board.perform(Send(number + 50, Put(1, b"")))

        assert len(board.links) == 4
        assert board.dropped("links_full") == 1


@attrs.define
class Relay:
    """An actor that sends another one what it receives."""

    next: Callable[[Any], Effect] | None = None
    received: list[object] = attrs.field(factory=list)

    def on_message(self, sender: Origin, message: object, now: float) -> list[Effect]:
        self.received.append(message)
        return [self.next(message)] if self.next else []

    def on_tick(self, now: float) -> list[Effect]:
        raise AssertionError("nothing is ever due")

    def deadline(self) -> float:
        return math.inf

    def check(self) -> None:
        assert len(self.received) < 100, "it goes round in circles"


async def test_a_fact_and_what_follows_from_it_are_handled_before_the_call_returns(
    tmp_path: Path,
) -> None:
    """From actor to actor, in any order of the mailboxes, and no task has to be woken for it."""
    fact = ViewChanged(())
    relays = {
        "ring": Relay(lambda _: NotifyDirectory(fact)),
        "directory": Relay(lambda _: NotifyPublisher(Republish())),
        "publisher": Relay(),
    }
    async with running(tmp_path) as board, trio.open_nursery() as nursery:
        boxes = board.mailboxes.named()
        for name, relay in relays.items():
            nursery.start_soon(run_actor, relay, boxes[name], board.board.perform, print)
        await trio.testing.wait_all_tasks_blocked()

        board.board.deliver(NotifyRing(fact))

        received = [relay.received for relay in relays.values()]
        assert received == [[fact], [fact], [Republish()]]
        nursery.cancel_scope.cancel()


async def test_what_is_reported_outside_any_turn_wakes_its_actor(tmp_path: Path) -> None:
    """The mailboxes are attended to only while the switchboard is at work."""
    relay = Relay()
    async with running(tmp_path) as board, trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, relay, board.mailboxes.pool, board.board.perform, print)
        await trio.testing.wait_all_tasks_blocked()
        board.board.deliver(NotifyPublisher(Republish()))
        board.mailboxes.pool.put(SELF, PoolGrew(1))
        await trio.testing.wait_all_tasks_blocked()

        assert relay.received == [PoolGrew(1)]
        nursery.cancel_scope.cancel()
