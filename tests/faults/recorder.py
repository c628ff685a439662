"""What a client of a run writes: its history as it happens.

Only the standard library: clients of other stores run in the environments of these stores.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import IO, Any

SET, GET, EXISTS, REMOVE = "set", "get", "exists", "remove"


class Recorder:
    """Appends to the file of one client."""

    def __init__(self, file: IO[str], process: int, host: str) -> None:
        """Record for a process at a host."""
        self._file, self._process, self._host = file, process, host
        self._number = 0

    def invoked(self, kind: str, began: float, keys: Sequence[str], values: Sequence[str]) -> int:
        """Record that a call begins; return its number."""
        self._number += 1
        self._write("invoke", number=self._number, kind=kind, began=began, keys=keys,
                    values=values)  # fmt: skip
        return self._number

    def answered(self, number: int, **more: Any) -> None:
        """Record its answer; more: fields of Call."""
        self._write("ok", number=number, **more)

    def saw(self, **more: Any) -> None:
        """Record what the client sees; more: fields of Sight."""
        self._write("saw", **more)

    def _write(self, kind: str, /, **more: Any) -> None:
        line = {"type": kind, "process": self._process, "host": self._host, **more}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
