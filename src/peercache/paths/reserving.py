"""The reservations of one client at one home incarnation, and its slots ahead.

A batch that follows others of its kind finds its slots reserved: a Commit asks for the slots of
later batches, before their pages are known. The home node reserves them right after its answer,
while the next batch is copied, and reports them with the answer to the next Commit; to a client
without any it reports them at once, over the same connection. The batch that takes such slots names
its pages in its own Commit. That saves the round trip of a Reserve and the evictions it needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Final, final

import attrs
import numpy as np

from peercache.model.runs import U64
from peercache.wire.messages.pool import RESERVED, Committed, Granted, LiveReservations

AHEAD_S: Final = 2.0
"""How long slots are kept for a batch that does not come, and how soon after another a batch
counts as following it. Unused slots are given back with the next list of live reservations."""

BATCHES_AHEAD: Final = 2
"""Batches whose slots are asked for. The home node reserves them after it has answered a Commit,
while the next batch is copied already: that batch uses the slots granted during the one before."""

SKIPPED: Final = 64
"""Batches that ask for no slots ahead after the home node had no room: its pool is likely small."""


@final
@attrs.define(eq=False)
class Ahead:
    """Slots for pages that are not known yet.

    lengths: the bytes of each page, packed as in a Reserve; offsets: (n,) in the page memory, None
    until granted.
    """

    sequence: int
    lengths: bytes
    asked_at: float
    offsets: U64 | None = None


@final
class ClientReservations:
    """The sequence numbers of one client at one home incarnation. Thread-safe.

    A number is live from before its Reserve is sent until nothing can be written under it.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._lock = Lock()
        self._newest = 0
        self._live: dict[int, None] = {}
        self._ahead: list[Ahead] = []
        self._followed_at = -np.inf
        self._skipping = 0

    def begin(self) -> int:
        """Return a new number, live."""
        with self._lock:
            return self._begin()

    def end(self, sequence: int) -> None:
        """Note that no write under this number follows."""
        with self._lock:
            self._live.pop(sequence, None)

    def report(self, now: float) -> LiveReservations:
        """Return the list for the home node, each second; give up slots ahead that are too old."""
        with self._lock:
            self._give_up(ahead for ahead in self._ahead if now - ahead.asked_at >= AHEAD_S)
            return LiveReservations(self._newest, tuple(self._live))

    def ask_ahead(self, lengths: U64, now: float) -> tuple[int, ...]:
        """Return the numbers for slots of batches that may follow one of these lengths; live.

        None if this batch follows no other or there was no room lately, else as many as are missing
        to BATCHES_AHEAD.
        """
        with self._lock:
            follows, self._followed_at = now - self._followed_at < AHEAD_S, now
            if self._skipping:
                self._skipping -= 1
                return ()
            wanting = BATCHES_AHEAD - len(self._ahead) if follows else 0
            packed = lengths.tobytes()
            asked = [Ahead(self._begin(), packed, now) for _ in range(wanting)]
            self._ahead += asked
            return tuple(ahead.sequence for ahead in asked)

    def awaits_grant(self) -> bool:
        """Return whether slots were asked for ahead, and none is known to be granted."""
        with self._lock:
            return bool(self._ahead) and all(ahead.offsets is None for ahead in self._ahead)

    def granted(self, granted: Granted) -> None:
        """Take an answer to no pending question: slots ahead, or one that came too late."""
        is_whole = granted.states == bytes((RESERVED,)) * (len(granted.offsets) // 8)
        self._take_offsets(granted.sequence, granted.offsets if is_whole else b"")

    def told_with(self, committed: Committed) -> None:
        """Take the slots ahead that the answer to a Commit reports, if any."""
        if committed.ahead:
            self._take_offsets(committed.ahead, committed.offsets)

    def take_ahead(self, lengths: U64) -> Ahead | None:
        """Return slots ahead that fit such a batch: still live, and from now on the caller's.

        A batch of fewer pages leaves some unnamed. Slots that do not fit this batch are given up:
        they would not fit the next one either.
        """
        packed = lengths.tobytes()
        with self._lock:
            self._give_up(ahead for ahead in self._ahead if not ahead.lengths.startswith(packed))
            if not self._ahead:
                return None
            known = [ahead for ahead in self._ahead if ahead.offsets is not None]
            taken = (known or self._ahead)[0]
            self._ahead.remove(taken)
            return taken

    def _take_offsets(self, sequence: int, offsets: bytes) -> None:
        """Take the offsets of slots ahead; where there are too few, there was no room."""
        with self._lock:
            for ahead in self._ahead:
                if ahead.sequence == sequence:
                    if len(offsets) == len(ahead.lengths):
                        ahead.offsets = np.frombuffer(offsets, np.uint64)
                    else:
                        self._skipping = SKIPPED
                        self._give_up([ahead])
                    return

    def _begin(self) -> int:
        self._newest += 1
        self._live[self._newest] = None
        return self._newest

    def _give_up(self, aheads: Iterable[Ahead]) -> None:
        """Leave these out of the next report: no write there follows."""
        for ahead in list(aheads):
            self._live.pop(ahead.sequence, None)
            self._ahead.remove(ahead)


def offsets_of(granted: Granted, pages: int) -> U64 | None:
    """Return the offset of each page's slot, None unless every page has one."""
    if granted.states != bytes((RESERVED,)) * pages or len(granted.offsets) != 8 * pages:
        return None
    return np.frombuffer(granted.offsets, np.uint64)
