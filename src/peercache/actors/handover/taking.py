"""Taking: pages that a node which is drained offers to this one, from the offer to the commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import attrs
import numpy as np

from peercache.actors.effects import Effect, Pull, Send, TellPool
from peercache.actors.mailboxes import PullDone, TakenOver, TakeOver
from peercache.actors.origin import Origin
from peercache.model.member import Member
from peercache.model.records import HAS_CHECKSUM, RECORD, RESIDENT, Records
from peercache.wire.messages.draining import PagesOffered, PagesTaken
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    REFUSED_FULL,
    RESERVED,
    Commit,
    Committed,
    Granted,
    Reserve,
)

TAKINGS_MAX: Final = 4
"""Offers that are taken at once: so many nodes are drained at a time, at most."""

OFFERED_MAX: Final = 256
"""Pages of an offer that are looked at."""

PULL_S: Final = 5.0
"""How long the reading of an offer may take."""


@attrs.define(eq=False)
class Taking:
    """An offer that is being taken. states: of its pages, as granted."""

    origin: Origin
    number: int
    namespace: int
    records: Records
    member: Member
    states: bytes = b""


@final
@attrs.define(eq=False)
class Takings:
    """The offers that are being taken; each has a number, which is that of its reservation, too."""

    count: Callable[[int], None] | None = None
    """Counts pages that were taken over."""
    _open: dict[int, Taking] = attrs.field(factory=dict)
    _last: int = 0

    def offered(
        self, origin: Origin, message: PagesOffered, member: Member | None, *, has_room: bool
    ) -> list[Effect]:
        """Ask the pool for free room. member: who offers; has_room: False takes nothing."""
        records = np.frombuffer(message.records, RECORD)
        if member is None or not has_room or len(self._open) >= TAKINGS_MAX:
            full = bytes((REFUSED_FULL,)) * len(records)
            return [Send(origin, PagesTaken(message.number, full))]
        if not 0 < len(records) <= OFFERED_MAX or (records["flags"] & RESIDENT == 0).any():
            return [Send(origin, PagesTaken(message.number, bytes((ABORTED,)) * len(records)))]
        self._last += 1
        taking = Taking(origin, message.number, message.namespace, records, member)
        self._open[self._last] = taking
        keys, lengths = records["key"].tobytes(), records["length"].astype("<u8").tobytes()
        return [TellPool(TakeOver(Reserve(0, self._last, message.namespace, keys, lengths)))]

    def granted(self, granted: Granted) -> list[Effect]:
        """Read what has room."""
        taking = self._open[granted.sequence]
        taking.states = granted.states
        chosen = np.frombuffer(granted.states, np.uint8) == RESERVED
        if not chosen.any():
            return self._answer(granted.sequence, granted.states)
        offsets = np.frombuffer(granted.offsets, "<u8")[chosen].astype(np.uint64)
        records = taking.records[chosen]
        return [Pull(granted.sequence, taking.member, taking.namespace, records, offsets)]

    def pulled(self, done: PullDone) -> list[Effect]:
        """Commit what has arrived, with the checksums that its records had."""
        taking = self._open[done.job]
        chosen = np.frombuffer(taking.states, np.uint8) == RESERVED
        written = np.zeros(len(chosen), np.uint8)
        written[chosen] = np.frombuffer(done.arrived, np.uint8)
        has = (taking.records["flags"] & HAS_CHECKSUM) != 0
        checksums = np.where(has & (written == 1), taking.records["checksum"], np.uint64(0))
        commit = Commit(0, done.job, written.tobytes(), checksums.astype("<u8").tobytes(), 0.0)
        return [TellPool(TakenOver(commit))]

    def committed(self, committed: Committed) -> list[Effect]:
        """Tell the offerer what this node holds now."""
        if self.count is not None:
            self.count(committed.states.count(COMMITTED))
        return self._answer(committed.sequence, committed.states)

    def check(self) -> None:
        """Assert the bound."""
        assert len(self._open) <= TAKINGS_MAX, f"{len(self._open)} offers are being taken"

    def _answer(self, sequence: int, states: bytes) -> list[Effect]:
        taking = self._open.pop(sequence)
        return [Send(taking.origin, PagesTaken(taking.number, states))]
