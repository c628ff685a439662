"""A death in a large cluster: how soon all views are equal again, and what it costs each node.

One process ends between two moments of a cluster that has started (`sims.start`); no goodbye is
sent. The failure detector notices it, and the figures show the consequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import attrs

from peercache.model.member import DEAD
from peercache.model.view import is_live

LOOK_S = 0.05
"""How often the views are checked: the precision of the times."""

AGREED_S = 2.0
"""How soon after one node holds it dead all nodes must."""

CLIENTS_AGREED_S = 3.5
"""The same for clients, which ask once a second."""

WATCHED_S = 20.0
"""How long the cluster is watched after the death: the messages in that time are its cost."""

NOTICED_S = 10.0
"""How long one node may take to hold it dead."""


class Node(Protocol):
    """A node of the simulated cluster, as far as a death concerns it."""

    membership: Any
    is_up: bool
    sent: int
    sent_bytes: int

    @property
    def incarnation(self) -> int:
        """Its incarnation."""


class Client(Protocol):
    """A client of it."""

    home: Any
    tie: Any


@attrs.frozen
class Death:
    """The cost of a death. Times are virtual seconds.

    noticed_s: from the death until one node held the member dead.
    agreed_s:  from there until all nodes did, with equal views. notified_s: until all clients did.
    messages, kilobytes: sent by a node within WATCHED_S of the death: the median, and the busiest.
    """

    what: str
    noticed_s: float
    agreed_s: float
    notified_s: float
    messages: tuple[int, int]
    kilobytes: tuple[float, float]

    def lines(self) -> list[str]:
        """Return readable lines."""
        agreed, notified = f"{self.agreed_s:.2f} s", f"{self.notified_s:.2f} s"
        median, most = [f"{size:.1f} KB" for size in self.kilobytes]
        return f"""\
{self.what} dies: one node holds it dead after {self.noticed_s:.2f} s, all {agreed} later, all \
clients {notified} later
in {WATCHED_S:.0f} s from its death a node sends {self.messages[0]} messages, {median}; \
the busiest {self.messages[1]}, {most}""".splitlines()


def die(
    what: str,
    victim: Node,
    *,
    nodes: list[Any],
    clients: list[Any],
    now: Callable[[], float],
    run_until: Callable[[float], None],
) -> Death:
    """End a node's process, and watch; raise AssertionError if views are not equal in time."""
    victim.is_up = False
    began = now()
    left = [node for node in nodes if node.is_up]
    asking = [client for client in clients if client.home.is_up]
    before = [(node.sent, node.sent_bytes) for node in left]

    def until(is_so: Callable[[], bool], at_most_s: float, failed: Callable[[], str]) -> float:
        from_s = now()
        while not is_so():
            assert now() - from_s < at_most_s, failed()
            run_until(now() + LOOK_S)
        return now()

    gone = victim.incarnation

    def lives_at(node: Any) -> bool:
        entry = node.membership.member(gone)
        return entry is not None and is_live(entry)

    def is_noticed() -> bool:
        entries = [node.membership.member(gone) for node in left]
        return any(entry is not None and entry.state == DEAD for entry in entries)

    def is_agreed() -> bool:
        if any(lives_at(node) for node in left):
            return False
        return len({node.membership.view.digest() for node in left}) == 1

    def is_notified() -> bool:
        return not any(gone in client.tie.cluster.members for client in asking)

    noticed = until(is_noticed, NOTICED_S, lambda: "no node holds it dead")
    agreed = until(
        is_agreed, AGREED_S, lambda: f"{sum(map(lives_at, left))} nodes hold it alive still"
    )
    notified = until(
        is_notified, CLIENTS_AGREED_S, lambda: "some clients have it in their views still"
    )
    run_until(began + WATCHED_S)
    spent = [(n.sent - s, n.sent_bytes - b) for n, (s, b) in zip(left, before, strict=True)]
    messages = sorted(count for count, _ in spent)
    sizes = sorted(size / 1000 for _, size in spent)
    return Death(
        what,
        noticed - began,
        agreed - noticed,
        notified - noticed,
        (messages[len(messages) // 2], messages[-1]),
        (sizes[len(sizes) // 2], sizes[-1]),
    )
