"""Retains in PeerCache what LMCache's coordinator has pinned.

The coordinator keeps pinned chunks out of its own evictions, and does not notify adapters.
PeerCache evicts by itself, so an adapter reads the list of pins, and has these chunks retained.

Owns    the pinned keys of the last list, and a thread.
Takes   `GET /cache/pins` of the coordinator, every PAUSE_S.
Keeps   a chunk is retained until KEPT_S after the last list that has it; after a list without it
        the retention ends at once. A coordinator that does not answer changes nothing before.
Limits  PINS_MAX keys; ANSWER_MAX bytes and ANSWER_S for each answer.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.request
from collections.abc import Callable, Collection
from typing import Any, Final, final

from lmcache.v1.distributed.api import EncodedObjectKey

from peercache.observability.log import WarnOnce

PAUSE_S: Final = 30.0
KEPT_S: Final = 4 * PAUSE_S
"""Three lists may fail before a pinned chunk can be evicted."""

PINS_MAX: Final = 100_000
PAGE: Final = 10_000
"""Keys of one answer: the most that the coordinator returns."""

ANSWER_S: Final = 5.0
ANSWER_MAX: Final = 16 << 20

REPEAT_S: Final = 600.0

Retain = Callable[[Collection[Any], float], int]


@final
class RetainedPins:
    """The pins of a coordinator, as they are retained in PeerCache."""

    def __init__(self, url: str, retain: Retain, log: Any) -> None:
        """Start to read the pins.

        url:    the coordinator's base URL.
        retain: retains objects for a time, and returns how many are retained; 0 s ends that.
        """
        self._url, self._retain = url, retain
        self._warn_once = WarnOnce(log, repeat_s=REPEAT_S)
        self._pinned: frozenset[Any] = frozenset()
        self._retained = 0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peercache-pins", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, int]:
        """Return how many objects are pinned, and how many of them PeerCache retains."""
        return {"pinned": len(self._pinned), "pins_retained": self._retained}

    def close(self) -> None:
        """End the thread; bounded, may be repeated. What is retained stays so for its time."""
        self._is_closing.set()
        self._thread.join(2 * ANSWER_S)

    def _run(self) -> None:
        while not self._is_closing.is_set():
            try:
                self._follow()
            except Exception as error:  # Whatever a coordinator answers, the thread goes on.
                self._warn_once(
                    "lmcache.pins_unknown", type(error).__name__, url=self._url, why=str(error)
                )
            self._is_closing.wait(PAUSE_S)

    def _follow(self) -> None:
        pinned = self._read()
        if unpinned := self._pinned - pinned:
            self._retain(unpinned, 0.0)
        self._pinned = pinned
        self._retained = self._retain(pinned, KEPT_S) if pinned else 0
        if self._retained < len(pinned):
            self._warn_once(
                "lmcache.pins_not_retained",
                "",
                pinned=len(pinned),
                retained=self._retained,
                hint="not retained: chunks that are in no node's memory, those above the "
                "namespace's quota, and those of models that this server has not stored or loaded",
            )

    def _read(self) -> frozenset[Any]:
        pinned: set[Any] = set()
        offset = 0
        while offset < PINS_MAX:
            answer = self._ask(f"/cache/pins?offset={offset}&limit={PAGE}")
            pinned.update(
                EncodedObjectKey(**each["key"]).to_object_key() for each in answer["pins"]
            )
            offset += len(answer["pins"])
            if not answer["pins"] or offset >= int(answer["total"]):
                break
        return frozenset(pinned)

    def _ask(self, path: str) -> dict[str, Any]:
        request = urllib.request.Request(self._url + path)  # noqa: S310 - http or https, checked
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310 - likewise
            body = answer.read(ANSWER_MAX + 1)
        if len(body) > ANSWER_MAX:
            raise http.client.HTTPException(f"an answer of more than {ANSWER_MAX} bytes")
        found: dict[str, Any] = json.loads(body)
        return found
