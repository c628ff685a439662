"""The tcp fabric, server side: decides which clients may read, and for how long a connection lives.

Owns    the data port's listeners, and each connection until its client is admitted.
Hears   greetings (wire.py) from every host that can connect: it believes none of them.
Says    whether it serves a client, and if not, why. The compiled loop on threads of its own
        (serving.py) answers the requests.
Keeps   nothing is served before `DataAdmission.admit` said so.
Limits  CONNECTIONS_MAX connections.
"""

from __future__ import annotations

import errno
import hmac
import os
import resource
import socket
from collections.abc import Callable, Sequence
from typing import final

import attrs
import trio

from peercache.fabric.tcp import wire
from peercache.fabric.tcp.serving import End, PageSource, Patience, ServingThread
from peercache.fabric.tcp.sockets import receive, send
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics

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
"""For a refused client to read why, before the close discards what is in flight."""
GOODBYE_BYTES_MAX = 2 * (wire.REQUEST_BYTES + wire.COUNT_MAX * wire.ENTRY_BYTES)
"""What an honest client may have sent ahead of a refusal."""
ACCEPT_PAUSE_S = 0.1
"""When the process has no descriptors left: the pause before the next accept."""
CORES_A_THREAD = 8
"""One sends 2 to 5 GB/s, and the cores of a small machine have other work."""
THREADS_MAX = 4
"""Unless the configuration says how many: they fill a network of 100 Gb."""
_log = get_logger(actor="tcp_server")


@final
@attrs.frozen(kw_only=True)
class DataAdmission:
    """Decides which clients the data port admits: the only place that does."""

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
        # Before every answer that tells about this node. Without a secret here, any proof will do.
        if self.credentials and not hmac.compare_digest(greeting.proof, expected.proof):
            return wire.CREDENTIALS
        if greeting.granule != self.granule:
            return wire.GRANULE
        if greeting.incarnation != self.incarnation:
            return wire.INCARNATION
        return None


async def serve_pages(
    listeners: Sequence[trio.SocketListener],
    source: PageSource,
    *,
    admission: DataAdmission,
    metrics: Metrics,
    connections_max: int = CONNECTIONS_MAX,
    threads: int = 0,
    between_bytes_and_words: Callable[[], None] | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve pages until cancelled; closes listeners and connections then.

    threads: how many send; 0 goes by this machine's cores.
    between_bytes_and_words: for tests that let the owner act at the worst moment.
    """
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files_max != resource.RLIM_INFINITY:
        connections_max = min(connections_max, files_max // 2)
    pages = [
        ServingThread(
            source,
            granule=admission.granule,
            incarnation=admission.incarnation,
            metrics=metrics,
            between_bytes_and_words=between_bytes_and_words,
        )
        for _ in range(threads or usual_threads())
    ]
    service = _Service(pages, admission, metrics, connections_max)
    try:
        async with trio.open_nursery() as nursery:
            for each in pages:
                await nursery.start(each.run)
            for listener in listeners:
                nursery.start_soon(service.accept_from, listener, nursery)
            task_status.started()
    finally:
        # Also where a thread could not be started, and no task accepts.
        for listener in listeners:
            listener.socket.close()


def usual_threads() -> int:
    """Return how many threads serve pages unless the configuration says how many."""
    return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0)) // CORES_A_THREAD))


@final
@attrs.define
class _Service:
    pages: Sequence[ServingThread]
    admission: DataAdmission
    metrics: Metrics
    connections_max: int
    connections: int = 0
    told: set[str] = attrs.field(factory=set)
    # Connections of each of `pages`.
    served: list[int] = attrs.Factory(lambda self: [0] * len(self.pages), takes_self=True)

    async def accept_from(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        async with listener:
            while True:
                try:
                    accepted, _ = await listener.socket.accept()
                except OSError as error:
                    if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}:
                        self._refuse("descriptors")
                        await trio.sleep(ACCEPT_PAUSE_S)
                    continue  # Otherwise the client hung up before the accept.
                # A plain socket: the compiled loop takes its descriptor over.
                connection = socket.socket(fileno=accepted.detach())
                if self.connections >= self.connections_max + BUSY_MAX:
                    self._refuse(wire.BUSY)
                    connection.close()
                    continue
                connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
                self.connections += 1
                nursery.start_soon(self._look_after, connection)

    async def _look_after(self, connection: socket.socket) -> None:
        """Serve one connection; an error ends this connection only."""
        open_now = self.metrics.connections.labels(port="data")
        open_now.inc()
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._converse(connection)
        except (OSError, trio.TooSlowError):
            pass  # The client hung up, or is paused: its own deadlines end its reads.
        except Exception:
            _log.error("tcp.connection_failed", exc_info=True)
        finally:
            self.connections -= 1
            open_now.dec()
            _close(connection)

    async def _converse(self, connection: socket.socket) -> None:
        refused = await self._refusal_of_greeting(connection)
        if refused is None:
            return
        if refused:
            await self._part(connection, wire.encode_answer(refused), refused)
            return
        await send(connection, wire.encode_answer(""), stall_s=SEND_STALL_S)
        patience = Patience(idle_s=IDLE_S, request_s=REQUEST_S, stall_s=SEND_STALL_S)
        left, refused = await self._serve(connection, patience)
        if left is not None:
            try:
                await self._part(left, wire.encode_status(refused), refused)
            finally:
                _close(left)

    async def _serve(self, connection: socket.socket, patience: Patience) -> End:
        # The thread with the fewest: in turn, all connections that stay could be one thread's.
        chosen = self.served.index(min(self.served))
        self.served[chosen] += 1
        try:
            return await self.pages[chosen].serve(connection, patience)
        finally:
            self.served[chosen] -= 1

    async def _refusal_of_greeting(self, connection: socket.socket) -> str | None:
        """Return why this client is refused, "" to serve it, None if it hung up."""
        if self.connections > self.connections_max:
            return wire.BUSY
        with trio.fail_after(GREETING_S):
            opening = bytearray(wire.OPENING_BYTES)
            if not await receive(connection, opening):
                return None
            try:
                wire.check_opening(opening)
            except wire.Refusal as refusal:
                return refusal.what
            rest = bytearray(wire.GREETING_REST_BYTES)
            if not await receive(connection, rest):
                return None
        return self.admission.admit(wire.decode_greeting(rest)) or ""

    async def _part(self, connection: socket.socket, answer: bytes, reason: str) -> None:
        """Send the refusal, then read on: a close with unread bytes would discard the answer."""
        self._refuse(reason)
        await send(connection, answer, stall_s=SEND_STALL_S)
        connection.shutdown(socket.SHUT_WR)
        with trio.move_on_after(GOODBYE_S):
            await receive(connection, bytearray(GOODBYE_BYTES_MAX))

    def _refuse(self, reason: str) -> None:
        self.metrics.tcp_refused.labels(reason=reason).inc()
        if reason not in self.told:
            # Once a reason: a stranger that can connect must not fill the log.
            self.told.add(reason)
            _log.warning("tcp.request_refused", reason=reason)


def _close(connection: socket.socket) -> None:
    # A connection that the compiled loop took over has no descriptor here any more.
    if connection.fileno() >= 0:
        trio.lowlevel.notify_closing(connection)
        connection.close()
