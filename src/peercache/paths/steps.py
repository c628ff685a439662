"""The steps of the sans-IO paths, which the bridge or a simulation performs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.reads import PeerRead
from peercache.model.runs import U64, PageRuns
from peercache.wire.messages.declared import Message

Answers: TypeAlias = Sequence[Message | None]
Questions: TypeAlias = Sequence[tuple[int, Message]]


@attrs.frozen(eq=False)
class Ask:
    """Send a request to several peers; the answer is one message each, None for a peer without one.

    until:  when to stop waiting.
    enough: a pure predicate: whether the answers so far make the others unnecessary.
    hedge:  when to call a function with the answers so far, and this function, if some are missing
            then. It returns further requests and when to be called again; the answers to these
            requests follow the others.
    """

    questions: tuple[tuple[int, Message], ...]
    until: float
    enough: Callable[[Answers], bool] | None = None
    hedge: tuple[float, Callable[[Answers], tuple[Questions, float]]] | None = None


@attrs.frozen(eq=False)
class ReadTable:
    """Read the directory table of a node of this host.

    The answer is Looked, or None if the table cannot be read now.

    keys: packed. ring: the version of the ring by which the path determined the keys' owners.
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
    """Send an idempotent request, and continue; the answer is its number, for `Collect`."""

    peer: int
    message: Message


@attrs.frozen
class Collect:
    """Wait for the answer to a submitted request; it is one message, or None.

    A request is collected at most once. Requests that are not collected end with the path.
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
    """Handle the messages of a peer that answer no pending request."""

    peer: int


@attrs.frozen(eq=False)
class Fetch:
    """Read from several holders in parallel; the answer is one Fetched each."""

    reads: tuple[PeerRead, ...]
    until: float


@attrs.frozen(eq=False)
class Place:
    """Copy pages from the caller's runs into reserved slots of the home segment.

    The answer is the number of leading pages that were copied completely.
    """

    offsets: U64
    runs: PageRuns
    until: float


@attrs.frozen(eq=False)
class Checksum:
    """Compute the xxh3_64 of some pages in the caller's memory; the answer is (n,) uint64.

    pages: (n,), indices of the runs' pages.
    """

    runs: PageRuns
    pages: npt.NDArray[np.intp]


@attrs.frozen
class Renew:
    """Request the view now; the answer is the latest known Cluster, new or not."""

    until: float


Step: TypeAlias = (
    Ask | ReadTable | Post | Submit | Collect | Greet | Drain | Fetch | Place | Checksum | Renew
)
