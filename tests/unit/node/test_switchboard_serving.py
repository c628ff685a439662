"""The switchboard serves actors: all that follows from one message happens in one turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import trio
import trio.testing

from peercache.actors.effects import Effect, TellDirectory, TellPublisher, TellRing
from peercache.actors.mailboxes import PoolGrew, Republish, ViewChanged
from peercache.actors.origin import Origin
from peercache.actors.runtime import SELF, run_actor
from tests.unit.node.test_switchboard import running


@attrs.define
class Relay:
    """An actor that tells another one what it hears."""

    next: Callable[[Any], Effect] | None = None
    heard: list[object] = attrs.field(factory=list)

    def on_message(self, sender: Origin, message: object, now: float) -> list[Effect]:
        self.heard.append(message)
        return [self.next(message)] if self.next else []

    def on_tick(self, now: float) -> list[Effect]:
        raise AssertionError("nothing is ever due")

    def deadline(self) -> float:
        return math.inf

    def check(self) -> None:
        assert len(self.heard) < 100, "it goes round in circles"


async def test_a_fact_and_what_follows_from_it_are_handled_before_the_call_returns(
    tmp_path: Path,
) -> None:
    """From actor to actor, in any order of the mailboxes, and no task has to be woken for it."""
    fact = ViewChanged(())
    relays = {
        "ring": Relay(lambda _: TellDirectory(fact)),
        "directory": Relay(lambda _: TellPublisher(Republish())),
        "publisher": Relay(),
    }
    async with running(tmp_path) as board, trio.open_nursery() as nursery:
        boxes = board.mailboxes.named()
        for name, relay in relays.items():
            nursery.start_soon(run_actor, relay, boxes[name], board.board.perform)
        await trio.testing.wait_all_tasks_blocked()

        board.board.tell(TellRing(fact))

        heard = [relay.heard for relay in relays.values()]
        assert heard == [[fact], [fact], [Republish()]]
        nursery.cancel_scope.cancel()


async def test_what_is_told_outside_any_turn_wakes_its_actor(tmp_path: Path) -> None:
    """The mailboxes are attended to only while the switchboard is at work."""
    relay = Relay()
    async with running(tmp_path) as board, trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, relay, board.mailboxes.pool, board.board.perform)
        await trio.testing.wait_all_tasks_blocked()
        board.board.tell(TellPublisher(Republish()))
        board.mailboxes.pool.tell(SELF, PoolGrew(1))
        await trio.testing.wait_all_tasks_blocked()

        assert relay.heard == [PoolGrew(1)]
        nursery.cancel_scope.cancel()
