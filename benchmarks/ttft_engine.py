"""One SGLang engine of `benchmarks.ttft_sglang`, as a process: JSON lines in, JSON lines out.

    python -m benchmarks.ttft_engine MODEL_FOLDER EXTRA_CONFIG_JSON DEVICE_TOKENS

EXTRA_CONFIG_JSON with a `linker` is the configuration of SGLang's external linker, which has no
host tier; any other is that of a storage backend of HiCache.

In:  {"input_ids": […]}, {"attach": EXTRA_CONFIG} or {"flush": true}
Out: {"ready": true} at the start; {"asked_s", "first_s", "tokens", "cached"} for a prompt, with the
     times, in seconds of the monotonic clock, when the engine was asked and when the first token
     was there; {"done": true} for the rest.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

PAGE_TOKENS = 64
NEW_TOKENS = 8
"""Generated for each prompt: the first one is timed, all are compared."""

FLUSH_S = 60.0

HOST_RATIO = 8.0
"""Ratio of host pool to device pool in tokens: no prompt is evicted from the host."""

CALLS_FILE = "TTFT_CALLS"
"""Environment: the file of the calls of the engine's store."""

COMPUTE_SLEEP = "TTFT_SLEEP"
"""Environment: the seconds that each layer sleeps for a token that it computes."""

ZERO_SUFFIX = ".zero"
"""A file of this name next to that of the calls makes every page zero that is read from then on."""

HOST_TIER = {"enable_hierarchical_cache": True, "hicache_ratio": HOST_RATIO}
STORAGE = {
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_write_policy": "write_through",
    "hicache_storage_backend": "dynamic",
}


def generate(engine: Any, input_ids: list[int]) -> dict[str, Any]:
    """Generate greedily; return the tokens, how many were cached, and the times."""
    sampling = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    asked_s = time.monotonic()
    pieces = engine.generate(input_ids=input_ids, sampling_params=sampling, stream=True)
    last = next(pieces)
    first_s = time.monotonic()
    for piece in pieces:
        last = piece  # it contains all tokens generated so far
    tokens = last["output_ids"]
    assert len(tokens) == NEW_TOKENS, tokens
    cached = last["meta_info"].get("cached_tokens_details")
    return {"asked_s": asked_s, "first_s": first_s, "tokens": tokens, "cached": cached}


def attach(engine: Any, extra_config: dict[str, Any]) -> None:
    """Replace the attached storage backend."""
    manager, run = engine.tokenizer_manager, engine.loop.run_until_complete
    detached = run(manager.detach_hicache_storage())
    assert detached.success, detached.message
    # SGLang's options have the settings under these names, without `extra_config_json`.
    attached = run(
        manager.attach_hicache_storage(
            **STORAGE, hicache_storage_backend_extra_config_json=json.dumps(extra_config)
        )
    )
    assert attached.success, attached.message


def options(extra_config: str) -> dict[str, Any]:
    """Return the options of the engine's caches."""
    config = json.loads(extra_config)
    if "linker" in config:
        return {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": config,
        }
    return {**HOST_TIER, **STORAGE, "hicache_storage_backend_extra_config": extra_config}


def answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Execute one request."""
    if "input_ids" in request:
        return generate(engine, request["input_ids"])
    if "attach" in request:
        attach(engine, request["attach"])
    if "flush" in request:
        # It waits for pending operations.
        flush = engine.tokenizer_manager.flush_cache(timeout_s=FLUSH_S)
        flushed = engine.loop.run_until_complete(flush)
        assert flushed.success, flushed.message
    return {"done": True}


def main(model: str, extra_config: str, device_tokens: str, replies: Any) -> None:
    """Start the engine, then answer until stdin ends."""
    import sglang  # noqa: PLC0415 - in its environment only

    engine = sglang.Engine(
        model_path=model,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        page_size=PAGE_TOKENS,
        max_total_tokens=int(device_tokens),
        mem_fraction_static=0.5,
        max_running_requests=2,
        chunked_prefill_size=int(device_tokens),
        disable_overlap_schedule=True,
        sleep_on_idle=True,  # otherwise each idle engine uses one processor
        skip_tokenizer_init=True,
        random_seed=0,
        enable_cache_report=True,
        **options(extra_config),
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
    main(sys.argv[1], sys.argv[2], sys.argv[3], channel)
