"""Serving by the compiled loop, where it is there: `_serving.c`, on a thread of its own.

That thread enters C once and stays: it takes Python's lock neither for a request nor for a byte, so
it waits for nobody who holds it and takes it from nobody. The node's loop hands admitted
connections over, and hears how each conversation ended.
"""

from __future__ import annotations

import atexit
import ctypes
import socket
import threading
from collections.abc import Callable
from typing import Any, final

import trio

from peercache.fabric.tcp import wire
from peercache.fabric.tcp.native import HAS_COMPILED, compiled
from peercache.fabric.tcp.serving import End, PageSource, Patience
from peercache.model.fork_guard import ForkGuard
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics

STOP_S = 5.0
"""What a stop waits for the thread. It is on its way out within one step of each connection, and
then wants Python's lock once, which a busy engine lets go every 5 ms."""
COUNT_EVERY_S = 1.0
"""How often the bytes served are brought to the metric: nothing tells us of them."""

_ENDS = ("", wire.MALFORMED, wire.INCARNATION, wire.BOUNDS)
"""How a conversation ends, by the numbers of `enum end`."""

_Usable = ctypes.CFUNCTYPE(ctypes.c_uint64)
_Between = ctypes.CFUNCTYPE(None)

_log = get_logger(actor="tcp_server")


class _Settings(ctypes.Structure):
    _fields_ = (
        ("pages", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        ("granule", ctypes.c_uint64),
        ("incarnation", ctypes.c_uint64),
        ("count_max", ctypes.c_uint64),
        ("request_bytes_max", ctypes.c_uint64),
        ("portion_bytes_max", ctypes.c_uint64),
        ("portion_pages_max", ctypes.c_uint64),
        ("usable", _Usable),
        ("between", _Between),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "open": (ctypes.c_void_p, ctypes.POINTER(_Settings), ctypes.POINTER(ctypes.c_int)),
    "take": (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, *[ctypes.c_uint64] * 4),
    "ended": (
        ctypes.c_int,
        ctypes.c_void_p,
        *map(ctypes.POINTER, (ctypes.c_uint64, ctypes.c_int, ctypes.c_int)),
    ),
    "served": (ctypes.c_uint64, ctypes.c_void_p),
    "stop": (None, ctypes.c_void_p),
    "close": (None, ctypes.c_void_p),
    "run": (None, ctypes.c_void_p),
}
"""The loop's functions. Only `run` is worth letting the GIL go; the others take microseconds."""

_functions = {
    name: compiled(f"peercache_pages_{name}", *signature, keeps_gil=name != "run")
    for name, signature in _SIGNATURES.items()
}


@final
class CompiledPages:
    """Serves admitted connections on a thread that runs no Python."""

    def __init__(
        self,
        source: PageSource,
        *,
        granule: int,
        incarnation: int,
        metrics: Metrics,
        between_bytes_and_words: Callable[[], None] | None,
    ) -> None:
        """Take nothing yet."""
        assert HAS_COMPILED, "nothing was compiled here"
        self._call = _functions
        self._metrics = metrics
        # What the thread reads is kept as long as we are.
        self._source = source
        self._memory = source.pages, source.words
        self._settings = _Settings(
            pages=source.pages.ctypes.data,
            words=source.words.ctypes.data,
            granule=granule,
            incarnation=incarnation,
            count_max=wire.COUNT_MAX,
            request_bytes_max=wire.REQUEST_BYTES_MAX,
            portion_bytes_max=wire.PORTION_BYTES_MAX,
            portion_pages_max=wire.PORTION_PAGES_MAX,
            usable=_Usable(lambda: source.usable_bytes),
            between=_Between(between_bytes_and_words) if between_bytes_and_words else _Between(),
        )
        self._server: int | None = None
        self._news = -1
        self._counted = 0
        self._next_name = 1
        self._talking: dict[int, _Talk] = {}
        self._serves = False
        self._fork = ForkGuard()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; every connection is closed when this returns.

        Raises OSError without descriptors and RuntimeError without a thread, and keeps nothing.
        """
        self._start()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._hear)
                task_status.started()
                while True:
                    await trio.sleep(COUNT_EVERY_S)
                    self._count()
        finally:
            # Who was accepted in this very turn of the loop may yet ask: the server goes now.
            self._serves = False
            atexit.unregister(self._stop)
            if self._stop():
                self._hear_all()
                self._count()
                self._call["close"](self._server)
                self._server = None

    async def serve(self, connection: socket.socket, patience: Patience) -> End:
        """Answer requests until the client ends it or is refused; the connection is ours now."""
        name = self._next_name
        self._next_name += 1
        limits = (patience.idle_s, patience.request_s, patience.stall_s)
        talk = self._talking[name] = _Talk()
        try:
            file = connection.fileno()
            nanoseconds = (int(seconds * 1e9) for seconds in limits)
            if not self._serves or not self._call["take"](self._server, file, name, *nanoseconds):
                return End(None, "")  # Whoever accepted it closes it.
            connection.detach()
            await talk.over.wait()
            return End(talk.connection, talk.refused)
        finally:
            del self._talking[name]

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
        # An exit that nobody announced: the thread is out of C before the interpreter goes.
        atexit.register(self._stop)
        self._serves = True

    async def _hear(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._news)
            self._hear_all()

    def _hear_all(self) -> None:
        name, file, how = ctypes.c_uint64(), ctypes.c_int(), ctypes.c_int()
        into = (ctypes.byref(name), ctypes.byref(file), ctypes.byref(how))
        while self._call["ended"](self._server, *into):
            connection = socket.socket(fileno=file.value) if file.value >= 0 else None
            if connection is not None:
                # A default time-out of the process would make it wait, and the loop with it.
                connection.setblocking(False)  # noqa: FBT003 - the standard library's signature
            talk = self._talking.get(name.value)
            if talk is not None:
                talk.connection, talk.refused = connection, _ENDS[how.value]
                talk.over.set()
            elif connection is not None:
                connection.close()

    def _count(self) -> None:
        served = self._call["served"](self._server)
        self._metrics.tcp_bytes_served.inc(served - self._counted)
        self._counted = served

    def _stop(self) -> bool:
        """End the thread; return whether it has ended."""
        if self._fork.is_child:
            # A forked child has no such thread, and its copy of the lock may be held for ever.
            return False
        if self._server is None:
            # Exit hooks run from a copy of their list: one that was taken back may yet run.
            return False
        self._call["stop"](self._server)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            # What it reads must stay: better never freed than freed under it.
            _log.error("tcp.stop_overdue", after_s=STOP_S)
            _kept.append(self)
            return False
        return True


class _Talk:
    """A conversation in progress, and how it ended."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.connection: socket.socket | None = None
        self.refused = ""


_kept: list[CompiledPages] = []
