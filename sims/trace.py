"""The trace of a run: lines of what happened, and one digest of all of them.

The digest is the run's *unseed*: equal seeds must give equal digests, in every process. A digest
that differs means that something depends on what the seed does not decide.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable

LINES_KEPT = 400
"""The number of last lines that are kept, to examine a failure."""


class Violation(Exception):
    """A checker has found a broken promise."""

    def __init__(self, checker: str, detail: str) -> None:
        """checker: its name; detail: a readable sentence."""
        super().__init__(f"{checker}: {detail}")
        self.checker = checker
        self.detail = detail


class Trace:
    """Takes lines, hashes all of them and keeps the last."""

    def __init__(self, clock: Callable[[], float], *, show: Callable[[str], None] | None) -> None:
        """Stamp lines with `clock`; pass each to `show`, if given."""
        self._clock = clock
        self._show = show
        self._hash = hashlib.sha256()
        self.last: deque[str] = deque(maxlen=LINES_KEPT)
        self.faults: Counter[str] = Counter()
        """How many faults of each kind there were."""

    def line(self, *words: object) -> None:
        """Note one event."""
        text = " ".join([f"{self._clock():.6f}", *map(str, words)])
        if words[0] == "fault":
            self.faults[str(words[1])] += 1
        self._hash.update(text.encode())
        self.last.append(text)
        if self._show is not None:
            self._show(text)

    def digest(self) -> str:
        """Return the digest of all lines so far."""
        return self._hash.hexdigest()[:32]


class SimLog:
    """The log that production code writes to: an error is a bug, and ends the run."""

    def __init__(self, trace: Trace, who: str) -> None:
        """Write into the trace in the name of `who`."""
        self._trace = trace
        self._who = who

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - as of every log
        """Return that every line is noted."""
        return level > 0

    def debug(self, event: str, **facts: object) -> None:
        """Note a line."""
        self._note("debug", event, facts)

    def info(self, event: str, **facts: object) -> None:
        """Note a line."""
        self._note("info", event, facts)

    def warning(self, event: str, **facts: object) -> None:
        """Note a line."""
        self._note("warning", event, facts)

    def error(self, event: str, **facts: object) -> None:
        """Fail the run."""
        self._note("error", event, facts)
        raise Violation("error-log", f"{self._who}: {event} {facts}")

    def _note(self, level: str, event: str, facts: dict[str, object]) -> None:
        shown = " ".join(f"{name}={facts[name]}" for name in sorted(facts))
        self._trace.line("log", level, self._who, event, shown)
