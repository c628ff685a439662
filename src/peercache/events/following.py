"""Follow what nodes hold: one node's changes by question and answer, and an index of many nodes.

`NodeFollower` is the follower's end of `wire.messages.following`, without I/O. What it returns is
applied in its order: after a gap, a restart or too long a pause the node tells everything anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import attrs
import numpy as np

from peercache.errors import RemoteProtocolError
from peercache.model.changes import CHANGE, GONE, Changes, from_bytes
from peercache.model.keys import PageKeys
from peercache.wire.messages.following import ALL_ROWS, ChangesAsked, ChangesTold

PAGES_MAX: Final = 50_000_000
"""Pages of an index, over all nodes: some ten gigabytes. Those beyond are left out: an index that
lacks a page costs a router one better choice."""


@attrs.frozen(eq=False, kw_only=True)
class NodeChanges:
    """What a follower was told of one node.

    node:     the control address of the node.
    anew:     all that was told of this node before is void; first of all where its store is lost.
    is_gone:  the node does not answer any more: it holds nothing that can be read.
    is_whole: all that was there when the follower began has been told by now.
    changes:  (n,) `model.changes.CHANGE`, in their order.
    """

    node: str
    anew: bool
    is_gone: bool
    is_whole: bool
    changes: Changes


@final
@attrs.define
class NodeFollower:
    """What is known of one node: the number of its last change, and how far its table was read."""

    node: str
    _incarnation: int = 0
    _after: int = 0
    _row: int = 0
    _failures: int = 0
    _has_told: bool = False

    def question(self, patience_s: float) -> ChangesAsked:
        """Return what to ask the node next. patience_s: how long it may wait for a change."""
        return ChangesAsked(0, self._incarnation, self._after, self._row, patience_s)

    def take(self, told: ChangesTold) -> NodeChanges | None:
        """Take an answer; None if it tells nothing. Raises RemoteProtocolError for a wrong one."""
        self._failures = 0
        changes, held = from_bytes(told.changes), from_bytes(told.held)
        if not told.anew:
            missed = told.after - self._after - len(changes)
            if told.incarnation != self._incarnation or missed or told.row < self._row:
                self.forget()
                raise RemoteProtocolError(
                    f"{self.node} told changes up to {told.after} that do not follow what it told"
                )
        is_whole, was_whole = told.row >= ALL_ROWS, self._row >= ALL_ROWS and not told.anew
        self._incarnation, self._after, self._row = told.incarnation, told.after, told.row
        if not told.anew and not len(changes) and not len(held) and is_whole == was_whole:
            return None
        self._has_told = True
        both = np.concatenate([changes, held]) if len(held) else changes
        return NodeChanges(
            node=self.node, anew=told.anew, is_gone=False, is_whole=is_whole, changes=both
        )

    def failed(self) -> NodeChanges | None:
        """Note a question without an answer; return that the node is gone if it was the second.

        A connection that broke is made anew, and nothing is lost; a node that cannot be asked
        twice holds nothing that can be read.
        """
        self._failures += 1
        return self.gone() if self._failures > 1 else None

    @property
    def is_silent(self) -> bool:
        """Whether the node counts as gone since it was asked last."""
        return self._failures > 1

    def gone(self) -> NodeChanges | None:
        """Return that the node is gone, None if nothing was told of it; it begins anew then."""
        # By itself: a node that has told something wrong begins anew, and what it told stays.
        has_told, self._has_told = self._has_told, False
        self.forget()
        if not has_told:
            return None
        nothing = np.empty(0, CHANGE)
        return NodeChanges(node=self.node, anew=True, is_gone=True, is_whole=False, changes=nothing)

    def forget(self) -> None:
        """Begin anew with the next question."""
        self._incarnation = self._after = self._row = 0


@final
class Index:
    """Which node holds which pages, and where: what a router keeps. Not thread-safe."""

    def __init__(self, *, pages_max: int = PAGES_MAX) -> None:
        """Start empty. pages_max: over all nodes."""
        self._nodes: dict[str, dict[bytes, int]] = {}
        self._pages_max = pages_max
        self._count = 0
        self.left_out = 0
        """Pages that were told and had no room."""

    def __len__(self) -> int:
        """Return the pages of all nodes; one that two nodes hold counts twice."""
        return self._count

    def apply(self, batch: NodeChanges) -> None:
        """Apply what was told of a node."""
        if batch.anew:
            self._count -= len(self._nodes.pop(batch.node, ()))
        if batch.is_gone:
            return
        pages = self._nodes.setdefault(batch.node, {})
        before = len(pages)
        room = self._pages_max - self._count + before
        keys: list[bytes] = batch.changes["key"].tolist()
        for key, tier in zip(keys, batch.changes["tier"].tolist(), strict=True):
            if tier == GONE:
                pages.pop(key, None)
            elif key in pages or len(pages) < room:
                pages[key] = tier
            else:
                self.left_out += 1
        self._count += len(pages) - before

    def nodes(self) -> list[str]:
        """Return the nodes that are followed and answer."""
        return list(self._nodes)

    def pages(self, node: str) -> dict[bytes, int]:
        """Return the tier of each page of a node, by its key of 16 bytes: a copy."""
        return dict(self._nodes.get(node, ()))

    def holders(self, key: bytes | np.void) -> dict[str, int]:
        """Return the tier of a page at each node that holds it."""
        key = key.tobytes() if isinstance(key, np.void) else key
        return {node: pages[key] for node, pages in self._nodes.items() if key in pages}

    def prefix(self, node: str, keys: Sequence[bytes] | PageKeys) -> int:
        """Return how many of the first of these pages a node holds without a gap."""
        pages = self._nodes.get(node, {})
        wanted: Sequence[bytes] = keys.tolist() if isinstance(keys, np.ndarray) else keys
        return next((at for at, key in enumerate(wanted) if key not in pages), len(wanted))
