"""Messages about pages that are to stay: retained until a time."""

from __future__ import annotations

from typing import ClassVar

import attrs

from peercache.wire.messages.declared import NODES, REMOVERS, Declared, Receiver, Rule

# What became of a page of a Retain; one byte each in `states`. The greatest of all members holds.
NOT_HERE = 0
"""No member that answered has the page in memory."""
OVER_QUOTA = 1
"""It is there, and its namespace retains as much as it may."""
RETAINED = 2
"""It is as was asked for: retained, or with 0 seconds no longer."""


@attrs.frozen
class Retain:
    """Ask a client's home node to keep these pages where they are, or a holder to keep its own.

    namespace:  the tag of their namespace; pages of another name are left as they are.
    seconds:    for how long, from when a holder hears of it; 0 lets them go.
    patience_s: how long the home node may wait for the other members.
    """

    # As a removal: it keeps other pages of its namespace from room that they would have had.
    declared: ClassVar = Declared(
        60, Receiver.REMOVAL, REMOVERS, rules=(Rule.OWN_NAMESPACE,), of_node=Receiver.POOL
    )

    request: int
    namespace: int
    keys: bytes
    seconds: float
    patience_s: float = 0.0


@attrs.frozen
class Retained:
    """Answer a Retain: a state a page.

    missed: the members that did not answer in time, and may retain pages all the same.
    """

    declared: ClassVar = Declared(61, Receiver.REMOVAL, NODES)

    request: int
    states: bytes
    missed: tuple[int, ...] = ()
