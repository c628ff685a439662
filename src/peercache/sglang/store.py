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
import torch
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from peercache.client.client import Client
from peercache.config.settings import Config
from peercache.model.keys import Namespace
from peercache.model.runs import PageRuns
from peercache.observability import log, reasons
from peercache.observability.metrics import Metrics
from peercache.sglang.namespace import model_name, namespace_of
from peercache.sglang.pages import HostPages, UnservedPool, UnusableBatch, flat_runs
from peercache.sglang.server import Server, separates_requests, version_facts
from peercache.sglang.stats import BatchTally, storage_metrics_class

Answer = TypeVar("Answer")

KV_POOL = "kv"

REOPEN_RETRY_S = 5.0
"""Until the next try to open a client after a weight update, where the home node refuses."""


@attrs.frozen(eq=False)
class _Attached:
    """What batch methods need, swapped as one: no method may see half of a re-registration."""

    client: Any
    pages: HostPages
    namespace: Namespace
    version: str
    end_registration: Callable[[], None]


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
        self._attached: _Attached | None = None
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

        A pool that cannot be served (the anchor of a hybrid model, pages spread over ranks) is
        logged once, and every call answers a miss: the engine recomputes.
        """
        self.mem_pool_host = mem_pool_host
        self._closing.clear()
        with self._registering:
            self._register(mem_pool_host, reasons.NO_HOME)

    def _register(self, mem_pool_host: Any, idle_reason: str) -> None:
        """Open a client for a pool. idle_reason: why calls are misses until it is open."""
        try:
            self._require_separate_requests()
            pages = HostPages.of(mem_pool_host)
        except UnservedPool as unserved:
            self._detach(reasons.UNSUPPORTED)
            self._log.warning(
                "sglang.pool_refused", pool=type(mem_pool_host).__name__, why=str(unserved)
            )
            return
        version = self._server.weight_version()
        namespace = self._namespace(mem_pool_host, pages.page_bytes, version)
        with self._change:
            before = self._attached
        if before is not None and before.namespace == namespace:
            registered = _registered(before.client, pages)
            with self._change:
                self._attached = attrs.evolve(before, pages=pages, end_registration=registered)
            # The new memory first: a pool that is named again stays registered all the time.
            before.end_registration()
            return
        self._detach(idle_reason)
        client = self._client_factory(self._config, namespace=namespace)
        registered = _registered(client, pages)
        with self._change:
            self._attached = _Attached(client, pages, namespace, version, registered)
        self._log.info(
            "sglang.store_attached",
            namespace=namespace.name,
            geometry=namespace.geometry,
            coordinates=namespace.coordinates,
            weights=namespace.weights,
            page_bytes=pages.page_bytes,
        )

    def _namespace(self, pool: Any, page_bytes: int, version: str) -> Namespace:
        """Return the namespace of a pool: as the setting says, else as the server's model says."""
        name = self._config.namespace
        if name:
            return namespace_of(
                self._storage_config, pool, page_bytes, name, version_facts(version)
            )
        weights = self._server.weights(version)
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
        return namespace_of(self._storage_config, pool, page_bytes, name, weights)

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

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take note of a pool of the v2 interface: only "kv" is served, and that through v1."""
        if not hasattr(self, "registered_pools"):
            self.registered_pools: dict[Any, Any] = {}
        self.registered_pools[host_pool_name] = host_pool
        if str(getattr(host_pool_name, "value", host_pool_name)) != KV_POOL:
            self._tell_hybrid()

    def on_host_pools_registered(self) -> None:
        """Nothing is left to do once SGLang has named all its pools."""

    # --- v1: host buffers in place ---------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Read pages into the host pool; one bool a key, True where every byte is there."""
        return self._answer(
            "get",
            keys,
            [False] * len(keys),
            lambda at: self._read(at, keys, at.pages.runs(host_indices, len(keys))),
        )

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Store pages from the host pool; one bool a key, True where the cluster holds it."""
        return self._answer(
            "set",
            keys,
            [False] * len(keys),
            lambda at: self._write(at, keys, at.pages.runs(host_indices, len(keys))),
        )

    # --- v0: flat page tensors -------------------------------------------------------------

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Fill and return the target, or a new flat page where none is given; None is a miss."""
        if target_location is None:
            target_location = self._answer(
                "get", [key], None, lambda at: at.pages.pool.get_dummy_flat_data_page()
            )
        if target_location is None:
            return None
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fill the targets in place; the target itself a page that is a hit, else None."""
        targets = [] if target_locations is None else list(target_locations)

        def read(at: _Attached) -> list[bool]:
            return self._read(at, keys, flat_runs(targets, len(keys), at.pages.page_bytes))

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
        pages = [] if given is None else list(given)

        def write(at: _Attached) -> list[bool]:
            return self._write(at, keys, flat_runs(pages, len(keys), at.pages.page_bytes))

        return all(self._answer("set", keys, [False] * len(keys), write))

    # --- what is there ---------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Return whether a page is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return the length of the leading run of keys that are present, 0 to len(keys)."""

        def ask(at: _Attached) -> int:
            found = int(at.client.batch_exists(keys))
            if not 0 <= found <= len(keys):
                raise ValueError(f"exists of {len(keys)} keys answered {found}")
            return found

        return self._answer("exists", keys, 0, ask)

    # --- v2: side pools of hybrid models, not served yet ------------------------------------

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """Answer that nothing is there, so that a hybrid model recomputes all of its state."""
        self._refuse_v2("exists", len(keys))
        # Later fields of the result have defaults; these two have been there since it exists.
        return hicache_storage.PoolTransferResult(kv_hit_pages=0, extra_pool_hit_pages={})

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Answer misses, one a key of each pool."""
        return self._misses_v2("get", transfers)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Refuse to store, one False a key of each pool."""
        return self._misses_v2("set", transfers)

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
        ask: Callable[[_Attached], Answer],
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

    def _leave(self, attached: _Attached) -> None:
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

    def _reopen(self, left: _Attached) -> None:
        left.client.close()
        while not self._closing.is_set():
            try:
                with self._registering:
                    self._register(left.pages.pool, reasons.WEIGHTS_CHANGED)
                break
            except Exception as error:
                self._warn_once("sglang.reopen_failed", str(error), why=str(error))
            self._closing.wait(REOPEN_RETRY_S)
        if self._closing.is_set():
            self._detach(reasons.CLOSED)

    def _read(self, at: _Attached, keys: Sequence[str], runs: PageRuns) -> list[bool]:
        return self._timed("prefetch", at, len(keys), lambda: at.client.batch_get_into(keys, runs))

    def _write(self, at: _Attached, keys: Sequence[str], runs: PageRuns) -> list[bool]:
        return self._timed("backup", at, len(keys), lambda: at.client.batch_set_from(keys, runs))

    def _timed(self, kind: str, at: _Attached, pages: int, move: Callable[[], Any]) -> list[bool]:
        begun_s = time.perf_counter()
        flags = move()
        elapsed_s = time.perf_counter() - begun_s
        if not isinstance(flags, list) or len(flags) != pages:
            raise ValueError(f"{kind} of {pages} pages answered {flags!r:.80}")
        self._tally.moved(kind, sum(flags), at.pages.page_bytes, elapsed_s)
        return flags

    def _misses_v2(self, operation: str, transfers: Any) -> dict[Any, list[bool]]:
        answer = {each.name: [False] * len(each.keys or ()) for each in transfers or ()}
        self._refuse_v2(operation, sum(map(len, answer.values())))
        return answer

    def _refuse_v2(self, operation: str, pages: int) -> None:
        self._refuse(f"{operation}_v2", reasons.UNSUPPORTED, pages)
        self._tell_hybrid()

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

    def _tell_hybrid(self) -> None:
        self._warn_once(
            "sglang.hybrid_pool_refused",
            "",
            why="this model keeps state in side pools (Mamba, sliding window, indexer, "
            "draft), which PeerCache does not store yet: it recomputes",
        )

    def _detach(self, idle_reason: str) -> None:
        with self._change:
            attached, self._attached = self._attached, None
            self._idle_reason = idle_reason
        if attached is not None:
            attached.client.close()


def _registered(client: Any, pages: HostPages) -> Callable[[], None]:
    """Have the client make a pool's memory ready for reads into it; return what ends that."""
    ends = [
        client.register_memory(address, length, pages.pool) for address, length in pages.memory()
    ]

    def end() -> None:
        for each in ends:
            each()

    return end
