"""Runs in vLLM's environment: its KV cache manager, with groups of layers and without an engine.

    python -m tests.integration.vllm_cache SEED PROMPTS [LAYOUT…]

Prints a JSON object by name of a layout: {"batches": [base64 of a batch as vLLM encodes it, …],
"asked": [[batches before, token ids, adapter, tokens that vLLM would not compute], …]}. For
`tests/contracts/test_engine_events.py` such an object is kept in `tests/contracts/frozen`:

    python -m tests.integration.vllm_cache 1 25 | xz -9e

One object has all layouts of vLLM 0.32, another those that came with vLLM 0.33 (`DRAFTS`).
"""

from __future__ import annotations

import base64
import inspect
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

BLOCK = 4
LAST = 120
"""Most tokens of a prompt."""
CACHED = 110
"""Blocks of a cache: some three prompts of a model with one group of layers."""


def short(what: Any) -> bytes:
    """Return a hash that takes little room in a file."""
    digest: bytes = sha256_cbor(what)
    return digest[:6]


def full(block: int = BLOCK) -> Any:
    """Return full attention."""
    return FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float32)


def window(tokens: int, block: int = BLOCK) -> Any:
    """Return a sliding window."""
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=tokens
    )


def state(block: int = BLOCK) -> Any:
    """Return a recurrent state, kept at the ends of blocks."""
    return MambaSpec(
        block_size=block, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )


LAYOUTS: dict[str, list[Any]] = {
    "full": [full()],
    "window": [window(10)],
    "full and window": [full(), window(10)],
    "window and full": [window(13), full()],
    "full and two windows": [full(), window(6), window(18)],
    "full and state": [full(), state()],
    "state, full and window": [state(), full(), window(9)],
    "windows kept now and then": [full(), window(6)],
    "states kept now and then": [full(), state()],
    "blocks of two sizes": [full(2 * BLOCK), window(9)],
    "states within blocks": [full(2 * BLOCK), state(2 * BLOCK)],
}
DRAFTS: dict[str, tuple[int, list[Any]]] = {
    "full, hashed ahead": (1, [full()]),
    "full and window, hashed ahead": (2, [full(), window(10)]),
    "full and state, hashed ahead": (1, [full(), state()]),
}
"""By layout: tokens behind a block that its hash covers, as with EAGLE from vLLM 0.33 on."""
if "num_hash_lookahead_tokens" in inspect.signature(KVCacheManager).parameters:
    LAYOUTS |= {name: groups for name, (_, groups) in DRAFTS.items()}
RETAINED = {"windows kept now and then": 4 * BLOCK, "states kept now and then": 4 * BLOCK}
"""By layout: of how many tokens each group but full attention keeps the end."""
HASHED = {"states within blocks": BLOCK}
"""By layout: tokens of a hash, where that is less than a block of any group."""


class Cache:
    """A KV cache of vLLM that is too small for all prompts, and the prompts."""

    def __init__(self, name: str, seed: int) -> None:
        """Begin empty, with a layout."""
        groups = LAYOUTS[name]
        ahead = {"num_hash_lookahead_tokens": DRAFTS[name][0]} if name in DRAFTS else {}
        hashed = HASHED.get(name) or min(group.block_size for group in groups)
        self.numbers = random.Random(seed)
        self.aligned = max(group.block_size for group in groups)
        config = KVCacheConfig(
            num_blocks=CACHED,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer{at}"], group) for at, group in enumerate(groups)
            ],
            prefix_cache_retention_interval=RETAINED.get(name),
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=4096,
            scheduler_block_size=self.aligned,
            hash_block_size=hashed,
            enable_kv_cache_events=True,
            **ahead,
        )
        self.hasher = get_request_block_hasher(hashed, short, **ahead)
        self.made = 0
        self.prompts: list[list[int]] = [[]]

    def request(self, tokens: list[int], adapter: str) -> Request:
        """Return a request for a prompt."""
        self.made += 1
        return Request(
            str(self.made),
            tokens,
            SamplingParams(max_tokens=1),
            None,
            lora_request=LoRARequest(adapter, 1, "/adapter") if adapter else None,
            block_hasher=self.hasher,
        )

    def prompt(self) -> list[int]:
        """Return a prompt that begins as an earlier one does."""
        earlier = self.numbers.choice(self.prompts[-12:])
        shared = earlier[: self.numbers.randint(0, len(earlier))]
        more = self.numbers.randint(1, LAST - len(shared)) if len(shared) < LAST else 0
        tokens = shared + [self.numbers.randint(0, 2) for _ in range(more)]
        self.prompts.append(tokens)
        return tokens

    def run(self, tokens: list[int], adapter: str) -> Iterator[bytes]:
        """Compute a prompt in parts, as a scheduler does; yield the events of each part."""
        request = self.request(tokens, adapter)
        computed, count, _ = self.manager.get_computed_blocks(request)
        request.num_computed_tokens = 0
        first = True
        while first or request.num_computed_tokens < len(tokens):
            done = count if first else request.num_computed_tokens
            new = min(len(tokens) - done, self.numbers.randint(1, 4) * self.aligned)
            if done + new < len(tokens):
                new -= (done + new) % self.aligned
            self.manager.new_step_starts()
            blocks = self.manager.allocate_slots(
                request, new, count if first else 0, computed if first else None
            )
            assert blocks is not None, "the cache is too small for one prompt"
            request.num_computed_tokens = done + new
            first = False
            yield self.events()
        self.manager.free(request)
        yield self.events()

    def events(self) -> bytes:
        """Return a batch, as vLLM's publisher encodes it."""
        batch = KVEventBatch(ts=0.0, events=self.manager.take_events())
        payload: bytes = msgspec.msgpack.encode(batch)
        return payload

    def hit(self, tokens: list[int], adapter: str) -> int:
        """Return how many tokens vLLM would not compute, if it could take all."""
        request = self.request(tokens, adapter)
        found = self.manager.coordinator.find_longest_cache_hit(request.block_hashes, len(tokens))
        return int(found[1])


def main(seed: int, prompts: int, *names: str) -> None:
    """Print what each layout reports, and what it has."""
    init_none_hash(short)
    reported = {}
    for name in names or LAYOUTS:
        cache = Cache(name, seed)
        batches: list[str] = []
        asked = []
        for _ in range(prompts):
            adapter = cache.numbers.choice(["", "", "french"])
            reported_now = list(cache.run(cache.prompt(), adapter))
            batches += [base64.b64encode(batch).decode() for batch in reported_now]
            for _ in range(4):
                tokens = cache.prompts[-1] if cache.numbers.random() < 0.3 else cache.prompt()
                asker = cache.numbers.choice(["", "french"])
                asked.append([len(batches), tokens, asker, cache.hit(tokens, asker)])
        reported[name] = {"batches": batches, "asked": asked}
    print(json.dumps(reported))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
