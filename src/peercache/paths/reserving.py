"""The reservations of one client at one home incarnation, and those that it has ahead.

A batch that follows others of its kind finds its slots reserved: a Commit asks for those of later
ones, before anybody knows for which pages. They are reserved a moment after that Commit has been
answered, while the next batch is copied, and are told with the answer to the next Commit; only a
client that has none is told at once, over the same connection. Whoever takes those slots
names the pages in its own Commit, and has saved the round trip of a Reserve and the evictions it
needs.
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
counts as following it. What is not used is given back with the next list of the live ones."""


BATCHES_AHEAD: Final = 2
"""Batches whose slots are asked for. The home node reserves them when it has answered a commit, and
then the next batch is being copied already: it uses those that were granted during the last."""

SKIPPED: Final = 64
"""Batches that ask for nothing ahead after the home node had no room: a small pool, most likely."""


@final
@attrs.define(eq=False)
class Ahead:
    """Slots for pages that are not known yet.

    lengths: (n,) bytes of the pages; offsets: (n,) in the page memory, None until granted.
    """

    sequence: int
    lengths: U64
    asked_at: float
    offsets: U64 | None = None


@final
class Reservations:
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
        """Note that nothing will be written under this number any more."""
        with self._lock:
            self._live.pop(sequence, None)

    def report(self, now: float) -> LiveReservations:
        """Return what the home node is told each second; give up slots that nobody came for."""
        with self._lock:
            self._give_up(ahead for ahead in self._ahead if now - ahead.asked_at >= AHEAD_S)
            return LiveReservations(self._newest, tuple(self._live))

    def ask_ahead(self, lengths: U64, now: float) -> tuple[int, ...]:
        """Return the numbers for slots of batches that may follow one of these lengths; live.

        None if this batch follows no other or there was no room lately, else as many as are wanting
        to BATCHES_AHEAD.
        """
        with self._lock:
            follows, self._followed_at = now - self._followed_at < AHEAD_S, now
            if self._skipping:
                self._skipping -= 1
                return ()
            wanting = BATCHES_AHEAD - len(self._ahead) if follows else 0
            asked = [Ahead(self._begin(), lengths, now) for _ in range(wanting)]
            self._ahead += asked
            return tuple(ahead.sequence for ahead in asked)

    def awaits_grant(self) -> bool:
        """Return whether slots were asked for ahead, and none is known to be granted."""
        with self._lock:
            return bool(self._ahead) and all(ahead.offsets is None for ahead in self._ahead)

    def granted(self, granted: Granted) -> None:
        """Take an answer that nobody waited for: slots ahead, or too late to be of use."""
        with self._lock:
            for ahead in self._ahead:
                if ahead.sequence == granted.sequence:
                    ahead.offsets = offsets_of(granted, len(ahead.lengths))
                    if ahead.offsets is None:
                        self._skipping = SKIPPED
                        self._give_up([ahead])
                    return

    def told_with(self, committed: Committed) -> None:
        """Take the slots ahead that the answer to a Commit tells of, if it does."""
        if committed.ahead:
            states = bytes((RESERVED,)) * (len(committed.offsets) // 8)
            self.granted(Granted(0, committed.ahead, states, committed.offsets))

    def take_ahead(self, lengths: U64) -> Ahead | None:
        """Return what was asked for ahead, if it is for such a batch: still live, and the caller's.

        A batch of fewer pages leaves some unnamed. Slots for others do not fit, nor will they fit
        the next.
        """
        with self._lock:
            self._give_up(
                ahead
                for ahead in self._ahead
                if not np.array_equal(ahead.lengths[: len(lengths)], lengths)
            )
            if not self._ahead:
                return None
            known = [ahead for ahead in self._ahead if ahead.offsets is not None]
            taken = (known or self._ahead)[0]
            self._ahead.remove(taken)
            return taken

    def _begin(self) -> int:
        self._newest += 1
        self._live[self._newest] = None
        return self._newest

    def _give_up(self, aheads: Iterable[Ahead]) -> None:
        """Let the next report tell that nothing will be written there."""
        for ahead in list(aheads):
            self._live.pop(ahead.sequence, None)
            self._ahead.remove(ahead)


def offsets_of(granted: Granted, pages: int) -> U64 | None:
    """Return where the pages go, if each of them has a slot."""
    if granted.states != bytes((RESERVED,)) * pages or len(granted.offsets) != 8 * pages:
        return None
    return np.frombuffer(granted.offsets, np.uint64)
