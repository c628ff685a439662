"""Publishes object events over ZeroMQ, like Mooncake's store: the pages of a shared cache.

Dynamo's router reads them for the cache that all its workers share. A page is one or several
objects, named by SGLang's hash of the prompt up to its end; it counts once all of them are stored.
The router forgets everything when a sequence is skipped, and requests nothing again. So all pages
are sent again to each new reader, and after a loss: a sequence is skipped on purpose before. Needs
the extra `events`.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, final

import attrs
import msgspec
import zmq

from peercache.errors import LocalProtocolError
from peercache.events.publishing import EventPublisher

SEQUENCE: Final = struct.Struct(">Q")

PAGES_A_MESSAGE: Final = 256
"""Pages of one message: some tens of kilobytes for each object that a page has."""

QUEUE_PAGES_MAX: Final = 65_536
"""Pages that wait to be sent. A caller never waits: beyond that everything is sent again."""

TENANT: Final = "default"
"""Mooncake's tenant for stores that name no tenant."""


@attrs.frozen
class ObjectNames:
    """How SGLang's Mooncake store names the objects of a page.

    prefix: the store's tag and the model's served name, joined by "_"; "" for none.
    ranks:  tensor-parallel ranks, each with a K and a V object; 0: MLA, one object for all ranks.
    stages: pipeline stages, each with objects of its own.
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
class ObjectPublisher(EventPublisher[tuple[str, bool]]):
    """One publisher of object events, with a thread that owns its socket.

    Its queue holds pages, and whether each was stored or removed. If more than WAITING_MAX messages
    wait for one reader, everything is sent again to all readers, once that one reads again or has
    gone.
    """

    def __init__(
        self,
        endpoint: str,
        names: ObjectNames,
        *,
        present: Callable[[], Iterable[str]] = tuple,
        rank: int = 0,
        readers: Sequence[str] = (),
    ) -> None:
        """Bind, and send each new reader all pages that are present.

        endpoint: to bind, such as tcp://127.0.0.1:5558; `tcp://127.0.0.1:*` takes a free port.
        present:  yields the hashes of all current pages; called by the publisher's thread.
        rank: the data-parallel rank.
        readers:  addresses or networks of other hosts that may connect; required for an endpoint
        beyond loopback.
        Raises OSError with the endpoint if it cannot be bound, ConfigError without readers.
        """
        super().__init__(
            endpoint, readers, name="peercache-objects", queued_max=QUEUE_PAGES_MAX,
            is_lossless=True,
        )  # fmt: skip
        self.resyncs = 0
        """How often everything was sent again after a loss."""
        self._names, self._present, self._rank = names, present, rank
        self._encoder = msgspec.msgpack.Encoder()
        self._has_joined = False
        self._thread.start()

    def publish(self, *, stored: Sequence[str] = (), removed: Sequence[str] = ()) -> None:
        """Queue pages, by their hashes; never waits."""
        if self._is_closing.is_set():
            raise LocalProtocolError("the publisher of object events is closed")
        self._add([*((page, True) for page in stored), *((page, False) for page in removed)])

    # --- the thread ---------------------------------------------------------------------------

    def _receive(self) -> None:
        self._has_joined |= self._readers.receive()

    def _send_some(self) -> bool:
        pages, is_lossy = self._take(0 if self._has_joined else PAGES_A_MESSAGE)
        if not is_lossy and not self._has_joined:
            if pages:
                self._send(pages)
            return bool(pages)
        if is_lossy:
            # Readers then also forget pages with a removal that could not be sent.
            self._next += 1
            self.resyncs += 1
        self._has_joined = False
        # Pages that are queued from here on may be sent twice, in order: that is harmless.
        for part in _parts(self._present()):
            self._send(part)
        if is_lossy:
            self._send([])  # If there are no pages, this message shows that a sequence was skipped.
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


def _parts(pages: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    left = iter(pages)
    while part := [(page, True) for page in itertools.islice(left, PAGES_A_MESSAGE)]:
        yield part
