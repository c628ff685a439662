"""`peercache drain`: a node hands its pages over to other nodes, and leaves."""

from __future__ import annotations

import time
from typing import Any

import click

from peercache.cli.operate.connecting import complete_members, target_of, target_options
from peercache.cli.options import json_option
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
"""Between two lines of progress."""

LEAVE_S = 120.0
"""The longest wait for a node that writes its pages to disk before it stops."""

EXIT_NOT_DONE = 1


@click.command
@click.argument("node", required=False, shell_complete=complete_members)
@target_options
@click.option(
    "--within",
    "within_s",
    type=click.FloatRange(0.1, 86_400),
    metavar="SECONDS",
    help="The most time for the hand-over. Default: the node's drain_s.",
)
@click.option("--cancel", is_flag=True, help="Let a node that is drained go on serving.")
@json_option
def drain(
    *, node: str | None, within_s: float | None, cancel: bool, as_json: bool, **target: Any
) -> int:
    """Have NODE (HOST:PORT) hand its pages over to other nodes, and leave; show how far it is.

    A second drain joins the first. Exit status: 0 when the node has left, or a cancel has worked;
    1 if it serves again, or could not be cancelled; 2 if it does not answer.
    """
    if node and target["at"]:
        raise click.UsageError("Name the node once: as NODE, or with --at.")
    wanted = target_of(**{**target, "at": node or target["at"]})
    with Operator(wanted) as operator:
        if cancel:
            told = operator.ask(CancelDrain(0), ReportDrainState).figures
            _show(told, as_json=as_json)
            return EXIT_NOT_DONE if told["problem"] else 0
        told = operator.ask(DrainNode(0, within_s or 0.0), ReportDrainState).figures
        until = time.monotonic() + LEAVE_S
        shown: dict[str, int | float | str] = {}
        while told["state"] != "serving":
            if told != shown:
                _show(shown := told, as_json=as_json)
            time.sleep(LOOK_S)
            try:
                told = operator.ask(RequestDrainState(0), ReportDrainState).figures
            except (PeerUnreachable, DeadlineExceeded):
                if told["state"] != "leaving":
                    raise
                _show({**told, "state": "left"}, as_json=as_json)
                return 0
            if told["state"] != "leaving":
                until = time.monotonic() + LEAVE_S
            elif time.monotonic() > until:
                raise DeadlineExceeded(f"the end of {wanted.at}", LEAVE_S)
        _show(told, as_json=as_json)
        return EXIT_NOT_DONE


def _show(told: dict[str, int | float | str], *, as_json: bool) -> None:
    """Print a line."""
    if as_json:
        print_json(dict(told))
    else:
        problem = f": {told['problem']}" if told["problem"] else ""
        gigabytes = float(told["given_bytes"]) / 1e9
        print(
            f"{str(told['state']).replace('_', ' ')}: {told['given']} pages handed over "
            f"({gigabytes:.2f} GB), {told['there']} elsewhere already, {told['left']} to go, "
            f"{told['lost']} without room{problem}",
            flush=True,
        )
