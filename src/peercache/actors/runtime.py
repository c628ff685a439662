"""The only loop of the control plane: one task an actor, one message or tick at a time.

While an actor's task sleeps, the task that put a message into its mailbox may have it handled in
its own turn of the loop (`Mailbox.serve`): a wake-up less for each actor on a message's way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar, final

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
@attrs.define(eq=False)
class Turn:
    """is_on: a task will `serve` mailboxes before the loop turns, so no actor need be woken."""

    is_on: bool = False


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
        self._step: Callable[[], bool] | None = None
        self.turn = Turn()
        """Shared by all mailboxes that a task serves together."""
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

    async def wait(self, step: Callable[[], bool] | None = None) -> None:
        """Wait until something is there; meanwhile `serve` does it by calling `step`, if any."""
        if not self.waiting:
            self._wake = trio.Event()
            self._step = step
            try:
                await self._wake.wait()
            finally:
                self._step = None

    def serve(self) -> bool:
        """Have the oldest message handled at once; False if none waits, or the actor is at work."""
        if not self.waiting or (step := self._step) is None:
            return False
        # What the actor does may come back to it: one message at a time.
        self._step = None
        try:
            return step()
        finally:
            self._step = step

    def wake(self) -> None:
        """Wake the actor if something waits."""
        if self.waiting:
            self._wake.set()

    def _put(self, sender: Origin, message: Hears, size_bytes: int) -> None:
        if self._is_closed:
            return
        self.waiting.append((sender, message, size_bytes))
        self._waiting_bytes += size_bytes
        if not self.turn.is_on:
            self._wake.set()


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

    `perform` never blocks: outboxes are bounded, and a drop is counted.
    """

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

    while True:
        with trio.CancelScope(deadline=actor.deadline()) as sleep:

            def serve(sleep: trio.CancelScope = sleep) -> bool:
                served = step()
                if (deadline := actor.deadline()) != sleep.deadline:
                    sleep.deadline = deadline
                return served

            await mailbox.wait(serve)
        for _ in range(TURN_MESSAGES):
            if not step():
                break
        await trio.lowlevel.checkpoint()
