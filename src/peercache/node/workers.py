"""Workers: the clients that write to this node, with what they reported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import attrs

from peercache.model.ids import name_of
from peercache.model.status import LISTED_MAX, Worker
from peercache.observability.metrics import PEER_FABRIC, is_increase
from peercache.observability.reasons import FABRICS
from peercache.wire.messages.session import Counted

TRACKED_MAX = 1024
"""As many as may attach; a client beyond it is shown without figures."""

RATE_S = 0.5
"""Least time between two reports that make a rate."""


@attrs.define(eq=False)
class _Reports:
    heard_at: float
    hits: float = 0.0
    misses: float = 0.0
    sets: float = 0.0
    rates: tuple[float, float, float] = (0.0, 0.0, 0.0)
    keys: float = 0.0
    fabrics: dict[str, str] = attrs.field(factory=dict)
    """By the name of a peer: how the client last read from it."""


@final
class AttachedWorkers:
    """What each attached client has reported. Times are of one monotonic clock."""

    def __init__(self) -> None:
        """Start without reports."""
        self._reports: dict[int, _Reports] = {}

    def note(self, client: int, counted: Counted, now: float) -> None:
        """Take a client's report."""
        known = self._reports.get(client)
        if known is None:
            if len(self._reports) >= TRACKED_MAX:
                return
            known = self._reports[client] = _Reports(now)
        hits, misses, sets = (
            _sum(counted, name) for name in ("pages_hit", "pages_missed", "pages_set")
        )
        known.keys += sets
        if told := _fabrics(counted):
            # The newest of a client that reads from more peers than a status lists.
            known.fabrics = dict([*{**known.fabrics, **told}.items()][-LISTED_MAX:])
        known.hits, known.misses, known.sets = (
            known.hits + hits, known.misses + misses, known.sets + sets,
        )  # fmt: skip
        if (passed_s := now - known.heard_at) >= RATE_S:
            known.rates = (known.hits / passed_s, known.misses / passed_s, known.sets / passed_s)
            known.hits = known.misses = known.sets = 0.0
            known.heard_at = now

    def fabrics(self) -> dict[str, str]:
        """Return by the name of a peer how clients read from it: `tcp`, or `shm+tcp` where both."""
        found: dict[str, set[str]] = {}
        for known in self._reports.values():
            for peer, fabric in known.fabrics.items():
                found.setdefault(peer, set()).add(fabric)
        return {peer: "+".join(sorted(names)) for peer, names in found.items()}

    def listed(
        self, attached: Iterable[tuple[int, str, int]], now: float
    ) -> tuple[tuple[Worker, ...], int]:
        """Return the attached clients (identity, namespace, pid), and how many are not listed.

        Those that are not attached any more are forgotten.
        """
        clients = {identity: (namespace, pid) for identity, namespace, pid in attached}
        self._reports = {c: known for c, known in self._reports.items() if c in clients}
        found = []
        for identity, (namespace, pid) in sorted(clients.items())[:LISTED_MAX]:
            known = self._reports.get(identity) or _Reports(now)
            silent_s = now - known.heard_at
            # A client that counts nothing sends no report: its last rates are over.
            hits, misses, sets = known.rates if silent_s < SILENT_S else (0.0, 0.0, 0.0)
            found.append(
                Worker(
                    name=name_of(identity), pid=pid, namespace=namespace, keys=int(known.keys),
                    hits=hits, misses=misses, sets=sets, heard_s=silent_s,
                )
            )  # fmt: skip
        return tuple(found), max(0, len(clients) - LISTED_MAX)


SILENT_S = 3.0
"""A client reports each second while it counts something."""


def _fabrics(counted: Counted) -> dict[str, str]:
    return {
        path.removeprefix(f"{PEER_FABRIC}/"): fabric
        for path, fabric in counted.counts.items()
        if path.startswith(f"{PEER_FABRIC}/") and isinstance(fabric, str) and fabric in FABRICS
    }


def _sum(counted: Counted, name: str) -> float:
    return sum(
        float(value)
        for path, value in counted.counts.items()
        if path.partition("/")[0] == name and is_increase(value)
    )
