"""Identities of nodes and clients.

A node is an *incarnation*, random and new at each start: an address may return, an incarnation
never does, so a message about a dead node is never taken for one about its successor. Incarnations
have no order.
"""

from __future__ import annotations

import random
from typing import NewType

Incarnation = NewType("Incarnation", int)
"""A node's identity, 1 … 2**64 - 1."""

ClientId = NewType("ClientId", int)
"""A client's identity, 1 … 2**64 - 1, new for each `Client.open`."""

ANY_NODE = Incarnation(0)
"""Target of a message to the process at an address (Hello, Join): no node has the identity 0."""


def new_incarnation(rng: random.Random) -> Incarnation:
    """Draw an incarnation; `rng` is `random.SystemRandom()` outside simulations."""
    return Incarnation(rng.randrange(1, 2**64))


def new_client_id(rng: random.Random) -> ClientId:
    """Draw a client id; `rng` is `random.SystemRandom()` outside simulations."""
    return ClientId(rng.randrange(1, 2**64))


def name_of(identity: int) -> str:
    """Return an identity as logs and people see it: 16 hex digits."""
    return f"{identity:016x}"
