"""`peercache slow`: the slowest calls of the last hour, and why their pages were misses."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.text import Text

from peercache.cli.operate.connecting import target_of, target_options
from peercache.cli.operate.screen import age
from peercache.cli.operate.status import present
from peercache.cli.options import json_option
from peercache.cli.terminal import WIDE_COLUMNS, console, duration, table
from peercache.client.operator import Operator
from peercache.model.status import NO_ANSWER, SlowCall, to_plain

EXIT_MISSED = 1
"""A member did not answer, and its calls are missing."""

LIMIT, LIMIT_MAX = 20, 1000


@click.command
@target_options
@click.option(
    "--limit",
    type=click.IntRange(1, LIMIT_MAX),
    default=LIMIT,
    show_default=True,
    help="Show so many calls.",
)
@click.option(
    "--operation",
    type=click.Choice(["get", "set", "exists"]),
    help="Show calls of this operation only.",
)
@json_option
def slow(*, limit: int, operation: str | None, as_json: bool, **target: Any) -> int:
    """Show the slowest calls of engines in the last hour, the slowest first.

    Clients report them to their home nodes, each of which keeps 64. Exit status: 0, 1 if a member
    does not answer, 2 if no node does.
    """
    with Operator(target_of(**target)) as operator:
        members = present(operator.statuses(detail=True))
    calls = [
        (call, each.status.name)
        for each in members
        for call in each.status.detail.slow
        if operation in (None, call.operation)
    ]
    calls = sorted(calls, key=lambda pair: -pair[0].seconds)[:limit]
    missed = [each.status.name for each in members if each.status.state == NO_ANSWER]
    if as_json:
        listed = [{"node": name, **to_plain(call)} for call, name in calls]
        print(json.dumps({"calls": listed, "missed": missed}))
        return EXIT_MISSED if missed else 0
    shown = table(
        "took",
        "ago",
        "call",
        "from",
        "pages",
        "missed",
        "namespace",
        "pid",
        "client",
        "number",
        "node",
    )
    for column in (*shown.columns[:2], shown.columns[4], shown.columns[7], shown.columns[9]):
        column.justify = "right"
    for call, name in calls:
        cells = (
            duration(call.seconds), age(call.age_s), call.operation, call.tier or "-",
            f"{call.pages:,}", why(call), call.namespace or "-", str(call.pid or "-"),
            call.client, str(call.call), name,
        )  # fmt: skip
        shown.add_row(*map(Text, cells))
    console(WIDE_COLUMNS).print(shown)
    for name in missed:
        click.echo(f"! {name} does not answer: its calls are missing", err=True)
    return EXIT_MISSED if missed else 0


def why(call: SlowCall) -> str:
    """Return the missed pages of a call by reason, the most frequent first; "-" for none."""
    most = sorted(call.missed.items(), key=lambda item: -item[1])
    return ", ".join(f"{reason.replace('_', ' ')} {count:,.0f}" for reason, count in most) or "-"
