"""The tcp fabric, server side: one task a connection on the node's trio loop.

Owns    the data port's connections; it reads the pool's memory and words, and writes neither.
Hears   greetings and requests (tcp_wire.py) from whoever connects: nothing is believed.
Says    the bytes of slots, straight from pool memory, and after them their generation words.
Keeps   a page's word is loaded after the `send` that took the page's last byte has returned, and
        goes out in a later one; sends copy (no MSG_ZEROCOPY, no sendfile), so what was accepted
        cannot change any more. Nothing is served before `Admission.admit` said so.
Limits  CONNECTIONS_MAX connections; one request of 64 KiB buffered each; TURN_S of sending before
        the rest of the loop has its turn, whatever the number of connections.
"""

from __future__ import annotations

import errno
import hmac
import resource
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol, final

import attrs
import numpy as np
import numpy.typing as npt
import trio

from peercache.config import format_address
from peercache.errors import AddressTaken
from peercache.fabric import tcp_wire as wire
from peercache.observe import Metrics, get_logger
from peercache.runs import U64

CONNECTIONS_MAX = 4096
"""Connections at once. 16 channels of 256 engine ranks; each costs a descriptor and a task (about
10 KiB), so a flood of idle ones costs tens of megabytes, not the node. Where the process may open
fewer than twice as many files, half of those: the control plane needs descriptors too."""
BUSY_MAX = 64
"""Connections beyond the limit that are told so; further ones are closed without a word."""
GREETING_S = 5.0
"""From connect to a whole greeting: a client sends it at once."""
REQUEST_S = 5.0
"""From a request's first byte to its last."""
IDLE_S = 120.0
"""Between two requests; twice the client's own patience (actors/channels.IDLE_S)."""
SEND_STALL_S = 10.0
"""Without a byte taken: the client is paused or gone. Its own deadlines are far shorter."""
GOODBYE_S = 1.0
"""For a refused client to read why, before the close resets what is on its way."""
GOODBYE_BYTES_MAX = 2 * (wire.REQUEST_BYTES + wire.COUNT_MAX * wire.ENTRY_BYTES)
"""What an honest client may have sent ahead of a refusal."""
STEP_BYTES_MAX = 2**20
"""Bytes of one `sendmsg`: about 0.3 ms of copying, the grain of TURN_S."""
TURN_S = 0.001
"""Sending time between two rounds of the loop. All connections share it: heartbeats and directory
answers wait for one turn, not for one of each connection."""
ACCEPT_PAUSE_S = 0.1
"""When the process has no descriptors left: until some come free."""
PORT_TRIES_MAX = 16
"""Tries to find one free port for both address families."""

_log = get_logger(actor="tcp_server")


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


@final
@attrs.frozen(kw_only=True)
class Admission:
    """Decides who may talk on the data port: the only place that does."""

    cluster: str
    credentials: str = attrs.field(repr=False)
    granule: int
    incarnation: int

    def admit(self, greeting: wire.Greeting) -> str | None:
        """Return why that client is refused, one of wire.REASONS, or None."""
        expected = wire.greet(
            cluster=self.cluster,
            credentials=self.credentials,
            granule=greeting.granule,
            incarnation=greeting.incarnation,
        )
        if greeting.cluster != expected.cluster:
            return wire.CLUSTER
        # Before what tells about this node. Without a secret here, any proof is as good as none.
        if self.credentials and not hmac.compare_digest(greeting.proof, expected.proof):
            return wire.CREDENTIALS
        if greeting.granule != self.granule:
            return wire.GRANULE
        if greeting.incarnation != self.incarnation:
            return wire.INCARNATION
        return None


async def open_listeners(host: str, port: int) -> list[trio.SocketListener]:
    """Listen on a host ("" is every interface) over IPv4 and IPv6, all on one port.

    port: 0 takes a free one. Raises AddressTaken if the port is in use, OSError if the host is not
    ours.
    """
    for _ in range(PORT_TRIES_MAX):
        try:
            first = await _listen(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                if port:
                    raise AddressTaken("data_port", format_address(host, port)) from error
                continue
            raise
        return first
    raise AddressTaken("data_port", format_address(host, port))


async def _listen(host: str, port: int) -> list[trio.SocketListener]:
    found = await trio.socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    listeners: list[trio.SocketListener] = []
    unusable: OSError | None = None
    try:
        for family, address in dict.fromkeys((row[0], row[4]) for row in found):
            try:
                listener = await _listen_at(family, (address[0], port, *address[2:]))
            except OSError as error:
                if error.errno not in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}:
                    raise
                unusable = error  # A host without this family serves the other.
                continue
            listeners.append(listener)
            port = port or listener.socket.getsockname()[1]
    except BaseException:
        for listener in listeners:
            listener.socket.close()
        raise
    if not listeners:
        raise unusable or OSError(errno.EADDRNOTAVAIL, f"no address of {host!r} can be bound")
    return listeners


async def _listen_at(family: int, address: tuple[object, ...]) -> trio.SocketListener:
    opened = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        await opened.bind(address)
        opened.listen(1024)
    except BaseException:
        opened.close()
        raise
    return trio.SocketListener(opened)


async def serve_pages(
    listeners: Sequence[trio.SocketListener],
    source: PageSource,
    *,
    admission: Admission,
    metrics: Metrics,
    connections_max: int = CONNECTIONS_MAX,
    between_bytes_and_words: Callable[[], None] | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve pages until cancelled; closes listeners and connections then.

    between_bytes_and_words: for tests that let the owner act at the worst moment.
    """
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files_max != resource.RLIM_INFINITY:
        connections_max = min(connections_max, files_max // 2)
    service = _Service(
        source, admission, metrics, connections_max, between_bytes_and_words or _nothing
    )
    async with trio.open_nursery() as nursery:
        for listener in listeners:
            nursery.start_soon(service.accept_from, listener, nursery)
        task_status.started()


def _nothing() -> None:
    """Happen between bytes and words in production."""


@final
@attrs.define
class _Service:
    source: PageSource
    admission: Admission
    metrics: Metrics
    connections_max: int
    between_bytes_and_words: Callable[[], None]
    connections: int = 0
    turn: trio.Lock = attrs.field(factory=trio.Lock)
    told: set[str] = attrs.field(factory=set)

    async def accept_from(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        async with listener:
            while True:
                try:
                    accepted, _ = await listener.socket.accept()
                except OSError as error:
                    if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}:
                        self._refuse("descriptors")
                        await trio.sleep(ACCEPT_PAUSE_S)
                    continue  # Else the client hung up before we looked.
                # A plain socket: trio's own has no send that tells "would block".
                connection = socket.socket(fileno=accepted.detach())
                if self.connections >= self.connections_max + BUSY_MAX:
                    self._refuse(wire.BUSY)
                    connection.close()
                    continue
                connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
                self.connections += 1
                nursery.start_soon(self._look_after, connection)

    async def _look_after(self, connection: socket.socket) -> None:
        """Serve one connection; whatever happens in it ends it, and nothing else."""
        open_now = self.metrics.connections.labels(port="data")
        open_now.inc()
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._converse(connection)
        except (OSError, trio.TooSlowError):
            pass  # The client hung up, or sleeps: its reads have ended, or will by their deadline.
        except Exception:
            _log.error("tcp.connection_failed", exc_info=True)
        finally:
            self.connections -= 1
            open_now.dec()
            trio.lowlevel.notify_closing(connection)
            connection.close()

    async def _converse(self, connection: socket.socket) -> None:
        refused = await self._refusal_of_greeting(connection)
        if refused is None:
            return
        if refused:
            await self._part(connection, wire.encode_answer(refused), refused)
            return
        await self._send(connection, [wire.encode_answer("")])
        while await self._serve_request(connection):
            pass

    async def _refusal_of_greeting(self, connection: socket.socket) -> str | None:
        """Return why this client is refused, "" to serve it, None if it hung up."""
        if self.connections > self.connections_max:
            return wire.BUSY
        with trio.fail_after(GREETING_S):
            opening = bytearray(wire.OPENING_BYTES)
            if not await _receive(connection, opening):
                return None
            try:
                wire.check_opening(opening)
            except wire.Refusal as refusal:
                return refusal.what
            rest = bytearray(wire.GREETING_REST_BYTES)
            if not await _receive(connection, rest):
                return None
        return self.admission.admit(wire.decode_greeting(rest)) or ""

    async def _serve_request(self, connection: socket.socket) -> bool:
        """Answer one request; return whether another may follow."""
        head = bytearray(wire.REQUEST_BYTES)
        with trio.fail_after(IDLE_S):
            await trio.lowlevel.wait_readable(connection)
        try:
            with trio.fail_after(REQUEST_S):
                if not await _receive(connection, head):
                    return False
                request = wire.decode_request(head, incarnation=self.admission.incarnation)
                entries = bytearray(request.count * wire.ENTRY_BYTES)
                if not await _receive(connection, entries):
                    return False
            offsets, lengths = wire.decode_entries(
                entries,
                request,
                page_bytes=self.source.usable_bytes,
                granule=self.admission.granule,
            )
        except wire.Refusal as refusal:
            await self._part(connection, wire.encode_status(refusal.what), refusal.what)
            return False
        await self._serve_pages(connection, offsets, lengths)
        return True

    async def _serve_pages(self, connection: socket.socket, offsets: U64, lengths: U64) -> None:
        memory = self.source.pages.data
        indices = offsets // np.uint64(self.admission.granule)
        begins, ends = offsets.tolist(), (offsets + lengths).tolist()
        pending: list[bytes | memoryview] = [wire.encode_status("")]
        for first, last in pairwise(wire.portions(lengths)):
            pending += [memory[begins[page] : ends[page]] for page in range(first, last)]
            await self._send(connection, pending)
            self.between_bytes_and_words()
            # Only now: a word loaded before its page's last byte was taken could vouch for bytes
            # that changed after it was loaded.
            pending = [self.source.words[indices[first:last]].tobytes()]
            self.metrics.tcp_bytes_served.inc(int(lengths[first:last].sum()))
        await self._send(connection, pending)

    async def _send(self, connection: socket.socket, pieces: list[bytes | memoryview]) -> None:
        """Send all of it; when this returns, the kernel has taken the last byte."""
        left = deque(memoryview(piece) for piece in pieces)
        while left:
            async with self.turn:
                blocked = _send_for_one_turn(connection, left)
            if blocked:
                with trio.fail_after(SEND_STALL_S):
                    await trio.lowlevel.wait_writable(connection)

    async def _part(self, connection: socket.socket, answer: bytes, reason: str) -> None:
        """Say no, and close in peace: unread bytes at a close would reset the answer's way."""
        self._refuse(reason)
        await self._send(connection, [answer])
        connection.shutdown(socket.SHUT_WR)
        with trio.move_on_after(GOODBYE_S):
            await _receive(connection, bytearray(GOODBYE_BYTES_MAX))

    def _refuse(self, reason: str) -> None:
        self.metrics.tcp_refused.labels(reason=reason).inc()
        if reason not in self.told:
            # Once each: who can connect must not be able to fill the log.
            self.told.add(reason)
            _log.warning("tcp.refused", reason=reason)


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


async def _receive(connection: socket.socket, into: bytearray) -> bool:
    """Fill `into`; return False if the other side closed before."""
    view = memoryview(into)
    while view:
        try:
            taken = connection.recv_into(view)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(connection)
            continue
        if not taken:
            return False
        view = view[taken:]
    return True
