"""What the demo shows: progress while it runs, then a table or the object that --json prints."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from peercache.cli.demo.pages import Reading


@attrs.define
class Report:
    """All findings of a demo."""

    op_timeout_s: float
    page_bytes: int
    nodes: int
    pages_published: int = 0
    publish_s: float = 0.0
    readings: list[Reading] = attrs.Factory(list)
    seconds: float = 0.0
    failures: list[str] = attrs.Factory(list)

    def problems(self) -> list[str]:
        """Return all problems; reading nothing is also one."""
        found = list(self.failures)
        for reading in self.readings:
            found += reading.problems(op_timeout_s=self.op_timeout_s)
        if not self.readings or not self.pages_published:
            found.append("nothing was published and read: a check of nothing proves nothing")
        return found

    def for_machines(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        readings, problems = self.readings, self.problems()
        # The speed of a fabric is that of its best step without failures.
        speeds = {reading.fabric: 0.0 for reading in readings}
        for reading in readings:
            if reading.is_whole:
                speeds[reading.fabric] = max(speeds[reading.fabric], round(reading.gb_s, 2))
        published_bytes = self.pages_published * self.page_bytes
        return {
            "ok": not problems,
            "problems": problems,
            "nodes": self.nodes,
            "page_bytes": self.page_bytes,
            "pages_published": self.pages_published,
            "pages_read": sum(reading.hits for reading in readings),
            "bytes_verified": sum(reading.verified_bytes for reading in readings),
            "wrong_bytes": sum(reading.wrong_bytes for reading in readings),
            "misses": sum(reading.misses for reading in readings),
            "gb_s": speeds,
            "publish_gb_s": round(published_bytes / (self.publish_s or 1.0) / 1e9, 2),
            "longest_call_s": round(max([r.longest_call_s for r in readings] or [0.0]), 4),
            "seconds": round(self.seconds, 1),
            "steps": [{**attrs.asdict(r), "gb_s": round(r.gb_s, 2)} for r in readings],
        }


class Screen:
    """Shows progress on a terminal, and prints only JSON with --json."""

    def __init__(self, *, as_json: bool) -> None:
        """Print only JSON if asked; else lines, and the current step if stdout is a terminal."""
        self._as_json = as_json
        self._started = time.monotonic()
        self._console = Console(quiet=as_json, highlight=False)

    @contextmanager
    def step(self, doing: str, done: str = "") -> Iterator[None]:
        """Show what a block does while it runs; then print `done`, if given."""
        with self._console.status(f"{doing} …"):
            yield
        if done:
            self.say(done)

    def say(self, line: str) -> None:
        """Print a line with the seconds since the start."""
        self._console.print(Text(f"  {time.monotonic() - self._started:4.1f} s  {line}"))

    def show(self, report: Report) -> None:
        """Print the report."""
        figures = report.for_machines()
        if self._as_json:
            # Not through rich: it would break long lines.
            print(json.dumps(figures))
            return
        if report.readings:
            self._console.print()
            self._console.print(_table(report.readings))
        for problem in figures["problems"]:
            self._console.print(Text(f"  {problem}", style="bold red"))
        self._console.print(
            f"  {figures['pages_read']:,} pages read, {figures['bytes_verified']:,} bytes checked,"
            f" {figures['wrong_bytes']} wrong"
        )
        if again := sum(reading.again for reading in report.readings):
            self._console.print(f"  {again:,} pages came only when they were asked for again")
        verdict = "everything as promised" if figures["ok"] else "NOT as promised"
        style = "bold green" if figures["ok"] else "bold red"
        self._console.print(Text(f"  {verdict}, in {figures['seconds']} s", style=style))


def _table(readings: list[Reading]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step", no_wrap=True)
    table.add_column("fabric")
    for name in ("hits", "misses", "wrong bytes", "GB/s", "slowest"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = ""
    for reading in readings:
        table.add_row(
            "" if reading.step == previous else reading.step,
            reading.fabric,
            str(reading.hits),
            str(reading.misses),
            Text(str(reading.wrong_bytes), "bold red" if reading.wrong_bytes else "green"),
            f"{reading.gb_s:.1f}" if reading.is_whole else "-",
            f"{1000 * reading.longest_call_s:.0f} ms",
        )
        previous = reading.step
    return table
