"""Follow the pages of a cluster's nodes: `events.following` over an operator's connections."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import final

import attrs

from peercache.client.operator import Operator, Target
from peercache.errors import DeadlineExceeded, PeerCacheError, PeerUnreachable
from peercache.events.following import ClusterFollower

LIVE = ("alive", "suspect")
"""States of members to follow: only a suspect member itself can report what it holds."""


@contextlib.contextmanager
def follow_cluster(
    target: Target,
    *,
    nodes: Collection[str] = (),
    failed: Callable[[str, Exception], None] = lambda *_: None,
) -> Iterator[ClusterFollower]:
    """Follow the members that the target's node knows of, as long as the context lasts.

    A context manager; its value is a `ClusterFollower`, with a thread and a connection for each
    node. If the target's node ends, another member is asked for the list of members.

    target: the node to ask first, and the identity to use.
    nodes:  HOST:PORT of the members to follow; none: every member, also later ones.
    failed: called with HOST:PORT and the error, on threads of the follower, for a node that could
            not be asked; it is retried every second.

    Raises PeerUnreachable, Rejected or DeadlineExceeded if the target's node does not answer at the
    start; later errors are passed to `failed`.
    """
    members = _Members(target, nodes)
    try:
        members()  # Raises at once if the cluster does not answer.
        with ClusterFollower(partial(_connected, target), members, failed=failed) as follower:
            yield follower
    finally:
        members.close()


def _connected(target: Target, node: str) -> Operator:
    return Operator(attrs.evolve(target, at=node)).__enter__()


@final
class _Members:
    """The members to follow, as one node reports them; if that node ended, another is asked."""

    def __init__(self, target: Target, wanted: Collection[str]) -> None:
        self._target, self._wanted = target, wanted
        self._asked: Operator | None = None
        self._known: list[str] = []

    def __call__(self) -> list[str]:
        """Return their control addresses; raise the error of the target's node if none answers."""
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
