"""Identities of nodes and clients.

A node is an *incarnation*, new at each start: an address may return, an incarnation never does, so
a message about a dead node is never mistaken for one about its successor. It is computed from the
cluster, the name in the node's certificate and a random nonce, so every peer that knows the name
and receives the nonce can verify it. Incarnations have no order.
"""

from __future__ import annotations

import hashlib
import random
from typing import Final, NewType

Incarnation = NewType("Incarnation", int)
"""A node's identity, FIRST_IDENTITY … 2**64 - 1."""

ClientId = NewType("ClientId", int)
"""A client's identity, FIRST_IDENTITY … 2**64 - 1, new for each `Client.open`."""

FIRST_IDENTITY: Final = 4
"""Smaller numbers are no identity of a node or a client: 0 stands for no one, and a node's own
actors use its pool under the next ones (`actors.mailboxes`)."""

NONCE_BYTES: Final = 16
"""Length of a nonce: no two starts of a node draw the same one."""


def new_nonce(rng: random.Random) -> bytes:
    """Draw a nonce; `rng` is `random.SystemRandom()` outside simulations."""
    return rng.getrandbits(8 * NONCE_BYTES).to_bytes(NONCE_BYTES, "little")


def incarnation_of(cluster: str, name: str, nonce: bytes) -> Incarnation:
    """Return the incarnation of a node: a different name, cluster or nonce gives a different one.

    name: the name in the node's certificate; "" without TLS.
    """
    parts = (cluster.encode(), name.encode(), nonce)
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    digest = hashlib.blake2b(framed, digest_size=8, person=b"peercache.node").digest()
    number = int.from_bytes(digest, "little")
    return Incarnation(number if number >= FIRST_IDENTITY else number + FIRST_IDENTITY)


def new_client_id(rng: random.Random) -> ClientId:
    """Draw a client id; `rng` is `random.SystemRandom()` outside simulations."""
    return ClientId(rng.randrange(FIRST_IDENTITY, 2**64))


def name_of(identity: int) -> str:
    """Return an identity as shown in logs and to operators: 16 hex digits."""
    return f"{identity:016x}"
