"""`peercache keys`: which pages of a namespace the members hold, some at a time."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

import attrs
import click
from rich.text import Text

from peercache.cli.operate.connecting import target_of, target_options
from peercache.cli.options import json_option
from peercache.cli.terminal import WIDE_COLUMNS, console, table
from peercache.client.operator import Operator
from peercache.client.scanning import scan_part
from peercache.model.keys import DEFAULT_NAME

EXIT_MISSED = 1
"""A member did not answer, and its pages are missing."""

LIMIT, LIMIT_MAX = 1000, 100_000


@click.command
@target_options
@click.option(
    "--namespace", default=DEFAULT_NAME, show_default=True, metavar="NAME",
    help="The namespace of the pages.",
)  # fmt: skip
@click.option(
    "--limit",
    type=click.IntRange(1, LIMIT_MAX),
    default=LIMIT,
    show_default=True,
    help="List up to this many pages.",
)
@click.option(
    "--cursor", default="", metavar="TEXT", help="Continue where an earlier call has ended."
)
@json_option
def keys(*, namespace: str, limit: int, cursor: str, as_json: bool, **target: Any) -> int:
    """List the pages of a namespace that the members hold, by member.

    A page is shown by its page key in hex, as in `events`: nodes do not store the keys that engines
    use. If there are more, the cursor of the next ones is printed; a call ends after --timeout with
    what it has. A page that a member holds from the first to the last call is listed at least once.
    Exit status: 0, 1 if a member does not answer, 2 if no node does.
    """
    wanted = target_of(**target)
    with Operator(wanted) as operator:
        part = scan_part(
            operator, namespace, cursor=cursor, limit=limit, timeout_s=wanted.timeout_s
        )
    if as_json:
        print(json.dumps(attrs.asdict(part)))
    else:
        shown = table("page key", "bytes", "tier", "node")
        shown.columns[1].justify = "right"
        for page in part.pages:
            shown.add_row(page.key, f"{page.bytes:,}", page.tier, Text(page.node))
        console(WIDE_COLUMNS).print(shown)
        for name in part.missed:
            print(f"! {name} does not answer: its pages are missing", file=sys.stderr)
        if part.cursor:
            print(f"more with --cursor {shlex.quote(part.cursor)}", file=sys.stderr)
    return EXIT_MISSED if part.missed else 0
