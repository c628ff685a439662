"""The only loop of the control plane: one task per actor, one message or tick at a time.

While an actor's task sleeps, the task that puts a message into its mailbox may have the message
handled in its own turn of the loop (`Turn.handle`): that saves a wake-up for each actor on the
path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, Generic, TypeVar, final

import attrs
import trio

from peercache.actors.effects import Effect, StateActor
from peercache.actors.origin import Origin

MAILBOX_MESSAGES_MAX = 4096
"""Pending messages from the network for one actor: more than a second of work. Further messages are
dropped and counted; requests have deadlines, streams have summaries."""

MAILBOX_BYTES_MAX = 16 * 2**20
"""The same in received bytes, for an actor that is behind: 64 of the largest messages."""

TURN_MESSAGES = 16
"""Messages handled before other tasks get a turn: about a millisecond."""

TICK_AGAIN_S = 0.1
"""Pause after a tick that leaves another one due, which is a bug: ten log lines a second, if it
stays so, and no timeout of the actor is late by more."""

SELF = Origin(0)
"""The sender of messages from other actors of this node."""

MessageT = TypeVar("MessageT")


@final
class Mailbox(Generic[MessageT]):
    """The queue of one actor. Messages from inside the node are never dropped: each is the effect
    of an accepted message, so they are as bounded as those are.
    """

    def __init__(self, *, messages_max: int = MAILBOX_MESSAGES_MAX) -> None:
        """Start empty."""
        self.messages_max = messages_max
        self.waiting: deque[tuple[Origin, MessageT, int]] = deque()
        """Oldest first. Other tasks only check whether it is empty."""
        self._waiting_bytes = 0
        self._wake = trio.Event()
        self.handle: Callable[[], bool] | None = None
        """Makes the actor handle one message in the caller's turn; None while its task is awake."""
        self.turn: Turn | None = None
        """The turn of the mailboxes that this one belongs to; None if it is alone."""
        self._is_closed = False

    def __len__(self) -> int:
        """Return how many messages are pending."""
        return len(self.waiting)

    def offer(self, sender: Origin, message: MessageT, size_bytes: int) -> bool:
        """Add a message from the network, with its size; return False if the mailbox is full."""
        if len(self.waiting) >= self.messages_max or self._waiting_bytes >= MAILBOX_BYTES_MAX:
            return False
        self._append(sender, message, size_bytes)
        return True

    def put(self, sender: Origin, message: MessageT) -> None:
        """Add a message from inside the node."""
        self._append(sender, message, 0)

    def close(self) -> None:
        """Drop all messages from now on: no actor reads them."""
        self._is_closed = True
        self.waiting.clear()
        self._waiting_bytes = 0

    def take(self) -> tuple[Origin, MessageT] | None:
        """Return the oldest message, or None."""
        if not self.waiting:
            return None
        sender, message, size_bytes = self.waiting.popleft()
        self._waiting_bytes -= size_bytes
        return sender, message

    async def wait(self, handle: Callable[[], bool] | None = None) -> None:
        """Wait until there is a message, or until a `Turn` has had one handled by `handle`."""
        if not self.waiting:
            self._wake = trio.Event()
            self.handle = handle
            try:
                await self._wake.wait()
            finally:
                self.handle = None

    def wake(self) -> None:
        """Wake the actor's task."""
        self._wake.set()

    def _append(self, sender: Origin, message: MessageT, size_bytes: int) -> None:
        if self._is_closed:
            return
        self.waiting.append((sender, message, size_bytes))
        self._waiting_bytes += size_bytes
        if self.turn is None or not self.turn.is_on:
            self._wake.set()


@final
class Turn:
    """The turn of a task that delivers messages: it handles all messages that follow from them."""

    def __init__(self, mailboxes: tuple[Mailbox[Any], ...]) -> None:
        """Handle the messages of these mailboxes, in this order."""
        self.is_on = False
        """Whether these mailboxes are emptied before the loop continues: no actor need be woken."""
        self._mailboxes = mailboxes
        for mailbox in mailboxes:
            mailbox.turn = self

    def handle(self, bring: Callable[..., None], *what: object) -> None:
        """Call `bring(*what)`, then handle the messages in the mailboxes, without waking a task.

        An exception of an actor is raised here: its state must not be trusted any more.
        """
        self.is_on = True
        try:
            bring(*what)
            for _ in range(TURN_MESSAGES):
                # Most messages concern one actor, and most mailboxes are empty.
                if not sum([box.handle() for box in self._mailboxes if box.waiting and box.handle]):
                    break
        finally:
            self.is_on = False
            for mailbox in self._mailboxes:
                if mailbox.waiting:
                    mailbox.wake()


@final
@attrs.frozen(eq=False)
class NamedActor(Generic[MessageT]):
    """An actor and its mailbox."""

    name: str
    actor: StateActor[MessageT]
    mailbox: Mailbox[MessageT]


async def run_actor(
    actor: StateActor[MessageT],
    mailbox: Mailbox[MessageT],
    perform: Callable[[Effect], None],
    tick_in_past: Callable[[float], None],
) -> None:
    """Hand the actor one message, or one tick, at a time until cancelled.

    Nothing else takes messages from the mailbox: this task does, or the `Turn` of another task by
    `handle`, while this one sleeps. `perform` never blocks: outboxes are bounded, and a drop is
    counted. `tick_in_past` reports a bug of the actor: after a tick it asks for another one, due so
    many seconds ago.
    """
    is_at_work = False
    rests_until = -inf

    def step() -> bool:
        nonlocal rests_until
        now = trio.current_time()
        if actor.deadline() <= now and rests_until <= now:
            effects = actor.on_tick(now)
            if (due := actor.deadline()) <= now:
                # Without a pause virtual time would stop here, and real time would spin. The node
                # goes on: its pages are worth more than one timeout.
                rests_until = now + TICK_AGAIN_S
                tick_in_past(now - due)
        elif (received := mailbox.take()) is not None:
            effects = actor.on_message(*received, now)
        else:
            return False
        actor.check()
        for effect in effects:
            perform(effect)
        return True

    def handle() -> bool:
        nonlocal is_at_work
        if is_at_work:
            # An effect of the actor has sent a message to the actor itself: one message at a time.
            return False
        is_at_work = True
        try:
            handled = step()
        finally:
            is_at_work = False
        if (deadline := max(actor.deadline(), rests_until)) != sleep.deadline:
            sleep.deadline = deadline
        return handled

    while True:
        with trio.CancelScope(deadline=max(actor.deadline(), rests_until)) as sleep:
            await mailbox.wait(handle)
        for _ in range(TURN_MESSAGES):
            if not step():
                break
        await trio.lowlevel.checkpoint()
