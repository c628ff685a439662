"""The only loop of the control plane: one task an actor, one message or tick at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import final

import trio

from peercache.ports import Effect, Origin, StateActor

MAILBOX_MESSAGES_MAX = 4096
"""Messages from the network that wait for an actor: more than a second of work. Beyond it they are
dropped and counted; askers have deadlines, streams have summaries."""

MAILBOX_BYTES_MAX = 64 * 2**20
"""The same in bytes as they came, for an actor behind: eight of the largest messages."""

TURN_MESSAGES = 16
"""Messages handled before other tasks get a turn: about a millisecond."""

SELF = Origin(0)
"""The sender of facts that another actor of this node tells."""


@final
class Mailbox:
    """What waits for one actor. Facts from inside the node are never dropped: each is the effect of
    a message that was let in, so they are as bounded as those are.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._waiting: deque[tuple[Origin, object, int]] = deque()
        self._waiting_bytes = 0
        self._wake = trio.Event()

    def __len__(self) -> int:
        """Return how many messages wait."""
        return len(self._waiting)

    def offer(self, sender: Origin, message: object, size_bytes: int) -> bool:
        """Take a message from the network, of so many bytes there; False if the mailbox is full."""
        if len(self._waiting) >= MAILBOX_MESSAGES_MAX or self._waiting_bytes >= MAILBOX_BYTES_MAX:
            return False
        self._put(sender, message, size_bytes)
        return True

    def tell(self, sender: Origin, message: object) -> None:
        """Take a fact from inside the node."""
        self._put(sender, message, 0)

    def take(self) -> tuple[Origin, object] | None:
        """Return the oldest message, or None."""
        if not self._waiting:
            return None
        sender, message, size_bytes = self._waiting.popleft()
        self._waiting_bytes -= size_bytes
        return sender, message

    async def wait(self) -> None:
        """Wait until something is there."""
        if not self._waiting:
            self._wake = trio.Event()
            await self._wake.wait()

    def _put(self, sender: Origin, message: object, size_bytes: int) -> None:
        self._waiting.append((sender, message, size_bytes))
        self._waiting_bytes += size_bytes
        self._wake.set()


async def run_actor(actor: StateActor, mailbox: Mailbox, perform: Callable[[Effect], None]) -> None:
    """Hand the actor one message, or one tick, at a time until cancelled.

    `perform` never blocks: outboxes are bounded, and a drop is counted.
    """
    while True:
        with trio.move_on_at(actor.deadline()):
            await mailbox.wait()
        for _ in range(TURN_MESSAGES):
            now = trio.current_time()
            if actor.deadline() <= now:
                effects = actor.on_tick(now)
                # Else virtual time would stop here, and real time would spin.
                assert actor.deadline() > now, f"{type(actor).__name__} ticks without end"
            elif (received := mailbox.take()) is not None:
                effects = actor.on_message(*received, now)
            else:
                break
            actor.check()
            for effect in effects:
                perform(effect)
        await trio.lowlevel.checkpoint()
