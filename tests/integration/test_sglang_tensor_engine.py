"""A whole engine at TP 2 and one at TP 1 read each other's pages, in groups of heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.utils import get_storage_hash_str

from peercache.sglang import PeerCacheStore
from tests.integration.engine_process import PAGE_TOKENS
from tests.integration.engines import DYNAMIC, a_prompt, from_storage, start_engine, wait_for
from tests.integration.processes import Child, StandaloneNode
from tests.integration.sglang_pools import host_pool
from tests.integration.test_sglang_tensor import config_of
from tests.integration.tiny_llama import HEAD_DIM, KV_HEADS, LAYERS, write_tiny_llama
from tests.pace import TIMEOUT_S, paced, wait_until

# Five processes that import SGLang.
pytestmark = pytest.mark.slow

LCM = 2
PROMPT_TOKENS = 1000
PAGES = PROMPT_TOKENS // PAGE_TOKENS
EXTRA = {
    **DYNAMIC,
    # Its own name, so that the test's store need not know the identity of the weights.
    "namespace": "tiny-llama",
    "tp_lcm_size": LCM,
}

LOGPROB_TOLERANCE = 1e-3
"""TP 2 adds two partial sums where TP 1 has one sum. In bfloat16 that alone, without any cache,
moves log probabilities of this model by 0.2, and changes tokens that are about equally likely: the
engines compute in float32, so that tokens can be compared."""


@attrs.frozen
class Cluster:
    """Two engines on one node, and a store of the test at TP 1 that looks at their pages."""

    at_one: Child
    at_two: Child
    probe: PeerCacheStore

    def stored(self, ids: list[int]) -> int:
        """Return how many pages of a prompt are there."""
        return int(self.probe.batch_exists(keys_of(ids)))

    def pages(self, ids: list[int]) -> torch.Tensor:
        """Return the pages of a prompt, (K and V, pages, heads, tokens, layers, head_dim)."""
        wait_until(lambda: self.stored(ids) == PAGES, "all pages of the prompt are stored")
        pool = self.probe.mem_pool_host
        pool.kv_buffer.zero_()
        slots = torch.arange(PAGES * PAGE_TOKENS)
        assert self.probe.batch_get_v1(keys_of(ids), slots) == [True] * PAGES
        pages: torch.Tensor = pool.kv_buffer[:, :PAGES].clone()
        return pages


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return both engines and the probe; the engines start at the same time."""
    folder = tmp_path_factory.mktemp("tensor")
    model = write_tiny_llama(folder / "tiny-llama")
    with (
        StandaloneNode(tmp_path_factory.mktemp("a")) as node,
        start(model, node, tp_size=2) as at_two,
        start(model, node, tp_size=1) as at_one,
    ):
        wait_for(at_one, at_two)
        patient = {"exists_timeout_s": TIMEOUT_S, "op_timeout_s": TIMEOUT_S, "home": node.home}
        config = config_of(
            0, 1, "page_head", tp_lcm_size=LCM,
            extra_config={**EXTRA, **patient},
        )  # fmt: skip
        config.extra_config.pop("tp_lcm_size")
        probe = PeerCacheStore(config, {})
        try:
            device = MHATokenToKVPool(
                size=4096, page_size=PAGE_TOKENS, dtype=torch.float32, layer_num=LAYERS,
                start_layer=0, end_layer=LAYERS, device="cpu", enable_memory_saver=False,
                head_num=KV_HEADS, head_dim=HEAD_DIM,
                v_head_dim=HEAD_DIM,
            )  # fmt: skip
            pool = host_pool("mha", "page_head", device, page_tokens=PAGE_TOKENS)
            # An engine's pool reports it.
            pool.target_layer_num = LAYERS
            probe.register_mem_pool_host(pool)
            yield Cluster(at_one, at_two, probe)
        finally:
            probe.close()


def keys_of(ids: list[int]) -> list[str]:
    """Return the hashes of a prompt's whole pages."""
    return list(get_storage_hash_str(ids[: PAGES * PAGE_TOKENS], None, page_size=PAGE_TOKENS))


def start(model: Path, node: StandaloneNode, *, tp_size: int) -> Child:
    """Start an engine of a tensor-parallel size; its ranks talk over gloo."""
    options = {"tp_size": tp_size, "hicache_mem_layout": "page_head", "dtype": "float32"}
    threads = "|".join(map(str, range(tp_size)))
    return start_engine(model, node, EXTRA, options=options, SGLANG_CPU_OMP_THREADS_BIND=threads)


def ask_stored(engine: Child, ids: list[int]) -> dict[str, Any]:
    """Ask an engine for a prompt that is stored; again where the machine was paused."""
    return paced(
        lambda _: engine.ask({"input_ids": ids, "flush": True}),
        lambda reply: from_storage(reply) == PAGES * PAGE_TOKENS,
    )


def test_tp_one_answers_from_pages_that_tp_two_computed(cluster: Cluster) -> None:
    """All whole pages come from storage, the tokens are equal, and so are the pages of both.

    They are the same numbers at the same places, but for the order of the sums over ranks.
    """
    ids = a_prompt(1, PROMPT_TOKENS)
    alone = cluster.at_one.ask({"input_ids": ids})
    by_one = cluster.pages(ids)
    cluster.probe.clear()
    wait_until(lambda: cluster.stored(ids) == 0, "the pages of TP 1 are gone")

    computed = cluster.at_two.ask({"input_ids": ids, "flush": True})
    by_two = cluster.pages(ids)
    answered = ask_stored(cluster.at_one, ids)

    assert from_storage(alone) == from_storage(computed) == 0
    assert answered["cached"] == {
        **answered["cached"], "device": 0, "host": 0, "storage": PAGES * PAGE_TOKENS,
    }  # fmt: skip
    assert from_storage(answered) > 0.9 * PROMPT_TOKENS
    assert answered["tokens"] == computed["tokens"] == alone["tokens"]
    for reply in (computed, answered):
        assert reply["logprobs"] == pytest.approx(alone["logprobs"], abs=LOGPROB_TOLERANCE)
    assert by_one.any(dim=-1).all()
    assert by_one.data_ptr() != by_two.data_ptr()
    assert torch.allclose(by_two, by_one, rtol=1e-3, atol=1e-3)


def test_tp_two_answers_from_pages_that_tp_one_computed(cluster: Cluster) -> None:
    """Each rank reads its group of heads out of what one rank wrote."""
    ids = a_prompt(2, PROMPT_TOKENS)
    computed = cluster.at_one.ask({"input_ids": ids})
    cluster.pages(ids)

    answered = ask_stored(cluster.at_two, ids)

    assert from_storage(computed) == 0
    assert from_storage(answered) > 0.9 * PROMPT_TOKENS
    assert answered["tokens"] == computed["tokens"]
    assert answered["logprobs"] == pytest.approx(computed["logprobs"], abs=LOGPROB_TOLERANCE)
