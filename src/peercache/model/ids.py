"""Identities: who is who in a cluster.

A node is an *incarnation*, random and new at each start: an address may come back, an incarnation
never does, so whatever was said about a dead one can never be taken for its successor.
Incarnations have no order.
"""

from __future__ import annotations

import random
from typing import NewType

Incarnation = NewType("Incarnation", int)
"""A node's identity, 1 … 2**64 - 1."""

ClientId = NewType("ClientId", int)
"""A client's identity, 1 … 2**64 - 1, new for each `Client.open`."""

NOBODY = Incarnation(0)
"""Target of a message to whoever listens at an address (Hello, Join): no node is called 0."""


def new_incarnation(rng: random.Random) -> Incarnation:
    """Draw an incarnation; `rng` is `random.SystemRandom()` outside simulations."""
    return Incarnation(rng.randrange(1, 2**64))


def new_client_id(rng: random.Random) -> ClientId:
    """Draw a client id; `rng` is `random.SystemRandom()` outside simulations."""
    return ClientId(rng.randrange(1, 2**64))


def name_of(identity: int) -> str:
    """Return an identity as logs and people see it: 16 hex digits."""
    return f"{identity:016x}"
