"""Output of the commands: tables, JSON, sizes, and progress on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

PIPE_COLUMNS = 100
"""The width of tables in a pipe, which has no width of its own."""

WIDE_COLUMNS = 200


def console(pipe_columns: int = PIPE_COLUMNS) -> Console:
    """Return the console of stdout. WIDE_COLUMNS: tables in a pipe are not wrapped."""
    return Console(width=None if sys.stdout.isatty() else pipe_columns, highlight=False)


def duration(seconds: float) -> str:
    """Return a short duration in the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def table(*columns: str, title: str | None = None) -> Table:
    """Return an empty table."""
    return Table(*columns, title=title, box=box.SIMPLE, title_justify="left", pad_edge=False)


def print_json(values: dict[str, Any]) -> None:
    """Print one object on one line, with numbers rounded to their precision."""
    rounded = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in values.items()
    }
    print(json.dumps(rounded))


def show_progress(text: str) -> None:
    """Print a line of progress if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"  {text}", file=sys.stderr)


@contextmanager
def progress_bar(title: str, total: int, *, is_shown: bool) -> Iterator[Callable[[], object]]:
    """Show a bar where stderr is a terminal; yield what is called after each of `total` steps."""
    with Progress(
        console=Console(stderr=True), transient=True, disable=not (is_shown and sys.stderr.isatty())
    ) as bar:
        yield partial(bar.advance, bar.add_task(title, total=total))
