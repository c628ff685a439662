"""The directory table of another process of this host, opened to be read.

Owns    a read-only mapping, or a descriptor alone where another user may cut the file short.
Keeps   nothing is unmapped under a look: looks and `close` take turns.
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path
from typing import final

import numpy as np

from peercache.errors import PeerUnreachable, Rejected
from peercache.memory.fork_release import let_go_in_children
from peercache.memory.kernel import address_of
from peercache.memory.layout import table_name
from peercache.memory.table_reading import TableReader, Unusable
from peercache.model.ids import Incarnation
from peercache.model.reads import Looked
from peercache.trust.sharing import Sharing

_REMOVALS_AT = 272
"""Where `removals` lies in the header (`_table_layout.h`)."""


@final
class AttachedTable:
    """A table of another process. Every method may be called from any thread."""

    def __init__(self, file: int, incarnation: Incarnation, *, by_kernel: bool) -> None:
        """Map a file that was checked; use `open`."""
        size = os.fstat(file).st_size
        self.by_kernel = by_kernel
        self._file = file
        self._lock = threading.Lock()
        self._mapping: mmap.mmap | None = None
        address = 0
        if not by_kernel:
            self._mapping = mmap.mmap(file, size, mmap.MAP_SHARED, mmap.PROT_READ)
            address = address_of(np.frombuffer(self._mapping, np.uint8))
        self._reader: TableReader | None = TableReader(
            address=address, file=file, size_bytes=size, incarnation=incarnation
        )

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        incarnation: Incarnation,
        sharing: Sharing | None = None,
    ) -> AttachedTable:
        """Open the table of a node whose file lies in this folder.

        sharing: whose files are read; None is this process's user and root.
        Raises PeerUnreachable if there is no such file here, Rejected if it is no file of a sharing
        uid, or not open to us. What is in it is checked with each look.
        """
        let_go_in_children()
        sharing = sharing if sharing is not None else Sharing.of()
        name = table_name(incarnation)
        path = Path(folder) / name
        try:
            at = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                file = sharing.open_file(name, os.O_RDONLY, folder=at, what=f"the table {path}")
            finally:
                os.close(at)
        except FileNotFoundError as error:
            raise PeerUnreachable(f"{path}, which is not there") from error
        except (OSError, ValueError) as error:
            raise Rejected("table", f"cannot open {path}: {error}") from error
        try:
            by_kernel = sharing.may_change_under_us(os.fstat(file))
            return cls(file, incarnation, by_kernel=by_kernel)
        except (OSError, ValueError) as error:
            os.close(file)
            raise Rejected("table", f"cannot map {path}: {error}") from error
        except BaseException:
            os.close(file)
            raise

    def look(self, keys: bytes, ring: int, now_s: float, asker: int) -> Looked:
        """Look for packed keys, as `TableReader.batch`; raise Unusable, also after `close`."""
        with self._lock:
            if self._reader is None:
                raise Unusable("closed")
            return self._reader.batch(keys, ring, now_s, asker)

    def removals(self) -> int:
        """Return how often pages were removed, as far as the table's node knows; 0 once closed."""
        with self._lock:
            if self._reader is None:
                return 0
            packed = (
                os.pread(self._file, 8, _REMOVALS_AT)
                if self._mapping is None
                else self._mapping[_REMOVALS_AT : _REMOVALS_AT + 8]
            )
            return int.from_bytes(packed, "little")

    def close(self) -> None:
        """Unmap, after a look that is under way. May be repeated."""
        with self._lock:
            if self._reader is None:
                return
            self._reader = None
            if self._mapping is not None:
                self._mapping.close()
            os.close(self._file)
