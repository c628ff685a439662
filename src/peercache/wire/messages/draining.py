"""Messages with which a node is drained, and hands its pages over to other nodes.

A target reads the pages that it is offered out of the offerer's memory, as any reader.
"""

from __future__ import annotations

from typing import ClassVar

import attrs

from peercache.wire.messages.declared import (
    NO_ROLE,
    NODES,
    OPERATORS,
    OPERATORS_AND_NODES,
    Declared,
    Receiver,
    Rule,
)


@attrs.frozen
class DrainNode:
    """Ask a node to take no more pages, hand over those it has, and leave; again: to say how far.

    within_s: the most time; 0 for the node's own `drain_s`.
    """

    declared: ClassVar = Declared(49, Receiver.NODE, OPERATORS)

    request: int
    within_s: float


@attrs.frozen
class CancelDrain:
    """Ask a node that drains to go on serving."""

    declared: ClassVar = Declared(50, Receiver.NODE, OPERATORS)

    request: int


@attrs.frozen
class DrainAsked:
    """Ask a node how far its drain is."""

    # A node asks whether one that offers it pages drains.
    declared: ClassVar = Declared(51, Receiver.NODE, OPERATORS_AND_NODES)

    request: int


@attrs.frozen
class DrainTold:
    """Answer a DrainNode, a CancelDrain or a DrainAsked: named figures."""

    declared: ClassVar = Declared(52, Receiver.ASKER, NO_ROLE)

    request: int
    figures: dict[str, int | float | str]


@attrs.frozen
class PagesOffered:
    """Offer a node pages of the sender: it may read them, and keep what it has room for.

    records: of the sender's own pages in memory, all of one namespace.
    """

    declared: ClassVar = Declared(
        53,
        Receiver.HANDOVER,
        NODES,
        rules=(
            Rule.OWN_RECORDS,
            Rule.OWN_NAMESPACE,
        ),
    )

    number: int
    namespace: int
    records: bytes


@attrs.frozen
class PagesTaken:
    """Answer a PagesOffered: a state a page (`wire.messages.pool`).

    COMMITTED and HERE: the node holds it. REFUSED_FULL: no free room. ABORTED: not read in time, or
    removed meanwhile.
    """

    declared: ClassVar = Declared(54, Receiver.HANDOVER, NODES)

    number: int
    states: bytes
