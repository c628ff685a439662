"""The steps of the sans-IO paths: what a path has the bridge, or a simulation, do next."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.reads import PeerRead
from peercache.model.runs import U64, PageRuns
from peercache.wire.messages.declared import Message


@attrs.frozen(eq=False)
class Ask:
    """Ask several peers at once; the answer is one message each, or None for a peer without one.

    until:  when to stop waiting.
    enough: given the answers so far, whether they make the others unnecessary; a pure predicate.
    """

    questions: tuple[tuple[int, Message], ...]
    until: float
    enough: Callable[[Collection[Message]], bool] | None = None


@attrs.frozen(eq=False)
class ReadTable:
    """Read the directory table of a node of this host.

    The answer is Looked, or None where the table cannot be read now.

    keys: packed. ring: the version of the ring by which the path knows the keys' owners.
    """

    peer: int
    keys: bytes
    ring: bytes


@attrs.frozen
class Post:
    """Send a message to each peer without an answer; it may be lost."""

    messages: tuple[tuple[int, Message], ...]


@attrs.frozen(eq=False)
class Submit:
    """Send an idempotent question, and go on; the answer is its number, for `Collect`."""

    peer: int
    message: Message


@attrs.frozen
class Collect:
    """Wait for the answer to a question that was sent; it is one message, or None.

    A question is collected once. What is never collected is forgotten with the path.
    """

    number: int
    until: float


@attrs.frozen
class Greet:
    """Send Hello to the listener of an address; the answer is Welcome, Refused or None."""

    url: str
    until: float


@attrs.frozen
class Drain:
    """Take the messages of a peer that answer no pending question."""

    peer: int


@attrs.frozen(eq=False)
class Fetch:
    """Read from several holders at once; the answer is one Fetched each."""

    reads: tuple[PeerRead, ...]
    until: float


@attrs.frozen(eq=False)
class Place:
    """Copy pages from the caller's runs into reserved slots of the home segment.

    The answer is the number of leading pages whose every byte is in place.
    """

    offsets: U64
    runs: PageRuns
    until: float


@attrs.frozen(eq=False)
class Checksum:
    """Compute the xxh3_64 of some pages in the caller's memory; the answer is (n,) uint64.

    pages: (n,), which of the runs' pages.
    """

    runs: PageRuns
    pages: npt.NDArray[np.intp]


@attrs.frozen
class Renew:
    """Have the view asked for now; the answer is the Cluster as it is known then, new or not."""

    until: float


Step: TypeAlias = (
    Ask | ReadTable | Post | Submit | Collect | Greet | Drain | Fetch | Place | Checksum | Renew
)
