"""The tcp fabric, client side: blocking sockets in the caller's thread.

No thread and no loop moves bytes. A read leases one channel, sends its request in one call, and
receives straight into the caller's memory. A channel with an incomplete or failed read is closed
before `read` returns. A closed socket writes nowhere, so nothing writes to a destination after
`read` has returned. Later reads close idle channels; if there are no more reads, the server closes
them.

In a busy Python program a thread may wait 5 ms for the GIL each time that it has released it: the
number of releases, not of bytes, decides how long a batch takes. So numpy builds the list of
places, and one call of a loop in C (`_receiving.c`) fills all of them with the GIL released once.
(`socket.recvmsg_into` needs a Python object for each place.) A request is small, and a send that
never blocks keeps the GIL. Waits are bounded by SO_RCVTIMEO and SO_SNDTIMEO, not by a poll before
each call. The kernel counts only the time in which a receive sleeps, so a `Watchdog` interrupts a
read that exceeds its deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from math import inf
from typing import final

import numpy as np
import numpy.typing as npt

from peercache.actors.channels.actor import ChannelLeased
from peercache.config.quantities import parse_address
from peercache.errors import LocalProtocolError, Rejected, RemoteProtocolError
from peercache.fabric.channels import ChannelDriver
from peercache.fabric.tcp import wire
from peercache.fabric.tcp.names import Names, dial
from peercache.fabric.tcp.tls import Contexts, TlsSession
from peercache.installation.library import function
from peercache.model.ids import incarnation_of, name_of
from peercache.model.member import Member
from peercache.model.reads import Fetched, PeerRead
from peercache.model.records import PAGE_BYTES_MAX
from peercache.model.runs import U64
from peercache.model.seal import SEAL, SEAL_BYTES, Seals, unread_seals
from peercache.observability.log import WarnOnce, get_logger
from peercache.observability.reasons import (
    DEADLINE,
    HANDSHAKE_LOST,
    INTERNAL,
    PEER_UNREACHABLE,
    REFUSED,
)
from peercache.trust.files import LiveTls
from peercache.trust.identity import CertificateRole
from peercache.trust.sharing import Sharing

STALL_S = 0.25
"""Silence after which a peer counts as unreachable. A paused process is silent permanently; a busy
one on a local network answers in milliseconds."""

CONNECT_TIMEOUT_S = 0.5
"""Timeout for a connection; the kernel resends a lost first packet only after a second."""

GONE = "gone"
"""Failure: the server closed before any answer, possibly while the channel was idle."""

REFUSED_BECAUSE = "refused: "
"""Failure: this and the server's reason."""

JOIN_S = 1.0
"""How long `Watchdog.close` waits for its thread, which is about to end."""

STEP_BYTES = 128 * 2**10
"""Bytes after which the loop in C returns from the kernel; see there."""

_receive = function(
    "peercache_receive", ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint64] * 3
)
# PyDLL calls without releasing the GIL.
_send = ctypes.PyDLL(None, use_errno=True).send
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send.restype = ctypes.c_ssize_t

_log = get_logger(actor="tcp")


@final
class TcpFabric:
    """Reads pages of any reachable member over pooled connections. Thread-safe; never raises."""

    name = "tcp"

    def __init__(
        self,
        *,
        cluster: str,
        granule: int,
        tls: LiveTls | None = None,
        sharing: Sharing | None = None,
        max_channels_per_peer: int,
        stall_s: float = STALL_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open nothing yet. tls: our certificate; None: read in clear text.

        sharing: whose processes serve us in clear text; None: any process's.
        clock: the clock of the deadlines, in seconds. Raises as `TlsContext` does.
        """
        self._cluster = cluster
        self._contexts = None if tls is None else Contexts(tls, is_server=False)
        self._sharing = sharing if tls is None else None
        self._granule = granule
        self._stall_s = stall_s
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock
        self._names = Names()
        self._watchdog = Watchdog(clock)
        self._channels: ChannelDriver[TcpChannel] = ChannelDriver(
            max_channels_per_peer=max_channels_per_peer, clock=clock
        )
        self._warn_once = WarnOnce(_log)

    def reaches(self, member: Member) -> bool:
        """Return whether the member announces a data port; only a read shows whether it serves."""
        return bool(member.data)

    def read(self, read: PeerRead, deadline: float) -> Fetched:
        """Fill the destinations in page order by `deadline`; see `Fabric`.

        A peer that is silent for stall_s, refuses connections or breaks the protocol is
        "peer_unreachable"; one that does not serve us, or not these slots, is "refused".
        """
        seals: Seals = np.zeros(len(read.offsets), SEAL)
        if not len(seals):
            return Fetched(seals, "", self.name)
        done = 0
        try:
            done, failure = self._read(read, seals, deadline)
        except Exception:
            name, at = name_of(read.member.incarnation), read.member.control
            _log.error("tcp.read_failed", peer=name, at=at, exc_info=True)
            failure = INTERNAL
        if done < len(seals):
            # A partly received seal may look like that of the page.
            seals[done:] = unread_seals(len(seals) - done)
        return Fetched(seals, failure, self.name)

    def forget(self, incarnation: int) -> None:
        """Close the channels to a member that is dead, those in use when their reads end."""
        self._channels.forget(incarnation)

    def close(self) -> None:
        """Refuse new reads, wait for those in flight (each ends by its deadline), close all."""
        self._channels.close()
        self._watchdog.close()

    def _read(self, read: PeerRead, seals: Seals, deadline: float) -> tuple[int, str]:
        if not np.array_equal(read.lengths, read.runs.lengths):
            raise LocalProtocolError("lengths differ from the destinations' sizes")
        if int(read.lengths.max()) > PAGE_BYTES_MAX:
            return 0, REFUSED
        peer = read.member.incarnation
        for _ in range(2):
            lease = self._channels.lease(peer, deadline)
            if isinstance(lease, str):
                return 0, lease
            done, failure = self._use(lease, read, seals, deadline)
            if failure != GONE:
                return done, failure
            # The server closed it: while it was idle (then a new one may work), or permanently.
            self._channels.retire_idle(peer)
            if lease.is_new:
                break
        return 0, PEER_UNREACHABLE

    def _use(
        self, lease: ChannelLeased, read: PeerRead, seals: Seals, deadline: float
    ) -> tuple[int, str]:
        """Read over one channel, and return it to the pool or close it."""
        channel: TcpChannel | None = None
        works = False
        try:
            if lease.is_new:
                channel, failure = self._open(read.member, deadline)
                if channel is None:
                    return 0, failure
            else:
                channel = self._channels.channels[lease.channel]
                if channel.has_expired():
                    # Treated as closed by the server: a new connection shows its current
                    # certificate.
                    return 0, GONE
            watched = self._watchdog.watch(channel.interrupt, deadline)
            try:
                done, failure = channel.fetch(read, seals, deadline)
            finally:
                in_time = self._watchdog.release(watched)
            works = in_time and not failure
            return done, self._explain(failure, read.member)
        finally:
            # After a KeyboardInterrupt, too: an unfinished channel must not return to the pool.
            self._channels.end(lease, channel, works=works)

    def _open(self, member: Member, deadline: float) -> tuple[TcpChannel | None, str]:
        try:
            host, port = parse_address(member.data)
        except ValueError:
            return None, PEER_UNREACHABLE
        wait_s = min(self._connect_timeout_s, deadline - self._clock())
        connection = dial(
            self._names.resolve(host, port, wait_s),
            until=deadline,
            connect_timeout_s=self._connect_timeout_s,
            clock=self._clock,
        )
        if connection is None:
            return None, DEADLINE if self._clock() >= deadline else PEER_UNREACHABLE
        channel = TcpChannel(connection, stall_s=self._stall_s, clock=self._clock)
        opened = False
        try:
            failure = self._explain(self._introduce(channel, member, deadline), member)
            opened = not failure
        finally:
            if not opened:
                channel.close()
        # The server closed instead of answering, on a connection that was never idle.
        failure = PEER_UNREACHABLE if failure == GONE else failure
        return (channel, "") if opened else (None, failure)

    def _introduce(self, channel: TcpChannel, member: Member, deadline: float) -> str:
        """Verify the member, and have it accept us; return "" or the failure."""
        greeting = wire.greet(
            cluster=self._cluster, granule=self._granule, incarnation=member.incarnation
        )
        watched = self._watchdog.watch(channel.interrupt, deadline)
        failure = ""
        try:
            if self._contexts is not None:
                failure = channel.secure(self._contexts, member, deadline)
            failure = failure or channel.greet(greeting, deadline)
            if not failure and self._sharing is not None:
                # After its answer: the kernel knows no process of a connection in the backlog.
                failure = channel.check_owner(self._sharing)
        finally:
            in_time = self._watchdog.release(watched)
        return failure if in_time else DEADLINE

    def _explain(self, failure: str, member: Member) -> str:
        """Return the miss reason of a failure; log once why a peer refuses us."""
        if not failure.startswith(REFUSED_BECAUSE):
            return failure
        reason = failure.removeprefix(REFUSED_BECAUSE)
        key = (member.incarnation, reason)
        name = name_of(member.incarnation)
        self._warn_once("tcp.read_refused", key, peer=name, at=member.data, reason=reason)
        return REFUSED


@final
class TcpChannel:
    """An accepted connection to one incarnation; one thread uses it at a time."""

    def __init__(
        self, connection: socket.socket, *, stall_s: float, clock: Callable[[], float]
    ) -> None:
        """Take over a connected, blocking socket."""
        self._socket = connection
        self._session: TlsSession | None = None
        self._stall_s = stall_s
        self._clock = clock
        self._timeout: dict[int, float] = {}
        self._not_after = inf

    def has_expired(self) -> bool:
        """Return whether the server's certificate has expired since the handshake."""
        return self._not_after <= time.time()

    def secure(self, contexts: Contexts, member: Member, until: float) -> str:
        """Encrypt the connection, once, and check the member; return "" or the failure.

        The member's certificate and its announced nonce determine its incarnation: no other node
        can answer in its place.
        """
        self._session = contexts.open(self._socket)
        try:
            failure = self._shake_hands(self._session, until)
            if failure:
                return failure
            peer = self._session.peer()
            self._not_after = peer.not_after
            identity = contexts.admit(peer)
        except Rejected as error:
            return self._why(error.reason)
        if identity.role is not CertificateRole.NODE:
            return REFUSED_BECAUSE + wire.ROLE
        meant = incarnation_of(identity.cluster, identity.name, member.nonce)
        return "" if meant == member.incarnation else REFUSED_BECAUSE + wire.INCARNATION

    def _shake_hands(self, session: TlsSession, until: float) -> str:
        while (left := until - self._clock()) > 0:
            wait_s = min(left, self._stall_s)
            self._wait_at_most(socket.SO_RCVTIMEO, wait_s)
            begun = self._clock()
            done = session.step()
            if done:
                return ""
            if done is None:
                self._wait_at_most(socket.SO_SNDTIMEO, wait_s)
                session.flush()
            elif self._clock() - begun >= wait_s:
                return DEADLINE if wait_s == left else PEER_UNREACHABLE
        return DEADLINE

    def _why(self, reason: str) -> str:
        """Return the failure of a session that failed for this reason."""
        return GONE if reason == HANDSHAKE_LOST else REFUSED_BECAUSE + reason

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

    def check_owner(self, sharing: Sharing) -> str:
        """Return "" if a process that may serve us has answered in clear text, or the failure.

        The member may have ended, and any process may have taken its port.
        """
        try:
            ends = self._socket.getsockname()[:2], self._socket.getpeername()[:2]
        except OSError:
            return GONE
        problem = sharing.tcp_peer_problem(*ends)
        return f"{REFUSED_BECAUSE}{wire.OWNER}: {problem}" if problem else ""

    def fetch(self, read: PeerRead, seals: Seals, until: float) -> tuple[int, str]:
        """Receive pages and their seals; return how many leading ones are complete, and a failure.

        After any failure the channel is out of sync and must be closed. seals: (n,) SEAL, filled in
        place; beyond the complete pages it may hold parts of seals.
        """
        requests = wire.requests(
            read.offsets, read.lengths, read.generations, read.member.incarnation
        )
        failure = self._send(requests[0].raw, until)
        if failure:
            return 0, failure
        done = 0
        for index, request in enumerate(requests):
            ahead = ""
            # One request ahead, so that the server continues with the next one without a round
            # trip.
            if index + 1 < len(requests):
                ahead = self._send(requests[index + 1].raw, until)
            if ahead and ahead != GONE:
                return done, ahead
            # A server that is gone may have answered this request before.
            pages, failure = self._response(read, seals, request, until)
            done += pages
            failure = failure or ahead
            if failure:
                break
        # A new attempt would discard the pages that have arrived.
        return done, PEER_UNREACHABLE if done and failure == GONE else failure

    def interrupt(self) -> None:
        """Make the read of another thread over this channel fail at once."""
        with contextlib.suppress(OSError):  # The server has closed it already.
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection: afterwards nothing is written to any destination."""
        if self._session is not None:
            self._session.close()
        # A forked child may have the descriptor, too: close() alone would not end the connection.
        self.interrupt()
        self._socket.close()

    def _response(
        self, read: PeerRead, seals: Seals, request: wire.PageRequest, until: float
    ) -> tuple[int, str]:
        status = np.zeros(wire.ANSWER_BYTES, np.uint8)
        plan, complete_at = _lay_out(read, seals, request, status)
        failure = self._fill(plan, until)
        if plan.received < wire.ANSWER_BYTES:
            return 0, failure
        try:
            raw = status.tobytes()
            reason = "" if raw == wire.PAGES_FOLLOW else wire.decode_status(raw)
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
            if self._session is not None:
                if not self._session.send_at_once(raw):
                    self._wait_at_most(socket.SO_SNDTIMEO, min(left, self._stall_s))
                    self._session.flush()
                return ""
            sent = send_at_once(self._socket.fileno(), raw)
            if sent < len(raw):
                self._wait_at_most(socket.SO_SNDTIMEO, min(left, self._stall_s))
                self._socket.sendall(memoryview(raw)[sent:])
        except BlockingIOError:
            return DEADLINE if left <= self._stall_s else PEER_UNREACHABLE
        except OSError:
            # Our own deadline does not mean that the server closed.
            return DEADLINE if self._clock() >= until else GONE
        return ""

    def _fill(self, plan: Scatter, until: float) -> str:
        while plan.received < plan.total:
            left = until - self._clock()
            if left <= 0:
                return DEADLINE
            self._wait_at_most(socket.SO_RCVTIMEO, min(left, self._stall_s))
            try:
                taken = plan.receive(self._socket.fileno(), self._session, left)
            except InterruptedError:
                continue
            except BlockingIOError:
                # No byte arrived in all that time.
                return DEADLINE if left <= self._stall_s else PEER_UNREACHABLE
            except OSError as error:
                if error.errno == errno.EFAULT:
                    return INTERNAL  # A destination of the caller is not mapped memory.
                taken = 0
            if not taken:
                if self._clock() >= until:
                    return DEADLINE  # The watchdog has interrupted the read.
                if self._session is not None and self._session.failure not in {"", HANDSHAKE_LOST}:
                    return REFUSED_BECAUSE + self._session.failure
                return PEER_UNREACHABLE if plan.received else GONE
        return ""

    def _wait_at_most(self, option: int, seconds: float) -> None:
        if self._timeout.get(option) == seconds:
            return
        # Zero would mean no timeout.
        microseconds = max(int(seconds * 1e6), 1)
        value = struct.pack("@ll", *divmod(microseconds, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, option, value)
        self._timeout[option] = seconds


def _lay_out(
    read: PeerRead, seals: Seals, request: wire.PageRequest, status: npt.NDArray[np.uint8]
) -> tuple[Scatter, U64]:
    """Return the places of one response, and after how many of its bytes each page is complete."""
    first, cut, runs = request.first, request.portions, read.runs
    lengths = read.lengths[first : first + cut[-1]]
    addresses: list[U64] = [np.array([status.ctypes.data], np.uint64)]
    sizes: list[U64] = [np.array([len(status)], np.uint64)]
    seal_memory = seals.ctypes.data + first * SEAL_BYTES
    for begin, end in pairwise(cut):
        low, high = runs.starts[first + begin], runs.starts[first + end]
        address, size = seal_memory + begin * SEAL_BYTES, (end - begin) * SEAL_BYTES
        addresses += [runs.addresses[low:high], np.array([address], np.uint64)]
        sizes += [runs.sizes[low:high], np.array([size], np.uint64)]
    bytes_until = np.cumsum(lengths, dtype=np.uint64)
    portion_end = np.repeat(bytes_until[np.array(cut[1:]) - 1], np.diff(cut))
    seals_until = np.arange(1, len(lengths) + 1, dtype=np.uint64) * np.uint64(SEAL_BYTES)
    complete_at = portion_end + seals_until + np.uint64(len(status))
    return Scatter(np.concatenate(addresses), np.concatenate(sizes)), complete_at


def send_at_once(descriptor: int, raw: bytes) -> int:
    """Send what the socket accepts without blocking; return the number of bytes; raise OSError."""
    sent: int = _send(descriptor, raw, len(raw), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    if sent >= 0:
        return sent
    code = ctypes.get_errno()
    if code in {errno.EAGAIN, errno.EINTR}:
        return 0
    raise OSError(code, os.strerror(code))


@final
class Scatter:
    """The places that a stream of `total` bytes fills, in order.

    addresses, sizes: (places,) uint64. The memory must stay valid until the last `receive`;
    `received` counts the received bytes.
    """

    def __init__(self, addresses: U64, sizes: U64) -> None:
        """Lay out the places; nothing is received yet."""
        self._places: npt.NDArray[np.uint64] = np.empty((len(addresses), 2), np.uint64)
        self._places[:, 0] = addresses
        self._places[:, 1] = sizes
        self._ends: U64 = np.cumsum(sizes, dtype=np.uint64)
        self.total = int(self._ends[-1]) if len(sizes) else 0
        self.received = 0

    def receive(
        self, descriptor: int, session: TlsSession | None = None, left_s: float = 0.0
    ) -> int:
        """Receive once, and return the number of bytes; 0 means that the other side closed.

        Returns early, with the bytes so far, when the socket's SO_RCVTIMEO has passed, or with a
        session after left_s. Raises OSError: BlockingIOError if nothing arrived in that time, EINTR
        as InterruptedError, EFAULT for a place that is not mapped.
        """
        assert self.received < self.total, "nothing is left to receive"
        here = np.uint64(self.received)
        first = int(np.searchsorted(self._ends, here, side="right"))
        filled = int(here - (self._ends[first] - self._places[first, 1]))
        left = self._places[first:]
        if session is not None:
            taken: int = session.receive(left.ctypes.data, len(left), filled, left_s)
            self.received += taken
            return taken
        taken = _receive(descriptor, left.ctypes.data, len(left), filled, STEP_BYTES)
        if taken < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.received += taken
        return taken


@final
class Watchdog:
    """Interrupts every read that is not released by its deadline; one thread for all reads.

    The thread sleeps as long as all reads end in time: it wakes about once per deadline, and never
    when nothing is read.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start no thread yet. clock: the clock of the deadlines, in seconds."""
        self._clock = clock
        self._changed = threading.Condition()
        self._watched: dict[int, tuple[float, Callable[[], None]]] = {}
        self._next_token = 1
        self._wakes_at = inf
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, interrupt: Callable[[], None], until: float) -> int:
        """Call `interrupt` at `until`, from another thread, unless `release` comes first.

        interrupt: must be short and never raise. Raises RuntimeError if no thread can be started.
        """
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="peercache-deadlines", daemon=True)
                thread.start()
                self._thread = thread
            token = self._next_token
            self._next_token += 1
            self._watched[token] = (until, interrupt)
            if until < self._wakes_at:
                # Only if needed: waking it for each read would cost more than the read's own calls.
                self._wakes_at = until
                self._changed.notify()
            return token

    def release(self, token: int) -> bool:
        """Stop watching a read; return whether it ended by itself: False after an interrupt."""
        with self._changed:
            return self._watched.pop(token, None) is not None

    def close(self) -> None:
        """End the thread, after every read has been released."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(JOIN_S)

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                now = self._clock()
                due = [token for token, (until, _) in self._watched.items() if until <= now]
                for token in due:
                    # Under the lock: no read is interrupted after its `release`.
                    self._watched.pop(token)[1]()
                self._wakes_at = min((until for until, _ in self._watched.values()), default=inf)
                self._changed.wait(None if self._wakes_at == inf else self._wakes_at - now)
