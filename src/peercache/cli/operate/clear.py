"""`peercache clear`: every page of a namespace, on every member."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from peercache.cli.operate.connecting import target_of, target_options
from peercache.cli.options import json_option
from peercache.client.operator import Operator
from peercache.model.ids import name_of
from peercache.model.keys import Namespace
from peercache.model.status import MemberStatus
from peercache.wire.messages.pool import Clear, Removed

EXIT_WRONG = 1
"""A member did not answer, or has just ended, and pages may still be found; or none had any."""

TIMEOUT_FRACTION = 0.8
"""The fraction of the time that the node may wait for the members: its answer takes time, too."""


@click.command
@target_options
@click.option("--namespace", required=True, metavar="NAME", help="The namespace, by its name.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def clear(*, namespace: str, yes: bool, as_json: bool, **target: Any) -> int:
    """Remove every page of a namespace from memory and disk of every member.

    All geometries, ranks and weights of that name go. Exit status: 0 if every member has answered,
    1 if one has not, and may still hold pages, if one has ended in the last seconds, if no member
    had a page of that name, or if the answer was no, 2 if no node answers.
    """
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("nothing here can be asked whether to go on: say --yes.")
    wanted = target_of(**target)
    with Operator(wanted) as operator:
        if not yes and not click.confirm(_question(namespace, operator.cluster), err=True):
            return EXIT_WRONG
        members = {each.status.incarnation: each for each in operator.statuses()}
        timeout_s = TIMEOUT_FRACTION * wanted.timeout_s
        answer = operator.ask(Clear(0, Namespace(namespace).space_tag(), timeout_s), Removed)
    missed = [_named(members, each) for each in answer.missed]
    if as_json:
        print(json.dumps({"removed": answer.count, "missed": [name for name, _ in missed]}))
        return 0 if answer.count and not missed else EXIT_WRONG
    if not answer.count and not missed:
        print(
            f"peercache: no member has a page of the namespace {namespace!r}: see its spelling in "
            "the settings of the engines (--namespace), or it is empty already",
            file=sys.stderr,
        )
        return EXIT_WRONG
    print(f"removed {answer.count} pages of {namespace!r}")
    for name, seen in missed:
        if seen in {"dead", "left"}:
            print(
                f"! {name} has just ended ({seen}), and engines may still find its pages: run this "
                "again in 10 seconds"
            )
        else:
            print(f"! {name} did not answer, and may still hold some: run this again once it does")
    return EXIT_WRONG if missed else 0


def _named(members: dict[str, MemberStatus], incarnation: int) -> tuple[str, str]:
    """Return the name of a member, and its state in the view."""
    member = members.get(name_of(incarnation))
    return (member.status.name, member.seen) if member else (name_of(incarnation), "")


def _question(namespace: str, cluster: str) -> str:
    return f"Remove every page of {namespace!r} from the cluster {cluster}?"
