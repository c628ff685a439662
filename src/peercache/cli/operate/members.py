"""`peercache members`: who is in the cluster."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.text import Text

from peercache.cli.operate.connecting import target_of, target_options
from peercache.cli.operate.screen import COLOURS, age
from peercache.cli.options import json_option
from peercache.cli.terminal import WIDE_COLUMNS, console, table
from peercache.client.operator import Operator
from peercache.model.status import NO_ANSWER

EXIT_WRONG = 1


@click.command
@target_options
@json_option
def members(*, as_json: bool, **target: Any) -> int:
    """List the members of the cluster, those that died or left lately too.

    Exit status: 0 if all answer, 1 if one does not, 2 if no node answers.
    """
    with Operator(target_of(**target)) as operator:
        found = operator.statuses()
        cluster = operator.cluster
    if as_json:
        listed = [
            {
                "name": each.status.name,
                "host": each.status.host,
                "incarnation": each.status.incarnation,
                "seen": each.seen,
                "state": each.status.state,
                "version": each.status.version,
            }
            for each in found
        ]
        print(json.dumps({"cluster": cluster, "members": listed}))
    else:
        shown = table("node", "seen", "state", "up", "host", "version", "incarnation")
        for each in found:
            status = each.status
            shown.add_row(
                Text(status.name),
                Text(each.seen),
                Text(status.state, COLOURS.get(status.state, "yellow")),
                Text(age(status.age_s) if each.answers else ""),
                Text(status.host),
                Text(status.version),
                Text(status.incarnation, "dim"),
            )
        console(WIDE_COLUMNS).print(shown)
    return EXIT_WRONG if any(each.status.state == NO_ANSWER for each in found) else 0
