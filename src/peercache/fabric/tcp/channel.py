"""One connection of the tcp fabric, as the reading side uses it.

Blocking calls on the caller's thread. Waiting is bounded by SO_RCVTIMEO and SO_SNDTIMEO, so that a
receive is one system call of the C library with the GIL released once, not a poll and a receive.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import final

import numpy as np
import numpy.typing as npt

from peercache.errors import RemoteProtocolError
from peercache.fabric.tcp import wire
from peercache.fabric.tcp.names import Address
from peercache.fabric.tcp.receiving import Scatter, send_at_once
from peercache.model.reads import PeerRead
from peercache.model.runs import U64
from peercache.observability.reasons import DEADLINE, INTERNAL, PEER_UNREACHABLE

GONE = "gone"
"""Failure: the server closed before it answered anything, perhaps while the channel was idle."""
REFUSED_BECAUSE = "refused: "
"""Failure: this and the server's reason."""
SEND_BUFFER_BYTES = 256 * 2**10
"""Holds two requests of COUNT_MAX pages, so that sending one ahead does not wait for the server."""


@final
class TcpChannel:
    """An accepted connection to one incarnation; one thread uses it at a time."""

    def __init__(
        self, connection: socket.socket, *, stall_s: float, clock: Callable[[], float]
    ) -> None:
        """Take over a connected, blocking socket."""
        self._socket = connection
        self._stall_s = stall_s
        self._clock = clock
        self._patience: dict[int, float] = {}

    def greet(self, greeting: wire.Greeting, until: float) -> str:
        """Introduce ourselves, once; return "" or the failure."""
        failure = self._send(wire.encode_greeting(greeting), until)
        if failure:
            return failure
        raw = np.zeros(wire.ANSWER_BYTES, np.uint8)
        plan = Scatter(np.array([raw.ctypes.data], np.uint64), np.array([len(raw)], np.uint64))
        failure = self._fill(plan, until)
        if failure:
            return failure
        try:
            reason = wire.decode_answer(raw.tobytes())
        except RemoteProtocolError:
            return PEER_UNREACHABLE
        return REFUSED_BECAUSE + reason if reason else ""

    def fetch(self, read: PeerRead, words: U64, until: float) -> tuple[int, str]:
        """Receive pages and their words; return how many leading ones are complete, and a failure.

        After any failure the channel is out of step and must be closed. words: (n,) uint64, filled
        in place; beyond the complete pages it may hold parts of words.
        """
        cut = wire.cuts(read.lengths, bytes_max=wire.REQUEST_BYTES_MAX, pages_max=wire.COUNT_MAX)
        spans = list(pairwise(cut))
        failure = self._request(read, spans[0], until)
        if failure:
            return 0, failure
        done = 0
        for index, span in enumerate(spans):
            ahead = ""
            # One request ahead, so that the server goes from one to the next without a round trip.
            if index + 1 < len(spans):
                ahead = self._request(read, spans[index + 1], until)
            if ahead and ahead != GONE:
                return done, ahead
            # A server that is gone may have answered this one before.
            pages, failure = self._response(read, words, span, until)
            done += pages
            failure = failure or ahead
            if failure:
                break
        # To begin anew would give up pages that are here.
        return done, PEER_UNREACHABLE if done and failure == GONE else failure

    def interrupt(self) -> None:
        """End what another thread does with this channel: it fails there at once."""
        with contextlib.suppress(OSError):  # The server was faster.
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection: from here on nothing arrives in any destination."""
        self._socket.close()

    def _request(self, read: PeerRead, span: tuple[int, int], until: float) -> str:
        first, last = span
        offsets, lengths = read.offsets[first:last], read.lengths[first:last]
        return self._send(wire.encode_request(offsets, lengths, read.member.incarnation), until)

    def _response(
        self, read: PeerRead, words: U64, span: tuple[int, int], until: float
    ) -> tuple[int, str]:
        status = np.zeros(wire.ANSWER_BYTES, np.uint8)
        plan, complete_at = _lay_out(read, words, span, status)
        failure = self._fill(plan, until)
        if plan.received < wire.ANSWER_BYTES:
            return 0, failure
        try:
            reason = wire.decode_status(status.tobytes())
        except RemoteProtocolError:
            return 0, PEER_UNREACHABLE
        if reason:
            return 0, REFUSED_BECAUSE + reason
        pages = int(np.searchsorted(complete_at, np.uint64(plan.received), side="right"))
        return pages, failure

    def _send(self, raw: bytes, until: float) -> str:
        left = until - self._clock()
        if left <= 0:
            return DEADLINE
        try:
            sent = send_at_once(self._socket.fileno(), raw)
            if sent < len(raw):
                self._wait_at_most(socket.SO_SNDTIMEO, min(left, self._stall_s))
                self._socket.sendall(memoryview(raw)[sent:])
        except BlockingIOError:
            return DEADLINE if left <= self._stall_s else PEER_UNREACHABLE
        except OSError:
            # The end of what we had time for is no sign that the server closed.
            return DEADLINE if self._clock() >= until else GONE
        return ""

    def _fill(self, plan: Scatter, until: float) -> str:
        while plan.received < plan.total:
            left = until - self._clock()
            if left <= 0:
                return DEADLINE
            self._wait_at_most(socket.SO_RCVTIMEO, min(left, self._stall_s))
            try:
                taken = plan.receive(self._socket.fileno())
            except InterruptedError:
                continue
            except BlockingIOError:
                # Not one byte in all that time.
                return DEADLINE if left <= self._stall_s else PEER_UNREACHABLE
            except OSError as error:
                if error.errno == errno.EFAULT:
                    return INTERNAL  # A destination of the caller's that is no memory.
                taken = 0
            if not taken:
                if self._clock() >= until:
                    return DEADLINE  # We were interrupted.
                return PEER_UNREACHABLE if plan.received else GONE
        return ""

    def _wait_at_most(self, option: int, seconds: float) -> None:
        if self._patience.get(option) == seconds:
            return
        # Zero would mean for ever.
        microseconds = max(int(seconds * 1e6), 1)
        value = struct.pack("@ll", *divmod(microseconds, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, option, value)
        self._patience[option] = seconds


def dial(
    addresses: Sequence[Address],
    *,
    until: float,
    connect_timeout_s: float,
    clock: Callable[[], float],
) -> socket.socket | None:
    """Return a connection to the first address that answers, or None."""
    until = min(until, clock() + connect_timeout_s)
    for family, address in addresses:
        left = until - clock()
        if left <= 0:
            break
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(left)
            connection.connect(address)
            connection.settimeout(None)
            # The last words of a response are a small packet behind large ones.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        except OSError:
            connection.close()
            continue
        return connection
    return None


def _lay_out(
    read: PeerRead, words: U64, span: tuple[int, int], status: npt.NDArray[np.uint8]
) -> tuple[Scatter, U64]:
    """Return where one response goes, and after how many of its bytes each page is complete."""
    first, last = span
    lengths = read.lengths[first:last]
    cut = wire.portions(lengths)
    runs = read.runs
    addresses: list[U64] = [np.array([status.ctypes.data], np.uint64)]
    sizes: list[U64] = [np.array([len(status)], np.uint64)]
    word_memory = words.ctypes.data + first * wire.WORD_BYTES
    for begin, end in pairwise(cut):
        low, high = runs.starts[first + begin], runs.starts[first + end]
        address, size = word_memory + begin * wire.WORD_BYTES, (end - begin) * wire.WORD_BYTES
        addresses += [runs.addresses[low:high], np.array([address], np.uint64)]
        sizes += [runs.sizes[low:high], np.array([size], np.uint64)]
    bytes_until = np.cumsum(lengths, dtype=np.uint64)
    portion_end = np.repeat(bytes_until[np.array(cut[1:]) - 1], np.diff(cut))
    words_until = np.arange(1, len(lengths) + 1, dtype=np.uint64) * np.uint64(wire.WORD_BYTES)
    complete_at = portion_end + words_until + np.uint64(len(status))
    return Scatter(np.concatenate(addresses), np.concatenate(sizes)), complete_at
