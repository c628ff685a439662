"""Whether operations on one page are linearizable: an order of single moments explains them.

The search of Wing and Gong in Lowe's just-in-time form (Testing for linearizability, 2017): events
are read by time with the set of configurations that explain them so far, (stored or not, pending
operations that took effect already); equal configurations are kept once.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import attrs

STORED, REMOVED, FOUND = "stored", "removed", "found"

Configuration = tuple[bool, frozenset[int]]


@attrs.frozen
class Operation:
    """One operation. ended: infinite where it may have taken effect at any time, or never."""

    kind: str
    began: float
    ended: float = inf


def is_linearizable(operations: Iterable[Operation]) -> Operation | None:
    """Return the first operation that no order explains, or None.

    A miss is no operation: it is always allowed. A set without an end explains all later hits.
    """
    known = sorted(operations, key=lambda each: each.began)
    events = [(each.began, 1, i) for i, each in enumerate(known)]
    events += [(each.ended, 0, i) for i, each in enumerate(known) if each.ended < inf]
    pending: set[int] = set()
    configurations: set[Configuration] = {(False, frozenset())}
    # Of events at one moment beginnings are first: such operations overlap.
    for _, is_begin, index in sorted(events, key=lambda event: (event[0], -event[1], event[2])):
        operation = known[index]
        if is_begin:
            if operation.kind == STORED and operation.ended == inf:
                return None
            pending.add(index)
            continue
        configurations = {
            (stored, done - {index})
            for stored, done in _reached(configurations, pending, known)
            if index in done
        }
        pending.remove(index)
        if not configurations:
            return operation
    return None


def _reached(
    configurations: set[Configuration], pending: set[int], known: list[Operation]
) -> set[Configuration]:
    """Return every configuration that pending operations lead to."""
    found: set[Configuration] = set()
    left = [_with_hits(each, pending, known) for each in configurations]
    while left:
        each = left.pop()
        if each in found:
            continue
        found.add(each)
        _, done = each
        for index in pending - done:
            if known[index].kind != FOUND:
                state = known[index].kind == STORED
                left.append(_with_hits((state, done | {index}), pending, known))
    return found


def _with_hits(
    configuration: Configuration, pending: set[int], known: list[Operation]
) -> Configuration:
    """Let all pending hits take effect where the page is stored: that excludes nothing."""
    stored, done = configuration
    if not stored:
        return configuration
    return stored, done | {index for index in pending if known[index].kind == FOUND}
