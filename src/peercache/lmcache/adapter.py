"""Owns PeerCacheL2Adapter, the class that LMCache's `plugin` L2 adapter builds.

Owns    the tasks of LMCache's controllers until their results are requested, and the counts of
        locks; the client moves the bytes, into and out of LMCache's own memory.
Takes   LMCache's store and prefetch loops, and its main thread.
Keeps   no method raises or waits. Each task gets one result and one signal. LMCache does not check
        the bytes of a set bit, so a bit is set only for a verified page.
Limits  RESULTS_MAX results that are not requested yet; the limits of the lanes, of `KnownObjects`
        and the client's deadlines.

A chunk hash identifies the tokens of an object. LMCache's key also has the model, the rank, the
object group and the salt, but not the layout of the bytes, so that is taken from the memory of the
object. All of these are part of the address (`Addresses`): a difference in any of them is a miss.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from peercache.client.client import Client
from peercache.client.report import reporting
from peercache.engines.decline import worth_reporting
from peercache.engines.lanes import AdapterLanes, harmless
from peercache.engines.late_client import TIMEOUT_FRACTION, LateClient, engine_config
from peercache.lmcache.config import PeerCacheL2AdapterConfig
from peercache.lmcache.known_objects import KnownObject, KnownObjects
from peercache.lmcache.pins import RetainedPins
from peercache.model.keys import KEY, Namespace, PageKeys, page_keys
from peercache.model.runs import PageRuns
from peercache.observability.log import WarnOnce, get_logger

GEOMETRY = {"engine": "lmcache"}
"""Geometry of the client's own namespace: one server holds objects of several models."""

LAYOUTS_MAX = 256
"""Layouts that are remembered for deletions: a server has one per model and object group."""

FLAT = re.compile(r"\d+:(torch\.)?uint8")
"""The layout of a row of bytes."""

Space: TypeAlias = tuple[str, str, int, int, str]
"""The input of one namespace digest: model, layout, rank, group, salt."""


def layout_of(described: Any) -> str:
    """Return the shapes and types of an object's parts as text; "" if LMCache names none.

    described: anything with `shapes` and `dtypes`: a layout, or the metadata of an object.
    """
    shapes = getattr(described, "shapes", None) or ()
    dtypes = getattr(described, "dtypes", None) or ()
    parts = (
        f"{'x'.join(map(str, map(int, shape)))}:{dtype}"
        for shape, dtype in zip(shapes, dtypes, strict=False)
    )
    return " ".join(parts)


class Addresses:
    """The page keys of one namespace's objects."""

    def __init__(self, name: str) -> None:
        """Create the addresses of objects in the namespaces of this name."""
        self._name = name
        # Tenants have salts, so there may be many; a forgotten digest is computed again.
        self._digest = functools.lru_cache(maxsize=4096)(self._digest_of)
        self._layouts: dict[tuple[str, int], dict[str, None]] = {}

    def of(self, keys: Sequence[Any], layouts: Iterable[str]) -> PageKeys:
        """Return the page keys of LMCache's keys, (n,) V16. layouts: one per key, from
        `layout_of`.
        """
        places: dict[Space, list[int]] = {}
        for place, (key, layout) in enumerate(zip(keys, layouts, strict=True)):
            space = (key.model_name, layout, key.kv_rank, key.object_group_id, key.cache_salt)
            places.setdefault(space, []).append(place)
        named: PageKeys = np.empty(len(keys), KEY)
        for space, those in places.items():
            self._remember(space)
            # The whole hash is hashed: LMCache pads short ones, so 16 bytes of it may be constant.
            hashes = [b"lmcache:" + keys[place].chunk_hash for place in those]
            named[those] = page_keys(hashes, self._digest(space))
        return named

    def likely(self, key: Any) -> str:
        """Return a layout for a lookup without one, such as those of LMCache's own benchmark."""
        return next(iter(self._layouts.get((key.model_name, key.object_group_id), ())), "")

    def known(self, keys: Sequence[Any]) -> tuple[PageKeys, list[int]]:
        """Return the page keys of keys without a layout, in every known layout.

        Returns (m,) V16 for the keys with a known model and group, and the positions of those keys.
        """
        layouts = [self._met(key) for key in keys]
        pairs = [(key, layout) for key, met in zip(keys, layouts, strict=True) for layout in met]
        named = self.of([key for key, _ in pairs], [layout for _, layout in pairs])
        return named, [place for place, met in enumerate(layouts) if met]

    def groups(self, model: str) -> list[int]:
        """Return the known object groups of a model."""
        return [group for name, group in list(self._layouts) if name == model]

    def is_serialized(self, key: Any) -> bool:
        """Return whether objects of this model and group were flat rows of bytes, and others too.

        So LMCache's serializers store them, but look them up with the layout of the model.
        """
        return {bool(FLAT.fullmatch(layout)) for layout in self._met(key)} == {True, False}

    def _met(self, key: Any) -> dict[str, None]:
        return self._layouts.get((key.model_name, key.object_group_id), {})

    def _remember(self, space: Space) -> None:
        model, layout, _, group, _ = space
        if (model, group) in self._layouts or len(self._layouts) < LAYOUTS_MAX:
            met = self._layouts.setdefault((model, group), {})
            if len(met) < LAYOUTS_MAX:
                met.setdefault(layout)

    def _digest_of(self, space: Space) -> bytes:
        model, layout, rank, group, salt = space
        return Namespace.of(
            self._name,
            {**GEOMETRY, "model": model, "layout": layout},
            {"kv_rank": rank, "group": group, "salt": salt},
        ).digest()


DEFAULT_NAME = "lmcache"
"""The default namespace of an adapter."""

RESULTS_MAX = 8192
"""Waiting results. LMCache does not request those of an abandoned prefetch; they must not grow."""

STORE_BYTES = 256 << 20
"""Bytes of one call of a store: each call has its own deadline."""

USAGE_S = 5.0
"""Pause between two requests to the home node for its usage, which LMCache's metrics need often.
Then a part of the known objects is checked, too: all of them within five minutes."""

OVERLAP_KEYS = 64
"""Keys of one question which pages are held: an answer has at most 64 holders."""

LISTED_MAX = 1000
"""Objects of one page of a list."""


class _Results:
    """Results of one kind of task, and the descriptor that signals them."""

    def __init__(self) -> None:
        self._notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._done: dict[int, Any] = {}
        self._is_closed = False

    def fileno(self) -> int:
        """Return the descriptor that LMCache polls."""
        number: int = self._notifier.fileno()
        return number

    def put(self, task: int, result: Any) -> None:
        """Store a result, and signal."""
        with self._lock:
            if self._is_closed:
                return
            while len(self._done) >= RESULTS_MAX:
                self._done.pop(next(iter(self._done)))
            self._done[task] = result
            self._notifier.notify()

    def take(self, task: int) -> Any | None:
        """Return a result once; None before it is available."""
        with self._lock:
            return self._done.pop(task, None)

    def take_all(self) -> dict[int, Any]:
        """Return all results, by their tasks."""
        with self._lock:
            done, self._done = self._done, {}
            return done

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._notifier.close()


class PeerCacheL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache has no stubs
    """The L2 of an LMCache server, in the memory of all hosts of a PeerCache cluster."""

    def __init__(
        self,
        params: Mapping[str, Any] | PeerCacheL2AdapterConfig,
        l1_memory_desc: Any = None,
        *,
        client_factory: Callable[..., Any] = Client.open,
    ) -> None:
        """Check the settings; raise a ConfigError that names a wrong one.

        params:         `adapter_params` of LMCache's JSON line: settings of PeerCache, and
                        `coordinator_url`.
        l1_memory_desc: the memory of the objects; it is registered for reads into it.
        client_factory: what opens the client; tests pass a fake with the same contract.
        """
        # PeerCache evicts by itself: LMCache's eviction must not see a capacity.
        super().__init__(max_capacity_bytes=0)
        if not isinstance(params, PeerCacheL2AdapterConfig):
            params = PeerCacheL2AdapterConfig(params)
        config = engine_config(params.settings, os.environ, engine="lmcache")
        self._config = config
        name = config.namespace or DEFAULT_NAME
        self._log = get_logger(component="lmcache")
        self._addresses = Addresses(name)
        self._numbers = itertools.count(1)
        self._stores, self._lookups, self._loads = _Results(), _Results(), _Results()
        self._lock = threading.Lock()
        self._locked: Counter[Any] = Counter()
        self._l1 = l1_memory_desc
        self._known = KnownObjects()
        self._warn_once = WarnOnce(self._log)
        self._used_bytes = 0
        self._usage_asked_s = -math.inf
        self._late = LateClient(
            config,
            Namespace.of(name, GEOMETRY, {}),
            self._log,
            on_open=self._register_memory,
            client_factory=client_factory,
        )
        timeout_s = config.op_timeout_s * TIMEOUT_FRACTION
        self._lanes = AdapterLanes("lmcache", self._log, timeout_s)
        self._pins: RetainedPins | None = None
        if params.coordinator_url:
            self._pins = RetainedPins(params.coordinator_url, self._retain, self._log)

    # --- descriptors -------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        """Return the descriptor that is readable when stores are done."""
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that is readable when lookups are done."""
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        """Return the descriptor that is readable when loads are done."""
        return self._loads.fileno()

    # --- store -------------------------------------------------------------------------------

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Store objects; return the task's number. The memory is in use until then."""
        task, keys, objects = next(self._numbers), list(keys), list(objects)
        self._lanes.store.submit(
            lambda: self._stores.put(task, self._store(keys, objects)),
            lambda: self._stores.put(task, L2StoreResult(success=False, bytes_transferred=0)),
        )
        return task

    @harmless(dict[int, Any])
    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return the results of stores that are done, each once."""
        return self._stores.take_all()

    # --- lookup ------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: Sequence[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Look up which objects are held, and have them evicted last; return the task's number.

        PeerCache pins nothing for a reader: if an object is evicted before its load, the load is a
        miss.
        """
        task, keys = next(self._numbers), list(keys)
        self._lanes.ask.submit(
            lambda: self._lookups.put(task, self._look_up(keys, group_layout_descs)),
            lambda: self._lookups.put(task, Bitmap(len(keys))),
        )
        return task

    @harmless(lambda: None)
    def query_lookup_and_lock_result(self, task_id: int) -> Any | None:
        """Return which objects are held, once; None before the answer."""
        return self._lookups.take(task_id)

    @harmless(lambda: None)
    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Decrement the counts of locks."""
        with self._lock:
            for key in keys:
                if self._locked[key] > 1:
                    self._locked[key] -= 1
                else:
                    del self._locked[key]

    # --- load --------------------------------------------------------------------------------

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Read objects into LMCache's memory; return the task's number."""
        task, keys, objects = next(self._numbers), list(keys), list(objects)
        self._lanes.load.submit(
            lambda: self._loads.put(task, self._load(keys, objects)),
            lambda: self._loads.put(task, Bitmap(len(keys))),
        )
        return task

    @harmless(lambda: None)
    def query_load_result(self, task_id: int) -> Any | None:
        """Return which objects were read and verified, once; None before they are loaded."""
        return self._loads.take(task_id)

    # --- other methods -----------------------------------------------------------------------

    @harmless(lambda: None)
    def delete(self, keys: Sequence[Any]) -> None:
        """Remove objects from every node, in the layouts that this server has met."""
        asked = list(keys)
        self._lanes.ask.submit(
            lambda: self._delete(asked),
            lambda: self._log.warning("lmcache.deletion_dropped", objects=len(asked)),
        )

    @harmless(lambda: AdapterUsage(0, 0))
    def get_usage(self) -> Any:
        """Return the used bytes of the home node's pool, as of the previous call.

        By cache salt: the bytes of the objects that this server has stored or loaded, and that are
        still held.
        """
        if time.monotonic() - self._usage_asked_s >= USAGE_S:
            self._usage_asked_s = time.monotonic()
            self._lanes.ask.submit(self._refresh, lambda: None)
        return AdapterUsage(self._used_bytes, 0, MappingProxyType(self._known.bytes_by_salt()))

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> Any:
        """Return a page of the objects that this server has stored or loaded, and that are held.

        For operators: it waits for the answers of nodes, up to the client's deadlines. Raises
        ValueError for a wrong page, NotImplementedError, which LMCache answers with 503, while the
        home node is lost.
        """
        if page_size <= 0:
            raise ValueError(f"page_size must be positive, not {page_size}")
        if cursor is not None and not (cursor.isascii() and cursor.isdigit()):
            raise ValueError(f"{cursor!r:.80} is not a cursor of this adapter")
        client, status = self._late.client, self._late.status()
        if client is None or not status["is_healthy"]:
            raise NotImplementedError(f"the home node is lost: {status['why']}")
        count = min(page_size, LISTED_MAX)
        part = self._known.after(int(cursor or 0), count, model_name)
        held, _ = self._held(client, part)
        entries = [KeyEntry(each.key.to_encoded_object_key(), each.size) for each in held]
        token = str(part[-1].number) if len(part) == count else None
        return KeyListPage(tuple(entries), token)

    @harmless(lambda: {"is_healthy": False, "type": "PeerCacheL2Adapter"})
    def report_status(self) -> dict[str, Any]:
        """Return a status for operators: the state of the home node, locks, and waiting work."""
        with self._lock:
            locked = len(self._locked)
        pins = {} if self._pins is None else self._pins.status()
        return self._late.status() | {
            "type": type(self).__name__,
            "locked": locked,
            "objects_known": len(self._known),
            "stores_waiting": len(self._lanes.store),
            "lookups_waiting": len(self._lanes.ask),
            "loads_waiting": len(self._lanes.load),
            **pins,
        }

    @harmless(lambda: None)
    def close(self) -> None:
        """End tasks, the client and the descriptors; bounded, may be repeated."""
        in_time = self._lanes.close()
        self._late.close()
        if self._pins is not None:
            self._pins.close()
        with self._lock:
            locked = len(self._locked)
        self._log.info("lmcache.closed", locked=locked, in_time=in_time)
        for results in (self._stores, self._lookups, self._loads):
            results.close()

    # --- in the lanes' threads -----------------------------------------------------------------

    def _store(self, keys: list[Any], objects: list[Any]) -> Any:
        client = self._late.client
        if client is None:
            return L2StoreResult(success=False, bytes_transferred=0)
        layouts = [layout_of(each.meta) for each in objects]
        names = self._addresses.of(keys, layouts)
        runs, sizes = _runs(objects)
        stored = np.zeros(len(keys), np.bool_)
        with reporting() as report:
            for part in _parts(sizes):
                stored[part] = client.batch_set_from(names[part], runs.take(part))
        self._add_known(keys, layouts, sizes, np.flatnonzero(stored))
        return L2StoreResult(bool(stored.all()), report.bytes)

    def _look_up(self, keys: list[Any], layouts: Mapping[int, Any]) -> Any:
        bits, client = Bitmap(len(keys)), self._late.client
        if client is None:
            return bits
        by_group = {group: layout_of(layout) for group, layout in layouts.items()}
        names = self._addresses.of(
            keys, [by_group.get(key.object_group_id) or self._addresses.likely(key) for key in keys]
        )
        found = client.touch(names)
        rows = [(key.model_name, key.kv_rank, key.object_group_id, key.cache_salt) for key in keys]
        reported = worth_reporting(client, self._config, names, found, rows)
        with self._lock:
            for place in np.flatnonzero(reported).tolist():
                bits.set(place)
                self._locked[keys[place]] += 1
        if keys and not found[0] and self._addresses.is_serialized(keys[0]):
            self._warn_once(
                "lmcache.serializer_configured",
                keys[0].model_name,
                model=keys[0].model_name,
                hint='chunks of a serializer are misses: remove "serde" from this --l2-adapter',
            )
        return bits

    def _load(self, keys: list[Any], objects: list[Any]) -> Any:
        bits, client = Bitmap(len(keys)), self._late.client
        if client is None:
            return bits
        layouts = [layout_of(each.meta) for each in objects]
        runs, sizes = _runs(objects)
        names = self._addresses.of(keys, layouts)
        loaded = np.flatnonzero(client.batch_get_into(names, runs))
        for place in loaded.tolist():
            bits.set(place)
        self._add_known(keys, layouts, sizes, loaded)
        return bits

    def _add_known(self, keys: list[Any], layouts: list[str], sizes: Any, places: Any) -> None:
        """Remember objects that are held, and notify LMCache of those that it did not know."""
        held = [keys[place] for place in places.tolist()]
        held_layouts = [layouts[place] for place in places.tolist()]
        held_sizes = sizes[places].tolist()
        new = self._known.add(held, held_layouts, held_sizes)
        # A key that was known counts already.
        if any(new):
            self._notify_keys_stored(
                [key for key, is_new in zip(held, new, strict=True) if is_new],
                [size for size, is_new in zip(held_sizes, new, strict=True) if is_new],
            )
        if not all(new):
            self._notify_keys_accessed(
                [key for key, is_new in zip(held, new, strict=True) if not is_new]
            )

    def _delete(self, keys: list[Any]) -> None:
        client = self._late.client
        if client is None:
            self._log.warning("lmcache.deletion_dropped", objects=len(keys))
            return
        names, places = self._addresses.known(keys)
        known = self._known.of(keys)
        if client.remove(names):
            deleted = [keys[place] for place in places]
        else:
            # They are gone already, or a node did not answer.
            _, known = self._held(client, known)
            deleted = [each.key for each in known]
        sizes = {each.key: each.size for each in self._known.drop(known)}
        if deleted:
            self._notify_keys_deleted(deleted, [sizes.get(key, 0) for key in deleted])

    def _refresh(self) -> None:
        client = self._late.client
        if client is None:
            return
        self._used_bytes = int(client.stats().get("home_pool_bytes_used", 0))
        _, gone = self._held(client, self._known.next_to_check())
        if dropped := self._known.drop(gone):
            self._notify_keys_deleted(
                [each.key for each in dropped], [each.size for each in dropped]
            )

    def _held(
        self, client: Any, objects: Sequence[KnownObject]
    ) -> tuple[list[KnownObject], list[KnownObject]]:
        """Return which objects a node holds, and which no node holds; of others that is unknown."""
        held: list[KnownObject] = []
        gone: list[KnownObject] = []
        for begin in range(0, len(objects), OVERLAP_KEYS):
            part = objects[begin : begin + OVERLAP_KEYS]
            names = self._addresses.of([each.key for each in part], [each.layout for each in part])
            overlap = client.overlap(names)
            for each, is_held in zip(part, overlap.flags.any(axis=0).tolist(), strict=True):
                if is_held:
                    held.append(each)
                elif overlap.whole:
                    gone.append(each)
        return held, gone

    def _retain(self, keys: Collection[Any], seconds: float) -> int:
        """Retain objects in the layouts and groups that are known; return how many keys are."""
        client = self._late.client
        if client is None:
            return 0
        # A pin names the first group, and is for the chunk in all of them.
        each_group = [
            type(key)(key.chunk_hash, key.model_name, key.kv_rank, group, key.cache_salt)
            for key in keys
            for group in self._addresses.groups(key.model_name)
        ]
        names, _ = self._addresses.known(each_group)
        return min(len(keys), client.retain(names, seconds)) if len(names) else 0

    def _register_memory(self, client: Any) -> None:
        if self._l1 is None:
            return
        # A lazy arena grows: only its first part keeps its address.
        size = getattr(self._l1, "stable_registration_size", None)
        client.register_memory(self._l1.ptr, self._l1.size if size is None else size)


def _runs(objects: Sequence[Any]) -> tuple[PageRuns, Any]:
    """Return the memory of objects, one run each, and their sizes in bytes, (n,) int64."""
    addresses = np.array([each.data_ptr for each in objects], np.uint64)
    sizes = np.array([each.get_size() for each in objects], np.int64)
    return PageRuns.regular(addresses, sizes, len(objects)), sizes


def _parts(sizes: Any) -> list[Any]:
    """Return indices of objects in groups of about STORE_BYTES, in their order."""
    groups = (np.cumsum(sizes) - sizes) // STORE_BYTES
    return np.split(np.arange(len(sizes)), np.flatnonzero(np.diff(groups)) + 1)
