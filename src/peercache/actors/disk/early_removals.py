"""What was removed before the disk was open: it may lie there, and goes once that is known.

In which order that was said does not matter, as nothing comes to a disk before it is open. So all
of it goes in one look and one removal, however many messages it came in.
"""

from __future__ import annotations

from typing import Final, final

import attrs
import numpy as np

from peercache.actors.disk.index import DiskIndex, Gone
from peercache.model.keys import KEY_BYTES
from peercache.wire.messages.pool import Clear, Remove

KEYS_MAX: Final = 2**18
"""Of pages, named twice or not: 4 MiB. Those beyond are lost."""

NAMESPACES_MAX: Final = 1024
"""Cleared, each counted once: more than there are models on a node. Those beyond are lost."""


@final
@attrs.define(eq=False)
class EarlyRemovals:
    """Keeps what is removed, until the disk is open or has ended."""

    _keys: bytearray = attrs.field(factory=bytearray)
    _namespaces: dict[int, None] = attrs.field(factory=dict)
    _is_over: bool = False

    def add(self, message: Remove | Clear) -> None:
        """Keep what is to go, as much of it as there is room for."""
        if self._is_over:
            return
        if isinstance(message, Remove):
            self._keys += message.keys[: KEYS_MAX * KEY_BYTES - len(self._keys)]
        elif len(self._namespaces) < NAMESPACES_MAX:
            self._namespaces[message.namespace] = None

    def take(self, index: DiskIndex) -> Gone:
        """End the entries of an index that was just loaded; nothing is kept from now on."""
        written = index.find(bytes(self._keys))
        cleared = index.of_namespaces(list(self._namespaces))
        self.stop()
        return index.remove(np.unique(np.concatenate([written[written >= 0], cleared])))

    def stop(self) -> None:
        """Keep nothing: the disk is open, or has ended and is not opened again."""
        self._is_over = True
        self._keys = bytearray()
        self._namespaces.clear()
