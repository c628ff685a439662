"""Serving in turns on the node's own trio loop: where no compiled loop is there (tcp_compiled.py).

Keeps   a page's word is loaded after the `send` that took the page's last byte has returned, and
        goes out in a later one; sends copy (no MSG_ZEROCOPY, no sendfile), so what was accepted
        cannot change any more.
Limits  One request of 64 KiB buffered for each connection; TURN_S of sending before the rest of the
        loop has its turn, whatever the number of connections.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import final

import numpy as np
import trio

from peercache.fabric.tcp import wire
from peercache.fabric.tcp.serving import End, PageSource, Patience
from peercache.fabric.tcp.sockets import receive
from peercache.model.runs import U64
from peercache.observability.metrics import Metrics

STEP_BYTES_MAX = 2**20
"""Bytes of one `sendmsg`: about 0.3 ms of copying, the grain of TURN_S."""
TURN_S = 0.001
"""Sending time between two rounds of the loop. All connections share it: heartbeats and directory
answers wait for one turn, not for one of each connection."""


@final
class PagesInTurns:
    """Serves admitted connections, each in the task that asks for it."""

    def __init__(
        self,
        source: PageSource,
        *,
        granule: int,
        incarnation: int,
        metrics: Metrics,
        between_bytes_and_words: Callable[[], None] | None,
    ) -> None:
        """Serve nobody yet."""
        self._source = source
        self._granule = granule
        self._incarnation = incarnation
        self._metrics = metrics
        self._between = between_bytes_and_words or _nothing
        self._turn = trio.Lock()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Do nothing until cancelled: every connection is served by its own task."""
        task_status.started()
        await trio.sleep_forever()

    async def serve(self, connection: socket.socket, patience: Patience) -> End:
        """Answer requests until the client ends it or is refused."""
        try:
            while await self._serve_request(connection, patience):
                pass
        except wire.Refusal as refusal:
            return End(connection, refusal.what)
        except (OSError, trio.TooSlowError):
            pass  # The client hung up, or sleeps: its reads have ended, or will by their deadline.
        except BaseException:
            connection.close()
            raise
        trio.lowlevel.notify_closing(connection)
        connection.close()
        return End(None, "")

    async def _serve_request(self, connection: socket.socket, patience: Patience) -> bool:
        """Answer one request; return whether another may follow."""
        head = bytearray(wire.REQUEST_BYTES)
        with trio.fail_after(patience.idle_s):
            await trio.lowlevel.wait_readable(connection)
        with trio.fail_after(patience.request_s):
            if not await receive(connection, head):
                return False
            request = wire.decode_request(head, incarnation=self._incarnation)
            entries = bytearray(request.count * wire.ENTRY_BYTES)
            if not await receive(connection, entries):
                return False
        offsets, lengths = wire.decode_entries(
            entries, request, page_bytes=self._source.usable_bytes, granule=self._granule
        )
        await self._serve_pages(connection, offsets, lengths, patience.stall_s)
        return True

    async def _serve_pages(
        self, connection: socket.socket, offsets: U64, lengths: U64, stall_s: float
    ) -> None:
        memory = self._source.pages.data
        indices = offsets // np.uint64(self._granule)
        begins, ends = offsets.tolist(), (offsets + lengths).tolist()
        pending: list[bytes | memoryview] = [wire.encode_status("")]
        for first, last in pairwise(wire.portions(lengths)):
            pending += [memory[begins[page] : ends[page]] for page in range(first, last)]
            await self._send(connection, pending, stall_s)
            self._between()
            # Only now: a word loaded before its page's last byte was taken could vouch for bytes
            # that changed after it was loaded.
            pending = [self._source.words[indices[first:last]].tobytes()]
            self._metrics.tcp_bytes_served.inc(int(lengths[first:last].sum()))
        await self._send(connection, pending, stall_s)

    async def _send(
        self, connection: socket.socket, pieces: list[bytes | memoryview], stall_s: float
    ) -> None:
        """Send all of it; when this returns, the kernel has taken the last byte."""
        left = deque(memoryview(piece) for piece in pieces)
        while left:
            async with self._turn:
                blocked = _send_for_one_turn(connection, left)
            if blocked:
                with trio.fail_after(stall_s):
                    await trio.lowlevel.wait_writable(connection)


def _nothing() -> None:
    """Happen between bytes and words in production."""


def _send_for_one_turn(connection: socket.socket, left: deque[memoryview]) -> bool:
    """Send for at most TURN_S and a step; return whether the socket would block."""
    ends = time.perf_counter() + TURN_S
    while left:
        step: list[memoryview] = []
        room = STEP_BYTES_MAX
        for piece in left:
            step.append(piece[:room])
            room -= len(step[-1])
            if not room:
                break
        try:
            sent = connection.sendmsg(step)
        except BlockingIOError:
            return True
        while left and sent >= len(left[0]):
            sent -= len(left.popleft())
        if sent:
            left[0] = left[0][sent:]
        if time.perf_counter() >= ends:
            return False
    return False
