"""Dynamo's router with a shared cache, as a process: what it makes of object events.

    python -m tests.integration.dynamo_router ENDPOINT MODEL FACTS

Runs in the environment of Dynamo. Each line of stdin is a JSON array of token ids; each line of
stdout is what the router's shared cache knows of them. MODEL: a folder with a tokenizer. FACTS: a
JSON object of what the worker reports of its cache, in addition to what all report.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

PAGE = 4


async def main() -> None:
    """Register a worker whose cache is reported at the endpoint, and answer each line."""
    from dynamo.llm import (
        KvRouter,
        KvRouterConfig,
        ModelInput,
        ModelRuntimeConfig,
        ModelType,
        WorkerType,
        register_model,
    )
    from dynamo.runtime import DistributedRuntime

    endpoint, model, facts = sys.argv[1:]
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "mem", "tcp", event_plane="zmq")
    worker = runtime.endpoint("feas.backend.generate")
    config = ModelRuntimeConfig()
    config.total_kv_blocks, config.max_num_seqs = 1000, 8
    config.max_num_batched_tokens = 8192
    reported = {
        "backend": "mooncake", "page_size": PAGE, "tp_size": 1, "pp_size": 1,
        "is_mla_model": False, "is_eagle": False, "tp_lcm_size": None,
        "should_split_heads": False, "extra_backend_tag": None, "kv_events_endpoint": endpoint,
        **json.loads(facts),
    }  # fmt: skip
    config.set_engine_specific("sglang_hicache_mooncake", json.dumps(reported))

    async def handler(request: Any, context: Any = None) -> AsyncIterator[dict[str, Any]]:
        yield {"token_ids": [1], "finish_reason": "stop"}

    serving = asyncio.ensure_future(worker.serve_endpoint(handler))
    await register_model(
        ModelInput.Tokens, ModelType.Completions, worker, model, "tiny",
        worker_type=WorkerType.Aggregated, kv_cache_block_size=PAGE, runtime_config=config,
        skip_model_assets=True,
    )  # fmt: skip
    await asyncio.sleep(1)
    router = KvRouter(
        worker, PAGE,
        KvRouterConfig(
            use_kv_events=False, shared_cache_type="hicache", shared_cache_multiplier=0.5
        ),
    )  # fmt: skip
    print("ready", flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await router.get_overlap_scores(json.loads(line))), flush=True)
    serving.cancel()


if __name__ == "__main__":
    asyncio.run(main())
