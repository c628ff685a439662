"""The loop of an actor in virtual time, and messages handled in the turn of their sender."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import attrs
import pytest
import trio
import trio.testing

from peercache.actors import runtime as _actor
from peercache.actors.effects import Effect, SendTo
from peercache.actors.origin import Origin
from peercache.actors.runtime import (
    MAILBOX_MESSAGES_MAX,
    SELF,
    TURN_MESSAGES,
    Mailbox,
    Turn,
    run_actor,
)
from peercache.wire.messages.session import HelloRequired


def said(text: object) -> SendTo:
    """Return an effect that a test recognises."""
    return SendTo(str(text), HelloRequired(1))


@attrs.define
class Diary:
    """An actor that writes down what it is given, and ticks when it is asked to."""

    due: float = math.inf
    every_s: float = math.inf
    written: list[str] = attrs.field(factory=list)
    is_sound: Callable[[], bool] = lambda: True

    def on_message(self, sender: Origin, message: object, now: float) -> list[Effect]:
        self.written.append(f"{now:g}: {sender.identity} sends {message}")
        return [said(message)]

    def on_tick(self, now: float) -> list[Effect]:
        self.written.append(f"{now:g}: tick")
        self.due += self.every_s
        return [said("tick")]

    def deadline(self) -> float:
        return self.due

    def check(self) -> None:
        self.written.append("check")
        assert self.is_sound(), "unsound"

    def entries(self) -> list[str]:
        return [entry for entry in self.written if entry != "check"]


def fails(by_s: float) -> None:
    """Accept no tick in the past."""
    raise AssertionError(f"a tick was due {by_s} s ago")


@asynccontextmanager
async def running(diary: Diary) -> AsyncIterator[tuple[Mailbox[str], list[Effect]]]:
    mailbox, performed = Mailbox[str](), list[Effect]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, diary, mailbox, performed.append, fails)
        yield mailbox, performed
        nursery.cancel_scope.cancel()


async def test_messages_are_taken_one_by_one_in_order(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Each is followed by the check of the invariants and by its own effects."""
    diary = Diary()
    async with running(diary) as (mailbox, performed):
        for i in range(3):
            assert mailbox.offer(Origin(7), f"m{i}", 10)
        await trio.testing.wait_all_tasks_blocked()

    assert diary.written == [
        "0: 7 sends m0", "check", "0: 7 sends m1", "check", "0: 7 sends m2", "check",
    ]  # fmt: skip
    assert performed == [said(f"m{i}") for i in range(3)]


async def test_a_message_that_comes_while_the_actor_waits_wakes_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """No matter how far away the next tick is."""
    diary = Diary(due=100.0)
    async with running(diary) as (mailbox, _):
        await trio.sleep(5)
        mailbox.put(SELF, "now")
        await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(5)
        mailbox.put(SELF, "later")
        await trio.testing.wait_all_tasks_blocked()

    assert diary.entries() == ["5: 0 sends now", "10: 0 sends later"]


async def test_ticks_come_at_their_deadlines(autojump_clock: trio.testing.MockClock) -> None:
    """Neither earlier nor, when nothing else is to do, later."""
    diary = Diary(due=2.0, every_s=3.0)
    async with running(diary) as (mailbox, performed):
        await trio.sleep(6)
        mailbox.put(SELF, "between")
        await trio.sleep(6)

    assert diary.entries() == ["2: tick", "5: tick", "6: 0 sends between", "8: tick", "11: tick"]
    assert performed.count(said("tick")) == 4


async def test_a_tick_that_is_due_goes_before_what_waits(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A full mailbox delays no timer."""
    diary = Diary(due=0.0, every_s=10.0)
    mailbox = Mailbox()
    for i in range(3):
        mailbox.put(SELF, i)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, diary, mailbox, lambda _: None, fails)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    assert diary.entries()[0] == "0: tick"
    assert len(diary.entries()) == 4


async def test_a_tick_that_does_not_advance_is_reported_and_comes_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Not at once: it would stop virtual time, and spin in real time. Messages go on meanwhile."""
    diary, mailbox, reported = Diary(due=1.0, every_s=0.05), Mailbox[str](), list[float]()
    performed: list[Effect] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, diary, mailbox, performed.append, reported.append)
        await trio.sleep(0.95)
        # The loop stalls for a while: no task runs.
        autojump_clock.jump(0.35)
        await trio.sleep(0.0)
        await trio.testing.wait_all_tasks_blocked()
        Turn((mailbox,)).handle(mailbox.put, SELF, "between")
        await trio.sleep(0.65)
        nursery.cancel_scope.cancel()

    ticks = [f"{at}: tick" for at in (1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9)]
    assert diary.entries() == [ticks[0], "1.3: 0 sends between", *ticks[1:]]
    assert reported == pytest.approx([0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55])
    assert performed == [said("tick"), said("between"), *[said("tick")] * 6]


async def test_an_actor_whose_next_tick_is_in_time_ticks_as_before(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Nothing is left of a tick that was reported."""
    diary, reported = Diary(due=1.0, every_s=0.0), list[float]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, diary, Mailbox[str](), lambda _: None, reported.append)
        await trio.sleep(1.05)
        diary.every_s = 3.0
        await trio.sleep(4)
        nursery.cancel_scope.cancel()

    assert diary.entries() == ["1: tick", "1.1: tick", "4: tick"]
    assert reported == [0.0]


async def test_a_broken_invariant_stops_the_actor_before_its_effects(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """What an unsound actor emits must not get out."""
    diary = Diary(is_sound=lambda: False)
    mailbox, performed = Mailbox[str](), list[Effect]()
    mailbox.put(SELF, "x")

    with pytest.raises(AssertionError, match="unsound"):
        await run_actor(diary, mailbox, performed.append, fails)
    assert performed == []


async def test_others_have_a_turn_between_many_messages(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A flood for one actor is handled in bursts."""
    diary, mailbox, seen = Diary(), Mailbox(), []
    for i in range(10 * TURN_MESSAGES):
        mailbox.put(SELF, i)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, diary, mailbox, lambda _: None, fails)
        while len(diary.entries()) < 10 * TURN_MESSAGES:
            await trio.lowlevel.checkpoint()
            seen.append(len(diary.entries()))
        nursery.cancel_scope.cancel()

    # The order of two tasks that are both ready is drawn, so two bursts may come together.
    steps = [after - before for before, after in pairwise(seen)]
    assert max(steps) <= 2 * TURN_MESSAGES


def test_the_mailbox_is_bounded_for_the_network_and_open_for_facts() -> None:
    """What is refused is for the caller to count; facts are as bounded as what caused them."""
    mailbox = Mailbox()

    taken = [mailbox.offer(Origin(1), i, 1) for i in range(MAILBOX_MESSAGES_MAX + 5)]
    mailbox.put(SELF, "fact")

    assert taken == [True] * MAILBOX_MESSAGES_MAX + [False] * 5
    assert len(mailbox) == MAILBOX_MESSAGES_MAX + 1
    mailbox.take()
    mailbox.take()
    assert mailbox.offer(Origin(1), "again", 1)


def test_the_mailbox_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few large messages count like many small ones, until they have been taken."""
    monkeypatch.setattr(_actor, "MAILBOX_BYTES_MAX", 100)
    mailbox = Mailbox()

    assert [mailbox.offer(Origin(1), i, 60) for i in range(3)] == [True, True, False]
    mailbox.take()
    assert mailbox.offer(Origin(1), 3, 60)
    assert [mailbox.take(), mailbox.take(), mailbox.take()] == [
        (Origin(1), 1), (Origin(1), 3), None,
    ]  # fmt: skip


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
        nursery.start_soon(run_actor, alarm, mailbox, performed.append, fails)
        await trio.testing.wait_all_tasks_blocked()

        turn.handle(mailbox.put, SELF, "one")
        turn.handle(lambda: None)

        assert (alarm.seen, performed) == (["one"], [said("one")])
        nursery.cancel_scope.cancel()


async def test_a_message_handled_moves_the_next_tick(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The task sleeps until a deadline that it had before: it must learn of the new one."""
    alarm, mailbox = Alarm(), Mailbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, alarm, mailbox, lambda _: None, fails)
        await trio.sleep(1)
        Turn((mailbox,)).handle(mailbox.put, SELF, "set")
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
            mailbox.put(SELF, "second")
            assert mailbox.handle is not None
            order.append(("handled within", mailbox.handle()))
        order.append(effect)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, alarm, mailbox, perform, fails)
        await trio.testing.wait_all_tasks_blocked()
        turn.handle(mailbox.put, SELF, "first")
        nursery.cancel_scope.cancel()

    assert order == [("handled within", False), said("first"), said("second")]


async def test_what_a_turn_leaves_wakes_the_actor(autojump_clock: trio.testing.MockClock) -> None:
    """A turn is bounded, and may end by an exception, with messages in mailboxes."""
    alarm, mailbox = Alarm(), Mailbox()
    turn = Turn((mailbox,))

    def bring() -> None:
        mailbox.put(SELF, "left behind")
        raise ZeroDivisionError

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_actor, alarm, mailbox, lambda _: None, fails)
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
        nursery.start_soon(run_actor, alarm, mailbox, lambda _: None, fails)
        await trio.testing.wait_all_tasks_blocked()
        woken = Woken()
        trio.lowlevel.add_instrument(woken)
        Turn((mailbox,)).handle(mailbox.put, SELF, "one")
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.remove_instrument(woken)

        assert alarm.seen == ["one"]
        assert woken.tasks == {trio.lowlevel.current_task()}
        nursery.cancel_scope.cancel()


def test_a_message_for_an_actor_that_does_not_run_waits() -> None:
    """Before the actor's task has begun, and after its end."""
    mailbox = Mailbox()
    Turn((mailbox,)).handle(mailbox.put, SELF, "early")
    assert len(mailbox) == 1
