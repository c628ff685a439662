"""PeerCacheTier, the secondary tier that vLLM's TieringOffloadingSpec instantiates.

Owns    the jobs of vLLM's scheduler until their results are requested; the client moves the bytes,
        into and out of the rows of vLLM's own CPU cache.
Takes   vLLM's scheduler, one call at a time; from 0.33 on a thread that polls tiers, too.
Keeps   no method raises, because that would end vLLM's EngineCore, and only `drain_jobs` waits.
        Each job gets one result. A chunk is reported as loaded only if its page was verified.
Limits  those of the lanes and of the client's deadlines, which also bound `drain_jobs`.

The scheduler asks key by key, and may not wait: the first answer to a key is "later", and the
lookups of a step become one call per request, in a thread (`Lookups`). A verdict is valid until its
request has finished.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar, Final, TypeAlias, final

import numpy as np
import vllm
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from peercache.client.client import Client
from peercache.client.operator import TIMEOUT_S, Operator, Target
from peercache.client.report import reporting
from peercache.engines.decline import worth_reporting
from peercache.engines.hints import Naming, RequestHints
from peercache.engines.lanes import CLOSE_S, AdapterLanes, CallLane, harmless
from peercache.engines.late_client import NOT_OPEN, TIMEOUT_FRACTION, LateClient, engine_config
from peercache.errors import ConfigError, PeerUnreachable
from peercache.events.following import AskedNode
from peercache.model.keys import Namespace, PageKeys, page_keys
from peercache.model.runs import PageRuns
from peercache.observability import reasons
from peercache.observability.log import get_logger
from peercache.vllm.figures import MISSED, NOT_STORED, TierFigures, definitions
from peercache.vllm.namespace import configuration_of_caller, namespace_of, weights_of

EVENTS: Final = "enable_kv_events"
LOCALITY: Final = "locality"
"""Settings of vLLM's own tiers, which this one has, too."""

NOT_IN_TIME: Final = reasons.DEADLINE
"""Reason of a job that waited too long for its thread."""

GROUP_BYTES = 4
"""Of a chunk's key, after the hash of its last block: the KV cache group."""


def key_of_hash(text: str | bytes) -> bytes | None:
    """Return the key of the first group's chunk with this block hash: bytes, or "hex:…"."""
    if isinstance(text, str):
        try:
            text = bytes.fromhex(text.removeprefix("hex:"))
        except ValueError:
            return None
    return text + bytes(GROUP_BYTES) if text else None


REQUESTS_MAX = 65536
"""Remembered requests: more than vLLM schedules, so only requests without an end are dropped."""


@final
class Lookups:
    """Verdicts by request and key. One call at a time, except `settle`."""

    def __init__(self, ask: Callable[[Any, list[bytes]], None]) -> None:
        """`ask` starts a lookup without waiting; `settle` must finally be called for each key."""
        self._ask = ask
        self._verdicts: dict[str, dict[bytes, bool | None]] = {}
        self._batch: dict[str, tuple[Any, list[bytes]]] = {}

    def verdict(self, context: Any, key: bytes) -> bool | None:
        """Return whether a chunk is held; None if that is not known yet.

        context: vLLM's of the request.
        """
        request = context.req_id
        known = self._verdicts.get(request)
        if known is None:
            if len(self._verdicts) >= REQUESTS_MAX:
                return False
            known = self._verdicts[request] = {}
        if key not in known:
            known[key] = None
            self._batch.setdefault(request, (context, []))[1].append(key)
        return known[key]

    def flush(self) -> None:
        """Start the lookups of this step."""
        batch, self._batch = self._batch, {}
        for context, keys in batch.values():
            self._ask(context, keys)

    def settle(self, request: str, keys: Iterable[bytes], *, held: Iterable[bool]) -> None:
        """Store verdicts, unless the request has finished. Any thread may call this."""
        if (known := self._verdicts.get(request)) is not None:
            known.update(zip(keys, held, strict=True))

    def forget(self, request: str) -> None:
        """Drop a request that has finished."""
        self._verdicts.pop(request, None)
        self._batch.pop(request, None)


Move: TypeAlias = Callable[[PageKeys, PageRuns], Sequence[bool]]
"""A batch call of the client."""


class PeerCacheTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not installed here
    """Chunks of vLLM engines in the memory of every host of a PeerCache cluster."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        client_factory: Callable[..., Any] = Client.open,
        **settings: Any,
    ) -> None:
        """Check the settings; raise a ConfigError that names a wrong one.

        primary_kv_view: (chunks, bytes) int8, vLLM's CPU cache; a row is a page.
        client_factory:  what opens the client; tests pass a fake with the same contract.
        settings:        the rest of the tier's JSON: settings of PeerCache, and those of vLLM's own
                         tiers, `enable_kv_events` and `locality`.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._log = get_logger(component="vllm")
        self.locality = _locality(settings.pop(LOCALITY, None))
        wants_events = bool(settings.pop(EVENTS, False))
        follow = self._follow_with(offloading_spec) if wants_events else None
        config = engine_config(settings, os.environ, engine="vllm")
        self._config = config
        self._figures = TierFigures(backpressure_detector, self._log)
        self._rows: Any = np.asarray(primary_kv_view)
        self._spec_config = offloading_spec.config
        self._name = config.namespace
        self._weights: dict[str, str] = {}
        namespace = self._space(reset=self._look_at_engine())
        self._digest = namespace.digest()
        self._finished: deque[Any] = deque()
        self._lookups = Lookups(self._ask)
        self._late = LateClient(
            config,
            namespace,
            self._log,
            on_open=self._register_memory,
            client_factory=client_factory,
        )
        self._lanes = AdapterLanes("vllm", self._log, config.op_timeout_s * TIMEOUT_FRACTION)
        self._hints = RequestHints("vllm", self._naming(), lambda: self._late.client, self._log)
        self._log.info(
            "vllm.tier_made",
            namespace=namespace.name,
            weights=namespace.weights,
            chunk_bytes=self._rows.shape[1],
        )
        self._events = None if follow is None else follow(self._connect, self._log)

    # --- lookups -------------------------------------------------------------------------------

    @harmless(lambda: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return whether a chunk is a miss or a hit, or not known yet."""
        held = self._lookups.verdict(req_context, bytes(key))
        if held is None:
            return LookupResult.RETRY
        return LookupResult.HIT if held else LookupResult.MISS

    @harmless(lambda: None)
    def on_schedule_end(self, context: Any) -> None:  # noqa: ARG002 - vLLM names it
        """Start the lookups of this step, and see whether vLLM drops stores to this tier."""
        self._lookups.flush()
        self._figures.watch(len(self._lanes.store))

    @harmless(RequestOffloadingContext)
    def on_new_request(self, req_context: Any) -> Any:
        """Take the hints of a request; return a policy: chunks are stored as they come."""
        self._hints.begin(req_context.req_id, getattr(req_context, "kv_hints", None))
        return RequestOffloadingContext()

    @harmless(lambda: None)
    def on_request_finished(self, req_context: Any) -> None:
        """Forget the lookups of a request, and obey the hints that were to wait for its end."""
        self._lookups.forget(req_context.req_id)
        position = getattr(req_context, "get_offload_key_position", None)
        self._hints.end(req_context.req_id, position)

    @harmless(lambda: None)
    def touch(self, keys: Collection[bytes], req_context: Any) -> None:  # noqa: ARG002 - likewise
        """Have chunks evicted last; dropped if too many lookups wait already."""
        names = self._names(keys)

        def touch() -> None:
            self._touch(names)

        self._lanes.ask.submit(touch, lambda: None)

    # --- figures -------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003 - vLLM names it
        """Return the metrics of `get_stats`."""
        return definitions()

    @harmless(lambda: None)
    def get_stats(self) -> Any | None:
        """Return the state of the home node and counts since the last call, for vLLM's /metrics."""
        return self._figures.take(self._late.status())

    @harmless(list[Any])
    def take_events(self) -> list[Any]:
        """Return which chunks the home node has stored and removed since the last call."""
        return [] if self._events is None else self._events.take()

    # --- jobs ----------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        """Store the rows of a job; they are read until its result is available."""
        self._hints.saw(map(bytes, job_metadata.keys), job_metadata.req_context.req_id)
        self._submit(self._lanes.store, job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        """Read chunks into the rows of a job; they are written until its result is available."""
        self._submit(self._lanes.load, job_metadata)

    @harmless(list[Any])
    def get_finished_jobs(self) -> list[Any]:
        """Return the results of jobs that are done, each once."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    @harmless(lambda: None)
    def drain_jobs(self) -> None:
        """Wait until no job uses a row, and abandon the chunks that were stored before.

        vLLM calls it when its caches are reset, as after an update of weights in place: from now on
        the engine shares chunks only with itself, until it restarts.
        """
        for lane in (self._lanes.store, self._lanes.load):
            lane.drain()
        space = self._space(reset=secrets.token_hex(8))
        self._digest = space.digest()
        if self._events is not None:
            self._events.forget()
        self._log.info("vllm.cache_reset", namespace=space.name, weights=space.weights)

    @harmless(lambda: None)
    def shutdown(self) -> None:
        """End jobs and the client; bounded, may be repeated."""
        in_time = self._lanes.close() & self._hints.close(CLOSE_S)
        if self._events is not None:
            self._events.close()
        self._late.close()
        if in_time:
            # vLLM unmaps the memory next: no array may refer to it then.
            self._rows = None
        self._log.info("vllm.tier_closed", in_time=in_time)

    # --- between the scheduler and the lanes -----------------------------------------------------

    def _submit(self, lane: CallLane, job: Any) -> None:
        begun_s = time.monotonic()
        lane.submit(lambda: self._move(job, begun_s), lambda: self._fail(job, NOT_IN_TIME))

    def _fail(self, job: Any, reason: str) -> None:
        self._figures.add(MISSED if job.is_promotion else NOT_STORED, {reason: len(job.keys)})
        if job.is_promotion:
            # Otherwise the scheduler requests the same load in every step.
            self._settle_failed(job, job.keys)
        self._finished.append(JobResult(job.job_id, success=False, successful_keys=()))

    def _ask(self, context: Any, keys: list[bytes]) -> None:
        request = context.req_id
        self._hints.saw(keys, request)
        self._lanes.ask.submit(
            lambda: self._lookups.settle(request, keys, held=self._look_up(keys, context)),
            lambda: self._lookups.settle(request, keys, held=[False] * len(keys)),
        )

    # --- in the lanes' threads -----------------------------------------------------------------

    def _look_up(self, keys: list[bytes], context: Any) -> list[bool]:
        """Return which chunks of a request to report."""
        names = self._names(keys)
        found, client = self._touch(names), self._late.client
        # vLLM asks group by group, and for sliding windows from their end.
        position = getattr(context, "get_offload_key_position", None)
        ends = [] if position is None else [position(key) for key in keys]
        if client is None or not ends or None in ends:
            return found
        groups = [key[-GROUP_BYTES:] for key in keys]
        return worth_reporting(client, self._config, names, found, groups, ends)

    def _touch(self, names: PageKeys) -> list[bool]:
        client = self._late.client
        return [False] * len(names) if client is None else list(client.touch(names))

    def _move(self, job: Any, begun_s: float) -> None:
        client, keys = self._late.client, list(job.keys)
        if client is None:
            self._fail(job, NOT_OPEN)
            return
        names, runs = self._names(keys), self._runs(job.chunk_ids, len(keys))
        with reporting() as report:
            move: Move = client.batch_get_into if job.is_promotion else client.batch_set_from
            flags = np.asarray(move(names, runs), np.bool_)
        moved = [key for key, is_moved in zip(keys, flags, strict=True) if is_moved]
        self._figures.add(MISSED if job.is_promotion else NOT_STORED, report.misses)
        if self._events is not None:
            self._events.used([bytes(key) for key in moved], names[flags])
        if job.is_promotion and len(moved) < len(keys):
            self._settle_failed(job, set(keys).difference(moved))
        if not job.is_promotion:
            self._hints.stored(map(bytes, moved))
        # Chunks that were stored before count, too: vLLM's back-pressure divides the time of a job
        # by them, and a job of known chunks is no sign of a slow tier.
        size = report.bytes if job.is_promotion else len(moved) * self._rows.shape[1]
        self._finished.append(
            JobResult(
                job.job_id,
                success=len(moved) == len(keys),
                successful_keys=moved,
                transfer_time=time.monotonic() - begun_s,
                transfer_bytes=size,
            )
        )

    def _settle_failed(self, job: Any, keys: Collection[bytes]) -> None:
        self._lookups.settle(job.req_context.req_id, map(bytes, keys), held=[False] * len(keys))

    def _names(self, keys: Iterable[bytes]) -> PageKeys:
        # The whole key is hashed: its first bytes do not contain the group.
        return page_keys([b"vllm:" + bytes(key) for key in keys], self._digest)

    def _naming(self) -> Naming:
        """Return how routers name chunks: by 64 bits of the block's hash, as in vLLM's events."""
        return Naming(
            number=lambda key: int.from_bytes(key[:-GROUP_BYTES][-8:], "big"),
            named=key_of_hash,
            keys=self._names,
        )

    def _runs(self, chunk_ids: Any, chunks: int) -> PageRuns:
        """Return the rows of a job; raise ValueError if one is not a row of vLLM."""
        rows = np.asarray(chunk_ids, np.int64)
        if rows.shape != (chunks,) or (rows < 0).any() or (rows >= len(self._rows)).any():
            raise ValueError(f"{chunks} chunks in rows {rows.tolist()!r:.80}")
        base = self._rows.__array_interface__["data"][0]
        addresses = (base + rows * self._rows.strides[0]).astype(np.uint64)
        return PageRuns.regular(addresses, np.full(chunks, self._rows.shape[1]), chunks)

    def _look_at_engine(self) -> str:
        """Find what computes the chunks; if that fails, return a value that separates them."""
        if self._name:
            return ""
        hint = "engines share with namespace = NAME"
        engine = configuration_of_caller()
        try:
            self._weights = weights_of(engine, self._spec_config.model.name)
        except AttributeError:
            # No caller has it, or this version of vLLM keeps an option elsewhere.
            self._log.warning("vllm.engine_unknown", hint=hint)
            return secrets.token_hex(8)
        if getattr(engine, "lora_config", None) is None:
            return ""
        # Block hashes contain an adapter's name: other engines may use it for other weights.
        self._log.warning("vllm.adapters_not_known", hint=hint)
        return secrets.token_hex(8)

    def _space(self, reset: str = "") -> Namespace:
        return namespace_of(
            self._spec_config,
            self._rows.shape[1],
            str(vllm.__version__),
            self._name,
            self._weights,
            reset,
        )

    def _follow_with(self, offloading_spec: Any) -> Callable[..., Any] | None:
        """Return what follows the home node; None, and log why, if vLLM would take no events."""
        if not offloading_spec.kv_events_config.enable_kv_cache_events:
            hint = "vLLM also requires --kv-events-config and prefix caching"
            self._log.warning("vllm.events_off", hint=hint)
            return None
        try:
            from peercache.vllm.events import TierEvents  # noqa: PLC0415 - of the extra `events`
        except ImportError as error:
            problem = f"requires {error.name}: pip install msgspec pyzmq"
            raise ConfigError(EVENTS, problem) from error
        return TierEvents

    def _connect(self) -> AskedNode:
        client = self._late.client
        if client is None:
            raise PeerUnreachable("the home node")
        home = client.home_address
        target = Target(at=home, config=self._config, timeout_s=TIMEOUT_S, has_cluster=True)
        return Operator(target).__enter__()

    def _register_memory(self, client: Any) -> None:
        address = self._rows.__array_interface__["data"][0]
        client.register_memory(address, self._rows.nbytes, self._rows)


def _locality(named: object) -> Any:
    """Return vLLM's locality of the tier: PeerCache's pages are on any host."""
    try:
        return Locality.REMOTE if named is None else Locality(named)
    except ValueError as error:
        raise ConfigError(LOCALITY, f"LOCAL or REMOTE, not {named!r:.80}") from error
