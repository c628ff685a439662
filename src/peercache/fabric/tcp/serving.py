"""What serves pages, as the data port's server sees it: the compiled loop, or turns on trio's."""

from __future__ import annotations

import socket
from typing import NamedTuple, Protocol

import attrs
import numpy as np
import numpy.typing as npt
import trio

from peercache.model.runs import U64


class PageSource(Protocol):
    """Published memory as the server sees it; a PublishedSegment is one."""

    @property
    def pages(self) -> npt.NDArray[np.uint8]:
        """Return the page memory, (bytes,) uint8."""

    @property
    def words(self) -> U64:
        """Return the generation words, uint64, one for each granule of the page memory."""

    @property
    def usable_bytes(self) -> int:
        """Return how much of the page memory, from its start, may be touched by now."""


@attrs.frozen
class Patience:
    """How long one connection may take.

    idle_s: between two requests. request_s: from a request's first byte to its last. stall_s:
    without a byte of the response taken.
    """

    idle_s: float
    request_s: float
    stall_s: float


class End(NamedTuple):
    """How a conversation ended.

    connection: still open if the client was refused, so that it can be told. refused: one of
    tcp_wire.REASONS, "" if it just ended.
    """

    connection: socket.socket | None
    refused: str


class Pages(Protocol):
    """Serves admitted connections."""

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Serve until cancelled; what `serve` took is closed when this returns."""

    async def serve(self, connection: socket.socket, patience: Patience) -> End:
        """Answer requests until the client ends it or is refused.

        connection: does not block, and is the server's from now on, the one in the End excepted.
        """
