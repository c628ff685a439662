"""Draining: an operator takes a node out; it hands its pages over first, and then leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

import attrs
import trio

from peercache.actors.handover.actor import HANDED_OVER, HANDING_OVER, SERVING, Giving
from peercache.actors.mailboxes import DrainBegan, DrainCancelled
from peercache.model import status
from peercache.wire.messages.membership import CancelDrain, DrainNode, RequestDrainState

LEAVING: Final = "leaving"
"""After the hand-over: the node tells so, and stops."""

WITHIN_MAX_S: Final = 24 * 3600.0

LOOK_S: Final = 0.05
PROGRESS_S: Final = 1.0

TELL_S: Final = 1.0
"""Between the last page that is handed over and the goodbye: owners of records hear of the new
holders meanwhile, and an operator who watches sees the end."""


@final
@attrs.define(eq=False, kw_only=True)
class Drainer:
    """The drain of one node.

    giving:   how far the handover actor is.
    others:   how many other nodes live.
    within_s: the most time, unless the operator says another.
    leave:    begins the graceful stop.
    """

    giving: Giving = attrs.field(kw_only=False)
    tell: Callable[[DrainBegan | DrainCancelled], None]
    others: Callable[[], int]
    within_s: float
    leave: Callable[[], None]
    nursery: trio.Nursery
    log: Any
    _scope: trio.CancelScope | None = None
    _is_leaving: bool = False
    _was_alone: bool = False

    @property
    def state(self) -> str:
        """Return serving, handing_over or leaving."""
        if self._is_leaving:
            return LEAVING
        return HANDING_OVER if self._scope is not None else SERVING

    def answer(
        self, message: DrainNode | CancelDrain | RequestDrainState
    ) -> dict[str, int | float | str]:
        """Do what an operator says; return how far the drain is, with a sentence if one is due."""
        problem = ""
        if isinstance(message, DrainNode):
            self._begin(message.within_s)
        elif isinstance(message, CancelDrain):
            problem = self._cancel()
        if self._was_alone and not problem:
            problem = "no other live node takes its pages: this is the last node of its cluster"
        progress = self.giving.progress
        return {"state": self.state, "problem": problem, **attrs.asdict(progress)}

    def status(self) -> status.Draining:
        """Return how far the drain is, as a status tells it."""
        if self.state == SERVING:
            return status.Draining()
        progress = self.giving.progress
        done = progress.given + progress.there
        bytes_done = progress.given_bytes + progress.there_bytes
        return status.Draining(
            active=True,
            phase=self.state,
            pages=done + progress.lost + progress.left,
            pages_done=done,
            bytes=bytes_done + progress.lost_bytes + progress.left_bytes,
            bytes_done=bytes_done,
        )

    def _begin(self, within_s: float) -> None:
        """Begin, unless it has begun: a second drain joins the first one."""
        if self._scope is not None or self._is_leaving:
            return
        within_s = min(within_s, WITHIN_MAX_S) if within_s > 0 else self.within_s
        self._was_alone = self.others() == 0
        self._scope = trio.CancelScope()
        self.nursery.start_soon(self._run, self._scope, within_s)

    def _cancel(self) -> str:
        """Take it back; return why not."""
        if self._is_leaving:
            return "too late to cancel: the node is leaving"
        if self._scope is None:
            return "this node is not being drained"
        self._scope.cancel()
        self._scope = None
        self._was_alone = False
        self.tell(DrainCancelled())
        self.log.info("drain.cancelled", given=self.giving.progress.given)
        return ""

    async def _run(self, scope: trio.CancelScope, within_s: float) -> None:
        with scope:
            began = told_at = trio.current_time()
            self.log.info("drain.began", within_s=within_s, other_nodes=self.others())
            self.tell(DrainBegan(began + within_s))
            # The actor begins when it hears of it, and ends by itself.
            while self.giving.state != HANDED_OVER:
                await trio.sleep(LOOK_S)
                now = trio.current_time()
                if now - told_at >= PROGRESS_S:
                    told_at = now
                    self.log.info("drain.progressed", **attrs.asdict(self.giving.progress))
            self._is_leaving = True
            self.log.info(
                "drain.ended",
                seconds=round(trio.current_time() - began, 3),
                **attrs.asdict(self.giving.progress),
            )
            await trio.sleep(TELL_S)
            self.leave()
