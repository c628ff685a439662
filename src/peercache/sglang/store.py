"""PeerCacheStore, the class that SGLang's `dynamic` storage backend instantiates.

Owns    the answers to SGLang's calls; `registration` owns the client and the pools.
Takes   the methods of HiCacheStorage, from SGLang's scheduler and its storage threads at the same
        time.
Keeps   every batch method returns a valid answer of the right length, in all cases: an error is a
        miss with a counted reason. Only construction and registration raise.
Limits  the client's deadlines; nothing here waits.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from peercache.client.client import Client
from peercache.client.operator import TIMEOUT_S, Operator, Target
from peercache.client.report import CallReport, add_missed, current, reporting
from peercache.config.settings import Config
from peercache.engines.late_client import level_named
from peercache.errors import ConfigError
from peercache.model.keys import PageKeys
from peercache.model.prefix import Prefix
from peercache.model.runs import I64, PageRuns
from peercache.observability import log, reasons
from peercache.observability.metrics import Metrics
from peercache.sglang import hybrid
from peercache.sglang.pages import (
    KV_POOL,
    Attachment,
    HostPages,
    UnusableBatch,
    object_keys,
    pool_name,
    whole_pages,
)
from peercache.sglang.registration import Registration
from peercache.sglang.request_hints import StoreHints

PENDING_MAX = 1024
"""Batches kept until SGLang drains them at its next event-loop step. If an engine stops stepping,
the lists must not grow."""

_METRICS_MODULES = ("sglang.srt.observability.metrics_collector", "sglang.srt.metrics.collector")


def storage_metrics_class() -> Any | None:
    """Return SGLang's StorageMetrics, or None if this version does not make it available."""
    for module in _METRICS_MODULES:
        with suppress(ImportError):
            return getattr(import_module(module), "StorageMetrics", None)
    return None


class BatchTally:
    """Counts of one store. Thread-safe: exists, get, set and the scheduler run concurrently."""

    def __init__(self, metrics_class: Any | None) -> None:
        """Count; store batches for SGLang only if it has StorageMetrics."""
        self._metrics_class = metrics_class
        self._lock = threading.Lock()
        self._refused: Counter[tuple[str, str]] = Counter()
        self._pending = metrics_class() if metrics_class is not None else None

    def refused(self, operation: str, reason: str, pages: int) -> None:
        """Count pages that never reached the client, by operation and miss reason."""
        if pages == 0:
            return
        with self._lock:
            self._refused[operation, reason] += pages

    def moved(self, kind: str, pages: int, bytes_moved: int, elapsed_s: float) -> None:
        """Record one batch that read ("prefetch") or wrote ("backup") pages."""
        if self._pending is None or pages == 0:
            return
        with self._lock:
            counts = getattr(self._pending, f"{kind}_pgs")
            if len(counts) < PENDING_MAX:
                counts.append(pages)
                gigabytes = bytes_moved / 1e9
                getattr(self._pending, f"{kind}_bandwidth").append(gigabytes / max(elapsed_s, 1e-9))

    def drain(self) -> Any | None:
        """Return a StorageMetrics with what happened since the last call, or None."""
        if self._metrics_class is None:
            return None
        fresh = self._metrics_class()
        with self._lock:
            pending, self._pending = self._pending, fresh
        return pending

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Return {operation: {reason: pages}}."""
        with self._lock:
            counted = dict(self._refused)
        out: dict[str, dict[str, int]] = {}
        for operation, reason in sorted(counted):
            out.setdefault(operation, {})[reason] = counted[operation, reason]
        return out


Answer = TypeVar("Answer")

KEY_SHOWN = 12
"""Digits of a page hash in a log line: enough to find it in another line."""


class PeerCacheStore(HiCacheStorage):  # type: ignore[misc]  # SGLang ships no type information
    """HiCache L3 storage in the memory of every SGLang host of a PeerCache cluster."""

    def __init__(
        self,
        storage_config: Any,
        *unused: Any,
        client_factory: Callable[..., Any] = Client.open,
        **unused_options: Any,
    ) -> None:
        """Check the configuration; raise a ConfigError that names a wrong key.

        storage_config: SGLang's HiCacheStorageConfig of any version; its `extra_config` contains
                        our settings in addition to SGLang's own keys; they override the environment
                        (PEERCACHE_…).
        unused:         SGLang passes a second argument, and some of its forks the host pool.
        client_factory: what opens the client; tests pass a fake with the same contract.
        """
        extra = getattr(storage_config, "extra_config", None) or {}
        self._config = Config.from_sglang(extra, os.environ)
        log.log_into("sglang", level=level_named(self._config, extra, os.environ))
        self._log = log.get_logger(component="sglang")
        wants_metrics = bool(getattr(storage_config, "enable_storage_metrics", False))
        self._tally = BatchTally(storage_metrics_class() if wants_metrics else None)
        self._warn_once = log.WarnOnce(self._log)
        self.registered_pools: dict[Any, Any] = {}
        self._storage_config = storage_config
        self._hints = StoreHints(self._client, self._keys, self._log)
        self._objects: Any = None
        """The publisher of object events, if configured."""
        self._registration = Registration(
            self._config,
            storage_config,
            client_factory,
            self.registered_pools,
            self._log,
            self._warn_once,
        )
        if isinstance(extra.get("interface_v1"), str):
            self._log.warning(
                "sglang.interface_guessed",
                interface_v1=extra["interface_v1"],
                hint="SGLang reads any non-empty string as true: write 1 or 0, without quotes",
            )

    # --- registration: may raise -----------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the client for this pool's pages; raise PeerCacheError if that fails.

        A pool that cannot be served (pages spread over ranks) is logged once, and every call
        returns misses: the engine recomputes.
        """
        self.mem_pool_host = mem_pool_host
        self._registration.register(mem_pool_host)
        self._hints.page_tokens = int(getattr(mem_pool_host, "page_size", 0))
        at, ranks = self._registration.attached, ("tp_rank", "pp_rank")
        is_first = not any(getattr(self._storage_config, rank, 0) for rank in ranks)
        if self._config.object_events and is_first and at is not None and self._objects is None:
            self._objects = self._object_events(at.client.home_address)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Also serve the pages of a side pool; never raises, because SGLang's threads run already.

        A pool that cannot be served is logged once, and its pages are misses: if it gates the
        prefix, the engine recomputes. "kv" is the pool that was registered first.
        """
        self.registered_pools[host_pool_name] = host_pool
        self._registration.register_side(host_pool, host_pool_name)

    def on_host_pools_registered(self) -> None:
        """Do nothing: each pool is served from its own registration on."""

    # --- v1: host buffers in place ---------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Read pages into the host pool; one bool per key, True if every byte was read."""
        return self._pages("get", keys, lambda pages: pages.runs(host_indices, len(keys)))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Store pages from the host pool; one bool per key, True if the cluster holds it."""
        return self._pages("set", keys, lambda pages: pages.runs(host_indices, len(keys)))

    # --- v0: flat page tensors -------------------------------------------------------------

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Fill and return the target, or a new flat page if none is given; None means a miss."""
        if target_location is None:
            target_location = self._answer(
                "get", [key], None, lambda at: at.anchor.get_dummy_flat_data_page()
            )
        if target_location is None:
            return None
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fill the targets in place; return the target of each hit, None for a miss."""
        targets = [] if target_locations is None else list(target_locations)
        hits = self._pages("get", keys, lambda pages: pages.flat_runs(targets, len(keys)))
        return [targets[index] if hit else None for index, hit in enumerate(hits)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store one flat page."""
        page = value if value is not None else target_location
        return self.batch_set([key], [page])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store flat pages; True if all are held. Nothing reads them after the return: with MLA
        they are views of live host memory.
        """
        given = values if values is not None else target_locations
        sources = [] if given is None else list(given)
        return all(self._pages("set", keys, lambda pages: pages.flat_runs(sources, len(keys))))

    # --- existence -------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Return whether a page exists."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return the length of the leading run of keys that are present, 0 to len(keys).

        Reported pages are evicted last from now on.
        """

        def ask(at: Attachment) -> int:
            if at.pages is None:
                # Such pages have no bytes here: only the side pools show which pages exist.
                raise UnusableBatch(reasons.UNSUPPORTED, "the KV pool of this model has no bytes")
            digests = at.spaces.digests
            named, more = object_keys(keys, digests), self._compute(len(digests))
            present = at.client.batch_touch(named, **more)
            if not isinstance(present, int) or not 0 <= present <= len(keys) * len(digests):
                raise ValueError(f"exists of {len(keys)} keys answered {present!r:.80}")
            # The first missing object ends the run of pages.
            return present // len(digests)

        return self._answer("exists", keys, 0, ask)

    # --- v2: the pools of hybrid models ------------------------------------------------------

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """Return how far a prefix reaches in its KV pages and in every required pool.

        One batch asks for the pages of all pools. `kv_hit_pages` is the longest usable prefix,
        `restorable_prefix_pages` are all usable ones, `extra_pool_hit_pages` the pages of each pool
        alone.
        """
        transfers = list(pool_transfers or ())
        nothing = Prefix(0, [], 0, [0] * len(transfers))
        found = self._answer(
            "exists_v2",
            keys,
            nothing,
            lambda at: hybrid.exists(
                at, keys, transfers, self._refuser("exists_v2"), self._compute(1).get("compute_s")
            ),
        )
        by_pool = {KV_POOL: found.kv} if found.kv else {}
        for each, pages in zip(transfers, found.sides, strict=True):
            if pages:
                by_pool[each.name] = pages
        return _result(found.pages, by_pool, found.ends)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Read the pages of side pools into the host, all pools in one batch; one bool per key."""

        def read(
            at: Attachment, keys: PageKeys, runs: PageRuns, objects: I64, parts: list[hybrid.Part]
        ) -> list[bool]:
            left = flags = self._timed("prefetch", runs, objects, at.client.batch_get_into, keys)
            for part in parts:
                if part.staged is not None:
                    part.staged.scatter(left[: part.pages])
                left = left[part.pages :]
            return flags

        answer = self._move("get_v2", transfers, read)
        for name, flags in answer.items():
            self._count_short(pool_name(name), flags)
        return answer

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store the pages of side pools, all pools in one batch; one bool per key."""

        def write(
            at: Attachment, keys: PageKeys, runs: PageRuns, objects: I64, parts: list[hybrid.Part]
        ) -> list[bool]:
            for part in parts:
                if part.staged is not None:
                    part.staged.gather()
            return self._timed("backup", runs, objects, at.client.batch_set_from, keys)

        return self._move("set_v2", transfers, write)

    def _move(
        self,
        operation: str,
        transfers: Any,
        batch: Callable[[Attachment, PageKeys, PageRuns, I64, list[hybrid.Part]], list[bool]],
    ) -> dict[Any, list[bool]]:
        listed = list(transfers or ())
        misses = [[False] * len(each.keys or ()) for each in listed]
        answers = self._answer(
            operation,
            [key for each in listed for key in each.keys or ()],
            misses,
            lambda at: hybrid.move(
                at,
                listed,
                self._refuser(operation),
                partial(batch, at),
                self._config.op_timeout_s,
            ),
        )
        return {each.name: flags for each, flags in zip(listed, answers, strict=True)}

    # --- other methods ---------------------------------------------------------------------

    def clear(self) -> None:
        """Remove the pages of this namespace on every live node."""
        self._answer("clear", (), 0, lambda at: at.client.clear())

    def get_stats(self) -> Any:
        """Return a StorageMetrics of what happened since the last call, or None."""
        return self._tally.drain()

    def stats(self) -> dict[str, Any]:
        """Return the client's counts, and those of pages that never reached it, for operators."""
        none: dict[str, Any] = {}
        counted = self._answer("stats", (), none, lambda at: dict(at.client.stats()))
        objects = {} if self._objects is None else {"object_events": self._objects.status()}
        return {**counted, **objects, "refused": self._tally.snapshot()}

    def close(self) -> None:
        """Close the client. Later calls are misses; may be repeated."""
        self._hints.close()
        self._registration.close()
        objects, self._objects = self._objects, None
        if objects is not None:
            objects.close()

    def _compute(self, objects: int) -> dict[str, float]:
        """Return the argument with the time to compute an object of a page, {} with decline off."""
        if self._config.decline == "off":
            return {}
        return {"compute_s": self._config.page_compute_ms / 1000 / objects}

    def _client(self) -> Any | None:
        attached = self._registration.attached
        return None if attached is None else attached.client

    def _keys(self, pages: Sequence[str]) -> PageKeys:
        """Return the keys of all objects of pages, in the pools of a hybrid model too.

        A window or a state belongs to few pages: hints count the others as missing.
        """
        attached = self._registration.attached
        if attached is None:
            return object_keys(pages, ())
        pools = (attached.spaces, *(side.spaces for side in attached.sides.values()))
        return object_keys(pages, [digest for spaces in pools for digest in spaces.digests])

    def _object_events(self, home: str) -> Any:
        """Start to publish the pages of the home node; raise ConfigError if that is impossible."""
        try:
            from peercache.sglang.object_events import (  # noqa: PLC0415 - of the extra `events`
                ObjectEvents,
                object_names,
            )
        except ImportError as error:
            problem = f"requires {error.name}: pip install msgspec pyzmq"
            raise ConfigError("object_events", problem) from error
        target = Target(at=home, config=self._config, timeout_s=TIMEOUT_S, has_cluster=True)
        names = object_names(self._storage_config, self.mem_pool_host)
        return ObjectEvents(self._config, names, lambda: Operator(target).__enter__(), self._log)

    # --- the only place that turns calls into answers --------------------------------------

    def _answer(
        self,
        operation: str,
        keys: Sequence[str],
        miss: Answer,
        ask: Callable[[Attachment], Answer],
    ) -> Answer:
        """Return the result of `ask`, or the miss: an engine's thread never sees an exception."""
        is_logged = len(keys) > 0 and self._log.isEnabledFor(logging.DEBUG)
        with reporting(is_detailed=is_logged) as report:
            answer = self._asked(operation, keys, miss, ask)
        if is_logged and (flags := _flags(answer, len(keys))):
            first = flags.index(False) if False in flags else None
            self._log.debug(
                "sglang.call_answered",
                call=report.call,
                operation=operation,
                pages=len(keys),
                hits=flags.count(True),
                reasons=dict(report.misses),
                first_missing=None if first is None else str(keys[first])[:KEY_SHOWN],
            )
        return answer

    def _asked(
        self,
        operation: str,
        keys: Sequence[str],
        miss: Answer,
        ask: Callable[[Attachment], Answer],
    ) -> Answer:
        attached, idle_reason = self._registration.serving()
        if attached is None:
            self._refuse(operation, idle_reason, len(keys))
            return miss
        try:
            if operation.startswith("set") and not self._registration.may_store(attached):
                raise UnusableBatch(
                    reasons.WEIGHTS_CHANGED,
                    "SGLang has not flushed its caches since the weights changed: /flush_cache",
                )
            if self._objects is not None and len(keys) > 0:
                self._objects.name(keys, attached.spaces.digests[0])
            self._hints.saw(keys)
            answer = ask(attached)
            if operation.startswith("set"):
                self._hints.stored(keys)
            return answer
        except UnusableBatch as unusable:
            self._refuse(operation, unusable.reason, len(keys))
            key = (operation, unusable.reason)
            self._warn_once("sglang.batch_refused", key, operation=operation, why=str(unusable))
        except Exception:
            self._refuse(operation, reasons.INTERNAL, len(keys))
            self._log.exception("sglang.call_failed", operation=operation, pages=len(keys))
        return miss

    def _pages(
        self, operation: str, keys: Sequence[str], runs_in: Callable[[HostPages], PageRuns]
    ) -> list[bool]:
        """Get or set pages that are in the runs of `runs_in`; one bool per key."""

        def move(at: Attachment) -> list[bool]:
            if at.pages is None:
                return [True] * len(keys)
            runs, named = runs_in(at.pages), object_keys(keys, at.spaces.digests)
            objects = np.full(len(keys), at.pages.objects)
            if operation == "set":
                return self._timed("backup", runs, objects, at.client.batch_set_from, named)
            flags = self._timed("prefetch", runs, objects, at.client.batch_get_into, named)
            self._count_short(KV_POOL, flags)
            return flags

        return self._answer(operation, keys, [False] * len(keys), move)

    def _timed(
        self,
        kind: str,
        runs: PageRuns,
        objects: I64,
        move: Callable[[PageKeys, PageRuns], Any],
        keys: PageKeys,
    ) -> list[bool]:
        """Move objects, and count pages; return one bool per page.

        keys, runs: those of the objects, page by page. objects: (pages,) the number of objects of
                    each.
        """
        report = current.report or CallReport()
        moved_before, bytes_before = report.pages, report.bytes
        begun_s = time.perf_counter()
        flags = move(keys, runs)
        elapsed_s = time.perf_counter() - begun_s
        if not isinstance(flags, list) or len(flags) != len(runs):
            raise ValueError(f"{kind} of {len(runs)} objects answered {flags!r:.80}")
        whole = whole_pages(flags, objects)
        if moved := report.pages - moved_before:
            # Partly moved pages count as the number of pages with the same total of objects.
            pages = min(whole.count(True), -(-moved * len(objects) // len(runs)))
            self._tally.moved(kind, pages, report.bytes - bytes_before, elapsed_s)
        return whole

    def _count_short(self, pool: str, flags: list[bool]) -> None:
        """Count pages that a get did not return: SGLang only requests reported pages."""
        short = flags.count(False)
        attached = self._registration.attached
        metrics = getattr(attached.client, "metrics", None) if attached is not None else None
        if short and isinstance(metrics, Metrics):
            metrics.pages_short.labels(pool).inc(short)

    def _refuser(self, operation: str) -> hybrid.Refuse:
        """Return a function that counts refused pages of a transfer, and logs that once."""

        def refuse(reason: str, pages: int, why: str) -> None:
            self._refuse(operation, reason, pages)
            key = (operation, reason, why.partition(":")[0])
            self._warn_once("sglang.batch_refused", key, operation=operation, why=why)

        return refuse

    def _refuse(self, operation: str, reason: str, pages: int) -> None:
        """Count pages that never reach the client, also in its metrics if there is a client."""
        self._tally.refused(operation, reason, pages)
        add_missed({reason: pages})
        attached = self._registration.attached
        metrics = getattr(attached.client, "metrics", None) if attached is not None else None
        if isinstance(metrics, Metrics):
            if operation.startswith("get"):
                metrics.pages_missed.labels(reason).inc(pages)
            elif operation.startswith("set"):
                metrics.sets_refused.labels(reason).inc(pages)


def _flags(answer: Any, pages: int) -> list[bool]:
    """Return whether each page of a call was a hit, or part of the prefix."""
    if isinstance(answer, Prefix):
        answer = answer.pages
    if isinstance(answer, int):
        return [True] * answer + [False] * (pages - answer)
    if not isinstance(answer, list):
        return []
    return [flag for each in answer for flag in (each if isinstance(each, list) else [each])]


def _result(pages: int, by_pool: dict[Any, int], ends: list[int]) -> Any:
    """Return SGLang's answer to an exists of several pools, in the fields of its version."""
    known = hicache_storage.PoolTransferResult
    # Since 0.5.19.
    more = {"restorable_prefix_pages": ends} if hasattr(known, "restorable_prefix_pages") else {}
    return known(kv_hit_pages=pages, extra_pool_hit_pages=by_pool, **more)
