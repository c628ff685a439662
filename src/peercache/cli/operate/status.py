"""`peercache status`: the state of a cluster, on one screen."""

from __future__ import annotations

import json
from typing import Any

import click

from peercache.cli.operate.connecting import target_of, target_options
from peercache.cli.operate.screen import is_fine, whole
from peercache.cli.options import json_option
from peercache.cli.terminal import WIDE_COLUMNS, console
from peercache.client.operator import Operator
from peercache.model.status import MemberStatus, to_plain

EXIT_WRONG = 1
"""Exit status if a member has a problem."""


@click.command
@target_options
@click.option("--detail", is_flag=True, help="With --json: threads, environment and settings too.")
@json_option
def status(*, detail: bool, as_json: bool, **target: Any) -> int:
    """Say how each member of the cluster is, and what is wrong.

    Exit status: 0 if nothing is wrong, 1 if something is, 2 if no node answers.
    """
    wanted = target_of(**target)
    with Operator(wanted) as operator:
        members = present(operator.statuses(detail=detail))
        cluster = operator.cluster
    if as_json:
        result = {"cluster": cluster, "ok": is_fine(members), "members": to_plain(members)}
        print(json.dumps(result))
    else:
        screen = console(WIDE_COLUMNS)
        screen.print(whole(members, cluster, wanted.at, screen.width))
    return 0 if is_fine(members) else EXIT_WRONG


def present(members: list[MemberStatus]) -> list[MemberStatus]:
    """Return the members without those that have left: they were stopped on purpose."""
    return [member for member in members if member.seen != "left"]
