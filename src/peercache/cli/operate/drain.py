"""`peercache drain`: a node hands its pages over to other nodes, and leaves."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from peercache.cli.operate.connecting import complete_members, target_of, target_options
from peercache.cli.options import DurationType, json_option
from peercache.cli.terminal import print_json
from peercache.client.operator import Operator
from peercache.errors import DeadlineExceeded, PeerUnreachable
from peercache.wire.messages.membership import (
    CancelDrain,
    DrainNode,
    ReportDrainState,
    RequestDrainState,
)

LOOK_S = 0.3
"""Time between two lines of progress."""

LEAVE_S = 120.0
"""The longest wait for a node to write its pages to disk before it stops."""

EXIT_NOT_DONE = 1


@click.command
@click.argument("node", required=False, shell_complete=complete_members)
@target_options
@click.option(
    "--within",
    "within_s",
    type=DurationType(0.1, 86_400),
    metavar="DURATION",
    help="Time limit of the hand-over. Default: the node's drain_s.",
)
@click.option("--cancel", is_flag=True, help="Cancel a drain: the node continues to serve.")
@click.option("--yes", is_flag=True, help="Do not ask before a node is drained that was not named.")
@json_option
def drain(
    *,
    node: str | None,
    within_s: float | None,
    cancel: bool,
    yes: bool,
    as_json: bool,
    **target: Any,
) -> int:
    """Have NODE (HOST:PORT) hand its pages over to other nodes, and leave; show how far it is.

    Without NODE it is the node of this host, after a question. A second drain joins the first. Exit
    status: 0 when the node has left, or a cancel has worked; 1 if it serves again, could not be
    cancelled, or the answer was no; 2 if it does not answer.
    """
    if node and target["at"]:
        raise click.UsageError("Name the node once: as NODE, or with --at.")
    wanted = target_of(**{**target, "at": node or target["at"]})
    # Without a name it is the node of this host, which its engines use, or that of a context.
    asks = not (node or target["at"] or cancel or yes)
    which = f"of the context {wanted.context}" if wanted.context else "of this host"
    if asks and not sys.stdin.isatty():
        raise click.UsageError(f"this drains the node {which}: name it, or say --yes.")
    with Operator(wanted) as operator:
        if asks and not click.confirm(_question(operator, which), err=True):
            return EXIT_NOT_DONE
        if cancel:
            reached = operator.ask(CancelDrain(0), ReportDrainState).figures
            _show(reached, as_json=as_json)
            return EXIT_NOT_DONE if reached["problem"] else 0
        reached = operator.ask(DrainNode(0, within_s or 0.0), ReportDrainState).figures
        until = time.monotonic() + LEAVE_S
        shown: dict[str, int | float | str] = {}
        while reached["state"] != "serving":
            if reached != shown:
                _show(shown := reached, as_json=as_json)
            time.sleep(LOOK_S)
            try:
                reached = operator.ask(RequestDrainState(0), ReportDrainState).figures
            except (PeerUnreachable, DeadlineExceeded):
                if reached["state"] != "leaving":
                    raise
                _show({**reached, "state": "left"}, as_json=as_json)
                return 0
            if reached["state"] != "leaving":
                until = time.monotonic() + LEAVE_S
            elif time.monotonic() > until:
                raise DeadlineExceeded(f"the end of {wanted.at}", LEAVE_S)
        _show(reached, as_json=as_json)
        return EXIT_NOT_DONE


def _question(operator: Operator, which: str) -> str:
    assert operator.welcome is not None, "it is connected"
    name = operator.welcome.member.control
    return f"Drain the node {which}, {name}, and stop it? Its engines then store nothing."


def _show(reached: dict[str, int | float | str], *, as_json: bool) -> None:
    """Print a line of progress."""
    if as_json:
        print_json(dict(reached))
    else:
        problem = f": {reached['problem']}" if reached["problem"] else ""
        gigabytes = float(reached["given_bytes"]) / 1e9
        print(
            f"{str(reached['state']).replace('_', ' ')}: {reached['given']} pages handed over "
            f"({gigabytes:.2f} GB), {reached['there']} elsewhere already, {reached['left']} to go, "
            f"{reached['lost']} without room{problem}",
            flush=True,
        )
