"""The output of the demo: a progress bar, a table at the end, or one JSON object."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from peercache.cli.demo.report import Reading, Report

Advance: TypeAlias = Callable[[int], None]
"""Adds pages that are done to a bar."""


class _PagesDone(ProgressColumn):
    """The number of pages done; empty for a step without pages."""

    def render(self, task: Task) -> Text:
        """Return the cell."""
        return Text(f"{int(task.completed)} pages" if task.completed else "")


class Screen:
    """Shows progress to a person, and only JSON to a machine; a context manager."""

    def __init__(self, *, as_json: bool) -> None:
        """Print JSON alone if asked; else lines, with a live bar where stdout is a terminal."""
        self._as_json = as_json
        self._started = time.monotonic()
        self._console = Console(quiet=as_json, highlight=False)
        self._progress = Progress(
            TextColumn("  {task.description}"),
            BarColumn(),
            _PagesDone(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=as_json or not self._console.is_terminal,
        )

    def __enter__(self) -> Screen:
        """Start the live part."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Give the terminal back as it was."""
        self._progress.stop()

    def say(self, line: str) -> None:
        """Print a line above the bar, with the seconds since the start."""
        elapsed_s = time.monotonic() - self._started
        self._console.print(Text(f"  {elapsed_s:4.1f} s  {line}"))

    @contextmanager
    def step(self, name: str, pages: int | None) -> Iterator[Advance]:
        """Show a bar for the length of a block. pages: None where their number is unknown."""
        task = self._progress.add_task(name, total=pages)
        try:
            yield lambda done: self._progress.update(task, advance=done)
        finally:
            self._progress.remove_task(task)

    def show(self, report: Report) -> None:
        """Print the report."""
        if self._as_json:
            # Not through rich: it would break long lines.
            print(json.dumps(report.for_machines()))
            return
        if report.readings:
            self._console.print()
            self._console.print(_table(report))
        problems = report.problems()
        for problem in problems:
            self._console.print(Text(f"  {problem}", style="bold red"))
        figures = report.for_machines()
        self._console.print(
            f"  {figures['pages_read']:,} pages read, {figures['bytes_verified']:,} bytes checked,"
            f" {figures['wrong_bytes']} wrong"
        )
        if again := sum(reading.again for reading in report.readings):
            self._console.print(f"  {again:,} pages came only when they were asked for again")
        verdict = "NOT as promised" if problems else "everything as promised"
        style = "bold red" if problems else "bold green"
        self._console.print(Text(f"  {verdict}, in {figures['seconds']} s", style=style))


def _table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step", no_wrap=True)
    table.add_column("fabric")
    for name in ("hits", "misses", "wrong bytes", "GB/s", "slowest"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = ""
    for reading in report.readings:
        table.add_row(*_row(reading, repeats=reading.step == previous))
        previous = reading.step
    return table


def _row(reading: Reading, *, repeats: bool) -> list[Text]:
    cells = [
        "" if repeats else reading.step,
        reading.fabric,
        str(reading.hits),
        str(reading.misses),
        str(reading.wrong_bytes),
        f"{reading.gb_s:.1f}" if reading.is_whole else "-",
        f"{1000 * reading.longest_call_s:.0f} ms",
    ]
    styles = ["", "", "", "", "bold red" if reading.wrong_bytes else "green", "", ""]
    return [Text(cell, style) for cell, style in zip(cells, styles, strict=True)]
