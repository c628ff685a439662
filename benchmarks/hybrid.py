"""The cost of SGLang's v2 interface compared with v1, for the same number of pages and bytes.

    PYTHONPATH=src ~/.cache/peercache/sglang-0.5.23/bin/python benchmarks/hybrid.py [--json]

v1 moves 128 pages of a KV pool. v2 moves 64 pages of each of two side pools of the same page size,
in one call. `exists` of v1 asks for 128 keys, that of v2 for 64 keys in KV and in a side pool. One
embedded node, pages in its own memory; v1 and v2 in turns. Each figure is the median of many runs,
and the ratio is that of the medians. Needs the environment of tests/integration/install_sglang.sh.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
PAGES = 128
PAGE_TOKENS = 64
ROUNDS = 120
"""On a shared machine this many rounds include quiet moments for both."""


def hashes(name: str, count: int) -> list[str]:
    """Return keys in the form of SGLang's."""
    return [hashlib.sha256(f"{name}/{i}".encode()).hexdigest() for i in range(count)]


def in_turns(v1: Callable[[int], bool], v2: Callable[[int], bool]) -> dict[str, float]:
    """Return the median microseconds of each, taken in turns, and their ratios; all must succeed.

    `cpu`: that of all threads of this process, including the embedded node; other programs affect
    it less.
    """
    times: list[list[float]] = [[], []]
    spent: list[list[float]] = [[], []]
    for number in range(ROUNDS):
        order = ((0, v1), (1, v2)) if number % 2 else ((1, v2), (0, v1))
        for place, call in order:
            begun, begun_cpu = time.perf_counter(), time.process_time()
            assert call(number), "a page was missing: the figures mean nothing"
            times[place].append(time.perf_counter() - begun)
            spent[place].append(time.process_time() - begun_cpu)
    wall, cpu = ([statistics.median(each) * 1e6 for each in kind] for kind in (times, spent))
    return {
        "v1_us": wall[0], "v2_us": wall[1], "ratio": wall[1] / wall[0],
        "v1_cpu_us": cpu[0], "v2_cpu_us": cpu[1], "ratio_cpu": cpu[1] / cpu[0],
    }  # fmt: skip


def whole(answer: dict[str, list[bool]]) -> bool:
    """Return whether every page of every pool was moved."""
    return all(map(all, answer.values()))


def measure(layer_num: int) -> dict[str, dict[str, float]]:
    """Build SGLang's pools and a store over an embedded node; measure set, get and exists."""
    import torch  # noqa: PLC0415 - only SGLang's environment has these
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer  # noqa: PLC0415
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: PLC0415
    from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls  # noqa: PLC0415

    from peercache.sglang import PeerCacheStore  # noqa: PLC0415

    def pool(pages: int) -> object:
        device = MHATokenToKVPool(
            size=PAGE_TOKENS, page_size=PAGE_TOKENS, dtype=torch.bfloat16, layer_num=layer_num,
            device="cpu", enable_memory_saver=False, head_num=8, head_dim=128, v_head_dim=128,
        )  # fmt: skip
        info = device.get_device_pool_infos()[0].buffer_info
        made = get_mha_host_pool_cls(info)(
            info, host_to_device_ratio=pages, host_size=0, page_size=PAGE_TOKENS,
            layout="page_first", device_capacity_tokens=device.size, start_layer=0,
            end_layer=layer_num, pin_memory=False,
        )  # fmt: skip
        made.kv_buffer.view(torch.uint8).random_()
        return made

    with tempfile.TemporaryDirectory(prefix="peercache-") as folder:
        config = SimpleNamespace(
            tp_rank=0, tp_size=1, is_mla_model=False, is_page_first_layout=True, model_name="bench",
            extra_config={
                "embedded": True, "pool_size": "1GiB", "shm_dir": folder, "listen": "127.0.0.1:0",
                "op_timeout_s": 30.0, "exists_timeout_s": 5.0, "cluster": Path(folder).name,
            },
        )  # fmt: skip
        store = PeerCacheStore(config, {})
        try:
            kv, half = pool(PAGES), PAGES // 2
            store.register_mem_pool_host(kv)
            names = ("swa", "indexer")
            for name in names:
                store.register_mem_host_pool_v2(pool(half), name)
            everything = torch.arange(PAGES * PAGE_TOKENS)
            some = everything[: half * PAGE_TOKENS]

            def transfers(keys: list[str]) -> list[PoolTransfer]:
                return [PoolTransfer(name=n, keys=keys, host_indices=some) for n in names]

            figures = {
                "set": in_turns(
                    lambda n: all(store.batch_set_v1(hashes(f"v1-{n}", PAGES), everything)),
                    lambda n: whole(store.batch_set_v2(transfers(hashes(f"v2-{n}", half)))),
                )
            }
            # The pages of the sets may be evicted by now.
            keys, halves = hashes("v1", PAGES), hashes("v2", half)
            assert all(store.batch_set_v1(keys, everything))
            assert all(store.batch_set_v1(halves, some))
            assert whole(store.batch_set_v2(transfers(halves)))
            figures["get"] = in_turns(
                lambda _: all(store.batch_get_v1(keys, everything)),
                lambda _: whole(store.batch_get_v2(transfers(halves))),
            )
            asked = [PoolTransfer("swa", keys=halves, hit_policy=PoolHitPolicy.ALL_PAGES)]
            figures["exists"] = in_turns(
                lambda _: store.batch_exists(keys) == PAGES,
                lambda _: store.batch_exists_v2(halves, asked).kv_hit_pages == half,
            )
        finally:
            store.close()
        return figures


def main() -> None:
    """Measure, and print a table or JSON."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments.add_argument("--layers", type=int, default=4, help="of a pool: 256 KiB a page each")
    options = arguments.parse_args()
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests/integration/cpu_engine")]
    try:
        host_copies = import_module("host_copies")
        import torch  # noqa: F401, PLC0415
    except ImportError as error:
        sys.exit(f"{error}: run it with the Python of tests/integration/install_sglang.sh")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        host_copies.prepare()
        import sglang.srt.managers.cache_controller  # noqa: F401, PLC0415 - in SGLang's own order
    figures = measure(options.layers)
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    for name, row in figures.items():
        for kind in ("", "_cpu"):
            v1, v2, ratio = row[f"v1{kind}_us"], row[f"v2{kind}_us"], row[f"ratio{kind}"]
            line = f"{name:8} {kind[1:] or 'wall':4}  v1 {v1:9.0f} us   v2 {v2:9.0f} us"
            sys.stdout.write(f"{line}   {ratio:.3f}\n")


if __name__ == "__main__":
    main()
