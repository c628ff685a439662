"""`peercache events`: what every node stores, moves to disk and drops, live."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import click

from peercache.cli.operate.connecting import complete_members, target_of, target_options
from peercache.cli.options import DurationType, json_option
from peercache.client.following import follow_cluster
from peercache.events.following import NodeChanges
from peercache.model.records import GONE, IN_FILES, IN_MEMORY

KINDS = {IN_MEMORY: "stored", IN_FILES: "on-disk", GONE: "removed"}
"""The name of a change, by its tier."""

RESYNC, NODE_GONE = "resync", "node-gone"
"""Events of a whole node: its earlier reports are void, a full list follows; it no longer
answers."""

LOOK_S = 0.5
"""How soon the end of --for is noticed."""


@click.command
@target_options
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="HOST:PORT",
    shell_complete=complete_members,
    help="Follow this node only; may be repeated. Default: every member, also later ones.",
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice([*KINDS.values(), RESYNC, NODE_GONE]),
    help="Show these events only; may be repeated.",
)
@click.option(
    "--for",
    "for_s",
    type=DurationType(0.1),
    metavar="DURATION",
    help="End after this time. Default: with Ctrl-C.",
)
@json_option
def events(
    *,
    nodes: tuple[str, ...],
    kinds: tuple[str, ...],
    for_s: float | None,
    as_json: bool,
    **where: Any,
) -> int:
    """Show what every node stores, moves to disk and drops, as it happens.

    It begins with all that is there. Exit status: 0, 2 if no node answers.
    """  # fmt: skip
    until = None if for_s is None else time.monotonic() + for_s
    failures: set[tuple[str, str]] = set()

    def failed(node: str, error: Exception) -> None:
        if (node, type(error).__name__) not in failures:
            failures.add((node, type(error).__name__))
            print(f"peercache: {error}; it is tried again", file=sys.stderr, flush=True)

    with follow_cluster(target_of(**where), nodes=nodes, failed=failed) as follower:
        while until is None or time.monotonic() < until:
            batch = follower.next(LOOK_S)
            if batch is not None:
                show(rows_of(batch), kinds, as_json=as_json)
    return 0


def rows_of(batch: NodeChanges) -> Iterator[dict[str, object]]:
    """Yield the events of a batch: node, event, and of a page its key and bytes."""
    if batch.again:
        yield {"node": batch.node, "event": NODE_GONE if batch.is_gone else RESYNC}
    keys: list[bytes] = batch.changes["key"].tolist()
    lengths: list[int] = batch.changes["length"].tolist()
    tiers: list[int] = batch.changes["tier"].tolist()
    for key, length, tier in zip(keys, lengths, tiers, strict=True):
        event = KINDS.get(tier, str(tier))
        yield {"node": batch.node, "event": event, "key": key.hex(), "bytes": length}


def show(rows: Iterable[dict[str, object]], kinds: Collection[str], *, as_json: bool) -> None:
    """Print a line for each event of these kinds, or of all kinds if none is named."""
    lines = [
        json.dumps(row) if as_json else " ".join(str(value) for value in row.values())
        for row in rows
        if not kinds or row["event"] in kinds
    ]
    if lines:
        # One write per batch: an operator watches, or a script reads line by line.
        print("\n".join(lines), flush=True)
