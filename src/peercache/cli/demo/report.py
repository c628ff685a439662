"""The findings of the demo: figures, problems, and the object that --json prints."""

from __future__ import annotations

from typing import Any

import attrs

from peercache.cli.demo.content import Checked


@attrs.define
class Reading:
    """A row of the table: the pages that one step read over one fabric.

    hits_expected, misses_expected: the right counts; None where any mixture is right.
    again: pages that were missed at first and read again.
    """

    step: str
    fabric: str
    hits_expected: int | None
    misses_expected: int | None
    hits: int = 0
    misses: int = 0
    wrong_pages: int = 0
    wrong_bytes: int = 0
    verified_bytes: int = 0
    read_s: float = 0.0
    longest_call_s: float = 0.0
    again: int = 0

    def add(self, checked: Checked, took_s: float, *, is_last: bool = True) -> None:
        """Add one call: its check, how long it took, whether its misses are final."""
        self.hits += checked.hits
        self.misses += checked.misses if is_last else 0
        self.again += 0 if is_last else checked.misses
        self.wrong_pages += checked.wrong_pages
        self.wrong_bytes += checked.wrong_bytes
        self.verified_bytes += checked.verified_bytes
        self.read_s += took_s
        self.longest_call_s = max(self.longest_call_s, took_s)

    @property
    def gb_s(self) -> float:
        """Verified bytes by the time spent in calls, in units of 10^9 bytes a second."""
        return self.verified_bytes / self.read_s / 1e9 if self.read_s else 0.0

    @property
    def is_whole(self) -> bool:
        """Whether every page had to be a hit, so that its speed says something."""
        return self.misses_expected == 0 and self.hits_expected is not None

    def problems(self, *, op_timeout_s: float) -> list[str]:
        """Return its problems, a sentence each."""
        found = []
        where = f"{self.step}, {self.fabric}"
        if self.wrong_bytes:
            found.append(f"{where}: {self.wrong_bytes} wrong bytes in {self.wrong_pages} hits")
        if self.hits_expected is not None and self.hits != self.hits_expected:
            found.append(f"{where}: {self.hits} hits, {self.hits_expected} were expected")
        if self.misses_expected is not None and self.misses != self.misses_expected:
            found.append(f"{where}: {self.misses} misses, {self.misses_expected} were expected")
        if not self.hits + self.misses:
            found.append(f"{where}: nothing was read at all")
        if self.longest_call_s > op_timeout_s:
            found.append(f"{where}: a call took {self.longest_call_s:.2f} s")
        return found


@attrs.define
class Report:
    """All findings of a demo."""

    op_timeout_s: float
    page_bytes: int
    nodes: int
    pages_published: int = 0
    publish_s: float = 0.0
    published_bytes: int = 0
    readings: list[Reading] = attrs.Factory(list)
    seconds: float = 0.0
    failures: list[str] = attrs.Factory(list)

    def problems(self) -> list[str]:
        """Return all problems; that nothing was read is one, too."""
        found = list(self.failures)
        for reading in self.readings:
            found += reading.problems(op_timeout_s=self.op_timeout_s)
        if not self.readings or not self.pages_published:
            found.append("nothing was published and read: a check of nothing proves nothing")
        return found

    def gb_s(self) -> dict[str, float]:
        """Return 10^9 bytes a second by fabric, in the best step in which nothing was broken."""
        speeds: dict[str, float] = {}
        for reading in self.readings:
            best = max(speeds.get(reading.fabric, 0.0), reading.gb_s if reading.is_whole else 0.0)
            speeds[reading.fabric] = round(best, 2)
        return speeds

    def for_machines(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        problems = self.problems()
        return {
            "ok": not problems,
            "problems": problems,
            "nodes": self.nodes,
            "page_bytes": self.page_bytes,
            "pages_published": self.pages_published,
            "pages_read": sum(reading.hits for reading in self.readings),
            "bytes_verified": sum(reading.verified_bytes for reading in self.readings),
            "wrong_bytes": sum(reading.wrong_bytes for reading in self.readings),
            "misses": sum(reading.misses for reading in self.readings),
            "gb_s": self.gb_s(),
            "publish_gb_s": round(self.published_bytes / self.publish_s / 1e9, 2)
            if self.publish_s
            else 0.0,
            "longest_call_s": round(max([r.longest_call_s for r in self.readings] or [0.0]), 4),
            "seconds": round(self.seconds, 1),
            "steps": [
                {**attrs.asdict(reading), "gb_s": round(reading.gb_s, 2)}
                for reading in self.readings
            ],
        }
