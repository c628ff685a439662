"""Identities of nodes and clients: none is one that a node's own actors use."""

from __future__ import annotations

import hashlib
import random
from types import SimpleNamespace
from typing import Any

import pytest

from peercache.model import ids
from peercache.model.ids import FIRST_IDENTITY, incarnation_of, new_client_id


class Lowest(random.Random):
    """Draws the lowest number of each range."""

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        del stop, step
        return start


def test_the_lowest_client_id_is_none_of_the_nodes_own() -> None:
    """A client would share the slots of the placement actor."""
    assert new_client_id(Lowest()) == FIRST_IDENTITY


@pytest.mark.parametrize("digest", [0, 1, FIRST_IDENTITY - 1, FIRST_IDENTITY, 2**64 - 1])
def test_no_incarnation_is_one_of_the_nodes_own_identities(
    monkeypatch: pytest.MonkeyPatch, digest: int
) -> None:
    """Whatever the digest of a name and a nonce is; most incarnations are that digest."""

    def blake2b(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(digest=lambda: digest.to_bytes(8, "little"))

    monkeypatch.setattr(ids, "hashlib", SimpleNamespace(blake2b=blake2b))

    incarnation = incarnation_of("c", "n", bytes(16))

    assert incarnation >= FIRST_IDENTITY
    assert incarnation == digest or digest < FIRST_IDENTITY


def test_an_incarnation_is_the_digest_of_cluster_name_and_nonce() -> None:
    """All builds compute the same one."""
    framed = b"\1\0\0\0c\1\0\0\0n\2\0\0\0xy"
    digest = hashlib.blake2b(framed, digest_size=8, person=b"peercache.node").digest()

    assert incarnation_of("c", "n", b"xy") == int.from_bytes(digest, "little")
