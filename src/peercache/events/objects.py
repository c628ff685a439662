"""Publishes object events over ZeroMQ, as Mooncake's store does: which pages a shared cache has.

Dynamo's router reads them for the cache that all its workers share. A page is one or several
objects, named by SGLang's hash of the prompt up to its end; it counts once all are stored. The
router forgets everything when a sequence is left out, and asks for nothing again. So everything
that is there is told again to each reader that comes, and after a loss, behind a sequence that is
left out on purpose. Needs the extra `events`.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, final

import attrs
import msgspec
import zmq

from peercache.errors import LocalProtocolError
from peercache.events.publishing import Readers
from peercache.observability.log import get_logger

SEQUENCE: Final = struct.Struct(">Q")

PAGES_A_MESSAGE: Final = 256
"""Pages of one message: some tens of kilobytes for each object that a page has."""

QUEUE_PAGES_MAX: Final = 65_536
"""Pages that wait to be told. A caller never waits: beyond that everything is told again."""

WAITING_MAX: Final = 1000
"""Messages that wait for one reader. With one more, all readers are told everything again, once
that one reads again or has gone."""

REST_S: Final = 5.0
"""Pause after what could not be sent, and after an error of what tells the pages that are there."""

POLL_MS: Final = 50
"""How long the thread waits for a page or a reader, and how soon a close is seen."""

CLOSE_S: Final = 1.0

TENANT: Final = "default"
"""Mooncake's tenant of stores that name none."""


@attrs.frozen
class ObjectNames:
    """How SGLang's Mooncake store names the objects of a page.

    prefix: its tag and the model's served name, joined by "_"; "" for none.
    ranks:  of tensor parallelism, each with a K and a V object; 0: MLA, one object for all ranks.
    stages: of a pipeline, each with objects of its own.
    """

    prefix: str = ""
    ranks: int = 1
    stages: int = 1

    def of(self, page: str) -> tuple[str, ...]:
        """Return the names of a page's objects. page: SGLang's hash, 64 hexadecimal digits."""
        name = f"{self.prefix}_{page}" if self.prefix else page
        stages = [str(stage) for stage in range(self.stages)] if self.stages > 1 else [""]
        if not self.ranks:
            return tuple(f"{name}_{stage}_k" for stage in stages)
        return tuple(
            f"{name}_{rank}{stage and '_' + stage}_{half}"
            for stage in stages
            for rank in range(self.ranks)
            for half in "kv"
        )


@final
class ObjectPublisher:
    """One publisher of object events, with a thread that owns its socket."""

    def __init__(
        self,
        endpoint: str,
        names: ObjectNames,
        *,
        present: Callable[[], Iterable[str]] = tuple,
        rank: int = 0,
        readers: Sequence[str] = (),
    ) -> None:
        """Bind, and tell each reader that comes what is present.

        endpoint: to bind, such as tcp://127.0.0.1:5558; `tcp://127.0.0.1:*` takes a free port.
        present:  yields the hashes of all pages there are now; called by the publisher's thread.
        rank:     of data parallelism.
        readers:  addresses or networks of other hosts that may connect; wanted for an endpoint
                  beyond loopback.
        Raises OSError with the endpoint if it cannot be bound, ConfigError without readers.
        """
        self._log = get_logger()
        self._context = zmq.Context()
        try:
            self._readers = Readers(self._context, endpoint, readers, _prepared)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._readers.endpoint
        self.resyncs = 0
        """How often everything was told again after a loss."""
        self._names, self._present, self._rank = names, present, rank
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._queue: deque[tuple[str, bool]] = deque()
        """Pages, and whether each is stored or removed."""
        self._is_lossy = False
        self._has_joined = False
        self._next = time.time_ns() // 1000
        self._is_closing = threading.Event()
        self._has_pages = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peercache-objects", daemon=True)
        self._thread.start()

    def publish(self, *, stored: Sequence[str] = (), removed: Sequence[str] = ()) -> None:
        """Queue pages, by their hashes; never waits."""
        if self._is_closing.is_set():
            raise LocalProtocolError("the publisher of object events is closed")
        with self._lock:
            if len(self._queue) + len(stored) + len(removed) > QUEUE_PAGES_MAX:
                self._queue.clear()
                self._is_lossy = True
            elif not self._is_lossy:
                self._queue.extend((page, True) for page in stored)
                self._queue.extend((page, False) for page in removed)
            # What happens before `present` is asked is in its answer.
        self._has_pages.set()

    def resync(self) -> None:
        """Have all readers forget what they were told, and tell them what is present."""
        with self._lock:
            self._queue.clear()
            self._is_lossy = True
        self._has_pages.set()

    def close(self) -> None:
        """Send what is queued, and end; bounded, may be repeated."""
        self._is_closing.set()
        self._has_pages.set()
        self._thread.join(CLOSE_S + 1)

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        resting_until, until = 0.0, float("inf")
        try:
            while time.monotonic() < until:
                self._has_joined |= self._readers.hear()
                is_resting = time.monotonic() < resting_until
                sent = False
                try:
                    sent = not is_resting and self._send_some()
                except zmq.Again:
                    self.resync()
                    resting_until = time.monotonic() + REST_S
                except Exception:
                    self._log.exception("events.publish_failed", at=self.endpoint)
                    self.resync()
                    resting_until = time.monotonic() + REST_S
                if self._is_closing.is_set():
                    if not sent:
                        return
                    until = min(until, time.monotonic() + CLOSE_S)
                elif not sent:
                    self._has_pages.wait(POLL_MS / 1000)
                    self._has_pages.clear()
        finally:
            self._context.destroy(linger=int(CLOSE_S * 1000))

    def _send_some(self) -> bool:
        """Send one message, or everything again; return whether there was something."""
        with self._lock:
            is_lossy, self._is_lossy = self._is_lossy, False
            is_resync = is_lossy or self._has_joined
            count = 0 if is_resync else min(len(self._queue), PAGES_A_MESSAGE)
            pages = [self._queue.popleft() for _ in range(count)]
        if not is_resync:
            if pages:
                self._send(pages)
            return bool(pages)
        if is_lossy:
            # Readers then forget what was removed and could not be told.
            self._next += 1
            self.resyncs += 1
        self._has_joined = False
        # Pages that are queued from here on may be told twice, in their order: that is harmless.
        for part in _parts(self._present()):
            self._send(part)
        if is_lossy:
            self._send([])  # Where nothing is there, this one shows that a sequence was left out.
        return True

    def _send(self, pages: Sequence[tuple[str, bool]]) -> None:
        events = [
            {
                "event_type": "stored" if is_stored else "removed",
                "object_key": name,
                "tenant_id": TENANT,
                "group_id": None,
            }
            for page, is_stored in pages
            for name in self._names.of(page)
        ]
        payload = self._encoder.encode([time.time_ns() // 1_000_000, events, self._rank])
        self._readers.send([b"", SEQUENCE.pack(self._next), payload], zmq.NOBLOCK)
        self._next += 1


def _prepared(socket: zmq.Socket[bytes]) -> None:
    socket.sndhwm = WAITING_MAX
    # What has no room is an error.
    socket.setsockopt(zmq.XPUB_NODROP, 1)


def _parts(pages: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    left = iter(pages)
    while part := [(page, True) for page in itertools.islice(left, PAGES_A_MESSAGE)]:
        yield part
