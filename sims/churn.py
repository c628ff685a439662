"""Churn: an hour of a large cluster in which nodes die, restart, leave and join all the time.

The nodes are those of `sims.start`: membership, ring and the ties of clients are real. After each
event all live nodes must have equal views with exactly the live nodes and the ring of these, and
all clients the view and the owners of these, within a stated time.
"""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import attrs

from peercache.model.member import ALIVE
from sims.start import HEADS, Start, _Client, _Node

LOOK_S = 0.1
"""How often views are checked after an event: the precision of the times."""

CONVERGED_S = 12.0
"""Within this all know an event. A killed node is dead after six seconds of silence, and a master
may need two seconds more to learn of it; clients ask once a second."""

EVERY_S = 30.0
"""Between two events."""

KILL, RESTART, LEAVE, JOIN = "kill", "restart", "leave", "join"
EVENTS = (KILL, RESTART, LEAVE, JOIN)

DOWN_S = (0.2, 8.0)
"""How long a node is down that restarts: it may come back before its death was noticed."""

START_S = 30.0


@attrs.frozen
class Converged:
    """How long an event took until all knew it: all nodes, then all clients."""

    what: str
    nodes_s: float
    clients_s: float


@attrs.frozen
class ChurnReport:
    """The cost of churn. messages, kilobytes: of a node and second: the median and the busiest."""

    nodes: int
    clients: int
    virtual_s: float
    events: tuple[Converged, ...]
    messages: tuple[float, float]
    kilobytes: tuple[float, float]
    live: int
    steps: int
    wall_s: float

    def worst(self, what: str) -> tuple[int, float, float]:
        """Return how many events of a kind there were, and the longest times of them."""
        found = [event for event in self.events if event.what == what]
        return (
            len(found),
            max((event.nodes_s for event in found), default=0.0),
            max((event.clients_s for event in found), default=0.0),
        )

    def cells(self) -> tuple[str, ...]:
        """Return the figures as cells of a table."""
        slowest = (f"{self.worst(what)[1]:.1f} / {self.worst(what)[2]:.1f} s" for what in EVENTS)
        return (
            f"{self.nodes:,}",
            f"{len(self.events)}",
            *slowest,
            f"{self.messages[0]:.1f}",
            f"{self.messages[1]:.1f}",
            f"{self.kilobytes[0]:.2f} KB",
            f"{self.kilobytes[1]:.1f} KB",
        )


def churn_table(reports: Sequence[ChurnReport]) -> Iterator[str]:
    """Yield reports as lines of Markdown."""
    head = (
        "nodes", "events", *EVENTS, "messages a node and second", "busiest", "bytes", "busiest",
    )  # fmt: skip
    for line in (head, ["--:"] * len(head), *(report.cells() for report in reports)):
        yield f"| {' | '.join(line)} |"


class Churn(Start):
    """A cluster that has started, and what happens to it."""

    def __init__(self, *, nodes: int, clients: int, seed: int) -> None:
        """Start nodes, and one client at each of the last so many of them."""
        super().__init__(nodes=nodes, ranks=0, seed=seed)
        self._rng = random.Random(f"{seed}/churn")
        self._everyone = list(self.nodes)
        """All that ever lived: what they sent counts."""
        self._spare = nodes
        """The number of the next node that joins."""
        # A client's home may be killed and restarted, but it does not go away for good.
        self._homes = {node.number for node in self.nodes[HEADS : HEADS + clients]}
        for number, home in enumerate(self.nodes[HEADS : HEADS + clients]):
            client = _Client(self, home, number)
            self.clients.append(client)
            self.at(self._rng.uniform(0.0, 1.0), client.open)

    def churn(
        self,
        seconds: float,
        *,
        minutes: float = float("inf"),
        report: Callable[[str], None] = lambda _: None,
    ) -> ChurnReport:
        """Let it happen for so long; raise AssertionError where views do not converge.

        minutes: of real time, after which the report is of what was simulated until then.
        """
        began = time.monotonic()
        # A million events create no cycles, and every collection would scan all of them.
        gc.freeze()
        gc.disable()
        try:
            self.run_until(1.0)
            self._converge("start", START_S)
            return self._churn(began, seconds, began + 60 * minutes, report)
        finally:
            gc.enable()
            gc.unfreeze()

    def _churn(
        self, began: float, seconds: float, until: float, report: Callable[[str], None]
    ) -> ChurnReport:
        from_s, before = self.now, {id(n): (n.sent, n.sent_bytes) for n in self._everyone}
        events: list[Converged] = []
        while self.now < from_s + seconds and time.monotonic() < until:
            due = self.now + EVERY_S
            # A small cluster must not run out of nodes.
            what = self._rng.choice(EVENTS if len(self.nodes) >= len(before) else (RESTART, JOIN))
            self._do(what)
            events.append(self._converge(what, CONVERGED_S))
            one = events[-1]
            report(
                f"{self.now:.0f} s: {one.what}, known to all nodes after {one.nodes_s:.1f} s, to "
                f"all clients after {one.clients_s:.1f} s ({time.monotonic() - began:.0f} s)"
            )
            self.run_until(due)
            self._assert_equal()
        lasted = self.now - from_s
        spent: Counter[int] = Counter()
        sizes: Counter[int] = Counter()
        for node in self._everyone:
            sent, size = before.get(id(node), (0, 0))
            spent[node.number] += node.sent - sent
            sizes[node.number] += node.sent_bytes - size
        # Of the numbers that lived from begin to end: restarted ones had several lives.
        whole = [n.number for n in self.nodes if n.number < len(before)]
        messages = sorted(spent[number] / lasted for number in whole)
        kilobytes = sorted(sizes[number] / lasted / 1000 for number in whole)
        return ChurnReport(
            nodes=len(before),
            clients=len(self.clients),
            virtual_s=lasted,
            events=tuple(events),
            messages=(messages[len(messages) // 2], messages[-1]),
            kilobytes=(kilobytes[len(kilobytes) // 2], kilobytes[-1]),
            live=len(self.nodes),
            steps=self.events,
            wall_s=time.monotonic() - began,
        )

    # --- events -----------------------------------------------------------------------------------

    def _do(self, what: str) -> None:
        """Let an event happen. Discovery addresses stay; homes of clients may restart."""
        if what == JOIN:
            self._come(_Node(self, self._spare))
            self._spare += 1
            return
        kept = range(HEADS) if what == RESTART else {*range(HEADS), *self._homes}
        victim = self._rng.choice([node for node in self.nodes if node.number not in kept])
        if what == LEAVE:
            victim.perform(victim.membership.leave(self.now))
            self.run_until(self.now + 0.01)
        self._end(victim)
        if what == RESTART:
            self.run_until(self.now + self._rng.uniform(*DOWN_S))
            self._come(_Node(self, victim.number, victim.life + 1))

    def _end(self, node: _Node) -> None:
        node.is_up = False
        self.nodes.remove(node)
        for other in self.nodes:
            other.drop_link(node.address)

    def _come(self, node: _Node) -> None:
        self.nodes.append(node)
        self._everyone.append(node)
        self.by_address[node.address] = node
        self.by_incarnation[node.incarnation] = node
        for client in self.clients:
            if client.home.number == node.number:
                client.home = node
        node.up()

    # --- what must be so --------------------------------------------------------------------------

    def _converge(self, what: str, within_s: float) -> Converged:
        from_s = self.now
        nodes_s = self._wait(self._nodes_know, from_s + within_s, what)
        clients_s = self._wait(self._clients_know, from_s + within_s, what)
        return Converged(what, round(nodes_s - from_s, 2), round(clients_s - from_s, 2))

    def _wait(self, is_so: Callable[[], bool], until: float, what: str) -> float:
        while not is_so():
            assert self.now < until, f"after {what}: {self._unknowing()} at {self.now:.1f} s"
            self.run_until(self.now + LOOK_S)
        return self.now

    def _members(self) -> tuple[int, ...]:
        return tuple(sorted(node.incarnation for node in self.nodes))

    def _nodes_know(self) -> bool:
        members = self._members()
        if any(node.ring.current.members != members for node in self.nodes):
            return False
        return len({node.membership.view.digest() for node in self.nodes}) == 1

    def _clients_know(self) -> bool:
        members = self._members()
        return all(client.tie.cluster.ring.members == members for client in self.clients)

    def _unknowing(self) -> str:
        members = self._members()
        rings = sum(node.ring.current.members != members for node in self.nodes)
        views = len({node.membership.view.digest() for node in self.nodes})
        clients = sum(client.tie.cluster.ring.members != members for client in self.clients)
        return f"{rings} nodes lack the ring, {views} views, {clients} clients lack the ring"

    def _assert_equal(self) -> None:
        """Between events nothing changes: all live nodes are alive in all views, and no others."""
        members = self._members()
        assert self._nodes_know(), self._unknowing()
        assert self._clients_know(), self._unknowing()
        live = [m for m in self.nodes[0].membership.view.members() if m.state == ALIVE]
        assert tuple(sorted(member.incarnation for member in live)) == members, "suspects"
        for client in self.clients:
            assert client.tie.attached is not None, "a client without a home"
