"""What a client takes from its home node: memory, slots ahead, and a view from other nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import attrs
import numpy as np
import pytest

from peercache.config.settings import Config
from peercache.errors import PeerCacheError
from peercache.model.member import Member
from peercache.model.records import RECORD
from peercache.net.breaker import Breakers
from peercache.observability.metrics import ClientReport, Metrics
from peercache.paths.cluster import Cluster
from peercache.paths.home_tie import VIEW_PARTS_MAX, Tie
from peercache.paths.read import Touches
from peercache.paths.steps import Ask, Greet, Post, Step
from peercache.wire.envelope import WIRE_VERSION
from peercache.wire.messages.declared import Message
from peercache.wire.messages.membership import (
    ReportViewChanges,
    RequestView,
    RequestViewChanges,
    ShareView,
)
from peercache.wire.messages.pool import RESERVED, Granted, Touched
from peercache.wire.messages.session import Refused, Welcome
from tests.contracts.fabric_suite import member_of

HOME, PREDECESSOR, OTHER = 7, 6, 5


@attrs.define
class Nodes:
    """The answers of a cluster, and what the tie reported about."""

    views: dict[int, Message] = attrs.field(factory=dict)
    greeting: Message | None = None
    reported: list[object] = attrs.field(factory=list)
    asked: list[object] = attrs.field(factory=list)
    report: ClientReport | None = None
    touches: Touches = attrs.field(factory=Touches)
    posted: list[tuple[int, Message]] = attrs.field(factory=list)
    opens: bool = True
    breakers: Breakers = attrs.field(factory=Breakers)
    now: float = 10.0

    def tie(self) -> Tie[str]:
        """Return a tie to a home node whose memory is its name."""
        return Tie(
            url="ipc:///home",
            config=Config(),
            boot_id="here",
            breakers=self.breakers,
            touches=self.touches,
            report=self.report,
            clock=lambda: self.now,
            open_memory=self._open,
            on_attached=lambda new, old: self.reported.append((new.memory, old and old.memory)),
            on_rejected=self._rejected,
            on_view=self._view,
        )

    def drive(self, path: Generator[Step, Any, bool]) -> bool:
        """Run a path to its end."""
        answer: Any = None
        while True:
            try:
                step = path.send(answer)
            except StopIteration as end:
                return bool(end.value)
            answer = None
            if isinstance(step, Greet):
                self.asked.append(step.url)
                answer = self.greeting
            if isinstance(step, Post):
                self.posted += step.messages
            if isinstance(step, Ask):
                ((peer, question),) = step.questions
                self.asked.append(peer)
                view = self.views.get(peer)
                if isinstance(question, RequestViewChanges) and isinstance(view, ShareView):
                    # A node that knows nothing of the view that the client has.
                    answer = [ReportViewChanges(0, b"", b"", (), ())]
                    self.asked.pop()
                else:
                    answer = [view]
                if view is None and step.until > self.now:
                    # As an Exchange counts the time in which nothing came.
                    waited_s, self.now = step.until - self.now, step.until
                    self.breakers.waited(peer, waited_s, self.now)

    def _open(self, member: Member) -> str | None:
        if not self.opens:
            return None
        return f"memory of {member.incarnation}"

    def _rejected(self, error: PeerCacheError) -> None:
        self.reported.append(str(error))

    def _view(self, _: Cluster, cluster: Cluster) -> None:
        self.reported.append(sorted(cluster.members))


def view_of(*incarnations: int) -> ShareView:
    """Return an answer that names these members."""
    return ShareView(0, tuple(member_of(each) for each in incarnations))


def welcome_of(incarnation: int) -> Welcome:
    """Return what a home node answers to a Hello."""
    return Welcome(0, WIRE_VERSION, member_of(incarnation), 0)


def test_slots_ahead_are_taken_from_the_node_that_pages_are_written_to() -> None:
    """What its predecessor granted under the same number is in memory that is gone."""
    nodes = Nodes(greeting=welcome_of(HOME))
    tie = nodes.tie()
    nodes.drive(tie.attach(11.0))
    assert tie.attached is not None
    reservations = tie.attached.reservations
    lengths = np.array([4096], np.uint64)
    reservations.ask_ahead(lengths, 0.0)
    (number, _) = reservations.ask_ahead(lengths, 0.1)
    granted = Granted(0, number, bytes((RESERVED,)), np.array([8192], np.uint64).tobytes())

    tie.take_unasked(PREDECESSOR, granted)
    before = reservations.awaits_grant()
    tie.take_unasked(HOME, granted)

    assert before
    assert not reservations.awaits_grant()


def test_home_node_that_restarted_is_attached_to_again() -> None:
    """Its old incarnation answers nothing; the node there now is the home from here on."""
    nodes = Nodes(greeting=welcome_of(PREDECESSOR))
    tie = nodes.tie()
    nodes.drive(tie.attach(11.0))
    nodes.greeting = welcome_of(HOME)
    nodes.views[HOME] = view_of(HOME, OTHER)
    nodes.asked.clear()

    is_well = nodes.drive(tie.beat())

    assert is_well
    assert nodes.asked == [PREDECESSOR, "ipc:///home", HOME]
    assert nodes.reported == [
        ("memory of 6", None),
        ("memory of 7", "memory of 6"),
        [OTHER, HOME],
    ]
    assert tie.is_home(HOME)
    assert tie.cluster.home == HOME


def test_home_node_that_restarted_is_sent_the_transports_in_use() -> None:
    """A report has changes only, and the new incarnation has received none yet."""
    report = ClientReport(Metrics(), lambda: {"aa": "tcp"})
    nodes = Nodes(greeting=welcome_of(PREDECESSOR), report=report)
    tie = nodes.tie()
    nodes.drive(tie.attach(11.0))
    first, second = report.take(), report.take()
    nodes.greeting = welcome_of(HOME)
    nodes.drive(tie.attach(12.0))

    assert second is None
    assert report.take() == first is not None


def test_view_comes_from_others_while_the_home_node_refuses() -> None:
    """A refusal is reported, and reads go on over what other members know."""
    nodes = Nodes(greeting=welcome_of(HOME), views={HOME: view_of(HOME, OTHER)})
    tie = nodes.tie()
    nodes.drive(tie.attach(11.0))
    nodes.drive(tie.ask_view())
    nodes.greeting = Refused(0, "lock", "no such file")
    nodes.views = {OTHER: view_of(OTHER)}
    nodes.asked.clear()
    nodes.reported.clear()

    is_well = nodes.drive(tie.beat())

    assert not is_well
    assert nodes.asked == [HOME, OTHER, "ipc:///home", HOME, OTHER]
    assert nodes.reported == [[OTHER], "refused (lock): no such file", [OTHER]]
    assert sorted(tie.cluster.members) == [OTHER]
    assert tie.cluster.handover_until > 0


def test_home_node_that_no_view_names_yet_is_read_and_owns_nothing() -> None:
    """It has restarted: others have not let it in, and it has not reported its own view yet."""
    nodes = Nodes(
        greeting=welcome_of(PREDECESSOR), views={PREDECESSOR: view_of(PREDECESSOR, OTHER)}
    )
    tie = nodes.tie()
    nodes.drive(tie.attach(11.0))
    nodes.drive(tie.ask_view())
    nodes.greeting = welcome_of(HOME)
    nodes.views = {OTHER: view_of(OTHER)}

    nodes.drive(tie.beat())

    assert tie.cluster.home == HOME
    assert tie.cluster.members[HOME] == member_of(HOME)
    assert tie.cluster.distance(HOME) == 0
    assert tie.cluster.ring.members == (OTHER,)


def test_home_node_that_a_view_has_named_ends_with_the_view() -> None:
    nodes = Nodes(greeting=welcome_of(HOME), views={HOME: view_of(HOME, OTHER)})
    tie = nodes.tie()
    nodes.drive(tie.attach(11.0))
    nodes.drive(tie.ask_view())
    nodes.views = {OTHER: view_of(OTHER)}

    nodes.drive(tie.ask_view())

    assert sorted(tie.cluster.members) == [OTHER]
    assert tie.cluster.home == 0


def test_one_beat_without_an_answer_closes_no_node_to_the_next_call() -> None:
    """A starved host is late once, while no call waits; a node that is hung is late again."""
    nodes = Nodes(greeting=welcome_of(HOME), views={HOME: view_of(HOME, OTHER)})
    tie = nodes.tie()
    nodes.drive(tie.attach(11.0))
    nodes.drive(tie.ask_view())
    nodes.views = {}

    nodes.drive(tie.ask_view())
    after_one = [nodes.breakers.is_open(peer) for peer in (HOME, OTHER)]
    nodes.drive(tie.ask_view())
    after_two = [nodes.breakers.is_open(peer) for peer in (HOME, OTHER)]

    assert after_one == [False, False]
    assert after_two == [True, True]


def test_only_members_that_answer_are_sent_what_was_read() -> None:
    """A message to a member that is gone or hung would be lost, and might cost a connection."""
    nodes = Nodes(greeting=welcome_of(HOME), views={HOME: view_of(HOME, OTHER, PREDECESSOR)})
    tie = nodes.tie()
    nodes.drive(tie.attach(11.0))
    nodes.breakers.failed(PREDECESSOR, nodes.now)
    for holder in (OTHER, PREDECESSOR, 4):
        nodes.touches.add(holder, np.zeros(1, RECORD))

    nodes.drive(tie.beat())

    assert [peer for peer, reported in nodes.posted if isinstance(reported, Touched)] == [OTHER]


def test_greeting_that_is_answered_closes_the_breaker() -> None:
    """The node has started again: the next call asks it at once."""
    nodes = Nodes(greeting=welcome_of(HOME))
    nodes.breakers.failed(HOME, nodes.now)

    nodes.drive(nodes.tie().attach(11.0))

    assert not nodes.breakers.is_open(HOME)


def test_home_node_that_is_attached_already_stays_so() -> None:
    """Its reservations are live: another mapping of the same node would forget them."""
    nodes = Nodes(greeting=welcome_of(HOME))
    tie = nodes.tie()
    nodes.drive(tie.attach(11.0))
    before = tie.attached

    assert nodes.drive(tie.attach(11.0))

    assert tie.attached is before
    assert nodes.reported == [(f"memory of {HOME}", None)]


def test_home_node_whose_memory_cannot_be_mapped_is_not_attached() -> None:
    """It may have stopped just now; the next beat tries again."""
    nodes = Nodes(greeting=welcome_of(HOME), opens=False)
    tie = nodes.tie()

    assert not nodes.drive(tie.attach(11.0))

    assert tie.attached is None


def test_member_whose_breaker_is_open_is_not_asked_for_a_view() -> None:
    """A beat must not wait for a hung member."""
    nodes = Nodes(greeting=welcome_of(HOME), views={HOME: view_of(HOME, OTHER, PREDECESSOR)})
    tie = nodes.tie()
    nodes.drive(tie.attach(11.0))
    nodes.drive(tie.ask_view())
    nodes.breakers.failed(PREDECESSOR, nodes.now)
    nodes.views = {}
    nodes.asked.clear()

    nodes.drive(tie.ask_view())

    assert nodes.asked == [HOME, OTHER]


def test_view_comes_in_parts_each_after_the_one_before() -> None:
    """A view of many members is more than one message."""
    parts = {0: (view_of(OTHER), True), OTHER: (view_of(PREDECESSOR, HOME), False)}
    nodes = Nodes(greeting=welcome_of(HOME))
    tie = nodes.tie()
    nodes.drive(tie.attach(11.0))

    path = tie.ask_view()
    step = next(path)
    with contextlib.suppress(StopIteration):
        while True:
            assert isinstance(step, Ask)
            ((_, question),) = step.questions
            assert isinstance(question, RequestView)
            part, more = parts.pop(question.after)
            step = path.send([attrs.evolve(part, more=more)])

    assert parts == {}
    assert sorted(tie.cluster.members) == [OTHER, PREDECESSOR, HOME]


@pytest.mark.parametrize("part", [ShareView(0, (), more=True), view_of(OTHER)])
def test_view_that_never_ends_is_given_up(part: ShareView) -> None:
    """Whatever a member reports, a beat ends."""
    nodes = Nodes(greeting=welcome_of(HOME), views={HOME: attrs.evolve(part, more=True)})
    tie = nodes.tie()
    nodes.drive(tie.attach(11.0))
    nodes.asked.clear()

    nodes.drive(tie.ask_view())

    assert len(nodes.asked) <= VIEW_PARTS_MAX
