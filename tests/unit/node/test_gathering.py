"""Gathering: every member is listed once, in bounded time, whatever the members do."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
import trio
from trio.testing import MockClock

from peercache.actors.effects import Effect, Send
from peercache.actors.origin import Origin
from peercache.model.member import ALIVE, DEAD, SUSPECT, Member
from peercache.model.status import (
    NO_ANSWER,
    UNAVAILABLE,
    MemberStatus,
    Status,
    decoded_statuses,
    encoded,
)
from peercache.node.questions import (
    ANSWER_BYTES_MAX,
    ANSWER_S,
    ASKERS_MAX,
    AT_ONCE,
    BUSY,
    FRESH_S,
    FRESH_STARTING_S,
    Gathering,
    MemberBroker,
    portion,
)
from peercache.wire.messages.membership import (
    ReportCluster,
    ReportStatus,
    RequestCluster,
    RequestStatus,
)
from peercache.wire.messages.session import Refused

OWN = 1


def member(incarnation: int, state: int = ALIVE) -> Member:
    return Member(incarnation, 1, state, 255, "host", f"n{incarnation}:1", "d:1", "", "")


class Cluster:
    """Members that answer as `replies` specifies, once they are asked."""

    def __init__(self, *members: Member, replies: Callable[[int, RequestStatus], None]) -> None:
        self.asked: list[int] = []
        self.reported: list[tuple[Origin, ReportCluster]] = []
        self.replies = replies
        self.broker = MemberBroker(self.perform)
        self.gathering = Gathering(
            own=OWN,
            status=lambda *, detail: Status(name=f"own {detail}"),
            members=lambda: (member(OWN), *members),
            broker=self.broker,
        )

    def perform(self, effect: Effect) -> None:
        assert isinstance(effect, Send)
        if isinstance(effect.to, Origin):
            assert isinstance(effect.message, ReportCluster)
            self.reported.append((effect.to, effect.message))
        else:
            assert isinstance(effect.message, RequestStatus)
            self.asked.append(effect.to)
            self.replies(effect.to, effect.message)

    def answer(self, node: int, asked: RequestStatus, sender: int = 0) -> None:
        reported = ReportStatus(asked.request, encoded(Status(name=f"n{node}:1", state="ok")))
        self.broker.take(sender or node, reported)


def silent(node: int, asked: RequestStatus) -> None:
    del node, asked


async def test_every_member_is_asked_once_and_listed(autojump_clock: MockClock) -> None:
    """Suspect ones too; the dead are listed without being asked."""
    del autojump_clock
    cluster = Cluster(member(2), member(3, SUSPECT), member(4, DEAD), replies=silent)
    cluster.replies = cluster.answer

    found = await cluster.gathering.statuses()

    assert sorted(cluster.asked) == [2, 3]
    assert [each.status.name for each in found] == ["own False", "n2:1", "n3:1", "n4:1"]
    assert [each.seen for each in found] == ["alive", "alive", "suspect", "dead"]
    assert [each.answers for each in found] == [True, True, True, False]


async def test_a_node_that_was_started_again_is_listed_once(autojump_clock: MockClock) -> None:
    """One process listens at an address; a dead member whose address is free is still listed."""
    del autojump_clock
    killed, hung, gone = member(2, DEAD), member(3), member(4, DEAD)
    again, also = (
        attrs.evolve(each, incarnation=each.incarnation + 10, state=ALIVE)
        for each in (killed, hung)
    )
    cluster = Cluster(killed, hung, gone, again, also, replies=silent)
    cluster.replies = lambda node, asked: cluster.answer(node, asked) if node > 10 else None

    found = await cluster.gathering.statuses()

    assert [each.status.name for each in found] == ["own False", "n4:1", "n12:1", "n13:1"]
    assert [each.answers for each in found] == [True, False, True, True]


async def test_a_node_with_a_revoked_certificate_is_described_as_that(
    autojump_clock: MockClock,
) -> None:
    """It may run and serve no one: to look for a dead process would mislead."""
    del autojump_clock
    cluster = Cluster(member(2, DEAD), member(3, DEAD), replies=silent)
    cluster.gathering = Gathering(
        own=OWN,
        status=lambda *, detail: Status(name=f"own {detail}"),
        members=lambda: (member(2, DEAD), member(3, DEAD)),
        broker=cluster.broker,
        refusal=lambda found: "revoked" if found.incarnation == 2 else "",
    )

    found = {each.status.name: each for each in await cluster.gathering.statuses()}

    assert found["n2:1"].status.reasons == ("revoked",)
    assert found["n3:1"].status.reasons == ()


async def test_silent_members_cost_one_second_together(autojump_clock: MockClock) -> None:
    """They are asked at once, and once more in case the question was lost."""
    del autojump_clock
    cluster = Cluster(*[member(n) for n in range(2, AT_ONCE + 2)], replies=silent)
    began = trio.current_time()

    found = await cluster.gathering.statuses()

    assert trio.current_time() - began == pytest.approx(ANSWER_S, abs=0.1)
    assert len(cluster.asked) == 2 * AT_ONCE
    assert {each.status.state for each in found[1:]} == {NO_ANSWER}


async def test_no_more_members_than_a_bound_are_asked_at_once(autojump_clock: MockClock) -> None:
    """A thousand members are not a thousand messages in one turn of the loop."""
    del autojump_clock
    cluster = Cluster(*[member(n) for n in range(2, 3 * AT_ONCE)], replies=silent)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cluster.gathering.statuses)
        await trio.sleep(0.1)
        assert len(cluster.asked) == AT_ONCE
        nursery.cancel_scope.cancel()


async def test_a_lost_question_is_asked_again(autojump_clock: MockClock) -> None:
    """A link that has just been made may lose it."""
    del autojump_clock

    def deaf_once(node: int, asked: RequestStatus) -> None:
        if cluster.asked.count(node) == 2:
            cluster.answer(node, asked)

    cluster = Cluster(member(2), replies=deaf_once)

    assert [each.answers for each in await cluster.gathering.statuses()] == [True, True]


async def test_no_member_answers_for_another_one(autojump_clock: MockClock) -> None:
    """Nor to a question that was not asked, nor with bytes that are no status."""
    del autojump_clock

    def lie(node: int, asked: RequestStatus) -> None:
        cluster.answer(node, asked, sender=9)
        cluster.answer(node, RequestStatus(asked.request + 100, detail=False))
        cluster.broker.take(node, ReportStatus(asked.request, b"\xff"))

    cluster = Cluster(member(2), replies=lie)

    assert [each.answers for each in await cluster.gathering.statuses()] == [True, False]


async def test_what_was_gathered_serves_for_a_second(autojump_clock: MockClock) -> None:
    """Ten people who look at once cost one question a member; without any, none is asked."""
    del autojump_clock
    cluster = Cluster(member(2), replies=silent)
    cluster.replies = cluster.answer
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(cluster.gathering.statuses)
    assert cluster.asked == [2]

    await trio.sleep(100 * FRESH_S)
    assert cluster.asked == [2]

    await cluster.gathering.statuses()
    assert cluster.asked == [2, 2]
    # Details are another question.
    assert (await cluster.gathering.statuses(detail=True))[0].status.name == "own True"


async def test_operators_get_portions_and_too_many_are_refused(autojump_clock: MockClock) -> None:
    """Each answer goes back along the connection of its question, behind what it named."""
    del autojump_clock
    cluster = Cluster(member(2), member(3), replies=silent)
    cluster.replies = cluster.answer
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cluster.broker.run)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(ASKERS_MAX):
            assert (
                cluster.gathering.ask(Origin(50, number), RequestCluster(number, False, 1)) is None
            )
        refused = cluster.gathering.ask(Origin(50, 99), RequestCluster(99, detail=False, after=0))
        assert isinstance(refused, Refused)
        assert refused.reason == BUSY
        await trio.testing.wait_all_tasks_blocked()
        assert len(cluster.reported) == ASKERS_MAX
        _, reported = cluster.reported[0]
        assert {(o.pipe, t.request, t.more) for o, t in cluster.reported} == {
            (number, number, False) for number in range(ASKERS_MAX)
        }
        names = [each.status.name for each in decoded_statuses(reported.statuses)]
        assert names == ["n2:1", "n3:1"]
        # Those that were answered make room.
        assert cluster.gathering.ask(Origin(50, 99), RequestCluster(99, False, 0)) is None
        nursery.cancel_scope.cancel()


def test_a_portion_fits_into_a_message() -> None:
    """A thousand statuses come in several; one that is too large comes alone."""
    many = [MemberStatus(status=Status(name=f"node {n}", cluster="x" * 900)) for n in range(1000)]
    rest, count, seen = many, 0, []
    while rest:
        raw, more = portion(rest)
        assert len(raw) <= ANSWER_BYTES_MAX
        found = decoded_statuses(raw)
        seen += found
        rest = rest[len(found) :]
        assert more == bool(rest)
        count += 1
    assert seen == many
    assert count > 5


async def test_a_node_that_starts_is_looked_at_again_soon(autojump_clock: MockClock) -> None:
    """It is not shown as unavailable for the second that follows its start."""
    del autojump_clock
    cluster = Cluster(member(2), replies=silent)
    states = iter([UNAVAILABLE, "ok", "ok"])

    def answer(node: int, asked: RequestStatus) -> None:
        reported = encoded(Status(name=f"n{node}:1", state=next(states)))
        cluster.broker.take(node, ReportStatus(asked.request, reported))

    cluster.replies = answer
    seen = []
    for pause_s in (0.0, FRESH_STARTING_S / 2, FRESH_STARTING_S, FRESH_S / 2):
        await trio.sleep(pause_s)
        seen.append((await cluster.gathering.statuses())[1].status.state)

    assert seen == [UNAVAILABLE, UNAVAILABLE, "ok", "ok"]
    assert cluster.asked == [2, 2]
