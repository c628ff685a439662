"""The guard that keeps a forked child away from what its parent owns."""

from __future__ import annotations

import os
from typing import final


@final
class ForkGuard:
    """Remembers the process that made an object.

    A forked child gets a copy of the object, but not its threads, and a lock in it may be held for
    ever. Devices, files and connections still belong to the parent.
    """

    def __init__(self) -> None:
        """Take the current process as the owner; `owner` is its pid."""
        self.owner = os.getpid()

    @property
    def is_child(self) -> bool:
        """Return whether this process is a fork of the owner."""
        return os.getpid() != self.owner
