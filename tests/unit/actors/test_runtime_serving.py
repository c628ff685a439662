"""Messages that are handled in the turn of their sender, while the actor's task sleeps."""

from __future__ import annotations

import math

import attrs
import pytest
import trio
import trio.testing

from peercache.actors.effects import Effect, SendTo
from peercache.actors.origin import Origin
from peercache.actors.runtime import SELF, Mailbox, Turn, run_actor
from peercache.wire.messages.session import HelloRequired


def said(text: object) -> SendTo:
    """Return an effect that a test recognises."""
    return SendTo(str(text), HelloRequired(1))


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


class Woken(trio.abc.Instrument):
    """The tasks that have had a turn."""

    def __init__(self) -> None:
        self.tasks: set[trio.lowlevel.Task] = set()

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        self.tasks.add(task)


async def test_a_sleeping_actor_handles_a_message_in_the_bringers_turn(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its effects are performed too, all before the call returns."""
    alarm, mailbox, performed = Alarm(), Mailbox(), list[Effect]()
    turn = Turn((mailbox,))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, alarm, mailbox, performed.append)
        await trio.testing.wait_all_tasks_blocked()

        turn.handle(mailbox.tell, SELF, "one")
        turn.handle(lambda: None)

        assert (alarm.seen, performed) == (["one"], [said("one")])
        nursery.cancel_scope.cancel()


async def test_a_message_handled_moves_the_next_tick(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The task sleeps until a deadline that it had before: it must hear of the new one."""
    alarm, mailbox = Alarm(), Mailbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, alarm, mailbox, lambda _: None)
        await trio.sleep(1)
        Turn((mailbox,)).handle(mailbox.tell, SELF, "set")
        assert alarm.seen == ["set"]
        await trio.sleep(10)
        nursery.cancel_scope.cancel()

    assert alarm.seen == ["set", "tick at 4"]


async def test_an_actor_at_work_is_not_entered_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """What its own effects bring back to it waits until the message before is done."""
    alarm, mailbox, order = Alarm(), Mailbox(), list[object]()
    turn = Turn((mailbox,))

    def perform(effect: Effect) -> None:
        if effect == said("first"):
            mailbox.tell(SELF, "second")
            assert mailbox.handle is not None
            order.append(("handled within", mailbox.handle()))
        order.append(effect)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, alarm, mailbox, perform)
        await trio.testing.wait_all_tasks_blocked()
        turn.handle(mailbox.tell, SELF, "first")
        nursery.cancel_scope.cancel()

    assert order == [("handled within", False), said("first"), said("second")]


async def test_what_a_turn_leaves_wakes_the_actor(autojump_clock: trio.testing.MockClock) -> None:
    """A turn is bounded, and may end by an exception, with messages in mailboxes."""
    alarm, mailbox = Alarm(), Mailbox()
    turn = Turn((mailbox,))

    def bring() -> None:
        mailbox.tell(SELF, "left behind")
        raise ZeroDivisionError

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, alarm, mailbox, lambda _: None)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ZeroDivisionError):
            turn.handle(bring)
        assert alarm.seen == []

        await trio.testing.wait_all_tasks_blocked()

        assert alarm.seen == ["left behind"]
        nursery.cancel_scope.cancel()


async def test_a_turn_wakes_no_task_for_what_it_handles(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A wake-up costs more than most messages do."""
    alarm, mailbox = Alarm(), Mailbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, alarm, mailbox, lambda _: None)
        await trio.testing.wait_all_tasks_blocked()
        woken = Woken()
        trio.lowlevel.add_instrument(woken)
        Turn((mailbox,)).handle(mailbox.tell, SELF, "one")
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.remove_instrument(woken)

        assert alarm.seen == ["one"]
        assert woken.tasks == {trio.lowlevel.current_task()}
        nursery.cancel_scope.cancel()


def test_a_message_for_an_actor_that_does_not_run_waits() -> None:
    """Before the actor's task has begun, and after its end."""
    mailbox = Mailbox()
    Turn((mailbox,)).handle(mailbox.tell, SELF, "early")
    assert len(mailbox) == 1
