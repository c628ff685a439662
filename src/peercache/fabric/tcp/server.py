"""The tcp fabric, server side: decides which clients may read, and how long a connection lasts.

Owns    the data port's listeners, and each connection until its client is admitted.
Takes   TLS handshakes and greetings (wire.py) from every host that can connect: it trusts none.
Sends   whether it serves a client, and if not, the reason. The compiled loop, on threads of its own
        (serving.py), answers the requests.
Keeps   nothing is served before `DataAdmission` admits the client. Silent connections do not block
        others: the one that has been silent for longest makes room.
Limits  serving.HELD_BYTES_MAX of requests and unsent responses, a part of it of one certificate;
        `DescriptorShares.data` admitted connections, half of them of one host and a quarter of one
        certificate; `DescriptorShares.newcomers` that are not admitted yet, HOST_NEWCOMERS_MAX of
        one host, and at most half of all. One step of a handshake at a time, on a thread, in turn
        for each host.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import final

import attrs
import trio

from peercache.errors import Rejected
from peercache.fabric.tcp import wire
from peercache.fabric.tcp.admission import DataAdmission
from peercache.fabric.tcp.serving import HELD_BYTES_MAX, PageSource, ServingThread
from peercache.fabric.tcp.sockets import Line
from peercache.fabric.tcp.tls import Contexts, TlsFailed, TlsPeer
from peercache.model.process import DATA_MAX, NEWCOMERS_MAX, OF_ONE_CERTIFICATE
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics
from peercache.observability.reasons import SILENT
from peercache.trust.files import LiveTls

HOST_NEWCOMERS_MAX = 64
"""The newcomers of one host: a flood from there makes room among its own."""
OF_ONE_HOST = 2
"""One host has at most one of this many parts of the connections, admitted or not: without
certificates its address is all that is known of a client."""
SILENCE_S = 5.0
"""Timeout without a byte of a client that is not admitted yet: it has no reason to wait."""
ADMISSION_S = 20.0
"""Timeout from connect to a complete greeting, even if bytes arrive."""
PLACE_S = 0.25
"""Timeout for an idle connection to close, so that a new client gets its place."""
LOG_EVERY_S = 60.0
"""Pause between two log lines about one host and reason."""
LOGGED_MAX = 1024
"""Hosts and reasons that are remembered for that; further ones are only counted."""
REQUEST_S = 5.0
"""Timeout from a request's first byte to its last."""
IDLE_S = 120.0
"""Timeout between two requests; twice the client's own timeout (actors/channels.IDLE_S)."""
SEND_STALL_S = 10.0
"""Timeout without a byte accepted: the client is paused or gone. Its deadlines are shorter."""
GOODBYE_S = 1.0
"""Time for a refused client to read the reason, before the close discards what is in flight."""
GOODBYE_BYTES_MAX = 2 * (wire.REQUEST_BYTES + wire.COUNT_MAX * wire.ENTRY_BYTES)
"""What an honest client may have sent ahead of a refusal."""
ACCEPT_PAUSE_S = 0.1
"""Pause before the next accept if the process has no descriptors left."""
CORES_A_THREAD = 8
"""Cores per serving thread: one sends 2 to 5 GB/s, and other work needs cores, too."""
THREADS_MAX = 4
"""Default maximum: they saturate a network of 100 Gb/s."""
_log = get_logger(actor="tcp_server")


async def serve_pages(
    listeners: Sequence[trio.SocketListener],
    source: PageSource,
    *,
    admission: DataAdmission,
    metrics: Metrics,
    connections_max: int = DATA_MAX,
    newcomers_max: int = NEWCOMERS_MAX,
    threads: int = 0,
    held_bytes_max: int = HELD_BYTES_MAX,
    between_bytes_and_words: Callable[[], None] | None = None,
    before_send: Callable[[], None] | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve pages until cancelled; closes listeners and connections then.

    threads: number of sending threads; 0: depends on this machine's cores.
    held_bytes_max: bytes of requests and responses in progress.
    between_bytes_and_words, before_send: for tests that let the owner act at the worst moments.
    """
    count = threads or usual_threads()
    pages = [
        ServingThread(
            source,
            granule=admission.granule,
            incarnation=admission.incarnation,
            metrics=metrics,
            held_max=held_bytes_max // count,
            between_bytes_and_words=between_bytes_and_words,
            before_send=before_send,
        )
        for _ in range(count)
    ]
    service = _Service(pages, admission, metrics, connections_max, newcomers_max)
    try:
        async with trio.open_nursery() as nursery:
            for each in pages:
                await nursery.start(each.run)
            nursery.start_soon(service.close_revoked)
            for listener in listeners:
                nursery.start_soon(service.accept_from, listener, nursery)
            task_status.started()
    finally:
        # Also if a thread could not be started, and no task accepts.
        for listener in listeners:
            listener.socket.close()


def usual_threads() -> int:
    """Return the default number of threads that serve pages."""
    return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0)) // CORES_A_THREAD))


@attrs.define(eq=False)
class _Newcomer:
    """A connection whose client is not admitted yet.

    turn: of its host, for a step of its handshake.
    """

    line: Line
    host: str
    turn: trio.Lock
    owner: TlsPeer | None = None
    name: str = ""
    """The name of the owner's certificate; several certificates may have it."""
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)


@final
@attrs.define
class _Service:
    pages: Sequence[ServingThread]
    admission: DataAdmission
    metrics: Metrics
    connections_max: int
    newcomers_max: int
    contexts: Contexts | None = attrs.Factory(
        lambda self: self.admission.contexts(), takes_self=True
    )
    # The connections that are not admitted yet, oldest first, and the admitted ones of each host
    # and of each certificate.
    newcomers: dict[_Newcomer, None] = attrs.field(factory=dict)
    hosts: Counter[str] = attrs.field(factory=Counter)
    owners: Counter[str] = attrs.field(factory=Counter)
    logged_at: dict[tuple[str, str], float] = attrs.field(factory=dict)
    steps: trio.CapacityLimiter = attrs.Factory(lambda: trio.CapacityLimiter(1))
    left: trio.Event = attrs.field(factory=trio.Event)
    # The number of connections of each of `pages`.
    served: list[int] = attrs.Factory(lambda self: [0] * len(self.pages), takes_self=True)

    async def accept_from(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        async with listener:
            while True:
                try:
                    accepted, address = await listener.socket.accept()
                except OSError as error:
                    if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}:
                        self._refuse("descriptors", "")
                        await trio.sleep(ACCEPT_PAUSE_S)
                    continue  # Otherwise the client hung up before the accept.
                # A plain socket: the compiled loop takes its descriptor over.
                connection = socket.socket(fileno=accepted.detach())
                host = str(address[0])
                if not self._make_room(host):
                    self._refuse(wire.BUSY, host)
                    connection.close()
                    continue
                connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
                of_host = [each.turn for each in self.newcomers if each.host == host]
                newcomer = _Newcomer(Line(connection), host, of_host[0] if of_host else trio.Lock())
                self.newcomers[newcomer] = None
                nursery.start_soon(self._look_after, newcomer)

    async def close_revoked(self) -> None:
        """Close the connections with revoked certificates, or with certificates of unknown CAs."""
        tls = self.admission.tls
        if tls is None:
            return
        changed = trio.Event()
        token = trio.lowlevel.current_trio_token()

        def update(_: LiveTls) -> None:
            # Called from any thread, and also after this server has ended.
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(changed.set)

        tls.on_change(update)
        dropped = tls.authorities_dropped
        while True:
            await changed.wait()
            changed = trio.Event()
            is_known = tls.authorities_dropped == dropped
            dropped = tls.authorities_dropped
            for each in self.pages:
                # The authority of the certificate is not known any more.
                each.close_unless(self.admission.stays if is_known else lambda _: False)

    def _make_room(self, host: str) -> bool:
        """Return whether there is room for a newcomer, after removing the one silent for longest.

        A host with too many newcomers makes room among its own.
        """
        rivals = [each for each in self.newcomers if each.host == host]
        if len(rivals) < min(HOST_NEWCOMERS_MAX, max(self.newcomers_max // OF_ONE_HOST, 1)):
            if len(self.newcomers) < self.newcomers_max:
                return True
            rivals = list(self.newcomers)
        oldest = min(rivals, key=lambda each: each.line.silent_since)
        if oldest.line.silent_since == inf:
            return False  # All newcomers are being served as fast as this node can.
        self._refuse(SILENT, oldest.host)
        oldest.scope.cancel()
        del self.newcomers[oldest]
        return True

    async def _look_after(self, newcomer: _Newcomer) -> None:
        """Serve one connection; an error ends this connection only."""
        open_now = self.metrics.connections.labels(port="data")
        open_now.inc()
        line = newcomer.line
        try:
            line.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            spaces = None
            with newcomer.scope:
                spaces = await self._admit(newcomer)
            self.newcomers.pop(newcomer, None)
            if spaces is not None:
                await self._converse(newcomer, spaces)
        except (OSError, trio.TooSlowError):
            pass  # The client closed, or is paused: its own deadlines end its reads.
        except Exception:
            _log.error("tcp.connection_failed", exc_info=True)
        finally:
            self.newcomers.pop(newcomer, None)
            open_now.dec()
            line.close()

    async def _admit(self, newcomer: _Newcomer) -> tuple[int, ...] | None:
        """Return the spaces that the client may read, () for all; None after a refusal."""
        line = newcomer.line
        try:
            with trio.fail_after(ADMISSION_S):
                spaces = await self._identify(newcomer)
                refused = await self._refusal_of_greeting(line)
        except Rejected as error:
            self._refuse(error.reason, newcomer.host, error.detail)
            if not isinstance(error, TlsFailed):
                await self._part(line, wire.encode_answer(_answer_of(error.reason)))
            return None
        except trio.TooSlowError:
            self._refuse(SILENT, newcomer.host)
            return None
        if refused == "" and not await self._has_place(newcomer):
            refused = wire.BUSY
        if refused == "":
            return spaces
        if refused:
            self._refuse(refused, newcomer.host)
            await self._part(line, wire.encode_answer(refused))
        return None

    async def _identify(self, newcomer: _Newcomer) -> tuple[int, ...]:
        """Return the spaces that the client may read; raises Rejected."""
        line = newcomer.line
        if self.contexts is None:
            connection = line.connection
            self.admission.check_address(connection.getsockname()[:2], connection.getpeername()[:2])
            return ()
        session = self.contexts.open(line.connection)
        await line.shake_hands(
            session, silence_s=SILENCE_S, of_host=newcomer.turn, steps=self.steps
        )
        newcomer.owner = session.peer()
        identity = self.contexts.admit(newcomer.owner)
        newcomer.name = identity.uri()
        return self.admission.spaces(identity)

    async def _refusal_of_greeting(self, line: Line) -> str | None:
        """Return why this client is refused, "" to serve it, None if it closed the connection."""
        opening = bytearray(wire.OPENING_BYTES)
        if not await line.receive(opening, silence_s=SILENCE_S):
            return None
        try:
            wire.check_opening(opening)
        except wire.Refusal as refusal:
            return refusal.what
        rest = bytearray(wire.GREETING_REST_BYTES)
        if not await line.receive(rest, silence_s=SILENCE_S):
            return None
        return self.admission.admit(wire.decode_greeting(rest)) or ""

    async def _has_place(self, newcomer: _Newcomer) -> bool:
        """Return whether one more client may stay, after closing an idle connection if needed."""
        if self._has_its_share(newcomer):
            return False
        if sum(self.served) >= self.connections_max:
            self.pages[self.served.index(max(self.served))].close_idle()
            with trio.move_on_after(PLACE_S):
                while sum(self.served) >= self.connections_max:
                    await self.left.wait()
        # Others of this host or certificate may have waited for a place, too.
        return sum(self.served) < self.connections_max and not self._has_its_share(newcomer)

    def _has_its_share(self, newcomer: _Newcomer) -> bool:
        """Return whether the client's host or certificate has all places that it may have.

        Also while no other host is connected: those that come later must find places.
        """
        if self.hosts[newcomer.host] >= max(self.connections_max // OF_ONE_HOST, 1):
            return True
        most = max(self.connections_max // OF_ONE_CERTIFICATE, 1)
        return newcomer.name != "" and self.owners[newcomer.name] >= most

    async def _converse(self, newcomer: _Newcomer, spaces: tuple[int, ...]) -> None:
        # The thread with the fewest: in turn, all long-lived connections could end up on one
        # thread.
        chosen, host = self.served.index(min(self.served)), newcomer.host
        self.served[chosen] += 1
        self.hosts[host] += 1
        self.owners[newcomer.name] += 1
        try:
            await newcomer.line.send(wire.encode_answer(""), stall_s=SEND_STALL_S)
            left, refused = await self.pages[chosen].serve(
                newcomer.line, (IDLE_S, REQUEST_S, SEND_STALL_S), spaces, newcomer.owner
            )
        finally:
            self.served[chosen] -= 1
            for counted, name in ((self.hosts, host), (self.owners, newcomer.name)):
                counted[name] -= 1
                if not counted[name]:
                    del counted[name]
            self.left.set()
            self.left = trio.Event()
        if left is not None:
            self._refuse(refused, host)
            try:
                await self._part(left, wire.encode_status(refused))
            finally:
                left.close()

    async def _part(self, line: Line, answer: bytes) -> None:
        """Send the refusal, then read on: a close with unread bytes would discard the answer."""
        await line.send(answer, stall_s=SEND_STALL_S)
        line.connection.shutdown(socket.SHUT_WR)
        with trio.move_on_after(GOODBYE_S):
            await line.receive(bytearray(GOODBYE_BYTES_MAX))

    def _refuse(self, reason: str, host: str, detail: str = "") -> None:
        """Count a refusal, and log it from time to time: a stranger must not fill the log."""
        self.metrics.tcp_refused.labels(reason=reason).inc()
        now = trio.current_time()
        if len(self.logged_at) >= LOGGED_MAX:
            self.logged_at = {
                key: at for key, at in self.logged_at.items() if now - at < LOG_EVERY_S
            }
        known = self.logged_at.get((reason, host))
        if len(self.logged_at) < LOGGED_MAX and (known is None or now - known >= LOG_EVERY_S):
            self.logged_at[reason, host] = now
            _log.warning("tcp.request_refused", reason=reason, peer=host, detail=detail)


def _answer_of(reason: str) -> str:
    return reason if reason in wire.REASONS else wire.CERTIFICATE
