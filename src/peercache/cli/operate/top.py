"""`peercache top`: the cluster, live; q ends it."""

from __future__ import annotations

import contextlib
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text

from peercache.cli.operate.connecting import target_of, target_options
from peercache.cli.operate.screen import COLOURS, headline, moves, percent, problems
from peercache.cli.operate.status import present
from peercache.cli.terminal import console, table
from peercache.client.operator import Operator
from peercache.config.quantities import written_size
from peercache.model.status import MemberStatus, Status

REFRESH_S = 1.0
QUIT = ("q", "Q", "\x03", "\x1b")
COLUMNS = ("node", "state", "memory", "workers", "hit/s", "miss/s", "set/s", "read/s", "hits")


@click.command
@target_options
def top(**target: Any) -> None:
    """Show the rates of each member, live. q ends it.

    Exit status: 0, and 2 if no node answers or there is no terminal.
    """
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise click.UsageError("top needs a terminal: use `peercache status`, or --json there.")
    wanted = target_of(**target)
    with Operator(wanted) as operator, _keys() as pressed:
        before: dict[str, tuple[float, Status]] = {}
        with Live(console=console(), screen=True, auto_refresh=False) as live:
            while True:
                found = present(operator.statuses())
                now = time.monotonic()
                live.update(frame(found, before, now, operator.cluster, wanted.at), refresh=True)
                before = {m.status.incarnation: (now, m.status) for m in found if m.answers}
                if pressed(REFRESH_S):
                    return


def frame(
    members: Sequence[MemberStatus],
    before: Mapping[str, tuple[float, Status]],
    now: float,
    cluster: str,
    at: str,
) -> Group:
    """Return a screen. before: by incarnation, when a member last answered, and its status then."""
    shown = table(*COLUMNS)
    for column in shown.columns[2:]:
        column.justify = "right"
    for member in members:
        status = member.status
        cells = [Text(status.name), Text(status.state, COLOURS.get(status.state, "yellow"))]
        if member.answers:
            share = status.pool.used / status.pool.size if status.pool.size else 0.0
            cells += [
                Text(f"{100 * share:.0f} %"),
                Text(str(len(status.workers) + status.workers_more)),
            ]
            cells += [Text(cell) for cell in _rates(status, before.get(status.incarnation), now)]
        shown.add_row(*cells)
    return Group(
        headline(members, cluster, at),
        shown,
        *problems(members),
        *moves(members),
        Text("q ends it", "dim"),
    )


def _rates(status: Status, before: tuple[float, Status] | None, now: float) -> list[str]:
    """Return pages and bytes a second since an earlier status."""
    if before is None or now <= before[0]:
        return ["", "", "", "", percent(status.hit_share())]
    then, old = before

    def rate(counter: str) -> float:
        return max(0.0, status.total(counter) - old.total(counter)) / (now - then)

    hits, misses = rate("pages_hit"), rate("pages_missed")
    share = hits / (hits + misses) if hits + misses else status.hit_share()
    return [
        f"{hits:,.0f}",
        f"{misses:,.0f}",
        f"{rate('pages_set'):,.0f}",
        written_size(rate("bytes_read")),
        percent(share),
    ]


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Read single keys from the terminal; yield a function that waits for one to end."""
    descriptor = sys.stdin.fileno()
    settings = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def pressed(within_s: float) -> bool:
        readable, _, _ = select.select([descriptor], [], [], within_s)
        return bool(readable) and sys.stdin.read(1) in ("", *QUIT)

    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, settings)
