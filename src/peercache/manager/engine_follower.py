"""Follows the KV events of engines: one thread, a ZMQ subscription for each engine.

Owns    the sockets. The publisher binds; ZMQ reconnects after a lost connection.
Keeps   an engine is unknown after its connection ends: blocks of a dead engine are not reported. A
        host that stops answering is noticed by ZMQ's own heartbeats.
Limits  ENGINES_MAX engines, UNREAD_MAX waiting batches, REPLAY_S for a replay.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, final

from peercache.config.entries import EngineEvents
from peercache.errors import ConfigError
from peercache.manager.gpu_blocks import GpuBlocks
from peercache.observability.log import get_logger

if TYPE_CHECKING:
    from peercache.manager.engine_stream import Batch, EngineStream

UNREAD_MAX: Final = 10_000
"""Waiting batches of one engine; further ones are dropped, which is noticed as a gap."""

BATCH_BYTES_MAX: Final = 16 * 2**20

HEARTBEAT_MS: Final = 1_000
SILENT_MS: Final = 3_000

REPLAY_S: Final = 2.0
REPLAYED_MAX: Final = 100_000
"""Batches of one replay: engines keep 10,000."""

CLOSE_S: Final = 5.0

_END = 2**64 - 1
"""The number that marks the end of a replay."""


@final
class EngineFollower:
    """Follows engines until `close`."""

    def __init__(self, engines: Sequence[EngineEvents], blocks: GpuBlocks) -> None:
        """Start to follow. ConfigError: the libraries are not installed."""
        try:
            import zmq  # noqa: PLC0415 - of the extra `events`, and only where engines are followed
            import zmq.utils.monitor as monitoring  # noqa: PLC0415

            from peercache.manager.engine_stream import EngineStream  # noqa: PLC0415
        except ModuleNotFoundError as error:
            if error.name not in ("zmq", "msgspec"):
                raise
            problem = f"requires {error.name}: pip install msgspec pyzmq"
            raise ConfigError("engine_events", problem) from error
        self._zmq: Any = zmq
        self._receive_event = monitoring.recv_monitor_message
        self._log = get_logger()
        self._blocks = blocks
        self._context = zmq.Context()
        self._wake = self._context.socket(zmq.PAIR)
        self._wake.bind("inproc://close")
        self._poller = zmq.Poller()
        self._followed: list[tuple[EngineEvents, Any, Any, EngineStream]] = []
        for engine in engines:
            self._subscribe(engine, EngineStream)
        self._thread: Thread | None = Thread(
            target=self._run, name="peercache-engines", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread and the sockets. May be repeated."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._wake.send(b"")
            thread.join(CLOSE_S)
            # It closes what a thread that did not end has left open: `term` would wait for it.
            self._context.destroy(0)

    def _subscribe(self, engine: EngineEvents, kind: type[EngineStream]) -> None:
        zmq = self._zmq
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RCVHWM, UNREAD_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, SILENT_MS)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        replay = partial(self._replay, engine) if engine.replay else None
        stream = kind(engine.name, self._blocks, replay=replay)
        self._followed.append((engine, socket, monitor, stream))
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        socket.connect(engine.endpoint)

    def _run(self) -> None:
        zmq = self._zmq
        closing = self._context.socket(zmq.PAIR)
        closing.connect("inproc://close")
        self._poller.register(closing, zmq.POLLIN)
        try:
            while True:
                readable = dict(self._poller.poll())
                if closing in readable:
                    return
                for followed in self._followed:
                    if followed[1] in readable or followed[2] in readable:
                        self._turn(*followed)
        finally:
            closing.close(0)
            for _, socket, monitor, _ in self._followed:
                socket.disable_monitor()
                monitor.close(0)
                socket.close(0)

    def _turn(self, engine: EngineEvents, socket: Any, monitor: Any, stream: EngineStream) -> None:
        """Handle what an engine has sent: first the state of its connection, then its events."""
        was_known = self._blocks.is_known(engine.name)
        try:
            while monitor.poll(0):
                event = self._receive_event(monitor)["event"]
                if event == self._zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    stream.connected()
                else:
                    stream.disconnected()
            if socket.poll(0):
                frames = socket.recv_multipart()
                if len(frames) == 3 and len(frames[1]) == 8:
                    stream.take(int.from_bytes(frames[1], "big"), frames[2])
        except Exception:
            # An error in one engine's events must not affect the others, and with a dead thread the
            # last state would be reported forever.
            self._log.exception("manager.engine_failed", engine=engine.name)
            self._blocks.lose(engine.name, "an event of it met a bug of PeerCache: see the log")
        why = self._blocks.why(engine.name)
        if was_known and why:
            self._log.warning(
                "manager.engine_lost", engine=engine.name, why=self._blocks.why(engine.name)
            )
        elif not why and not was_known:
            self._log.info("manager.engine_followed", engine=engine.name, at=engine.endpoint)

    def _replay(self, engine: EngineEvents, first: int) -> list[Batch] | None:
        """Return the batches from a number on that an engine still has; None without an answer."""
        zmq = self._zmq
        found: list[Batch] = []
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
            socket.connect(engine.replay)
            socket.send_multipart([b"", first.to_bytes(8, "big")])
            until = time.monotonic() + REPLAY_S
            while len(found) <= REPLAYED_MAX:
                left_ms = int((until - time.monotonic()) * 1000)
                if left_ms <= 0 or not socket.poll(left_ms):
                    return None
                frames = socket.recv_multipart()
                if len(frames) < 2 or len(frames[-2]) != 8:
                    return None
                number = int.from_bytes(frames[-2], "big")
                if number == _END:
                    return found
                found.append((number, frames[-1]))
        return None
