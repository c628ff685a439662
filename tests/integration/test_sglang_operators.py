"""What operators see: SGLang's storage metrics, and the log: why pages of a call are misses."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.observability.metrics_collector import StorageMetrics, StorageMetricsCollector

import peercache.sglang.store as store_module
from peercache.observability.log import LOGGER
from peercache.sglang import PeerCacheStore
from peercache.sglang.store import BatchTally
from tests.integration.sglang_fakes import FakeCluster
from tests.integration.sglang_pools import PAGE_TOKENS, filled, host_pool, page_hash
from tests.integration.test_sglang_store import KEYS, SLOTS, open_store

LABELS = {"storage_backend": "dynamic"}
ABSENT = "f" * 64

Figures = Callable[[PeerCacheStore], dict[str, float]]


@pytest.fixture(scope="module")
def collector() -> Iterator[Any]:
    """Return SGLang's own collector; a process has one, in the registry of all metrics."""
    registered: list[Any] = []
    register = REGISTRY.register

    def noted(each: Any) -> None:
        registered.append(each)
        register(each)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(REGISTRY, "register", noted)
        yield StorageMetricsCollector(LABELS)
    for each in registered:
        REGISTRY.unregister(each)


@pytest.fixture
def figures(collector: Any) -> Figures:
    """Return a function that hands a store's stats to SGLang, and what Prometheus then shows more.

    Names are without "sglang:", such as prefetch_pgs_sum.
    """

    def show(store: PeerCacheStore) -> dict[str, float]:
        before = _figures()
        collector.log_storage_metrics(store.get_stats())
        after = _figures()
        changed = {name: after[name] - before.get(name, 0) for name in after}
        return {name: change for name, change in changed.items() if change}

    return show


def _figures() -> dict[str, float]:
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    return {
        sample.name.removeprefix("sglang:"): sample.value
        for sample in samples
        if sample.name.startswith("sglang:") and sample.name.endswith(("_sum", "_count"))
    }


def transfer(keys: list[str]) -> PoolTransfer:
    """Return pages of a sliding window."""
    slots = torch.arange(len(keys) * PAGE_TOKENS)
    return PoolTransfer(name=PoolName.SWA, keys=keys, host_indices=slots)


def flat(store: PeerCacheStore, pages: int) -> list[torch.Tensor]:
    """Return empty flat pages."""
    return [store.mem_pool_host.get_dummy_flat_data_page() for _ in range(pages)]


def set_v1(store: PeerCacheStore, keys: list[str]) -> None:
    store.batch_set_v1(keys, torch.arange(len(keys) * PAGE_TOKENS))


def get_v1(store: PeerCacheStore, keys: list[str]) -> None:
    store.batch_get_v1(keys, torch.arange(len(keys) * PAGE_TOKENS))


def set_v0(store: PeerCacheStore, keys: list[str]) -> None:
    store.batch_set(keys, flat(store, len(keys)))


def get_v0(store: PeerCacheStore, keys: list[str]) -> None:
    store.batch_get(keys, flat(store, len(keys)))


def set_v2(store: PeerCacheStore, keys: list[str]) -> None:
    store.batch_set_v2([transfer(keys)])


def get_v2(store: PeerCacheStore, keys: list[str]) -> None:
    store.batch_get_v2([transfer(keys)])


INTERFACES = {"v0": (set_v0, get_v0), "v1": (set_v1, get_v1), "v2": (set_v2, get_v2)}


def hybrid_store(cluster: FakeCluster, **changes: Any) -> PeerCacheStore:
    """Return a store with a window's pool next to KV."""
    store = open_store(cluster, **changes)
    store.register_mem_host_pool_v2(filled(host_pool("mha", "page_first")), PoolName.SWA)
    return store


# --- SGLang's metrics ---------------------------------------------------------------------------


@pytest.mark.parametrize("interface", INTERFACES)
def test_prometheus_shows_pages_and_bandwidth_of_each_interface(
    cluster: FakeCluster, figures: Figures, interface: str
) -> None:
    """One backup of three pages, one prefetch of the two that are there, and a bandwidth each."""
    put, get = INTERFACES[interface]
    store = hybrid_store(cluster, enable_storage_metrics=True)

    put(store, KEYS)
    get(store, [*KEYS[:2], ABSENT])
    shown = figures(store)

    pages = {name: value for name, value in shown.items() if "bandwidth_sum" not in name}
    assert pages == {
        "backup_pgs_sum": 3,
        "backup_pgs_count": 1,
        "backup_bandwidth_count": 1,
        "prefetch_pgs_sum": 2,
        "prefetch_pgs_count": 1,
        "prefetch_bandwidth_count": 1,
    }
    assert shown["backup_bandwidth_sum"] > 0
    assert shown["prefetch_bandwidth_sum"] > 0
    assert figures(store) == {}


def test_a_call_that_moves_nothing_is_no_operation(cluster: FakeCluster, figures: Figures) -> None:
    """A second set copies nothing: counted as a transfer, it had a bandwidth beyond all bounds."""
    store = open_store(cluster, enable_storage_metrics=True)
    store.batch_set_v1(KEYS, SLOTS)
    figures(store)

    stored = store.batch_set_v1(KEYS, SLOTS)
    store.batch_get_v1([ABSENT], SLOTS[:PAGE_TOKENS])

    assert stored == [True] * 3
    assert figures(store) == {}


def test_pages_that_were_there_are_not_part_of_a_backup(
    cluster: FakeCluster, figures: Figures
) -> None:
    """SGLang's words for the bandwidth: "excluding pages the backend already held"."""
    store = open_store(cluster, enable_storage_metrics=True)
    store.batch_set_v1(KEYS[:2], SLOTS[: 2 * PAGE_TOKENS])
    figures(store)

    store.batch_set_v1(KEYS, SLOTS)

    assert figures(store)["backup_pgs_sum"] == 1


def test_groups_of_heads_that_were_there_are_not_part_of_a_backup(
    cluster: FakeCluster, figures: Figures
) -> None:
    """A page in two groups of heads is one page; without bytes that were there."""
    changes = {"tp_lcm_size": 2, "should_split_heads": True, "enable_storage_metrics": True}
    store = open_store(cluster, filled(host_pool("mha", "page_head")), **changes)
    store.batch_set_v1(KEYS[:2], SLOTS[: 2 * PAGE_TOKENS])
    first = figures(store)

    store.batch_set_v1(KEYS, SLOTS)

    assert len(cluster.pages) == 6
    assert first["backup_pgs_sum"] == 2
    assert figures(store)["backup_pgs_sum"] == 1


def test_bandwidth_is_in_gigabytes_a_second() -> None:
    tally = BatchTally(StorageMetrics)

    tally.moved("prefetch", 128, 3_000_000_000, 2.0)

    assert tally.drain().prefetch_bandwidth == [1.5]


# --- the log ------------------------------------------------------------------------------------


def reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines about calls, without what all of them have."""
    lines = [line for line in caplog.messages if "event=sglang.call_answered" in line]
    return [re.sub(r"event=\S+ |component=\S+ ?|call=\d+ ?", "", line).strip() for line in lines]


@pytest.fixture
def at_debug(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return the log, at debug."""
    caplog.set_level(logging.DEBUG, LOGGER)
    return caplog


def test_each_call_reports_at_debug_how_many_pages_missed_and_why(
    cluster: FakeCluster, at_debug: pytest.LogCaptureFixture
) -> None:
    """One line a call, for every interface."""
    store = hybrid_store(cluster)
    some = [KEYS[0], KEYS[1], ABSENT]
    store.batch_set_v1(KEYS[:2], SLOTS[: 2 * PAGE_TOKENS])
    store.batch_set_v2([transfer(KEYS[:1])])
    at_debug.clear()

    store.batch_exists(some)
    store.batch_get_v1(some, SLOTS)
    get_v0(store, some)
    store.batch_exists_v2(some, [transfer(some)])
    store.batch_get_v2([transfer(some)])
    store.batch_set_v1(some, SLOTS)

    absent = "first_missing=ffffffffffff"
    second = f"first_missing={KEYS[1][:12]}"
    assert reported(at_debug) == [
        f"operation=exists pages=3 hits=2 reasons=\"{{'absent': 1}}\" {absent}",
        f"operation=get pages=3 hits=2 reasons=\"{{'absent': 1}}\" {absent}",
        f"operation=get pages=3 hits=2 reasons=\"{{'absent': 1}}\" {absent}",
        f"operation=exists_v2 pages=3 hits=1 reasons=\"{{'absent': 3}}\" {second}",
        f"operation=get_v2 pages=3 hits=1 reasons=\"{{'absent': 2}}\" {second}",
        "operation=set pages=3 hits=3 reasons={} first_missing=",
    ]


def test_pages_that_never_reach_the_client_have_their_reason_too(
    cluster: FakeCluster, at_debug: pytest.LogCaptureFixture
) -> None:
    """A pool that is not served, indices that do not fit, a store that is closed."""
    store = open_store(cluster)
    at_debug.clear()

    store.batch_get_v2([transfer(KEYS)])
    store.batch_get_v1(KEYS, SLOTS[:-1])
    store.close()
    store.batch_exists(KEYS)

    assert [re.search(r"reasons=\"?({.*})", line)[1] for line in reported(at_debug)] == [
        "{'unsupported': 3}",
        "{'wrong_size': 3}",
        "{'closed': 3}",
    ]


def test_nothing_is_worked_out_where_the_log_does_not_want_it(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At info a call does no work for a line that is not written."""
    caplog.set_level(logging.INFO, LOGGER)
    worked_out: list[Any] = []
    monkeypatch.setattr(store_module, "_flags", lambda *given: worked_out.append(given))
    store = open_store(cluster)

    store.batch_get_v1(KEYS, SLOTS)
    store.batch_exists(KEYS)

    assert not worked_out
    assert not reported(caplog)


def test_a_long_chain_is_one_line_at_debug(
    cluster: FakeCluster, at_debug: pytest.LogCaptureFixture
) -> None:
    """The line of a thousand pages has the length of any other."""
    store = open_store(cluster)
    at_debug.clear()

    store.batch_exists([page_hash(number) for number in range(1000)])

    (line,) = reported(at_debug)
    assert line.startswith("operation=exists pages=1000 hits=0 reasons=\"{'absent': 1000}\"")
    assert len(line) < 200
