"""The switchboard serves actors: all that follows from one message happens in one turn."""

from __future__ import annotations

import math
from pathlib import Path

import attrs
import trio
import trio.testing

from peercache.actors.effects import Effect, Origin, Tell
from peercache.actors.runtime import SELF, run_actor
from tests.unit.node.test_switchboard import running


@attrs.define
class Relay:
    """An actor that tells the next one what it hears."""

    to: str
    heard: list[object] = attrs.field(factory=list)

    def on_message(self, sender: Origin, message: object, now: float) -> list[Effect]:
        self.heard.append(message)
        return [Tell(self.to, message)] if self.to else []

    def on_tick(self, now: float) -> list[Effect]:
        raise AssertionError("nothing is ever due")

    def deadline(self) -> float:
        return math.inf

    def check(self) -> None:
        assert len(self.heard) < 100, "it goes round in circles"


async def test_a_fact_and_what_follows_from_it_are_handled_before_the_call_returns(
    tmp_path: Path,
) -> None:
    """From actor to actor, in whatever order they stand; nobody has to be woken for it."""
    relays = {"publisher": Relay("directory"), "directory": Relay("pool"), "pool": Relay("")}
    async with running(tmp_path) as board, trio.open_nursery() as nursery:
        for name, relay in relays.items():
            nursery.start_soon(run_actor, relay, board.mailboxes[name], board.board.perform)
        await trio.testing.wait_all_tasks_blocked()

        board.board.tell("publisher", "fact")

        assert [relay.heard for relay in relays.values()] == [["fact"]] * 3
        nursery.cancel_scope.cancel()


async def test_what_is_told_outside_any_turn_wakes_its_actor(tmp_path: Path) -> None:
    """The mailboxes are attended to only while the switchboard is at work."""
    relay = Relay("")
    async with running(tmp_path) as board, trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, relay, board.mailboxes["pool"], board.board.perform)
        board.board.tell("membership", "somebody else")
        board.mailboxes["pool"].tell(SELF, "now")
        await trio.testing.wait_all_tasks_blocked()

        assert relay.heard == ["now"]
        nursery.cancel_scope.cancel()
