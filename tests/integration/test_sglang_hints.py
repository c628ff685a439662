"""The hints of SGLang's requests reach the store, by the hooks of the plug-in."""

from __future__ import annotations

import importlib.util
import math
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from peercache.sglang import PeerCacheStore, plugin
from tests.integration.sglang_fakes import FakeCluster
from tests.integration.sglang_pools import PAGE_TOKENS, filled, host_pool, storage_config
from tests.pace import wait_until

if importlib.util.find_spec(plugin.HINTS) is None:
    pytest.skip("this SGLang has no kv_hints", allow_module_level=True)

from sglang.srt.managers.kv_hints import decode_kv_hints_envelope
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str, hash_str_to_int64
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams

from tests.integration.sglang_linked import Linked

TOKENS = list(range(100, 100 + 4 * PAGE_TOKENS))


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the requests of this process go through the hooks, as SGLang applies them."""
    monkeypatch.setattr(Req, "__init__", Req.__init__)
    hooks: dict[str, list[Any]] = {}
    monkeypatch.setattr(HookRegistry, "_hooks", hooks)
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(HookRegistry, "register", _only(plugin.REQUEST, hooks))
    plugin.register()
    HookRegistry.apply_hooks()


def _only(target: str, hooks: dict[str, list[Any]]) -> Any:
    def register(named: str, hook: Any, kind: Any) -> None:
        if named == target:
            hooks.setdefault(named, []).append((kind, hook, None))

    return register


@pytest.fixture
def store(cluster: FakeCluster, hooked: None) -> Iterator[PeerCacheStore]:
    store = PeerCacheStore(storage_config(), {}, client_factory=cluster.open)
    store.register_mem_pool_host(filled(host_pool("mha", "page_first")))
    yield store
    store.close()


def request(kind: str = "", salt: str | None = None, **payload: Any) -> Req:
    """Return a request as SGLang's scheduler makes it."""
    envelope = {
        "protocol_version": "0.1",
        "message_id": "m",
        "actions": [
            {"action_id": "a", "action_type": kind, "action_version": "1.0", "payload": payload}
        ],
    }
    return Req(
        "rid", "", array("q", TOKENS[: 3 * PAGE_TOKENS + 1]), SamplingParams(), cache_salt=salt,
        kv_hints=decode_kv_hints_envelope(envelope) if kind else None,
    )  # fmt: skip


def hashes(salt: str | None = None) -> list[str]:
    """Return the hashes by which SGLang stores the pages."""
    return list(
        get_storage_hash_str(
            RadixKey(array("q", TOKENS), cache_salt=salt), None, page_size=PAGE_TOKENS
        )
    )


def end(asked: Req) -> None:
    """Have the request generate a page of tokens and end."""
    asked.output_ids.extend(TOKENS[3 * PAGE_TOKENS + 1 :])
    asked.finished = lambda: True
    plugin._take_release(None, asked, None, checkpoint=True)


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_the_pages_of_a_request_are_retained_at_its_end(
    cluster: FakeCluster, store: PeerCacheStore, salt: str | None
) -> None:
    """Prompt and output; those that SGLang stores after that when they are stored."""
    pages = hashes(salt)
    assert store.batch_set_v1(pages[:3], torch.arange(3 * PAGE_TOKENS)) == [True] * 3
    asked = request("kv.retain", salt, include_current_request=True, ttl_seconds=90)
    assert cluster.hints == []

    end(asked)
    wait_until(lambda: len(cluster.hints) == 1)
    assert store.batch_set_v1(pages[3:], torch.arange(PAGE_TOKENS)) == [True]

    wait_until(lambda: len(cluster.hints) >= 2)
    assert [(hint, seconds) for hint, seconds, _ in cluster.hints] == [("retain", 90.0)] * 2
    assert {key for _, _, held in cluster.hints for key in held} == set(cluster.pages)


def test_a_prompt_is_prefetched_before_it_is_looked_up(
    cluster: FakeCluster, store: PeerCacheStore
) -> None:
    """SGLang's proposal has no payload: the prompt is meant. Other pages by their blocks."""
    pages = hashes()
    store.batch_set_v1(pages[:3], torch.arange(3 * PAGE_TOKENS))

    request("kv.prefetch")
    wait_until(lambda: len(cluster.hints) == 1)
    request("kv.demote", block_hashes=[hash_str_to_int64(pages[0]), pages[1], pages[3]])

    wait_until(lambda: len(cluster.hints) == 2)
    assert [(hint, len(held)) for hint, _, held in cluster.hints] == [
        ("prefetch", 3),
        ("demote", 2),
    ]


def test_parts_of_a_prompt_are_retained(cluster: FakeCluster, store: PeerCacheStore) -> None:
    store.batch_set_v1(hashes()[:3], torch.arange(3 * PAGE_TOKENS))

    end(request("kv.retain", directives=[{"start": 0, "end": 2 * PAGE_TOKENS, "priority": 1}]))

    wait_until(lambda: len(cluster.hints) == 1)
    hint, seconds, held = cluster.hints[0]
    assert (hint, seconds, len(held)) == ("retain", math.inf, 2)


@pytest.mark.parametrize("kind", ["mha", "window", "states"])
def test_the_pages_of_a_linker_are_retained(cluster: FakeCluster, hooked: None, kind: str) -> None:
    """Of a hybrid model those of all pools: KV pages without a window or a state are no hit."""
    linked = Linked(cluster.open, kind)
    try:
        linked.compute(TOKENS[: 3 * PAGE_TOKENS], 1)
        end(request("kv.retain", include_current_request=True, ttl_seconds=90))

        wait_until(lambda: len(cluster.hints) == 1)
    finally:
        linked.close()
    hint, seconds, held = cluster.hints[0]
    assert (hint, seconds, sorted(held)) == ("retain", 90.0, sorted(cluster.pages))


def test_bad_hints_and_requests_without_any_change_nothing(
    cluster: FakeCluster, store: PeerCacheStore
) -> None:
    for asked in (request(), request("kv.retain", ttl_seconds="long"), request("kv.teleport")):
        end(asked)
    store.batch_set_v1(hashes()[:1], torch.arange(PAGE_TOKENS))

    assert cluster.hints == []
    assert store.batch_exists(hashes()) == 1
