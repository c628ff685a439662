"""Messages that are handled in the turn of their sender, while the actor's task sleeps."""

from __future__ import annotations

import math

import attrs
import trio
import trio.testing

from peercache.actors.effects import Effect, SendTo
from peercache.actors.origin import Origin
from peercache.actors.runtime import SELF, Mailbox, run_actor
from peercache.wire.messages.session import SayHello


def said(text: object) -> SendTo:
    """Return an effect that a test recognises."""
    return SendTo(str(text), SayHello(1))


@attrs.define
class Alarm:
    """An actor whose every message sets the time of its next tick."""

    due: float = math.inf
    seen: list[object] = attrs.field(factory=list)

    def on_message(self, sender: Origin, message: object, now: float) -> list[Effect]:
        self.seen.append(message)
        self.due = now + 3.0
        return [said(message)]

    def on_tick(self, now: float) -> list[Effect]:
        self.seen.append(f"tick at {now:g}")
        self.due = math.inf
        return []

    def deadline(self) -> float:
        return self.due

    def check(self) -> None:
        assert len(self.seen) < 100, "the test goes round in circles"


async def test_a_sleeping_actor_handles_a_message_in_the_bringers_turn(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its effects are performed too, all before the call returns; an empty mailbox serves none."""
    alarm, mailbox, performed = Alarm(), Mailbox(), list[Effect]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, alarm, mailbox, performed.append)
        await trio.testing.wait_all_tasks_blocked()

        mailbox.turn.is_on = True
        mailbox.tell(SELF, "one")
        assert (mailbox.serve(), mailbox.serve()) == (True, False)

        assert (alarm.seen, performed) == (["one"], [said("one")])
        nursery.cancel_scope.cancel()


async def test_a_message_served_moves_the_next_tick(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The task sleeps until a deadline that it had before: it must hear of the new one."""
    alarm, mailbox = Alarm(), Mailbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, alarm, mailbox, lambda _: None)
        await trio.sleep(1)
        mailbox.turn.is_on = True
        mailbox.tell(SELF, "set")
        assert mailbox.serve()
        await trio.sleep(10)
        nursery.cancel_scope.cancel()

    assert alarm.seen == ["set", "tick at 4"]


async def test_an_actor_at_work_is_not_entered_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """What its own effects bring back to it waits until the message before is done."""
    alarm, mailbox, order = Alarm(), Mailbox(), list[object]()

    def perform(effect: Effect) -> None:
        if effect == said("first"):
            mailbox.tell(SELF, "second")
            order.append(("served within", mailbox.serve()))
        order.append(effect)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, alarm, mailbox, perform)
        await trio.testing.wait_all_tasks_blocked()
        mailbox.turn.is_on = True
        mailbox.tell(SELF, "first")
        assert (mailbox.serve(), mailbox.serve(), mailbox.serve()) == (True, True, False)
        nursery.cancel_scope.cancel()

    assert order == [("served within", False), said("first"), said("second")]


async def test_what_was_not_served_wakes_the_actor(autojump_clock: trio.testing.MockClock) -> None:
    """The task of a mailbox may end at any time, with messages in it."""
    alarm, mailbox = Alarm(), Mailbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, alarm, mailbox, lambda _: None)
        await trio.testing.wait_all_tasks_blocked()
        mailbox.turn.is_on = True
        mailbox.tell(SELF, "left behind")
        await trio.testing.wait_all_tasks_blocked()
        assert alarm.seen == []

        mailbox.turn.is_on = False
        mailbox.wake()
        await trio.testing.wait_all_tasks_blocked()

        assert alarm.seen == ["left behind"]
        nursery.cancel_scope.cancel()


def test_a_mailbox_whose_actor_does_not_run_serves_nothing() -> None:
    """Before the actor's task has begun, and after its end, messages wait."""
    mailbox = Mailbox()
    mailbox.tell(SELF, "early")
    assert not mailbox.serve()
    assert len(mailbox) == 1
