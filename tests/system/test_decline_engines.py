"""Pages that are slow to read are not reported to vLLM, LMCache and the connector: real nodes.

The engines' own modules are stand-ins; the clients and the link are real.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from peercache import Client
from peercache.connector import ConnectorMetadata, RemoteKVConnector, cluster_store
from tests.pace import wait_until
from tests.system.nodes import CALL_S, PAGE_BYTES, LocalCluster, NodeProcess
from tests.system.relay import SlowLink
from tests.unit.lmcache import fake_lmcache
from tests.unit.lmcache.fake_lmcache import MemoryObject, ObjectKey, readable
from tests.unit.vllm import fake_vllm
from tests.unit.vllm.fake_vllm import LookupResult, job

CHUNKS, TOKENS = 12, 16
PAGE_S = 0.4
SLOW_BYTE_S = PAGE_S / PAGE_BYTES
SLOW = {"decline": "cost", "page_compute_ms": 20}
"""Reading a page takes longer than computing all, whatever else delays the first read."""
WORTH = {"decline": "cost", "page_compute_ms": 60_000}
HALF = {**WORTH, "op_timeout_s": 8.0}
"""Worth reading, but two pages of each of these chunks do not all arrive within a get."""
HALF_BYTE_S = 1.5 / PAGE_BYTES


@pytest.fixture(scope="module")
def link() -> Iterator[SlowLink]:
    """A link to the node that holds the chunks."""
    with SlowLink.open() as link:
        yield link


@pytest.fixture(scope="module")
def cluster(link: SlowLink) -> Iterator[LocalCluster]:
    """Two nodes: the one that reads, and the one behind the link that has the chunks."""
    with LocalCluster() as cluster:
        reader = cluster.start()
        cluster.start(flags=link.flags)
        cluster.wait_for_members(reader, 2)
        yield cluster


def at(cluster: LocalCluster, node: NodeProcess, **settings: Any) -> dict[str, Any]:
    """Return the settings of an adapter at a node, with deadlines that no test should come to."""
    patient = {"op_timeout_s": CALL_S, "exists_timeout_s": CALL_S, "fabric": "tcp"}
    return {**patient, "cluster": cluster.name, "home": node.ready["home"], **settings}


def declined(clients: list[Client]) -> dict[str, object]:
    """Return the counts of declined pages of the last client, by reason."""
    prefix, figures = "exists_declined_", clients[-1].stats()
    return {k.removeprefix(prefix): n for k, n in figures.items() if k.startswith(prefix)}


class Opened(list[Client]):
    """Opens the clients of adapters, and remembers them."""

    def open(self, config: Any, *, namespace: Any) -> Client:
        """Open a client."""
        self.append(Client.open(config, namespace=namespace))
        return self[-1]


@pytest.fixture
def opened() -> Opened:
    return Opened()


# --- vLLM -----------------------------------------------------------------------------------------

FULL, WINDOW = ([bytes([at]) * 32 + bytes([0, 0, 0, group]) for at in range(CHUNKS)]
                for group in (0, 1))  # fmt: skip


class Context(SimpleNamespace):
    """A ReqContext of vLLM."""

    def get_offload_key_position(self, key: bytes) -> int:
        """Return the tokens up to the end of a chunk."""
        return TOKENS * (key[0] + 1)


@pytest.fixture(autouse=True)
def engines_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the adapters imported without their engines."""
    fake_vllm.install(monkeypatch)
    fake_lmcache.install(monkeypatch)
    yield
    fake_vllm.forget()
    fake_lmcache.forget()


@contextmanager
def tier_of(opened: Opened, settings: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield a tier and its rows: two for each chunk."""
    words = np.arange(2 * CHUNKS * PAGE_BYTES // 4, dtype=np.uint32)
    rows: Any = words.view(np.int8).reshape(2 * CHUNKS, PAGE_BYTES)
    vllm_config = fake_vllm.engine()
    tier = importlib.import_module("peercache.vllm").PeerCacheTier(
        offloading_spec=fake_vllm.spec(),
        primary_kv_view=memoryview(rows),
        tier_type="PeerCacheTier",
        client_factory=opened.open,
        **settings,
    )
    try:
        yield tier, rows
    finally:
        tier.shutdown()
    del vllm_config


def finish(tier: Any) -> Any:
    """Return the result of the only job."""
    done: list[Any] = []
    wait_until(lambda: bool(done.extend(tier.get_finished_jobs()) or done))  # type: ignore[func-returns-value]
    return done[0]


def hits(tier: Any, request: str, keys: list[bytes]) -> list[bool]:
    """Look keys up as vLLM's scheduler does: in its steps, in this order, until all are known."""
    context, answers = Context(req_id=request), list[Any]()

    def are_known() -> bool:
        answers[:] = [tier.lookup(key, context) for key in keys]
        tier.on_schedule_end(None)
        return LookupResult.RETRY not in answers

    wait_until(are_known)
    return [answer is LookupResult.HIT for answer in answers]


@pytest.fixture
def chunks_of_vllm(cluster: LocalCluster, opened: Opened) -> None:
    """Store the chunks of both groups at the node behind the link."""
    with tier_of(opened, at(cluster, cluster.nodes[1])) as (tier, _):
        tier.submit_store(job(1, FULL + WINDOW, list(range(2 * CHUNKS))))
        assert finish(tier).success


@pytest.mark.usefixtures("chunks_of_vllm")
def test_vllm_computes_chunks_that_take_longer_to_read(
    cluster: LocalCluster, link: SlowLink, opened: Opened
) -> None:
    """From the first request on; each request has the verdict that it was given first."""
    link.data.byte_s = math.inf
    with tier_of(opened, at(cluster, cluster.nodes[0])) as (tier, _):
        assert hits(tier, "a", FULL) == [True] * CHUNKS
        assert declined(opened) == {}
    with tier_of(opened, at(cluster, cluster.nodes[0], **SLOW)) as (tier, _):
        assert hits(tier, "a", FULL) == [False] * CHUNKS
        assert declined(opened) == {"unmeasured": CHUNKS}
        link.data.byte_s = SLOW_BYTE_S
        others = map(str, itertools.count())
        wait_until(
            lambda: not any(hits(tier, next(others), FULL)) and "slow_fabric" in declined(opened)
        )
        link.data.byte_s = 0.0
        assert hits(tier, "a", FULL) == [False] * CHUNKS


@pytest.mark.usefixtures("chunks_of_vllm")
def test_vllm_reads_what_it_was_promised(
    cluster: LocalCluster, link: SlowLink, opened: Opened
) -> None:
    """A link that becomes slow after the lookup shortens no load."""
    link.data.byte_s = 0.0
    with tier_of(opened, at(cluster, cluster.nodes[0], **WORTH)) as (tier, rows):
        stored = rows[:3].copy()
        rows[:] = 0
        assert hits(tier, "a", FULL) == [True] * CHUNKS
        link.data.byte_s = SLOW_BYTE_S
        tier.submit_load(job(1, FULL[:3], [5, 6, 7], request="a"))
        assert finish(tier).success
        assert (rows[5:8] == stored).all()
        assert hits(tier, "a", FULL) == [True] * CHUNKS


@pytest.mark.usefixtures("chunks_of_vllm")
def test_a_prefix_of_vllm_ends_at_the_same_chunk_in_every_group(
    cluster: LocalCluster, link: SlowLink, opened: Opened
) -> None:
    """Also of a sliding window, for which vLLM asks from its end."""
    link.data.byte_s = HALF_BYTE_S
    with tier_of(opened, at(cluster, cluster.nodes[0], **HALF)) as (tier, _):
        flags = hits(tier, "a", FULL + WINDOW[::-1])
        full, window = flags[:CHUNKS], flags[CHUNKS:][::-1]
        assert 0 < full.count(True) < CHUNKS
        assert full == window == sorted(full, reverse=True)


# --- LMCache --------------------------------------------------------------------------------------

RANKS = [[ObjectKey(bytes([at]) * 32, kv_rank=rank) for at in range(CHUNKS)] for rank in (1, 2)]
OBJECTS = [key for row in RANKS for key in row]


@contextmanager
def adapter_of(opened: Opened, settings: dict[str, Any]) -> Iterator[Any]:
    module = importlib.import_module("peercache.lmcache")
    with closing(module.PeerCacheL2Adapter(settings, client_factory=opened.open)) as adapter:
        yield adapter


def found(adapter: Any, keys: list[ObjectKey]) -> list[bool]:
    """Look objects up as LMCache does: row by row; unlock what is found."""
    layouts = {0: fake_lmcache.layout(PAGE_BYTES)}
    task = adapter.submit_lookup_and_lock_task(keys, layouts)
    assert readable(adapter.get_lookup_and_lock_event_fd())
    bits: list[bool] = adapter.query_lookup_and_lock_result(task).bits
    assert adapter.report_status()["locked"] == bits.count(True)
    adapter.submit_unlock([key for key, bit in zip(keys, bits, strict=True) if bit])
    return bits


@pytest.fixture
def objects_of_lmcache(cluster: LocalCluster, opened: Opened) -> None:
    """Store the objects of two ranks at the node behind the link."""
    with adapter_of(opened, at(cluster, cluster.nodes[1])) as adapter:
        task = adapter.submit_store_task(
            OBJECTS, [MemoryObject(key.chunk_hash[:1] * PAGE_BYTES) for key in OBJECTS]
        )
        assert readable(adapter.get_store_event_fd())
        assert adapter.pop_completed_store_tasks()[task] >= 0


@pytest.mark.usefixtures("objects_of_lmcache")
def test_lmcache_is_not_offered_objects_that_take_longer_to_read(
    cluster: LocalCluster, link: SlowLink, opened: Opened
) -> None:
    """It locks none of them; a load of them is a hit all the same."""
    link.data.byte_s = math.inf
    with adapter_of(opened, at(cluster, cluster.nodes[0])) as adapter:
        assert found(adapter, OBJECTS) == [True] * len(OBJECTS)
        assert declined(opened) == {}
    with adapter_of(opened, at(cluster, cluster.nodes[0], **SLOW)) as adapter:
        assert found(adapter, OBJECTS) == [False] * len(OBJECTS)
        assert declined(opened) == {"unmeasured": len(OBJECTS)}
        link.data.byte_s = SLOW_BYTE_S
        wait_until(lambda: not any(found(adapter, OBJECTS)) and "slow_fabric" in declined(opened))
        into = MemoryObject(bytes(PAGE_BYTES))
        task = adapter.submit_load_task(OBJECTS[3:4], [into])
        assert readable(adapter.get_load_event_fd())
        assert adapter.query_load_result(task).bits == [True]
        assert into.data == bytes([3]) * PAGE_BYTES


@pytest.mark.usefixtures("objects_of_lmcache")
def test_a_prefix_of_lmcache_ends_at_the_same_chunk_in_every_rank(
    cluster: LocalCluster, link: SlowLink, opened: Opened
) -> None:
    """Also where a sliding window has only its last chunks, which limit no prefix."""
    link.data.byte_s = HALF_BYTE_S
    unknown = [ObjectKey(bytes([at]) * 32, kv_rank=3) for at in range(CHUNKS)]
    with adapter_of(opened, at(cluster, cluster.nodes[0], **HALF)) as adapter:
        flags = found(adapter, OBJECTS)
        first, second = flags[:CHUNKS], flags[CHUNKS:]
        assert 0 < first.count(True) < CHUNKS
        assert first == second == sorted(first, reverse=True)
        flags = found(adapter, unknown + RANKS[0] + RANKS[1])
        assert not any(flags[:CHUNKS])
        assert 0 < flags.count(True) < len(OBJECTS)


@pytest.mark.usefixtures("objects_of_lmcache")
def test_chunks_behind_a_missing_one_save_lmcache_no_computing(
    cluster: LocalCluster, link: SlowLink, opened: Opened
) -> None:
    """With them, reading the two before it would seem worth it."""
    link.data.byte_s = SLOW_BYTE_S
    missing = [ObjectKey(bytes([100 + at]) * 32, kv_rank=1) for at in range(5)]
    broken = [*RANKS[0][:2], *missing, *RANKS[0][7:]]
    costs = {**SLOW, "page_compute_ms": 0.75 * PAGE_S * 1000}
    with adapter_of(opened, at(cluster, cluster.nodes[0], **costs)) as adapter:
        wait_until(lambda: not any(found(adapter, broken)) and "slow_fabric" in declined(opened))


# --- the connector --------------------------------------------------------------------------------


@contextmanager
def connector_of(settings: dict[str, Any]) -> Iterator[tuple[RemoteKVConnector, Any]]:
    """Yield a connector and its only buffer."""
    metadata = ConnectorMetadata(
        model="a/model", dtype="bfloat16", page_tokens=TOKENS, store=cluster_store(**settings)
    )
    pages = np.arange(CHUNKS * PAGE_BYTES // 4, dtype=np.uint32).view(np.uint8)
    with closing(RemoteKVConnector(metadata)) as connector:
        connector.register_kv_buffers(
            SimpleNamespace(
                kv_data_ptrs=[pages.ctypes.data],
                kv_data_lens=[pages.nbytes],
                kv_item_lens=[PAGE_BYTES],
            )
        )
        yield connector, pages


def test_a_connector_matches_tokens_that_take_less_time_to_read(
    cluster: LocalCluster, link: SlowLink
) -> None:
    """The settings are those of its store; what it retrieves is read all the same."""
    tokens = list(range(CHUNKS * TOKENS))
    mapping = [(at, slice(at * TOKENS, (at + 1) * TOKENS)) for at in range(CHUNKS)]
    with connector_of(at(cluster, cluster.nodes[1])) as (writer, _):
        assert writer.store_kv_async("w", mapping, tokens)[0].result(CALL_S) == len(tokens)
    link.data.byte_s = SLOW_BYTE_S
    with connector_of(at(cluster, cluster.nodes[0])) as (off, _):
        assert off.num_external_matched_tokens("r", tokens, 0) == len(tokens)
    with connector_of(at(cluster, cluster.nodes[0], **SLOW)) as (cost, pages):
        assert cost.num_external_matched_tokens("r", tokens, 0) == 0
        stored = pages[:PAGE_BYTES].copy()
        pages[:] = 0
        assert cost.retrieve_kv_async("r", mapping[:1], tokens).result(CALL_S) == TOKENS
        assert (pages[:PAGE_BYTES] == stored).all()
