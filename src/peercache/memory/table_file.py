"""The file of a node's directory table, beside its segment, for other processes of the host.

Owns    the file's name and its lock, which lives and dies with this process: a process that can
        take the lock knows that the owner is dead, and removes the file (`stale_segments`).
Keeps   the file is this user's to write; a sharing group may read it. What is in it belongs to
        the directory actor.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import final

from peercache.memory.layout import table_name
from peercache.memory.published import create_locked
from peercache.model.fork_guard import ForkGuard
from peercache.model.ids import Incarnation
from peercache.trust.sharing import Sharing

GROUP_READS_MODE = 0o640
"""Clients of the group read, and the owner alone writes."""


@final
class TableFile:
    """An empty file for a table, locked. file: its descriptor."""

    def __init__(self, path: Path, file: int) -> None:
        """Own a locked file; use `create`."""
        self.path = path
        self.file = file
        self._fork = ForkGuard()

    @classmethod
    def create(
        cls, folder: str | os.PathLike[str], incarnation: Incarnation, sharing: Sharing | None
    ) -> TableFile:
        """Make the file; raises AddressTaken where it is there already, OSError, ConfigError."""
        path = Path(folder) / table_name(incarnation)
        file = create_locked(path)
        try:
            if sharing is not None:
                sharing.open_to_group(file, GROUP_READS_MODE)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(file)
            raise
        return cls(path, file)

    def close(self) -> None:
        """Remove the name; the table lives on where it is mapped. May be repeated."""
        if self.file < 0 or self._fork.is_child:
            return
        self.path.unlink(missing_ok=True)
        os.close(self.file)
        self.file = -1
