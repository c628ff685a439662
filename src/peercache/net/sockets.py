"""The nng sockets of the control plane: listening, dialling, and probing an address.

One protocol everywhere, PAIR1. A node listens with one polyamorous socket on all its addresses; a
peer dials it with a socket of its own. Members answer each other over their own links; a client
does not listen, so it gets the answer over the pipe that it dialled.

Sends and receives never block, and keep the GIL (`NonblockingSocket`). A busy engine takes the GIL
whenever another thread releases it, and keeps it for a switch interval of 5 ms. pynng releases it
around every call. These calls take microseconds and never block, so they keep it: a request costs
one hand-off, in the poll, instead of three.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import pynng
import trio
from pynng._nng import ffi, lib

from peercache.config.quantities import format_address, parse_address
from peercache.errors import AddressTaken, ConfigError, DefiniteError, InvalidRequest, Rejected
from peercache.model.process import FORKED, descriptors_max
from peercache.net.peers import Address, ControlTls, Peer, control_url, peer_of
from peercache.trust.sharing import Sharing
from peercache.wire.codec import MESSAGE_BYTES_MAX

AGAIN: int = lib.NNG_EAGAIN
CLOSED: int = lib.NNG_ECLOSED


class _Socket(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32),)


class _Pipe(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32),)


# No call that keeps the GIL may block, or wait for one of nng's threads that calls into Python. So
# this class has only sends and receives with NNG_FLAG_NONBLOCK: nng finishes them in the calling
# thread, and adds and removes its pipes under a lock of their own.
def _held(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of nng that is called with the GIL held (PYFUNCTYPE)."""
    address = int(ffi.cast("uintptr_t", ffi.addressof(lib, name)))
    return ctypes.PYFUNCTYPE(result, *arguments)(address)


_nng_send = _held("nng_send", ctypes.c_int, _Socket, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_nng_recv = _held(
    "nng_recv",
    ctypes.c_int,
    _Socket,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.c_int,
)
_nng_free = _held("nng_free", None, ctypes.c_void_p, ctypes.c_size_t)
_nng_recvmsg = _held(
    "nng_recvmsg", ctypes.c_int, _Socket, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int
)
_nng_sendmsg = _held("nng_sendmsg", ctypes.c_int, _Socket, ctypes.c_void_p, ctypes.c_int)
_nng_msg_alloc = _held(
    "nng_msg_alloc", ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t
)
_nng_msg_append = _held(
    "nng_msg_append", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
)
_nng_msg_free = _held("nng_msg_free", None, ctypes.c_void_p)
_nng_msg_body = _held("nng_msg_body", ctypes.c_void_p, ctypes.c_void_p)
_nng_msg_len = _held("nng_msg_len", ctypes.c_size_t, ctypes.c_void_p)
_nng_msg_get_pipe = _held("nng_msg_get_pipe", _Pipe, ctypes.c_void_p)
_nng_msg_set_pipe = _held("nng_msg_set_pipe", None, ctypes.c_void_p, _Pipe)


class NonblockingSocket:
    """The calls on one nng socket. Not for use after its close."""

    def __init__(self, socket_id: int) -> None:
        """Use the socket of this number."""
        self._socket = _Socket(socket_id)

    def send(self, raw: bytes) -> bool:
        """Pass a message to nng; False if its buffer is full. It may never arrive."""
        verdict: int = _nng_send(self._socket, raw, len(raw), lib.NNG_FLAG_NONBLOCK)
        return verdict != AGAIN

    def receive(self) -> bytes | None:
        """Return the next message that has arrived, or None."""
        data, size = ctypes.c_void_p(), ctypes.c_size_t()
        verdict: int = _nng_recv(
            self._socket,
            ctypes.byref(data),
            ctypes.byref(size),
            lib.NNG_FLAG_ALLOC | lib.NNG_FLAG_NONBLOCK,
        )
        if verdict:
            return None
        # An empty message has no memory.
        raw = ctypes.string_at(data.value, size.value) if data.value else b""
        _nng_free(data, size)
        return raw

    def send_to(self, pipe: int, raw: bytes) -> bool:
        """Send on one pipe of a polyamorous socket; False if it is gone or full."""
        message = ctypes.c_void_p()
        verdict: int = _nng_msg_alloc(ctypes.byref(message), 0)
        if verdict:
            return False
        verdict = _nng_msg_append(message, raw, len(raw))
        if not verdict:
            _nng_msg_set_pipe(message, _Pipe(pipe))
            verdict = _nng_sendmsg(self._socket, message, lib.NNG_FLAG_NONBLOCK)
        if verdict:
            # nng frees only a message that it has accepted.
            _nng_msg_free(message)
        return not verdict

    def receive_from(self) -> tuple[int, bytes] | None:
        """Return the pipe and the bytes of the next message that has arrived, or None."""
        message = ctypes.c_void_p()
        verdict: int = _nng_recvmsg(self._socket, ctypes.byref(message), lib.NNG_FLAG_NONBLOCK)
        if verdict:
            return None
        size = _nng_msg_len(message)
        raw = ctypes.string_at(_nng_msg_body(message), size) if size else b""
        pipe: int = _nng_msg_get_pipe(message).id
        _nng_msg_free(message)
        return pipe, raw


# nng's exit hook waits for its threads. In a forked child these do not exist and it hangs forever,
# and in a parent that never closed it may wait for a peer; the end of a process ends them anyway.
# Remove when pynng offers a switch.
atexit.unregister(pynng.nng._pynng_atexit)  # noqa: SLF001 - it has no public name

_state = {"sockets_opened": False, "is_forked": False}


def _disarm_in_child() -> None:
    """Keep a forked child from using the sockets of its parent.

    nng's threads do not exist there, so closing a socket, as its finaliser does, hangs forever.
    """
    if _state["sockets_opened"]:
        _state["is_forked"] = True
        pynng.Socket.close = pynng.Socket.__del__ = _do_nothing


def _do_nothing(_socket: object) -> None:
    return


os.register_at_fork(after_in_child=_disarm_in_child)


def _disarm_finalisers() -> None:
    """Keep the end of the interpreter from closing the sockets that are still open.

    A close waits for callbacks in flight, and those wait for an interpreter that no longer runs
    other threads. The end of the process closes the sockets anyway.
    """
    pynng.Socket.__del__ = _do_nothing


# The hook that is registered first runs last: until then sockets are closed as usual.
atexit.register(_disarm_finalisers)


def _open(**options: Any) -> Any:
    if _state["is_forked"]:
        # nng would abort the process.
        raise InvalidRequest(FORKED)
    _state["sockets_opened"] = True
    # The limit applies to a received message with the protocol's header.
    try:
        return pynng.Pair1(recv_max_size=MESSAGE_BYTES_MAX + HEADER_BYTES_MAX, **options)
    except (pynng.OutOfFiles, pynng.NoMemory) as error:
        raise OutOfDescriptors(f"a socket: {error}") from error


PAIR1_GREETING = b"\0SP\0\0\x11\0\0"
"""The first bytes of each side of a PAIR1 connection."""

HEADER_BYTES_MAX = 64

SEND_BUFFER_MESSAGES = 64
"""Messages that nng accepts before it returns "try again"; a link has a bounded outbox on top."""

RECEIVE_BUFFER_MESSAGES = 256
RECONNECT_MIN_MS = 50
RECONNECT_MAX_MS = 1000
"""nng redials a lost peer with this back-off, forever: partitions heal by themselves."""

CLOSE_AFTER_S = 2.0
"""How long a closed dialer keeps its socket: longer than nng pauses between two dials."""

CLOSING_MAX = 128
CLOSING_DIVISOR = 16
"""Sockets that wait for it: one for 16 files that the process may open. Each has 3 to 5 open files,
so together they take a quarter of them. Beyond that the eldest is closed."""

NEVER_MS = 2**30 - 1
"""Twelve days. nng doubles this number, and pauses for a random part of it."""

_OWN_HOST = {"::": "::1", "0.0.0.0": "127.0.0.1"}  # noqa: S104 - where to reach what is bound

TOUCH_S = 0.5
"""How long a connection to a listener of our own may take."""

PipeFact = Callable[[int], None]
"""Called with a pipe's number on a thread of nng: it must pass it on and return."""


PROBE_S = 0.5
"""How long a starting node waits for the answer of a listener at its home address."""


NO_DESCRIPTOR = -1


class UnusableAddress(DefiniteError):
    """nng cannot dial the address that a peer has announced."""


class OutOfDescriptors(UnusableAddress):
    """Too many files are open for another socket; a later attempt may succeed."""


class Listener:
    """A polyamorous PAIR1 socket on a trio loop: receives from all pipes, answers on each."""

    def __init__(self, *, on_removed: PipeFact, tls: ControlTls | None = None) -> None:
        """Call `on_removed` (on a thread of nng) for each pipe that ends. tls: for tcp
        addresses.
        """
        self._socket = _open(
            polyamorous=True,
            send_buffer_size=SEND_BUFFER_MESSAGES,
            recv_buffer_size=RECEIVE_BUFFER_MESSAGES,
        )
        self._tls = tls
        self._tcp_listeners: list[tuple[Any, str, int]] = []
        self._open_pipes: dict[int, Peer] = {}
        # nng keeps a pipe that is closed between its first callback and its start in the list of
        # the socket, and aborts the process when it finds it there after its memory was freed.
        self._started_pipes: set[int] = set()
        self._ending_pipes: set[int] = set()
        self._on_removed = on_removed
        # Before, not after: messages may arrive in between.
        self._socket.add_pre_pipe_connect_cb(self._pipe_added)
        self._socket.add_post_pipe_connect_cb(self._pipe_settled)
        self._socket.add_post_pipe_remove_cb(self._pipe_removed)
        self._receive_fd: int = self._socket.recv_fd
        self._nonblocking = NonblockingSocket(self._socket.socket.id)
        self._is_closed = False

    def _pipe_added(self, pipe: Any) -> None:
        peer = peer_of(pipe)
        if peer is None:
            # Its end was reported before its beginning, and pynng dropped that report.
            self._socket._pipes.pop(pipe.id, None)  # noqa: SLF001 - it has no public name
        else:
            self._open_pipes[pipe.id] = peer

    def _pipe_settled(self, pipe: Any) -> None:
        if pipe.id not in self._open_pipes:
            # pynng may report a pipe after its end, and has just added it again, permanently.
            self._socket._pipes.pop(pipe.id, None)  # noqa: SLF001 - it has no public name
            return
        self._started_pipes.add(pipe.id)
        if pipe.id in self._ending_pipes:
            _end(pipe)

    def _pipe_removed(self, pipe: Any) -> None:
        number = pipe.id
        # This comes first, so that the end of a pipe that is found open is reported later.
        self._open_pipes.pop(number, None)
        self._started_pipes.discard(number)
        self._ending_pipes.discard(number)
        self._on_removed(number)

    def listen_tcp(self, name: str, host: str, port: int) -> int:
        """Listen on one TCP address; return the port. AddressTaken names the setting `name`."""
        address = format_address(host, port)
        try:
            url = control_url(address, self._tls)
            if self._tls is not None:
                # A listener uses the socket's TLS settings; ipc and inproc ignore them.
                self._socket.tls_config = self._tls.server
            listener = self._socket.listen(url)
        except pynng.AddressInUse as error:
            raise AddressTaken(name, address) from error
        except pynng.NNGException as error:
            raise ConfigError(name, f"cannot listen on {address}: {error}") from error
        # nng keeps port numbers in network byte order.
        bound: int = int.from_bytes(listener.local_address.port.to_bytes(2, "little"), "big")
        self._tcp_listeners.append((listener, host, bound))
        return port or bound

    def renew_tls(self) -> None:
        """Use the current certificates of `tls` for new connections.

        Open connections stay. nng already waits for the next connection with the old certificates,
        so we make that one ourselves.
        """
        assert self._tls is not None, "there are no certificates"
        for listener, host, port in self._tcp_listeners:
            listener.tls_config = self._tls.server
            touch(_OWN_HOST.get(host, host), port)

    def tcp_ports(self) -> list[int]:
        """Return the ports of the tcp addresses that it listens on."""
        return [port for _, _, port in self._tcp_listeners]

    def remotes(self) -> list[Address]:
        """Return the remote addresses of the open tcp connections."""
        # A copy: threads of nng add and remove connections.
        return [peer.remote for peer in list(self._open_pipes.values()) if peer.remote[0]]

    def peer(self, pipe: int) -> Peer | None:
        """Return the peer of a connection; None once it has ended."""
        return self._open_pipes.get(pipe)

    def listen_local(self, url: str) -> None:
        """Listen on ipc://PATH or inproc://NAME; raise AddressTaken or ConfigError."""
        try:
            self._socket.listen(url)
        except pynng.AddressInUse as error:
            raise AddressTaken("home", url) from error
        except pynng.NNGException as error:
            raise ConfigError("home", f"cannot listen on {url}: {error}") from error

    async def receive(self) -> tuple[int, bytes]:
        """Return the next message and the number of its pipe."""
        while True:
            taken = self.receive_now()
            if taken is not None:
                return taken
            await trio.lowlevel.wait_readable(self._receive_fd)

    def receive_now(self) -> tuple[int, bytes] | None:
        """Return the pipe and the bytes of a message that has arrived already, or None."""
        if self._is_closed:
            raise pynng.Closed("the listener is closed", CLOSED)
        return self._nonblocking.receive_from()

    def is_open(self, pipe: int) -> bool:
        """Return whether a connection is still open; `on_removed` is called after its end."""
        return pipe in self._open_pipes

    def reply(self, pipe: int, raw: bytes) -> bool:
        """Send on a pipe; False if it is gone or full. nng may still drop it silently."""
        is_there = pipe in self._open_pipes and not self._is_closed
        return is_there and self._nonblocking.send_to(pipe, raw)

    def disconnect(self, pipe: int) -> None:
        """End one pipe, or let it end as soon as it has started."""
        found = self._socket._pipes.get(pipe)  # noqa: SLF001 - `pipes` copies them all
        if found is None:
            return
        # Either this thread or `_pipe_settled` finds the pipe in both sets.
        self._ending_pipes.add(pipe)
        if pipe in self._started_pipes:
            _end(found)

    def pipes(self) -> list[int]:
        """Return the open connections, oldest first."""
        return list(self._open_pipes)

    def close(self) -> None:
        """Stop listening and end every pipe."""
        self._is_closed = True
        self._socket.close()


@final
class _Closer:
    """Closes sockets when they have stopped dialling, on a thread that ends after the last one.

    nng 1.9 to 1.11 may free a dialer before the callback of its dial has run, if it is closed at
    the moment in which the dial ends; then nng aborts the process (nng's issue 2208,
    docs/adr/0046). A dialer is closed when its peer does not answer, so the two moments often
    coincide.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[float, Any]] = deque()
        self._is_running = False

    def close_later(self, socket: Any) -> None:
        """Close a socket that will not dial again, CLOSE_AFTER_S from now."""
        eldest = None
        with self._lock:
            self._waiting.append((time.monotonic() + CLOSE_AFTER_S, socket))
            if len(self._waiting) > min(CLOSING_MAX, descriptors_max() / CLOSING_DIVISOR):
                eldest = self._waiting.popleft()[1]
            is_first, self._is_running = not self._is_running, True
        if is_first:
            self._start()
        if eldest is not None:
            eldest.close()

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name="peercache-close", daemon=True).start()
        except RuntimeError:
            # No thread can be started now; the next close tries again.
            self._is_running = False

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                due, socket = self._waiting.popleft()
            time.sleep(max(0.0, due - time.monotonic()))
            socket.close()


_closer = _Closer()


class Dialer:
    """A PAIR1 socket that dials one address, and redials it when it is lost. Never blocks."""

    def __init__(
        self,
        url: str,
        *,
        on_connected: Callable[[], None] | None = None,
        on_removed: Callable[[], None] | None = None,
        tls: ControlTls | None = None,
        accepts: Callable[[Peer], bool] | None = None,
        waits_to_send: bool = True,
    ) -> None:
        """Start dialling; the callbacks are called on threads of nng, and not after `close`.

        tls:     for tls+tcp addresses.
        accepts: verifies the process that has answered, before anything is sent to it.
        waits_to_send: whether `send_fd` is available; it takes two open files.
        Raises UnusableAddress, or OutOfDescriptors if a later attempt may succeed.
        """
        self._socket = _open(
            send_buffer_size=SEND_BUFFER_MESSAGES,
            recv_buffer_size=RECEIVE_BUFFER_MESSAGES,
            reconnect_time_min=RECONNECT_MIN_MS,
            reconnect_time_max=RECONNECT_MAX_MS,
        )
        if tls is not None:
            self._socket.tls_config = tls.client
        self._is_closed = False

        def judge(pipe: Any) -> None:
            peer = None if self._is_closed else peer_of(pipe)
            if peer is None or not (accepts is None or accepts(peer)):
                _end(pipe)

        self._socket.add_pre_pipe_connect_cb(judge)
        if on_connected is not None:
            self._socket.add_post_pipe_connect_cb(self._unless_closed(on_connected))
        if on_removed is not None:
            self._socket.add_post_pipe_remove_cb(self._unless_closed(on_removed))
        try:
            # nng opens each descriptor on its first use.
            self.receive_fd: int = self._socket.recv_fd
            self.send_fd: int = self._socket.send_fd if waits_to_send else NO_DESCRIPTOR
            nonblocking = NonblockingSocket(self._socket.socket.id)
            self.send, self.receive = nonblocking.send, nonblocking.receive
            self._dialer = self._socket.dial(url, block=False)
        except (pynng.OutOfFiles, pynng.NoMemory) as error:
            self._socket.close()
            raise OutOfDescriptors(f"{url}: {error}") from error
        except pynng.NNGException as error:
            self._socket.close()
            raise UnusableAddress(f"{url}: {error}") from error

    def _unless_closed(self, fact: Callable[[], None]) -> Callable[[Any], None]:
        def report(_pipe: object) -> None:
            if not self._is_closed:
                fact()

        return report

    def renew_tls(self, tls: ControlTls) -> None:
        """Use new certificates from the connection after the next on; the open one stays."""
        self._dialer.tls_config = tls.client

    def disconnect(self) -> None:
        """End the open connection; nng dials again."""
        for pipe in self._socket.pipes:
            _end(pipe)

    def close(self) -> None:
        """End the connection, and dial no more. Its descriptors are closed CLOSE_AFTER_S later."""
        if self._is_closed or _state["is_forked"]:
            return
        self._is_closed = True
        # A pause that has begun is shorter, but its dial is the last one.
        self._dialer.reconnect_time_max = NEVER_MS
        self._dialer.reconnect_time_min = NEVER_MS
        self.disconnect()
        _closer.close_later(self._socket)


def _end(pipe: Any) -> None:
    """End a pipe, which may have ended already: pynng is notified later than nng."""
    with suppress(pynng.NoEntry, pynng.Closed):
        pipe.close()


class Alarm:
    """Ends a poll of the thread that created it, from another thread."""

    def __init__(self) -> None:
        """Take a descriptor; without one the poll ends by its own timeout."""
        self._has_rung = False
        try:
            self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            self.fd = -1

    def ring(self) -> None:
        """End the poll; may be called from any thread, also when the poll is over."""
        self._has_rung = True
        if self.fd >= 0:
            with suppress(BlockingIOError):
                os.eventfd_write(self.fd, 1)

    def reset(self) -> None:
        """Prepare the next poll."""
        if self._has_rung:
            self._has_rung = False
            with suppress(BlockingIOError):
                os.eventfd_read(self.fd)

    def __del__(self) -> None:
        """Release the descriptor, when its thread ends."""
        if self.fd >= 0:
            os.close(self.fd)


_of_thread = threading.local()


def alarm_of_thread() -> Alarm:
    """Return the alarm of the calling thread."""
    alarm: Alarm | None = getattr(_of_thread, "alarm", None)
    if alarm is None or alarm.fd < 0:
        alarm = _of_thread.alarm = Alarm()
    return alarm


def local_path(url: str) -> str:
    """Return the path of an ipc:// address."""
    return url.removeprefix("ipc://")


def remove_dead_socket(url: str, sharing: Sharing) -> None:
    """Remove the socket file of a dead listener at an ipc address, if it is of a sharing uid.

    Anything else at that path is left unchanged: raises AddressTaken if a node listens, and
    ConfigError if another program does, or if it is not a socket.
    """
    path = Path(local_path(url))
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    # Only a socket is removed: the path may be mistyped, and name a file of the user.
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError("home", f"{path} is there already, and no socket")
    try:
        sharing.check_uid(f"the socket {path}", found.st_uid)
    except Rejected as refusal:
        raise ConfigError("home", refusal.detail) from refusal
    try:
        is_node = _greeted(socket.AF_UNIX, os.fspath(path), PROBE_S)
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
        return
    except FileNotFoundError:
        return
    except (TimeoutError, BlockingIOError):
        is_node = True  # A paused node keeps its clients.
    except OSError:
        is_node = False
    if is_node:
        raise AddressTaken("home", url)
    raise ConfigError("home", f"another program listens at {path}: choose a path of its own")


def reached(url: str, timeout_s: float) -> bool | None:
    """Return whether nng answers at an address: True, False (nothing listens), None (unknown).

    nng dials in the background and does not report a refusal; the kernel does. The protocol's first
    bytes are exchanged before we close: otherwise the peer's nng would refuse all other connections
    for 100 ms. With TLS, which would need a handshake, the connection is only made, and reset. A
    host name is not resolved: that may exceed every deadline.
    """
    try:
        if url.startswith("tls+tcp://"):
            host, port = parse_address(url[10:])
            _touch(*_numeric(host, port), timeout_s)
            return True
        if url.startswith("tcp://"):
            host, port = parse_address(url[6:])
            return _greeted(*_numeric(host, port), timeout_s)
        if url.startswith("ipc://"):
            return _greeted(socket.AF_UNIX, local_path(url), timeout_s)
    except (TimeoutError, BlockingIOError, socket.gaierror):
        return None
    except (OSError, ValueError):
        return False
    return None


def _numeric(host: str, port: int) -> tuple[int, Any]:
    flags = socket.AI_NUMERICHOST
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return found[0][0], found[0][4]


def touch(host: str, port: int) -> None:
    """Connect to a listener of our own and close: then it accepts its next connection."""
    with suppress(OSError):
        _touch(*_numeric(host, port), TOUCH_S)


def _touch(family: int, address: Any, timeout_s: float) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(timeout_s)
        # After a half handshake, nng accepts the next connection at once only if this one is reset.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        probe.connect(address)


def _greeted(family: int, address: Any, timeout_s: float) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(timeout_s)
        probe.connect(address)
        probe.sendall(PAIR1_GREETING)
        return probe.recv(len(PAIR1_GREETING)) == PAIR1_GREETING
