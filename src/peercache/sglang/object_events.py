"""Object events of one engine: the pages that its home node holds, for Dynamo's router.

Owns    the names of pages in the engine's calls, and which of them the home node holds.
Takes   the page hashes of each call of the store; the changes of the home node, over its home
        address, on a thread of its own.
Keeps   a page is published as stored only if the home node reported it, in memory or on disk; a
        page that leaves the node is published as removed.
Limits  NAMES_MAX.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, final

from peercache.config.settings import Config
from peercache.errors import ConfigError
from peercache.events.following import AskedNode, ClusterFollower, Index, NodeChanges
from peercache.events.objects import ObjectNames, ObjectPublisher
from peercache.model.keys import page_keys_of
from peercache.model.records import GONE
from peercache.sglang.namespace import HeadGroups, UncutPool

HOME: Final = "home"

NAMES_MAX: Final = 1_000_000
"""Pages with stored hashes, the latest ones of calls: about 300 MB."""


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
        self._log = log
        self._lock = threading.Lock()
        self._digest = b""
        self._names: OrderedDict[bytes, str] = OrderedDict()
        """The hash of each page, by its key, in the order of their last use."""
        self._index = Index()
        self._logged_problem = ""
        self._is_closed = False
        try:
            self._publisher = ObjectPublisher(
                config.object_events, names, present=self._present, readers=config.event_readers
            )
        except ConfigError as error:
            raise ConfigError("event_readers", error.problem) from error
        except OSError as error:
            raise ConfigError("object_events", str(error)) from error
        self._follower = ClusterFollower(
            lambda _: connect(), lambda: (HOME,), failed=self._log_problem
        )
        self._thread = threading.Thread(
            target=self._run, name="peercache-object-events", daemon=True
        )
        self._thread.start()

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
        stored, removed = [], []
        with self._lock:
            if self._is_closed:
                return
            if digest != self._digest:
                self._digest = digest
                self._names.clear()
                self._publisher.resync()
            for key, page in zip(keys, hashes, strict=True):
                if key in self._names:
                    self._names.move_to_end(key)
                    continue
                self._names[key] = page
                if self._index.holders(key):
                    stored.append(page)
            while len(self._names) > NAMES_MAX:
                key, page = self._names.popitem(last=False)
                if self._index.holders(key):
                    removed.append(page)
            if stored or removed:
                self._publisher.publish(stored=stored, removed=removed)

    def close(self) -> None:
        """End both threads; bounded, may be repeated."""
        with self._lock:
            self._is_closed = True
        self._follower.close()
        self._thread.join()
        self._publisher.close()

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        for batch in self._follower:
            self._take(batch)

    def _take(self, batch: NodeChanges) -> None:
        keys, tiers = batch.changes["key"].tolist(), batch.changes["tier"].tolist()
        with self._lock:
            self._index.apply(batch)
            # Only the last change of a page counts.
            last = {
                self._names[key]: tier != GONE
                for key, tier in zip(keys, tiers, strict=True)
                if key in self._names
            }
            stored = [page for page, is_stored in last.items() if is_stored]
            removed = [page for page, is_stored in last.items() if not is_stored]
            if batch.again:
                # All that the home node reported before is void.
                self._publisher.resync()
            elif stored or removed:
                self._publisher.publish(stored=stored, removed=removed)
        self._logged_problem = ""

    def _present(self) -> Iterable[str]:
        with self._lock:
            pages = self._index.pages(HOME)
            return [page for key, page in self._names.items() if key in pages]

    def _log_problem(self, _: str, problem: Exception) -> None:
        if str(problem) != self._logged_problem:
            self._logged_problem = str(problem)
            self._log.warning("sglang.home_not_followed", why=str(problem))
