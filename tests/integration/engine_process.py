"""One SGLang engine on a CPU, as a process that answers prompts: JSON lines in, JSON lines out.

    engine_process.py MODEL_FOLDER EXTRA_CONFIG_JSON [STORAGE_BACKEND [ENGINE_OPTIONS_JSON]]

In:  {"input_ids": […], "flush": bool, "clear": bool, "more": {…}}
     flush empties the engine's own caches first, clear the storage too; more: further arguments of
     generate
Out: {"ready": true}, then one {"tokens": […], "logprobs": […], "cached": {…}} a prompt,
     or {"failed": "why"} where the engine gives the request up
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

PAGE_TOKENS = 64
NEW_TOKENS = 8
FLUSH_S = 120.0
LINKER = "linker:"
"""Before the name of a linker, in place of a storage backend's."""


def answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Generate greedily; return tokens, their log probabilities and what was cached."""
    if request.get("flush"):
        flush(engine)
    if request.get("clear"):
        engine.loop.run_until_complete(engine.tokenizer_manager.clear_hicache_storage())
    try:
        out = engine.generate(
            input_ids=request["input_ids"],
            sampling_params={"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            return_logprob=True,
            **request.get("more", {}),
        )
    except ValueError as error:  # what SGLang makes of a request that it aborted
        return {"failed": str(error)}
    meta = out["meta_info"]
    return {
        "tokens": out["output_ids"],
        "logprobs": [each[0] for each in meta["output_token_logprobs"]],
        "cached": meta.get("cached_tokens_details"),
    }


def flush(engine: Any) -> None:
    """Empty the engine's own caches; a request counts as running for a moment after its reply."""
    ends = time.monotonic() + FLUSH_S
    while not engine.flush_cache().success:
        assert time.monotonic() < ends, "the engine does not come to rest"
        time.sleep(0.05)


def main(
    model: str, extra_config: str, replies: Any, backend: str = "dynamic", more: str = "{}"
) -> None:
    """Start the engine, then answer until stdin ends. more: options of sglang.Engine."""
    import sglang

    storage = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend": backend,
        "hicache_storage_backend_extra_config": extra_config,
    }
    linker = {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": backend.removeprefix(LINKER),
        "unified_cache_external_linker_config": json.loads(extra_config),
    }
    engine = sglang.Engine(
        **(linker if backend.startswith(LINKER) else storage) | json.loads(more),
        model_path=model,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        page_size=PAGE_TOKENS,
        max_total_tokens=4096,
        max_running_requests=4,
        disable_overlap_schedule=True,
        skip_tokenizer_init=True,
        random_seed=0,
        enable_cache_report=True,
        log_level="warning",
    )
    try:
        print(json.dumps({"ready": True}), file=replies, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(engine, json.loads(line))), file=replies, flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    # SGLang and its libraries write to stdout: the replies get a descriptor of their own.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(sys.argv[1], sys.argv[2], channel, *sys.argv[3:])
