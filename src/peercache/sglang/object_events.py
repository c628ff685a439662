"""Object events of one engine: the pages that its home node holds, for Dynamo's router.

Owns    the publisher, and the limit of the router's index.
Takes   the page hashes of each call of the store; the changes of the home node, from `HeldPages`.
Keeps   a page is published as stored only if the home node reported it, in memory or on disk; a
        page that leaves the node is published as removed. The router never has more than
        OBJECTS_MAX objects: above them it would forget all of them, and not ask again.
Limits  NAMES_MAX; OBJECTS_MAX.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from peercache.config.settings import Config
from peercache.errors import ConfigError
from peercache.events.following import AskedNode
from peercache.events.held import HeldPages
from peercache.events.objects import ObjectNames, ObjectPublisher
from peercache.model.keys import page_keys_of
from peercache.observability.log import WarnOnce
from peercache.sglang.namespace import HeadGroups, UncutPool

NAMES_MAX: Final = 1_000_000
"""Pages with stored hashes, the latest ones of calls: about 300 MB, 400 MB if all are held."""

OBJECTS_MAX: Final = 1_000_000
"""Objects in the index of Dynamo's router (1.6.1): with more it clears the index, and from then on
has only what is stored later. A page has two objects for each tensor-parallel rank."""

WARN_FRACTION: Final = 0.9
"""Fraction of OBJECTS_MAX from which on the log has a warning."""

REPEAT_S: Final = 600.0
"""After this time a warning is written again, if its cause is still there."""


def object_names(storage_config: Any, pool: Any) -> ObjectNames:
    """Return how SGLang's Mooncake store would name the objects of this engine's pages."""
    stages = int(getattr(storage_config, "pp_size", 1) or 1)
    prefix = str(getattr(storage_config, "model_name", None) or "").replace("/", "-")
    if getattr(storage_config, "is_mla_model", False):
        return ObjectNames(prefix, 0, stages)
    groups = None
    with contextlib.suppress(UncutPool):
        groups = HeadGroups.of(storage_config, pool)
    size = int(getattr(storage_config, "tp_size", 1) or 1)
    return ObjectNames(prefix, size if groups is None else groups.total, stages)


@final
class ObjectEvents:
    """Publishes the pages of one engine that its home node holds. Thread-safe."""

    def __init__(
        self, config: Config, names: ObjectNames, connect: Callable[[], AskedNode], log: Any
    ) -> None:
        """Bind the endpoint of `config.object_events`, and follow the home node.

        connect: opens a connection to the home node.
        Raises ConfigError if the endpoint cannot be bound.
        """
        self._lock = threading.Lock()
        self._digest = b""
        self._warn_once = WarnOnce(log, repeat_s=REPEAT_S)
        self._objects_a_page = len(names.of(""))
        self._pages_max = OBJECTS_MAX // self._objects_a_page
        self._pages: HeldPages[str] = HeldPages(
            connect,
            self._publish,
            names_max=NAMES_MAX,
            held_max=self._pages_max,
            restarted=self._resync,
            failed=self._log_problem,
            thread="peercache-object-events",
        )
        present, readers = self._pages.present, config.event_readers
        try:
            self._publisher = ObjectPublisher(
                config.object_events, names, present=present, readers=readers
            )
        except ConfigError as error:
            raise ConfigError("event_readers", error.problem) from error
        except OSError as error:
            raise ConfigError("object_events", str(error)) from error
        self._pages.start()

    @property
    def endpoint(self) -> str:
        """The endpoint to which routers connect."""
        return self._publisher.endpoint

    def name(self, hashes: Sequence[str], digest: bytes) -> None:
        """Record the hashes of pages that a call names. digest: that of their namespace.

        Earlier pages of another namespace, as before new weights, no longer count. A call that
        began before `close` may arrive after it, and is ignored.
        """
        keys: list[bytes] = page_keys_of(hashes, (digest,))[0].tolist()
        with self._lock:
            if digest != self._digest:
                self._digest = digest
                self._pages.forget()
            self._pages.name(keys, hashes)

    def status(self) -> dict[str, int]:
        """Return how many objects a router has of this engine, the limit, and pages left out."""
        return {
            "objects": len(self._pages) * self._objects_a_page,
            "objects_max": OBJECTS_MAX,
            "pages_left_out": self._pages.left_out,
        }

    def close(self) -> None:
        """End all threads; bounded, may be repeated."""
        self._pages.close()
        self._publisher.close()

    # --- on the thread of `HeldPages`, or an engine's ---------------------------------------------

    def _publish(self, stored: Sequence[str], removed: Sequence[str]) -> None:
        self._publisher.publish(stored=stored, removed=removed)
        if stored and len(self._pages) >= self._pages_max * WARN_FRACTION:
            self._warn_once(
                "sglang.router_index_nearly_full",
                "",
                objects=len(self._pages) * self._objects_a_page,
                pages_left_out=self._pages.left_out,
                hint="Dynamo's router is not notified of pages above the limit, those used longest "
                "ago: a larger --page-size makes fewer objects",
            )

    def _resync(self) -> None:
        self._publisher.resync()

    def _log_problem(self, problem: Exception) -> None:
        self._warn_once("sglang.home_not_followed", str(problem), why=str(problem))
