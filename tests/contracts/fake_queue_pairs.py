"""Queue pairs without devices, behind the port of the rdma actor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import final

import numpy as np

from peercache.actors.ports import (
    DropPair,
    OpenPair,
    PairOpened,
    RdmaAbsent,
    RdmaEffect,
    RdmaFact,
    RdmaServes,
    ServeMemory,
)
from peercache.wire.messages.session import NO_PATH, ChannelOpened, OpenChannel, Refused

PAGES_ADDRESS, SEALS_ADDRESS = 2**40, 2**41
GRANULE = 4096


@final
class FakeQueuePairs:
    """The port `QueuePairs` over a table. `step` performs one effect, when the test requests it.

    live: (client, channel) → the client's question and the number of the queue pair.
    """

    def __init__(self, notify: Callable[[RdmaFact], None], *, absent_because: str = "") -> None:
        """Hand facts to `notify`; the first one comes with the first `step`."""
        self._notify = notify
        self._absent_because = absent_because
        self._is_open = False
        self._usable_bytes = 0
        self._newest = 0
        self.pending: deque[RdmaEffect] = deque()
        self.live: dict[tuple[int, int], tuple[OpenChannel, int]] = {}

    def perform(self, effect: RdmaEffect) -> None:
        """Queue an effect."""
        if not (self._is_open and self._absent_because):
            self.pending.append(effect)

    def step(self) -> None:
        """Look for the devices, or perform the oldest effect."""
        if not self._is_open:
            self._is_open = True
            if self._absent_because:
                self.pending.clear()
                self._notify(RdmaAbsent(self._absent_because))
            else:
                self._notify(RdmaServes())
        elif self.pending:
            self._do(self.pending.popleft())

    def _do(self, effect: RdmaEffect) -> None:
        if isinstance(effect, OpenPair):
            self._open(effect)
        elif isinstance(effect, DropPair):
            self.live.pop((effect.client, effect.channel), None)
        else:
            assert isinstance(effect, ServeMemory)
            self._usable_bytes = effect.usable_bytes

    def _open(self, effect: OpenPair) -> None:
        wanted, key = effect.wanted, (effect.origin.identity, effect.wanted.channel)
        if not 1 <= wanted.mtu <= 5:
            self.live.pop(key, None)
            refusal = Refused(wanted.request, NO_PATH, "no queue pair has such an end")
            self._notify(PairOpened(effect.origin, wanted.channel, is_open=False, answer=refusal))
            return
        known = self.live.get(key)
        if known is None or (known[0].qp_num, known[0].psn) != (wanted.qp_num, wanted.psn):
            self._newest += 1
            self.live[key] = (wanted, self._newest)
        regions = [(SEALS_ADDRESS, 8, 1)]
        if self._usable_bytes:
            regions.append((PAGES_ADDRESS, self._usable_bytes, 2))
        answer = ChannelOpened(
            request=wanted.request, channel=wanted.channel, qp_num=self.live[key][1], psn=1, lid=0,
            gid=wanted.gid, mtu=wanted.mtu, reads_at_once=1, pages_address=PAGES_ADDRESS,
            page_bytes=GRANULE, seals_address=SEALS_ADDRESS, granule=GRANULE,
            regions=np.array(regions, "<u8").tobytes(),
        )  # fmt: skip
        self._notify(PairOpened(effect.origin, wanted.channel, is_open=True, answer=answer))
