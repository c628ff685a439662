"""Owns the threads that serve pages: each runs the compiled loop of `_serving.c`.

A thread enters C once and stays there. It does not take the GIL to serve requests, so a thread that
holds the GIL does not delay it, and it delays no other thread. The node's loop hands admitted
connections over, and is notified of the end of each conversation.
"""

from __future__ import annotations

import atexit
import ctypes
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt
import trio

from peercache.fabric.tcp import wire
from peercache.fabric.tcp.sockets import Line
from peercache.fabric.tcp.tls import TlsPeer, TlsSession
from peercache.installation.library import function
from peercache.model.process import ForkGuard
from peercache.model.seal import Seals
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics

STOP_S = 5.0
"""How long a stop waits for the thread. The thread stops within one step of each connection, and
then needs the GIL once, which a busy engine releases every 5 ms."""
COUNT_EVERY_S = 1.0
"""How often the metric is updated with the thread's byte count, and expired certificates are
searched."""

HELD_BYTES_MAX = 256 * 2**20
"""The most bytes that requests and responses in progress hold, on all threads: with TLS about 480
responses, each with half a MiB of ciphertext that waits for its socket. Further requests wait their
turn."""
OWNERS_AT_ONCE = 4
"""Each certificate may use at most one of this many parts of that: its slow readers do not delay
those of others."""

_ENDS = ("", wire.MALFORMED, wire.INCARNATION, wire.BOUNDS)
"""The ends of a conversation, by the numbers of `enum end`."""

_Usable = ctypes.CFUNCTYPE(ctypes.c_uint64)
_Between = ctypes.CFUNCTYPE(None)

_log = get_logger(actor="tcp_server")


class PageSource(Protocol):
    """Published memory, as the server needs it; implemented by PublishedSegment."""

    @property
    def pages(self) -> npt.NDArray[np.uint8]:
        """Return the page memory, (bytes,) uint8."""

    @property
    def seals(self) -> Seals:
        """Return the seals, one for each granule of the page memory."""

    @property
    def usable_bytes(self) -> int:
        """Return how much of the page memory, from its start, may be accessed now."""


class _Settings(ctypes.Structure):
    _fields_ = (
        ("pages", ctypes.c_void_p),
        ("seals", ctypes.c_void_p),
        ("granule", ctypes.c_uint64),
        ("incarnation", ctypes.c_uint64),
        ("count_max", ctypes.c_uint64),
        ("request_bytes_max", ctypes.c_uint64),
        ("portion_bytes_max", ctypes.c_uint64),
        ("portion_pages_max", ctypes.c_uint64),
        ("held_max", ctypes.c_uint64),
        ("owner_held_max", ctypes.c_uint64),
        ("usable", _Usable),
        ("between", _Between),
        ("before_send", _Between),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "open": (ctypes.c_void_p, ctypes.POINTER(_Settings), ctypes.POINTER(ctypes.c_int)),
    "take": (
        ctypes.c_int,
        *(ctypes.c_void_p, ctypes.c_int, *[ctypes.c_uint64] * 5),
        *(ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64), ctypes.c_uint64),
    ),
    "close_idle": (None, ctypes.c_void_p),
    "close_named": (None, ctypes.c_void_p, ctypes.c_uint64),
    "ended": (
        ctypes.c_int,
        ctypes.c_void_p,
        *map(ctypes.POINTER, (ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)),
    ),
    "served": (ctypes.c_uint64, ctypes.c_void_p),
    "stop": (None, ctypes.c_void_p),
    "close": (None, ctypes.c_void_p),
    "run": (None, ctypes.c_void_p),
}
"""The loop's functions. Only `run` releases the GIL; the others take microseconds."""

_functions = {
    name: function(f"peercache_pages_{name}", *signature, keeps_gil=name != "run")
    for name, signature in _SIGNATURES.items()
}


@final
class ServingThread:
    """Serves admitted connections on a thread that runs no Python."""

    def __init__(
        self,
        source: PageSource,
        *,
        granule: int,
        incarnation: int,
        metrics: Metrics,
        held_max: int = HELD_BYTES_MAX,
        between_bytes_and_words: Callable[[], None] | None = None,
        before_send: Callable[[], None] | None = None,
    ) -> None:
        """Prepare the settings; `run` starts the thread.

        held_max: bytes that requests and unsent responses may hold.
        between_bytes_and_words, before_send: for tests that let the owner act at the worst moments.
        """
        self._call = _functions
        self._metrics = metrics
        # The thread reads all of this; this object keeps it alive.
        self._memory = source.pages, source.seals
        self._settings = _Settings(
            pages=source.pages.ctypes.data,
            seals=source.seals.ctypes.data,
            granule=granule,
            incarnation=incarnation,
            count_max=wire.COUNT_MAX,
            request_bytes_max=wire.REQUEST_BYTES_MAX,
            portion_bytes_max=wire.PORTION_BYTES_MAX,
            portion_pages_max=wire.PORTION_PAGES_MAX,
            held_max=held_max,
            owner_held_max=held_max // OWNERS_AT_ONCE,
            usable=_Usable(lambda: source.usable_bytes),
            between=_Between(between_bytes_and_words) if between_bytes_and_words else _Between(),
            before_send=_Between(before_send) if before_send else _Between(),
        )
        self._server: int | None = None
        self._news = -1
        self._counted = 0
        self._next_name = 1
        self._conversations: dict[int, _Conversation] = {}
        self._serves = False
        self._fork = ForkGuard()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; every connection is closed when this returns.

        Raises OSError without descriptors and RuntimeError without a thread, and releases
        everything.
        """
        self._start()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_ends)
                task_status.started()
                while True:
                    await trio.sleep(COUNT_EVERY_S)
                    self._count()
                    self.close_unless(lambda owner: time.time() < owner.not_after)
        finally:
            # A connection that was accepted in this turn of the loop may still arrive: refuse it.
            self._serves = False
            atexit.unregister(self._stop)
            if self._stop():
                self._handle_ends()
                self._count()
                self._call["close"](self._server)
                self._server = None

    def close_idle(self) -> None:
        """Have the connection closed that has been idle for longest, if there is one."""
        if self._serves:
            self._call["close_idle"](self._server)

    def close_unless(self, stays: Callable[[TlsPeer], bool]) -> None:
        """Have the connections closed with certificates that are no longer valid."""
        for name, conversation in self._conversations.items():
            owner = conversation.owner
            if self._serves and owner is not None and not stays(owner):
                self._call["close_named"](self._server, name)

    async def serve(
        self,
        line: Line,
        limits_s: tuple[float, float, float],
        spaces: tuple[int, ...] = (),
        owner: TlsPeer | None = None,
    ) -> tuple[Line | None, str]:
        """Answer requests until the client closes the connection or is refused.

        Returns the open line of a refused client, so that the refusal can be sent, and one of
        wire.REASONS; None and "" if the connection just ended.

        limits_s: timeouts between two requests, from a request's first byte to its last, and
        without a byte of the response accepted. spaces: those that the client may read; none: all.
        owner: its certificate. The thread owns the line's connection and session from now on and
        closes them, except those of a refused client.
        """
        name = self._next_name
        self._next_name += 1
        conversation = self._conversations[name] = _Conversation(owner)
        try:
            if not self._serves or not self._take(line, name, limits_s, spaces, owner):
                return None, ""  # The caller still owns the connection, and closes it.
            await conversation.over.wait()
            return conversation.line, conversation.refused
        finally:
            del self._conversations[name]

    def _take(
        self,
        line: Line,
        name: int,
        limits_s: tuple[float, ...],
        spaces: tuple[int, ...],
        owner: TlsPeer | None,
    ) -> bool:
        session = line.session
        handle = None if session is None else session.detach()
        taken = self._call["take"](
            self._server,
            line.connection.fileno(),
            name,
            0 if owner is None else hash(owner.serial) % 2**64 or 1,
            *(int(seconds * 1e9) for seconds in limits_s),
            handle,
            (ctypes.c_uint64 * len(spaces))(*spaces),
            len(spaces),
        )
        if taken:
            line.connection.detach()
        elif handle is not None:
            line.session = TlsSession(handle)
        return bool(taken)

    def _start(self) -> None:
        news = ctypes.c_int()
        self._server = self._call["open"](ctypes.byref(self._settings), ctypes.byref(news))
        if not self._server:
            raise OSError(ctypes.get_errno(), "the page server cannot start")
        self._news = news.value
        self._thread = threading.Thread(
            target=self._call["run"], args=(self._server,), name="peercache-pages", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            self._call["close"](self._server)
            raise
        # If the process exits without a cancel, the thread must leave C before the interpreter
        # ends.
        atexit.register(self._stop)
        self._serves = True

    async def _watch_ends(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._news)
            self._handle_ends()

    def _handle_ends(self) -> None:
        name, file, how, tls = ctypes.c_uint64(), ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        into = (*map(ctypes.byref, (name, file, how, tls)),)
        while self._call["ended"](self._server, *into):
            line = None
            if file.value >= 0:
                connection = socket.socket(fileno=file.value)
                # A default socket timeout of the process would make it block, and the loop with it.
                connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
                line = Line(connection, TlsSession(tls.value) if tls.value else None)
            conversation = self._conversations.get(name.value)
            if conversation is not None:
                conversation.line, conversation.refused = line, _ENDS[how.value]
                conversation.over.set()
            elif line is not None:
                line.close()

    def _count(self) -> None:
        served = self._call["served"](self._server)
        self._metrics.tcp_bytes_served.inc(served - self._counted)
        self._counted = served

    def _stop(self) -> bool:
        """End the thread; return whether it has ended."""
        if self._fork.is_child:
            # A forked child has no such thread, and its copy of the lock may be held forever.
            return False
        if self._server is None:
            # Python runs exit hooks from a copy of their list: an unregistered hook may still run.
            return False
        self._call["stop"](self._server)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            # The thread still reads this object's memory: a leak is better than a crash.
            _log.error("tcp.stop_overdue", after_s=STOP_S)
            _never_freed.append(self)
            return False
        return True


class _Conversation:
    """A conversation in progress, and how it ended."""

    def __init__(self, owner: TlsPeer | None) -> None:
        self.owner = owner
        self.over = trio.Event()
        self.line: Line | None = None
        self.refused = ""


_never_freed: list[ServingThread] = []
