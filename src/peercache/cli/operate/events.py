"""`peercache events`: what every node stores, moves to disk and drops, live."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, final

import attrs
import click

from peercache.cli.operate.connecting import Operator, Target, complete_members, target_options
from peercache.cli.options import json_option
from peercache.errors import DeadlineExceeded, PeerCacheError, PeerUnreachable
from peercache.events.cluster import ClusterFollower
from peercache.events.following import NodeChanges
from peercache.model.changes import GONE, IN_FILES, IN_MEMORY

KINDS = {IN_MEMORY: "stored", IN_FILES: "on-disk", GONE: "removed"}
"""What a change is called, by its tier."""

ANEW, NODE_GONE = "anew", "node-gone"
"""Events of a whole node: what it told is void, and more follows; it does not answer any more."""

LIVE = ("alive", "suspect")
"""States of members to follow: what a suspect one holds, only it can tell."""

LOOK_S = 0.5
"""How soon an end of --for is seen."""


@click.command
@target_options
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="HOST:PORT",
    shell_complete=complete_members,
    help="Follow this node only; may be repeated. Default: every member, also those to come.",
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice([*KINDS.values(), ANEW, NODE_GONE]),
    help="Show these events only; may be repeated.",
)
@click.option(
    "--for",
    "for_s",
    type=click.FloatRange(0.1),
    metavar="SECONDS",
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
    """Tell what every node stores, moves to disk and drops, as it happens.

    It begins with all that is there. Exit status: 0, 2 if no node answers.
    """  # fmt: skip
    until = None if for_s is None else time.monotonic() + for_s
    failures: set[tuple[str, str]] = set()

    def failed(node: str, error: Exception) -> None:
        if (node, type(error).__name__) not in failures:
            failures.add((node, type(error).__name__))
            print(f"peercache: {error}; it is tried again", file=sys.stderr, flush=True)

    with follow_cluster(Target.of(**where), nodes=nodes, failed=failed) as follower:
        while until is None or time.monotonic() < until:
            batch = follower.next(LOOK_S)
            if batch is not None:
                show(rows_of(batch), kinds, as_json=as_json)
    return 0


@contextlib.contextmanager
def follow_cluster(
    target: Target,
    *,
    nodes: Collection[str] = (),
    failed: Callable[[str, Exception], None] = lambda *_: None,
) -> Iterator[ClusterFollower]:
    """Follow the members that the target's node knows of, as long as the context lasts.

    nodes:  the control addresses of those to follow; none: every member, also those to come.
    failed: hears, on threads of the follower, of a node that could not be asked; it is retried.
    Raises PeerUnreachable, Rejected or DeadlineExceeded where the target's node does not answer.
    """
    members = _Members(target, nodes)
    try:
        members()  # A cluster that does not answer is told at once.
        with ClusterFollower(partial(_connected, target), members, failed=failed) as follower:
            yield follower
    finally:
        members.close()


def rows_of(batch: NodeChanges) -> Iterator[dict[str, object]]:
    """Yield the events of a batch: node, event, and of a page its key and bytes."""
    if batch.anew:
        yield {"node": batch.node, "event": NODE_GONE if batch.is_gone else ANEW}
    keys: list[bytes] = batch.changes["key"].tolist()
    lengths: list[int] = batch.changes["length"].tolist()
    tiers: list[int] = batch.changes["tier"].tolist()
    for key, length, tier in zip(keys, lengths, tiers, strict=True):
        event = KINDS.get(tier, str(tier))
        yield {"node": batch.node, "event": event, "key": key.hex(), "bytes": length}


def show(rows: Iterable[dict[str, object]], kinds: Collection[str], *, as_json: bool) -> None:
    """Print a line for each event of these kinds, of all where none is named."""
    lines = [
        json.dumps(row) if as_json else " ".join(str(value) for value in row.values())
        for row in rows
        if not kinds or row["event"] in kinds
    ]
    if lines:
        # One write: a person follows, and a script reads line by line.
        print("\n".join(lines), flush=True)


def _connected(target: Target, node: str) -> Operator:
    return Operator(attrs.evolve(target, at=node)).__enter__()


@final
class _Members:
    """The members to follow, as one node tells them; another member is asked where it ended."""

    def __init__(self, target: Target, wanted: Collection[str]) -> None:
        self._target, self._wanted = target, wanted
        self._asked: Operator | None = None
        self._known: list[str] = []

    def __call__(self) -> list[str]:
        """Return their control addresses; raise what the target's node did where none answers."""
        try:
            self._known = self._ask(self._target.at)
        except (PeerUnreachable, DeadlineExceeded):
            for other in self._known:
                with contextlib.suppress(PeerCacheError):
                    self._known = self._ask(other)
                    break
            else:
                raise
        return [name for name in self._known if not self._wanted or name in self._wanted]

    def close(self) -> None:
        """Close the connection."""
        if self._asked is not None:
            self._asked.close()
            self._asked = None

    def _ask(self, node: str) -> list[str]:
        try:
            if self._asked is None:
                self._asked = _connected(self._target, node)
            found = self._asked.statuses()
        except BaseException:
            self.close()
            raise
        return [each.status.name for each in found if each.seen in LIVE]
