"""Removals: answers that wait until the disk has forgotten, and removals before the disk is open.

Nothing is written to a disk before it is open, so the order of early removals does not matter: all
of them are one look-up and one removal when it opens, however many messages they came in.
"""

from __future__ import annotations

from math import inf
from typing import Final, final

import attrs
import numpy as np

from peercache.actors.disk.index import DiskIndex, Gone
from peercache.actors.effects import Effect, TellPool
from peercache.actors.mailboxes import RemovalDone
from peercache.actors.origin import Origin
from peercache.model.keys import KEY_BYTES
from peercache.wire.messages.pool import Clear, Remove, Removed

ANSWERS_MAX: Final = 1024
"""Removals that wait at once; those beyond are answered at once."""

KEYS_MAX: Final = 2**18
"""Pages of early removals, repeated or not: 4 MiB. Those beyond are lost."""

NAMESPACES_MAX: Final = 1024
"""Namespaces of early clears, each counted once: more than the models of a node."""


@final
@attrs.frozen(eq=False)
class PendingRemoval:
    """A removal whose index rows are being deleted. count: the pages that it removed."""

    origin: Origin
    message: Remove | Clear
    count: int
    until: float

    def answer(self) -> Effect:
        """Have the client answered, behind what the pool has still to publish."""
        removed = Removed(self.message.request, self.count)
        return TellPool(RemovalDone(self.origin, removed, self.message.patience_s))


@final
@attrs.define(eq=False)
class PendingRemovals:
    """The removals that wait for the disk, by their Forget's job."""

    _pending: dict[int, PendingRemoval] = attrs.field(factory=dict)

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._pending)

    def add(self, job: int, removal: PendingRemoval) -> None:
        """Let a removal wait for its ForgetDone."""
        self._pending[job] = removal

    def done(self, job: int) -> list[Effect]:
        """Answer the removal of this job, unless its patience was over before."""
        removal = self._pending.pop(job, None)
        return [] if removal is None else [removal.answer()]

    def expire(self, now: float) -> list[Effect]:
        """Answer the removals whose patience is over."""
        over = [job for job, removal in self._pending.items() if removal.until <= now]
        return [self._pending.pop(job).answer() for job in over]

    def deadline(self) -> float:
        """Return when the oldest patience is over; inf without removals."""
        oldest = next(iter(self._pending.values()), None)
        return inf if oldest is None else oldest.until


@final
@attrs.define(eq=False)
class EarlyRemovals:
    """The removals from before the disk is open; none once it is, or has ended."""

    _keys: dict[int, bytearray] = attrs.field(factory=dict)
    _keys_bytes: int = 0
    _namespaces: dict[int, None] = attrs.field(factory=dict)
    _is_over: bool = False

    def add(self, message: Remove | Clear) -> None:
        """Keep what is to go, as much of it as there is room for."""
        if self._is_over:
            return
        if isinstance(message, Remove):
            keys = message.keys[: KEYS_MAX * KEY_BYTES - self._keys_bytes]
            if keys:
                self._keys.setdefault(message.namespace, bytearray()).extend(keys)
                self._keys_bytes += len(keys)
        elif len(self._namespaces) < NAMESPACES_MAX:
            self._namespaces[message.namespace] = None

    def take(self, index: DiskIndex) -> Gone:
        """End the entries of an index that was just loaded."""
        gone = [index.of_namespaces(list(self._namespaces))]
        for namespace, keys in self._keys.items():
            written = index.find(bytes(keys))
            written = written[written >= 0]
            gone.append(written[index.are_of_space(written, namespace)])
        self.stop()
        return index.remove(np.unique(np.concatenate(gone)))

    def stop(self) -> None:
        """Keep nothing from now on."""
        self._is_over = True
        self._keys.clear()
        self._keys_bytes = 0
        self._namespaces.clear()
