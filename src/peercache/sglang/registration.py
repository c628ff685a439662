"""Opens and closes the parts of a store: the client, the KV pool, the side pools of a model.

Owns    the attachment: one client, opened when SGLang registers its host pool, reopened when the
        engine gets new weights, and closed with the store.
Takes   pools that SGLang registers, each call of the store (is there an attachment?), and close.
Keeps   no call sees a partial registration: an attachment is replaced as a whole. A call that
        begins after SGLang names a new version gets no pages of old weights.
Limits  only registration waits for the home node. After new weights a separate thread waits.

SGLang passes the served model's name to a storage backend, but nothing about its weights. The
server's own configuration contains more; each version keeps it in a different place (`Server`).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import attrs

from peercache.config.settings import Config
from peercache.engines.weights import weights_identity
from peercache.observability import reasons
from peercache.observability.log import WarnOnce
from peercache.sglang.namespace import (
    HeadGroups,
    PageSpaces,
    UncutPool,
    model_name,
    spaces_of,
)
from peercache.sglang.pages import (
    KV_POOL,
    Attachment,
    FlatPages,
    HostPages,
    SidePool,
    UnservedPool,
    is_logical,
    pool_name,
    side_pages_of,
)

_BAGS = ("model", "serving", "lora", "spec")
"""Namespaces of SGLang's resolved configuration with the options that we read, since 0.5.20."""

_FACTS = ("dtype", "kv_cache_dtype", "quantization", "modelopt_quant", "json_model_override_args")
"""Options that change what the model computes from the same weight files."""

MODEL, DRAFT = "model", "draft"
"""Facts that identify the weights: a namespace that is configured replaces these, and no others."""

DEFAULT_VERSION = "default"
"""SGLang's weight version until a trainer names one."""


class Server:
    """The server of this process; every answer is None or empty if SGLang does not provide it."""

    def __init__(self) -> None:
        """Find the server's configuration; there may be none, as in tests of SGLang."""
        self._sources = list(_sources())

    @property
    def model_path(self) -> str:
        """Folder or repository of the weights, "" if unknown."""
        return str(self._value("model_path") or "")

    @property
    def has_adapters(self) -> bool:
        """Whether requests may use LoRA adapters."""
        return bool(self._value("enable_lora") or self._value("lora_paths"))

    def weight_version(self) -> str:
        """Return the version of the last weight update; read before every call."""
        return str(self._value("weight_version") or DEFAULT_VERSION)

    def weights(self, version: str) -> dict[str, str]:
        """Return facts that are equal on two servers if they can share pages."""
        return self.loaded_weights | version_facts(version)

    @cached_property
    def loaded_weights(self) -> dict[str, str]:
        """Facts of the weights that the server loaded at its start.

        They are read once: files that change later are not those with which this process computes.
        """
        if not self.model_path:
            return {}
        cache = self._value("download_dir")
        facts: dict[str, object] = {
            MODEL: weights_identity(self.model_path, self._value("revision"), cache)
        }
        facts |= {name: self._value(name) for name in _FACTS}
        if self._value("load_format") == "dummy":
            facts["load_format"] = "dummy"
        if scales := self._value("quantization_param_path"):
            facts["quantization_scales"] = weights_identity(str(scales))
        for name, path in sorted(self._adapters()):
            facts[f"lora {name}"] = f"{path} {weights_identity(path, None, cache)}"
        written = {name: str(value) for name, value in facts.items() if value is not None}
        return {name: value for name, value in written.items() if value not in {"", "{}"}}

    @cached_property
    def draft_weights(self) -> dict[str, str]:
        """Facts about the draft model that fills the draft pools, {} if it is the model itself."""
        path = self._value("speculative_draft_model_path")
        if not path:
            return {}
        revision = self._value("speculative_draft_model_revision")
        identity = weights_identity(str(path), revision, self._value("download_dir"))
        facts = {DRAFT: identity}
        if quantized := self._value("speculative_draft_model_quantization"):
            facts["draft_quantization"] = str(quantized)
        return facts

    def _value(self, name: str) -> Any:
        for source in self._sources:
            value = getattr(source, name, None)
            if value is not None:
                return value
        return None

    def _adapters(self) -> Iterable[tuple[str, str]]:
        """Yield name and path of each adapter from the start of the server.

        SGLang derives an adapter's hash from these two, so new weights under an old path would
        look like the old ones. Adapters that are loaded later have random names.
        """
        named = self._value("lora_paths") or []
        if isinstance(named, dict):
            yield from ((str(name), str(path)) for name, path in named.items())
            return
        for each in named:
            if isinstance(each, str):
                name, _, path = each.partition("=")
                yield name, path or name
            elif isinstance(each, dict):
                yield str(each.get("lora_name")), str(each.get("lora_path"))
            else:
                yield str(getattr(each, "lora_name", "")), str(getattr(each, "lora_path", ""))


def version_facts(version: str) -> dict[str, str]:
    """Return the fact that a weight update adds, {} before the first one."""
    return {} if version == DEFAULT_VERSION else {"version": version}


def separates_requests() -> bool:
    """Return whether page hashes distinguish LoRA adapters and cache salts: since SGLang 0.5.20."""
    with suppress(ImportError):
        return hasattr(import_module("sglang.srt.mem_cache.utils"), "storage_namespace_seed")
    return False


def _sources() -> Iterable[Any]:
    """Yield the objects with the server's configuration, the most exact first."""
    with suppress(Exception):  # each version fails in its own way if no server has started
        context = import_module("sglang.srt.runtime_context")
        for bag in _BAGS:
            with suppress(Exception):
                yield context.get_context().config_bag(bag)
        yield context.get_server_args()
        return
    with suppress(Exception):
        yield import_module("sglang.srt.server_args").get_global_server_args()


DRAFT_PREFIX = "draft"
"""Pools that a draft model fills: draft, draft_indexer, draft_swa."""

REOPEN_RETRY_S = 5.0
"""Pause until the next attempt to open a client after a weight update, if the home node refuses."""


class Registration:
    """The attachment of one store, or why there is none. Thread-safe."""

    def __init__(
        self,
        config: Config,
        storage_config: Any,
        client_factory: Callable[..., Any],
        side_pools: Mapping[Any, Any],
        logger: Any,
        warn_once: WarnOnce,
    ) -> None:
        """Serve nothing until a pool is registered.

        side_pools: the pools that SGLang has registered, by name; they are served again when a
                    client is opened.
        """
        self._config = config
        self._storage_config = storage_config
        self._client_factory = client_factory
        self._side_pools = side_pools
        self._log = logger
        self._warn_once = warn_once
        self._server = Server()
        self._own_name = f"unnamed-{secrets.token_hex(8)}"
        self._registering = threading.Lock()
        self._closing = threading.Event()
        self._change = threading.Lock()
        self._attached: Attachment | None = None
        self._idle_reason = reasons.NO_HOME
        self._versions_stored: WeakKeyDictionary[threading.Thread, str | None] = WeakKeyDictionary()

    @property
    def attached(self) -> Attachment | None:
        """The current attachment, of any weights."""
        return self._attached

    def serving(self) -> tuple[Attachment | None, str]:
        """Return the attachment for a call that begins now; None, and why, if there is none."""
        attached = self._attached
        if attached is not None and self._server.weight_version() != attached.version:
            self._leave(attached)
            attached = None
        return attached, self._idle_reason

    def may_store(self, at: Attachment) -> bool:
        """Return whether pages that this thread stores are of the attached weights.

        After an update SGLang's caches hold pages of the old weights until it flushes them, and its
        backup thread continues with them. Stored under the new version, they would be wrong for
        every server with that version. A flush ends that thread and starts a new one: so a thread
        that has stored pages of one version must not store pages of another.
        """
        thread = threading.current_thread()
        with self._change:
            if self._versions_stored.setdefault(thread, at.version) == at.version:
                return True
            self._versions_stored[thread] = None
            return False

    def register(self, anchor: Any) -> None:
        """Open the client for a pool's pages; raise PeerCacheError if that fails."""
        self._closing.clear()
        with self._registering:
            self._register(anchor, reasons.NO_HOME)

    def register_side(self, pool: Any, name: Any) -> None:
        """Also serve the pages of a side pool; never raises."""
        with self._registering:
            before = self._attached
            if before is None:
                return
            attached = self._with_side(before, pool_name(name), pool)
            with self._change:
                # Closed, or detached for new weights: then the pool is served when a client is
                # opened.
                if self._attached is before:
                    self._attached = attached

    def close(self) -> None:
        """Close the client; may be repeated."""
        self._closing.set()
        self._detach(reasons.CLOSED)

    def _register(self, mem_pool_host: Any, idle_reason: str) -> None:
        """Open a client for a pool. idle_reason: why calls are misses until it is open."""
        try:
            self._require_separate_requests()
            groups = self._head_groups(KV_POOL, mem_pool_host)
            objects = 1 if groups is None else groups.count
            pages = (
                None if is_logical(mem_pool_host) else HostPages.of(mem_pool_host, objects=objects)
            )
        except UnservedPool as unserved:
            self._detach(reasons.UNSUPPORTED)
            self._log_refused(KV_POOL, mem_pool_host, unserved)
            return
        version = self._server.weight_version()
        page_bytes = 0 if pages is None else pages.page_bytes
        spaces = self._spaces(mem_pool_host, page_bytes, version, groups)
        namespace = spaces.shared
        with self._change:
            before = self._attached
        if before is not None and before.spaces == spaces:
            registered = _registered(before.client, pages)
            with self._change:
                self._attached = attrs.evolve(
                    before,
                    anchor=mem_pool_host,
                    pages=pages,
                    end_registration=registered,
                )
            # The new memory first, so that a pool that is registered again stays registered all the
            # time.
            before.end_registration()
            return
        self._detach(idle_reason)
        client = self._client_factory(self._config, namespace=namespace)
        try:
            registered = _registered(client, pages)
        except BaseException:
            # SGLang has closed the store, which does not know this client yet.
            client.close()
            raise
        at = Attachment(client, mem_pool_host, pages, spaces, version, registered, {})
        for name, pool in list(self._side_pools.items()):
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
            objects=len(spaces.objects),
        )

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

    def _with_side(self, at: Attachment, name: str, pool: Any) -> Attachment:
        """Return the attachment with a side pool; without it if the pool cannot be served."""
        if name == KV_POOL:
            return at
        sides, before = dict(at.sides), at.sides.get(name)
        sides.pop(name, None)
        try:
            groups = self._head_groups(name, pool)
            pages = side_pages_of(pool, 1 if groups is None else groups.count)
            spaces = spaces_of(
                self._storage_config,
                pool,
                pages.page_bytes,
                at.spaces.shared.name,
                self._weights(at.version) | self._draft_weights(name),
                groups,
                name,
            )
            sides[name] = SidePool(pages, spaces, _registered(at.client, pages))
        except UnservedPool as unserved:
            self._log_refused(name, pool, unserved)
        except Exception:
            self._log.exception("sglang.call_failed", operation=f"register {name}", pages=0)
        else:
            self._log.info(
                "sglang.pool_attached",
                pool=name,
                geometry=spaces.shared.geometry,
                coordinates=spaces.shared.coordinates,
                page_bytes=pages.page_bytes,
                objects=len(spaces.objects),
                copied=not isinstance(pages, HostPages),
            )
        if before is not None:
            before.end_registration()
        return attrs.evolve(at, sides=sides)

    def _head_groups(self, name: str, pool: Any) -> HeadGroups | None:
        """Return the groups of heads of a pool's pages; None if they are not cut."""
        try:
            return HeadGroups.of(self._storage_config, pool)
        except UncutPool as uncut:
            self._warn_once("sglang.heads_not_split", (name, str(uncut)), pool=name, why=str(uncut))
            return None

    def _spaces(
        self, pool: Any, page_bytes: int, version: str, groups: HeadGroups | None
    ) -> PageSpaces:
        """Return the namespaces of the KV pool: from the setting, else from the model."""
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
        return spaces_of(self._storage_config, pool, page_bytes, name, weights, groups)

    def _weights(self, version: str) -> dict[str, str]:
        """Return the facts of the weights, without their identity if a namespace is configured."""
        return self._named(self._server.weights(version))

    def _draft_weights(self, name: str) -> dict[str, str]:
        """Return the facts about the draft model's weights for a pool that it fills."""
        return self._named(self._server.draft_weights) if name.startswith(DRAFT_PREFIX) else {}

    def _named(self, facts: dict[str, str]) -> dict[str, str]:
        if not self._config.namespace:
            return facts
        return {name: value for name, value in facts.items() if name not in (MODEL, DRAFT)}

    def _require_separate_requests(self) -> None:
        """Refuse to serve if page hashes do not distinguish LoRA adapters."""
        if separates_requests():
            return
        if self._server.has_adapters:
            raise UnservedPool(
                "this SGLang hashes a prompt to the same pages under every LoRA adapter; "
                "0.5.20 and later distinguish them"
            )
        self._warn_once(
            "sglang.salts_not_separated",
            "",
            why="this SGLang ignores cache salts in page hashes, so requests of several salts "
            "share pages; 0.5.20 and later separate them",
        )

    def _log_refused(self, name: str, pool: Any, unserved: UnservedPool) -> None:
        self._log.warning(
            "sglang.pool_refused", pool=name, kind=type(pool).__name__, why=str(unserved)
        )

    def _detach(self, idle_reason: str) -> None:
        with self._change:
            attached, self._attached = self._attached, None
            self._idle_reason = idle_reason
        if attached is not None:
            attached.client.close()


def _registered(client: Any, pages: HostPages | FlatPages | None) -> Callable[[], None]:
    """Register a pool's memory with the client; return a function that ends that."""
    if pages is None:
        return lambda: None
    ends = ExitStack()
    for address, length in pages.memory():
        ends.callback(client.register_memory(address, length, pages.pool))
    return ends.close
