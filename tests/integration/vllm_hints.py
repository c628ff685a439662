"""A script for vLLM's Python: the tier obeys envelopes of vLLM's own classes. Prints the hints."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob

from peercache.vllm import PeerCacheTier
from tests.unit.engines.fake_client import FakeClient

ROW_BYTES = 64
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(4)]
SPEC = SimpleNamespace(
    config=SimpleNamespace(
        groups=(SimpleNamespace(tokens_per_block=16, layer_names=("layer.0",)),),
        model=SimpleNamespace(name="a/model", dtype="torch.bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
        kv_cache_layout="NHD",
        canonical_layout=False,
        replicated_layout=False,
    )
)


def context(kind: str, **payload: Any) -> ReqContext:
    """Return what vLLM's scheduler passes for a request with a hint."""
    action = KvHintAction("a", kind, "1.0", payload)
    return ReqContext("r", kv_hints=KvHintsEnvelope("0.1", "m", [action]))


def main() -> None:
    """Retain a part of a prompt, and demote a block."""
    fake = FakeClient()
    tier = PeerCacheTier(
        offloading_spec=SPEC,
        primary_kv_view=memoryview(np.zeros((8, ROW_BYTES), np.int8)),
        tier_type="PeerCacheTier",
        client_factory=fake.open,
        namespace="tests",
    )
    asks = context("kv.retain", directives=[{"start": 0, "end": 32, "priority": 1, "duration": 9}])
    for number, key in enumerate(KEYS):
        asks.set_offload_key_position(key, 16 * (number + 1))
    tier.on_new_request(asks)
    tier.submit_store(TransferJob(1, KEYS, np.arange(4, dtype=np.int32), False, asks))
    while not list(tier.get_finished_jobs()):
        time.sleep(0.01)
    tier.on_request_finished(asks)
    while not fake.hints:
        time.sleep(0.01)
    tier.on_new_request(context("kv.demote", block_hashes=["hex:" + KEYS[1][:-4].hex()]))
    while len(fake.hints) < 2:
        time.sleep(0.01)
    tier.shutdown()
    print(json.dumps([(hint, seconds, len(held)) for hint, seconds, held in fake.hints]))


if __name__ == "__main__":
    main()
