"""Reports of a client's counters to its home node, so that a node's scrape includes its engines.

A client has no HTTP port. Once a second it reports the increases of its counters and the duration
of its calls. The node adds them to its own metrics, embedded and standalone alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeGuard, final

import numpy as np

from peercache.observability.latency import CALL, observe_calls, packed
from peercache.observability.metrics import Metrics, totals_of
from peercache.observability.reasons import FABRICS, MISS_REASONS, RDMA_FAILURES, TABLE_FAILURES
from peercache.wire.messages.session import Counted

CALLS_MAX = 4096
"""Most times in one report (20 KiB); a second with more of them loses the oldest. A get has two."""

PEER_FABRIC = "peer_fabric"
"""Before the slash and a peer's name: the fabric by which the client last read from it."""

PEERS_MAX = 256
"""Most peers in one report (10 KB): the others are in the next one."""

INCREASE_MAX = 2**53
"""Most that a counter grows by in one report: beyond it a sum of floats loses pages, and sums of
such figures are infinite one day."""

_LABELS: dict[str, tuple[str, ...]] = {
    "pages_hit": FABRICS,
    "bytes_read": FABRICS,
    "rdma_fallbacks": RDMA_FAILURES,
    "rdma_channels_failed": RDMA_FAILURES,
    "rdma_channels_opened": (),
    "pages_missed": MISS_REASONS,
    "sets_refused": MISS_REASONS,
    "pages_set": ("copied", "here"),
    "pages_unpublished": (),
    "pages_mirrored": (),
    "exists_asked": (),
    "exists_found": (),
    "bytes_written": (),
    "deadlines_overrun": (),
    "home_attached": (),
    "breakers_opened": (),
    "tables_unusable": TABLE_FAILURES,
}
"""The counters of a client, and the values their one label may have."""


@final
class ClientReport:
    """The counts that one client has not reported yet. Calls are added from any thread."""

    def __init__(
        self, metrics: Metrics, fabric_of_peers: Callable[[], Mapping[str, str]] = dict
    ) -> None:
        """Report the increases of `metrics` from here on, and by what each peer is read.

        fabric_of_peers: by the name of the peer.
        """
        self._metrics = metrics
        self._fabric_of_peers = fabric_of_peers
        self._fabrics_told: dict[str, str] = {}
        self._told: dict[str, float] = {}
        self.calls: deque[tuple[int, float]] = deque(maxlen=CALLS_MAX)
        """(series, seconds) of each call (`observability.latency`); the client appends."""

    def take(self) -> Counted | None:
        """Return the increases since the last call, or None."""
        counts: dict[str, int | float | str] = {}
        for name, values in _LABELS.items():
            # Each counter is read once: this runs in the engine's process, with its lock held.
            totals = totals_of(getattr(self._metrics, name))
            for value in values or ("",):
                path = f"{name}/{value}" if value else name
                total = totals.get(value, 0.0)
                if total > self._told.get(path, 0.0):
                    counts[path] = total - self._told.get(path, 0.0)
                    self._told[path] = total
        counts |= self._take_fabrics()
        calls = self._take_calls()
        if not counts and not calls:
            return None
        return Counted(counts, packed(calls).tobytes())

    def begin_anew(self) -> None:
        """Tell a new home node by what each peer is read: it has heard nothing yet."""
        self._fabrics_told.clear()

    def _take_fabrics(self) -> dict[str, str]:
        """Return what has changed of the fabrics, at most of PEERS_MAX peers."""
        used = self._fabric_of_peers()
        now = {f"{PEER_FABRIC}/{peer}": name for peer, name in used.items()}
        told = {path: name for path, name in self._fabrics_told.items() if path in now}
        changed = [item for item in now.items() if told.get(item[0]) != item[1]][:PEERS_MAX]
        self._fabrics_told = {**told, **dict(changed)}
        return dict(changed)

    def settle(self) -> None:
        """Add the calls to the own metrics: those of a client whose node is in this process."""
        if calls := self._take_calls():
            observe_calls(self._metrics.latency_s, self._metrics.page_s, packed(calls))

    def _take_calls(self) -> list[tuple[int, float]]:
        return [self.calls.popleft() for _ in range(len(self.calls))]


def is_increase(value: object) -> TypeGuard[float]:
    """Return whether a client may have counted so much since its last report."""
    return isinstance(value, (int, float)) and 0 <= value <= INCREASE_MAX


def absorb(metrics: Metrics, counted: Counted) -> int:
    """Add a client's report; return the number of items that no correct client sends."""
    ignored = 0
    for path, increase in counted.counts.items():
        name, _, value = path.partition("/")
        if name == PEER_FABRIC and increase in FABRICS:
            continue  # No metric: the node's status tells it.
        is_known = name in _LABELS and (value in _LABELS[name] or (not value and not _LABELS[name]))
        if not is_known or not is_increase(increase):
            ignored += 1
            continue
        counter = getattr(metrics, name)
        (counter.labels(value) if value else counter).inc(increase)
    times = np.frombuffer(counted.calls, CALL)[:CALLS_MAX]
    ignored += observe_calls(metrics.latency_s, metrics.page_s, times)
    return ignored
