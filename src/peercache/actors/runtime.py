"""The only loop of the control plane: one task an actor, one message or tick at a time.

While an actor's task sleeps, the task that put a message into its mailbox may have it handled in
its own turn of the loop (`Turn.handle`): a wake-up less for each actor on a message's way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

import attrs
import trio

from peercache.actors.effects import Effect, StateActor
from peercache.actors.origin import Origin

MAILBOX_MESSAGES_MAX = 4096
"""Pending messages from the network for one actor: more than a second of work. Beyond it they are
dropped and counted; requests have deadlines, streams have summaries."""

MAILBOX_BYTES_MAX = 16 * 2**20
"""The same in bytes as they came, for an actor behind: 64 of the largest messages."""

TURN_MESSAGES = 16
"""Messages handled before other tasks get a turn: about a millisecond."""

SELF = Origin(0)
"""The sender of facts that another actor of this node tells."""

Hears = TypeVar("Hears")


@final
class Mailbox(Generic[Hears]):
    """The queue of one actor. Facts from inside the node are never dropped: each is the effect of
    a message that was let in, so they are as bounded as those are.
    """

    def __init__(self, *, messages_max: int = MAILBOX_MESSAGES_MAX) -> None:
        """Start empty."""
        self.messages_max = messages_max
        self.waiting: deque[tuple[Origin, Hears, int]] = deque()
        """Oldest first. Other tasks only look whether it is empty."""
        self._waiting_bytes = 0
        self._wake = trio.Event()
        self.handle: Callable[[], bool] | None = None
        """Has the actor handle one message, in the caller's turn; None while its task is awake."""
        self.turn: Turn | None = None
        """Of the mailboxes among which this one is; None alone."""
        self._is_closed = False

    def __len__(self) -> int:
        """Return how many messages are pending."""
        return len(self.waiting)

    def offer(self, sender: Origin, message: Hears, size_bytes: int) -> bool:
        """Take a message from the network, of so many bytes there; False if the mailbox is full."""
        if len(self.waiting) >= self.messages_max or self._waiting_bytes >= MAILBOX_BYTES_MAX:
            return False
        self._put(sender, message, size_bytes)
        return True

    def tell(self, sender: Origin, message: Hears) -> None:
        """Take a fact from inside the node."""
        self._put(sender, message, 0)

    def close(self) -> None:
        """Drop all messages from now on: no actor takes them."""
        self._is_closed = True
        self.waiting.clear()
        self._waiting_bytes = 0

    def take(self) -> tuple[Origin, Hears] | None:
        """Return the oldest message, or None."""
        if not self.waiting:
            return None
        sender, message, size_bytes = self.waiting.popleft()
        self._waiting_bytes -= size_bytes
        return sender, message

    async def wait(self, handle: Callable[[], bool] | None = None) -> None:
        """Wait until something is there, or until a `Turn` has had it handled by `handle`."""
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

    def _put(self, sender: Origin, message: Hears, size_bytes: int) -> None:
        if self._is_closed:
            return
        self.waiting.append((sender, message, size_bytes))
        self._waiting_bytes += size_bytes
        if self.turn is None or not self.turn.is_on:
            self._wake.set()


@final
class Turn:
    """The turn of a task that brings messages: all that follows from them is handled in it."""

    def __init__(self, mailboxes: tuple[Mailbox[Any], ...]) -> None:
        """Handle what waits in these mailboxes, in this order."""
        self.is_on = False
        """Whether these mailboxes are looked at before the loop goes on: no actor need be woken."""
        self._mailboxes = mailboxes
        for mailbox in mailboxes:
            mailbox.turn = self

    def handle(self, bring: Callable[..., None], *what: object) -> None:
        """Call `bring(*what)`, and have what waits in mailboxes handled, without waking a task.

        An exception of an actor is raised here: its state is not to be trusted any more.
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
class NamedActor(Generic[Hears]):
    """An actor with the mailbox that it takes its messages from."""

    name: str
    actor: StateActor[Hears]
    mailbox: Mailbox[Hears]


async def run_actor(
    actor: StateActor[Hears], mailbox: Mailbox[Hears], perform: Callable[[Effect], None]
) -> None:
    """Hand the actor one message, or one tick, at a time until cancelled.

    Nothing else drains a mailbox into an actor: this task does it, or the `Turn` of another one
    does it by `handle` while this one sleeps.
    `perform` never blocks: outboxes are bounded, and a drop is counted.
    """
    is_at_work = False

    def step() -> bool:
        now = trio.current_time()
        if actor.deadline() <= now:
            effects = actor.on_tick(now)
            # Else virtual time would stop here, and real time would spin.
            assert actor.deadline() > now, f"{type(actor).__name__} ticks without end"
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
            # What the actor does has come back to it: one message at a time.
            return False
        is_at_work = True
        try:
            handled = step()
        finally:
            is_at_work = False
        if (deadline := actor.deadline()) != sleep.deadline:
            sleep.deadline = deadline
        return handled

    while True:
        with trio.CancelScope(deadline=actor.deadline()) as sleep:
            await mailbox.wait(handle)
        for _ in range(TURN_MESSAGES):
            if not step():
                break
        await trio.lowlevel.checkpoint()
