"""Owns PeerCacheStore, the class that SGLang's `dynamic` storage backend builds.

Owns    one client, opened when SGLang registers its host pool and closed with the store.
Hears   the methods of HiCacheStorage, from SGLang's scheduler and its storage threads at once.
Keeps   every batch method answers, well-formed and as long as it was asked, whatever happens:
        an error is a miss with a counted reason. Only construction and registration raise.
Limits  the client's deadlines; nothing here waits.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np
import torch
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from peercache.client.client import Client
from peercache.config.settings import Config
from peercache.model.keys import Namespace
from peercache.model.prefix import Prefix
from peercache.model.runs import PageRuns
from peercache.observability import log, reasons
from peercache.observability.metrics import Metrics
from peercache.sglang import hybrid
from peercache.sglang.attached import KV_POOL, Attachment, SidePool, pool_name
from peercache.sglang.namespace import model_name, namespace_of, side_namespace_of
from peercache.sglang.pages import (
    FlatPages,
    HostPages,
    UnservedPool,
    UnusableBatch,
    flat_runs,
    is_logical,
    side_pages_of,
)
from peercache.sglang.server import Server, separates_requests, version_facts
from peercache.sglang.stats import BatchTally, storage_metrics_class

Answer = TypeVar("Answer")

DRAFT_PREFIX = "draft"
"""Pools that a draft model fills: draft, draft_indexer, draft_swa."""

REOPEN_RETRY_S = 5.0
"""Until the next try to open a client after a weight update, where the home node refuses."""


class PeerCacheStore(HiCacheStorage):  # type: ignore[misc]  # SGLang ships no type information
    """HiCache L3 storage in the memory of every SGLang host of a PeerCache cluster."""

    def __init__(
        self,
        storage_config: Any,
        *unused: Any,
        client_factory: Callable[..., Any] = Client.open,
        **unused_options: Any,
    ) -> None:
        """Check the configuration; raise ConfigError that names the key that is wrong.

        storage_config: SGLang's HiCacheStorageConfig of any version; its `extra_config` holds our
        settings beside SGLang's own keys, and the environment (PEERCACHE_…) is read below them.
        unused:         SGLang passes a second argument, and some of its forks the host pool.
        client_factory: what opens the client; tests pass a fake with the same contract.
        """
        extra = getattr(storage_config, "extra_config", None) or {}
        self._config = Config.from_sglang(extra, os.environ)
        self._storage_config = storage_config
        self._client_factory = client_factory
        self._log = log.get_logger(component="sglang")
        wants_metrics = bool(getattr(storage_config, "enable_storage_metrics", False))
        self._tally = BatchTally(storage_metrics_class() if wants_metrics else None)
        self._server = Server()
        self._own_name = f"unnamed-{secrets.token_hex(8)}"
        self._registering = threading.Lock()
        self._closing = threading.Event()
        self._change = threading.Lock()
        self._attached: Attachment | None = None
        self.registered_pools: dict[Any, Any] = {}
        self._idle_reason = reasons.NO_HOME
        self._warn_once = log.WarnOnce(self._log)
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
        answers a miss: the engine recomputes.
        """
        self.mem_pool_host = mem_pool_host
        self._closing.clear()
        with self._registering:
            self._register(mem_pool_host, reasons.NO_HOME)

    def _register(self, mem_pool_host: Any, idle_reason: str) -> None:
        """Open a client for a pool. idle_reason: why calls are misses until it is open."""
        try:
            self._require_separate_requests()
            pages = None if is_logical(mem_pool_host) else HostPages.of(mem_pool_host)
        except UnservedPool as unserved:
            self._detach(reasons.UNSUPPORTED)
            self._tell_refused(KV_POOL, mem_pool_host, unserved)
            return
        version = self._server.weight_version()
        page_bytes = 0 if pages is None else pages.page_bytes
        namespace = self._namespace(mem_pool_host, page_bytes, version)
        with self._change:
            before = self._attached
        if before is not None and before.namespace == namespace:
            registered = _registered(before.client, pages)
            with self._change:
                self._attached = attrs.evolve(
                    before,
                    anchor=mem_pool_host,
                    pages=pages,
                    end_registration=registered,
                )
            # The new memory first: a pool that is named again stays registered all the time.
            before.end_registration()
            return
        self._detach(idle_reason)
        client = self._client_factory(self._config, namespace=namespace)
        registered = _registered(client, pages)
        at = Attachment(client, mem_pool_host, pages, namespace, version, registered, {})
        for name, pool in list(self.registered_pools.items()):
            at = self._with_side(at, pool_name(name), pool)
        with self._change:
            self._attached = at
        self._log.info(
            "sglang.store_attached",
            namespace=namespace.name,
            geometry=namespace.geometry,
            coordinates=namespace.coordinates,
            weights=namespace.weights,
            page_bytes=page_bytes,
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Serve the pages of a side pool too; never raises, for SGLang's threads run already.

        A pool that cannot be served is logged once, and its pages are misses: as far as it gates
        the prefix, the engine recomputes. "kv" is the pool that was registered first.
        """
        self.registered_pools[host_pool_name] = host_pool
        with self._registering:
            before = self._attached
            if before is None:
                return
            attached = self._with_side(before, pool_name(host_pool_name), host_pool)
            with self._change:
                # Closed, or left for new weights: then the pool is served when a client is opened.
                if self._attached is before:
                    self._attached = attached

    def on_host_pools_registered(self) -> None:
        """Nothing is left to do: each pool is served from its own registration on."""

    def _with_side(self, at: Attachment, name: str, pool: Any) -> Attachment:
        """Return what is attached, with a side pool; without it where it cannot be served."""
        if name == KV_POOL:
            return at
        sides, before = dict(at.sides), at.sides.get(name)
        sides.pop(name, None)
        try:
            pages = side_pages_of(pool)
            namespace = side_namespace_of(
                self._storage_config,
                pool,
                name,
                pages.page_bytes,
                at.namespace.name,
                self._weights(at.version) | self._draft_weights(name),
            )
            sides[name] = SidePool(pages, namespace, _registered(at.client, pages))
        except UnservedPool as unserved:
            self._tell_refused(name, pool, unserved)
        except Exception:
            self._log.exception("sglang.call_failed", operation=f"register {name}", pages=0)
        else:
            self._log.info(
                "sglang.pool_attached",
                pool=name,
                geometry=namespace.geometry,
                coordinates=namespace.coordinates,
                page_bytes=pages.page_bytes,
                copied=not isinstance(pages, HostPages),
            )
        if before is not None:
            before.end_registration()
        return attrs.evolve(at, sides=sides)

    def _namespace(self, pool: Any, page_bytes: int, version: str) -> Namespace:
        """Return the namespace of a pool: as the setting says, else as the server's model says."""
        name = self._config.namespace
        if not name:
            name = model_name(self._storage_config, pool) or self._server.model_path
        if not name:
            name = self._own_name
            self._warn_once(
                "sglang.model_unnamed",
                "",
                namespace=name,
                why="SGLang names neither a model nor its weights, so this process shares no page "
                "with any other: name the model with the setting `namespace`",
            )
        weights = self._weights(version)
        return namespace_of(self._storage_config, pool, page_bytes, name, weights)

    def _weights(self, version: str) -> dict[str, str]:
        """Return the facts of the weights; a name that was set stands for all but their version."""
        if self._config.namespace:
            return version_facts(version)
        return self._server.weights(version)

    def _draft_weights(self, name: str) -> dict[str, str]:
        """Return the facts of the draft model's weights for a pool that it fills."""
        is_draft = name.startswith(DRAFT_PREFIX) and not self._config.namespace
        return self._server.draft_weights if is_draft else {}

    def _require_separate_requests(self) -> None:
        """Refuse to serve where one page hash stands for a prompt under several LoRA adapters."""
        if separates_requests():
            return
        if self._server.has_adapters:
            raise UnservedPool(
                "this SGLang hashes a prompt to the same pages under every LoRA adapter; "
                "0.5.20 and later tell them apart"
            )
        self._warn_once(
            "sglang.salts_not_separated",
            "",
            why="this SGLang ignores cache salts in page hashes, so requests of several salts "
            "share pages; 0.5.20 and later tell them apart",
        )

    # --- v1: host buffers in place ---------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Read pages into the host pool; one bool a key, True where every byte is there."""
        return self._answer(
            "get",
            keys,
            [False] * len(keys),
            lambda at: self._read(at, keys, lambda pages: pages.runs(host_indices, len(keys))),
        )

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Store pages from the host pool; one bool a key, True where the cluster holds it."""
        return self._answer(
            "set",
            keys,
            [False] * len(keys),
            lambda at: self._write(at, keys, lambda pages: pages.runs(host_indices, len(keys))),
        )

    # --- v0: flat page tensors -------------------------------------------------------------

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Fill and return the target, or a new flat page where none is given; None is a miss."""
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
        """Fill the targets in place; the target itself a page that is a hit, else None."""
        targets = [] if target_locations is None else list(target_locations)

        def read(at: Attachment) -> list[bool]:
            return self._read(
                at, keys, lambda pages: flat_runs(targets, len(keys), pages.page_bytes)
            )

        hits = self._answer("get", keys, [False] * len(keys), read)
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

        def write(at: Attachment) -> list[bool]:
            return self._write(
                at, keys, lambda pages: flat_runs(sources, len(keys), pages.page_bytes)
            )

        return all(self._answer("set", keys, [False] * len(keys), write))

    # --- what is there ---------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Return whether a page is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return the length of the leading run of keys that are present, 0 to len(keys).

        What is reported is evicted last from now on.
        """

        def ask(at: Attachment) -> int:
            if at.pages is None:
                # Such pages have no bytes here: only the side pools can say what there is.
                raise UnusableBatch(reasons.UNSUPPORTED, "the KV pool of this model has no bytes")
            found = at.client.touch(keys)
            if not isinstance(found, list) or len(found) != len(keys):
                raise ValueError(f"exists of {len(keys)} keys answered {found!r:.80}")
            return found.index(False) if False in found else len(found)

        return self._answer("exists", keys, 0, ask)

    # --- v2: the pools of hybrid models ------------------------------------------------------

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """Return how far a prefix reaches in its KV pages and in every pool that it needs.

        One batch asks for the pages of all pools. `kv_hit_pages` is the longest usable prefix,
        `restorable_prefix_pages` are all of them, `extra_pool_hit_pages` what each pool has alone.
        """
        transfers = list(pool_transfers or ())
        nothing = Prefix(0, [], 0, [0] * len(transfers))
        found = self._answer(
            "exists_v2",
            keys,
            nothing,
            lambda at: hybrid.exists(at, keys, transfers, self._refuser("exists_v2")),
        )
        by_pool = {KV_POOL: found.kv} if found.kv else {}
        for each, pages in zip(transfers, found.sides, strict=True):
            if pages:
                by_pool[each.name] = pages
        return _result(found.pages, by_pool, found.ends)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Read the pages of side pools into the host, all pools in one batch; one bool a key."""

        def read(at: Attachment, keys: Any, runs: PageRuns, parts: list[hybrid.Part]) -> list[bool]:
            flags = self._timed("prefetch", runs, lambda: at.client.batch_get_into(keys, runs))
            left = list(flags)
            for part in parts:
                if part.staged is not None:
                    part.staged.scatter(left[: len(part.keys)])
                left = left[len(part.keys) :]
            return flags

        answer = self._move("get_v2", transfers, read)
        for name, flags in answer.items():
            self._count_short(pool_name(name), flags)
        return answer

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store the pages of side pools, all pools in one batch; one bool a key."""

        def write(
            at: Attachment, keys: Any, runs: PageRuns, parts: list[hybrid.Part]
        ) -> list[bool]:
            for part in parts:
                if part.staged is not None:
                    part.staged.gather()
            return self._timed("backup", runs, lambda: at.client.batch_set_from(keys, runs))

        return self._move("set_v2", transfers, write)

    def _move(
        self,
        operation: str,
        transfers: Any,
        batch: Callable[[Attachment, Any, PageRuns, list[hybrid.Part]], list[bool]],
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
                lambda keys, runs, parts: batch(at, keys, runs, parts),
                self._config.op_timeout_s,
            ),
        )
        return {each.name: flags for each, flags in zip(listed, answers, strict=True)}

    # --- the rest ----------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove the pages of this namespace, on every live node, and no others."""
        self._answer("clear", (), 0, lambda at: at.client.clear())

    def get_stats(self) -> Any:
        """Return a StorageMetrics of what happened since the last call, or None."""
        return self._tally.drain()

    def stats(self) -> dict[str, Any]:
        """Return what the client counts, and what never reached it, for people."""
        none: dict[str, Any] = {}
        counted = self._answer("stats", (), none, lambda at: dict(at.client.stats()))
        return {**counted, "refused": self._tally.snapshot()}

    def close(self) -> None:
        """Close the client. Later calls are misses; closing twice is fine."""
        self._closing.set()
        self._detach(reasons.CLOSED)

    # --- one place where everything becomes an answer ----------------------------------------

    def _answer(
        self,
        operation: str,
        keys: Sequence[str],
        miss: Answer,
        ask: Callable[[Attachment], Answer],
    ) -> Answer:
        """Return what `ask` says, or the miss: an engine's thread never sees an exception."""
        attached = self._attached
        if attached is not None and self._server.weight_version() != attached.version:
            self._leave(attached)
            attached = None
        if attached is None:
            self._refuse(operation, self._idle_reason, len(keys))
            return miss
        try:
            return ask(attached)
        except UnusableBatch as unusable:
            self._refuse(operation, unusable.reason, len(keys))
            key = (operation, unusable.reason)
            self._warn_once("sglang.batch_refused", key, operation=operation, why=str(unusable))
        except Exception:
            self._refuse(operation, reasons.INTERNAL, len(keys))
            self._log.exception("sglang.call_failed", operation=operation, pages=len(keys))
        return miss

    def _leave(self, attached: Attachment) -> None:
        """Stop serving pages of weights that the engine no longer has.

        No caller waits for the client of the new weights: a thread opens it, and calls are misses
        until then.
        """
        with self._change:
            if self._attached is not attached:
                return
            self._attached, self._idle_reason = None, reasons.WEIGHTS_CHANGED
        self._log.info("sglang.weights_changed", before=attached.version)
        threading.Thread(
            target=self._reopen, args=(attached,), name="peercache-reopen", daemon=True
        ).start()

    def _reopen(self, left: Attachment) -> None:
        left.client.close()
        while not self._closing.is_set():
            try:
                with self._registering:
                    self._register(left.anchor, reasons.WEIGHTS_CHANGED)
                break
            except Exception as error:
                self._warn_once("sglang.reopen_failed", str(error), why=str(error))
            self._closing.wait(REOPEN_RETRY_S)
        if self._closing.is_set():
            self._detach(reasons.CLOSED)

    def _read(
        self, at: Attachment, keys: Sequence[str], runs_in: Callable[[HostPages], PageRuns]
    ) -> list[bool]:
        if at.pages is None:
            return [True] * len(keys)
        runs = runs_in(at.pages)
        flags = self._timed("prefetch", runs, lambda: at.client.batch_get_into(keys, runs))
        self._count_short(KV_POOL, flags)
        return flags

    def _write(
        self, at: Attachment, keys: Sequence[str], runs_in: Callable[[HostPages], PageRuns]
    ) -> list[bool]:
        if at.pages is None:
            return [True] * len(keys)
        runs = runs_in(at.pages)
        return self._timed("backup", runs, lambda: at.client.batch_set_from(keys, runs))

    def _timed(self, kind: str, runs: PageRuns, move: Callable[[], Any]) -> list[bool]:
        begun_s = time.perf_counter()
        flags = move()
        elapsed_s = time.perf_counter() - begun_s
        if not isinstance(flags, list) or len(flags) != len(runs):
            raise ValueError(f"{kind} of {len(runs)} pages answered {flags!r:.80}")
        moved = runs.lengths if all(flags) else runs.lengths[np.array(flags, np.bool_)]
        self._tally.moved(kind, len(moved), int(moved.sum()), elapsed_s)
        return flags

    def _count_short(self, pool: str, flags: list[bool]) -> None:
        """Count pages that a get lacks: SGLang asks for nothing that was not reported before."""
        short = flags.count(False)
        attached = self._attached
        metrics = getattr(attached.client, "metrics", None) if attached is not None else None
        if short and isinstance(metrics, Metrics):
            metrics.pages_short.labels(pool).inc(short)

    def _refuser(self, operation: str) -> hybrid.Refuse:
        """Return what counts the pages of one transfer that are not served, and says so once."""

        def refuse(reason: str, pages: int, why: str) -> None:
            self._refuse(operation, reason, pages)
            key = (operation, reason, why.partition(":")[0])
            self._warn_once("sglang.batch_refused", key, operation=operation, why=why)

        return refuse

    def _refuse(self, operation: str, reason: str, pages: int) -> None:
        """Count pages that never reach the client, in its metrics too where it has any."""
        self._tally.refused(operation, reason, pages)
        attached = self._attached
        metrics = getattr(attached.client, "metrics", None) if attached is not None else None
        if isinstance(metrics, Metrics):
            if operation.startswith("get"):
                metrics.pages_missed.labels(reason).inc(pages)
            elif operation.startswith("set"):
                metrics.sets_refused.labels(reason).inc(pages)

    def _tell_refused(self, name: str, pool: Any, unserved: UnservedPool) -> None:
        self._log.warning(
            "sglang.pool_refused", pool=name, kind=type(pool).__name__, why=str(unserved)
        )

    def _detach(self, idle_reason: str) -> None:
        with self._change:
            attached, self._attached = self._attached, None
            self._idle_reason = idle_reason
        if attached is not None:
            attached.client.close()


def _result(pages: int, by_pool: dict[Any, int], ends: list[int]) -> Any:
    """Return SGLang's answer to an exists of several pools, in the fields that its version has."""
    known = hicache_storage.PoolTransferResult
    # Since 0.5.19.
    more = {"restorable_prefix_pages": ends} if hasattr(known, "restorable_prefix_pages") else {}
    return known(kv_hit_pages=pages, extra_pool_hit_pages=by_pool, **more)


def _registered(client: Any, pages: HostPages | FlatPages | None) -> Callable[[], None]:
    """Have the client make a pool's memory ready for reads into it; return what ends that."""
    if pages is None:
        return lambda: None
    ends = [
        client.register_memory(address, length, pages.pool) for address, length in pages.memory()
    ]

    def end() -> None:
        for each in ends:
            each()

    return end
