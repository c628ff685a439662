"""zstd on KV pages that SGLang's CPU engine computed: ratio and speed by level.

    PYTHONPATH=src ~/.cache/peercache/sglang-0.5.23/bin/python -m benchmarks.zstd_pages [--json]

The engine stores the pages of a few prompts with SGLang's own file backend. Each page then goes
through the codec of `peercache.connector.folder_store`, in one thread: bytes before by bytes after,
and bytes of the page by second. The model has the proportions of a Llama 3 layer and random
weights: the numbers of a trained model may be more or less similar within a page, so measure your
own, too. Needs the environment of tests/integration/install_sglang.sh.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.ttft_engine import PAGE_TOKENS
from benchmarks.ttft_sglang import FULL
from peercache.connector.folder import Zstd
from tests.integration.processes import Child
from tests.integration.tiny_llama import write_tiny_llama

LEVELS = (1, 3, 6, 9)
PROMPTS = 2
PROMPT_TOKENS = 1024
ROUNDS = 3

STORAGE = {
    "backend_name": "file",
    "module_path": "sglang.srt.mem_cache.hicache_storage",
    "class_name": "HiCacheFile",
    "interface_v1": 0,
}
"""The configuration of SGLang's file backend, for `benchmarks.ttft_engine`."""


def pages_of_an_engine() -> list[bytes]:
    """Return the pages of a few prompts, as SGLang stores them."""
    with tempfile.TemporaryDirectory() as folder:
        stored, model = Path(folder, "stored"), write_tiny_llama(Path(folder, "model"), FULL.sizes)
        engine = Child(
            "-m", "benchmarks.ttft_engine", str(model), json.dumps(STORAGE),
            str(FULL.device_tokens),
            PEERCACHE_TEST_CPU_ENGINE="1", SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1",
            SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=str(stored),
        )  # fmt: skip
        try:
            engine.receive(600.0)
            for number in range(PROMPTS):
                engine.ask({"input_ids": FULL.prompt(number)[:PROMPT_TOKENS]})
            engine.ask({"flush": True})
        finally:
            engine.close()
        pages = [path.read_bytes() for path in sorted(stored.glob("*.bin"))]
    wanted = PROMPTS * (PROMPT_TOKENS // PAGE_TOKENS)
    assert len(pages) >= wanted, f"{len(pages)} pages were stored, not {wanted}"
    assert {len(page) for page in pages} == {FULL.page_bytes}, "these are no whole pages"
    return pages


def measured(pages: list[bytes]) -> list[dict[str, float]]:
    """Return level, ratio and MB a second of each level."""
    total, rows = sum(map(len, pages)), []
    for level in LEVELS:
        codec = Zstd(level)
        small = [codec.compress(memoryview(page)) for page in pages]

        def compress(codec: Zstd = codec) -> None:
            for page in pages:
                codec.compress(memoryview(page))

        def decompress(codec: Zstd = codec, small: list[bytes] = small) -> None:
            for page, raw in zip(pages, small, strict=True):
                assert codec.decompress(memoryview(raw), len(page)) == page

        rows.append(
            {
                "level": level,
                "ratio": total / sum(map(len, small)),
                "compress_mb_s": total / 1e6 / taken(compress),
                "decompress_mb_s": total / 1e6 / taken(decompress),
            }
        )
    return rows


def taken(call: Callable[[], None]) -> float:
    """Return the median of the seconds that a call takes."""
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zstd_pages", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args()
    pages = pages_of_an_engine()
    rows = measured(pages)
    if chosen.json:
        print(json.dumps({"pages": len(pages), "page_bytes": len(pages[0]), "levels": rows}))
        return
    print(f"{len(pages)} pages of {len(pages[0])} bytes")
    print(f"{'level':>5}{'ratio':>9}{'compress MB/s':>16}{'decompress MB/s':>18}")
    for row in rows:
        print(
            f"{row['level']:5.0f}{row['ratio']:9.3f}{row['compress_mb_s']:16,.0f}"
            f"{row['decompress_mb_s']:18,.0f}"
        )


if __name__ == "__main__":
    main()
