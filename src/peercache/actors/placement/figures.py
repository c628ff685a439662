"""Figures of placement: between which nodes pages moved, and why other pages did not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, final

import attrs
import numpy as np

from peercache.model.member import Member
from peercache.model.status import MovedPages
from peercache.observability.metrics import Metrics
from peercache.observability.reasons import (
    DRAINING,
    FULL,
    MALFORMED,
    NOT_READ,
    OTHER_BYTES,
    TOO_LARGE,
)
from peercache.wire.messages.pool import (
    ABORTED,
    REFUSED_DRAINING,
    REFUSED_FULL,
    REFUSED_SIZE,
    REFUSED_TOO_LARGE,
    REPEATED,
)

PEERS_MAX: Final = 64
"""Peers that have a row: the one with the fewest pages leaves its row to a new one."""

OTHERS: Final = ""
"""The name of the row of all peers that have none of their own."""

_REASONS: Final = {
    REFUSED_FULL: FULL,
    REFUSED_DRAINING: DRAINING,
    REFUSED_SIZE: OTHER_BYTES,
    REFUSED_TOO_LARGE: TOO_LARGE,
    REPEATED: MALFORMED,
    ABORTED: NOT_READ,
}

Count = Callable[[str, int], None]
"""Counts pages, by a reason."""


def reasons_of(states: bytes) -> Iterator[tuple[str, int]]:
    """Yield why pages of an offer were not taken, and how many, from the states in its answer."""
    counts = np.bincount(np.frombuffer(states, np.uint8), minlength=256)
    for state, reason in _REASONS.items():
        if counts[state]:
            yield reason, int(counts[state])


@final
@attrs.define(eq=False)
class PlacementFigures:
    """What moved between this node and each peer since it began, in drains and spills.

    count_taken: counts pages, and their bytes, that this node took from others.
    not_moved: counts pages that were offered ahead of their eviction and not taken.
    not_taken: counts pages that others offered and this node did not take.
    """

    count_taken: Callable[[int, int], None] = lambda _, __: None
    not_moved: Count = lambda _, __: None
    not_taken: Count = lambda _, __: None
    _peers: dict[str, MovedPages] = attrs.field(factory=dict)
    """By HOST:PORT, which a restart of the peer does not change."""
    _others: MovedPages = attrs.field(factory=MovedPages)

    def show(self, metrics: Metrics) -> None:
        """Count in metrics from now on."""

        def count_taken(pages: int, size: int) -> None:
            metrics.pages_taken_over.inc(pages)
            metrics.bytes_taken_over.inc(size)

        self.count_taken = count_taken
        self.not_moved = lambda reason, pages: metrics.pages_not_moved.labels(reason).inc(pages)
        self.not_taken = lambda reason, pages: metrics.pages_not_taken_over.labels(reason).inc(
            pages
        )

    def gave(self, peer: Member | None, pages: int, size: int) -> None:
        """Count pages that a peer took."""
        if peer is not None and pages:
            self._add(MovedPages(name=peer.control, given=pages, given_bytes=size))

    def took(self, peer: Member, pages: int, size: int) -> None:
        """Count pages that this node took from a peer."""
        self.count_taken(pages, size)
        if pages:
            self._add(MovedPages(name=peer.control, taken=pages, taken_bytes=size))

    def peers(self) -> tuple[MovedPages, ...]:
        """Return a row for each peer, the one with the most pages first; then one for the rest."""
        rows = sorted(self._peers.values(), key=lambda row: -row.pages)
        return (*rows, self._others) if self._others.pages else tuple(rows)

    def check(self) -> None:
        """Assert the bound."""
        assert len(self._peers) <= PEERS_MAX, f"{len(self._peers)} peers"

    def _add(self, more: MovedPages) -> None:
        known = self._peers.get(more.name)
        if known is None and len(self._peers) >= PEERS_MAX:
            least = min(self._peers.values(), key=lambda row: row.pages)
            self._others = self._others.plus(self._peers.pop(least.name))
        self._peers[more.name] = more if known is None else known.plus(more)
