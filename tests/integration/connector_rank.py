"""One tensor-parallel rank of test_sglang_connector.py: `connector_rank.py RANK FOLDER`.

Each rank keeps its pages in a folder of its own; the second has stored fewer, and looks up slowly.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch import tensor

from peercache.connector import AsyncKVPrefetchQueue, folder_store
from peercache.model.keys import Namespace, PageKeys
from tests.pace import TIMEOUT_S
from tests.unit.connector.rig import Engine, mapping_of

TOKENS = list(range(100, 130))
STORED = (7, 5)


def smallest(numbers: list[int]) -> list[int]:
    """Return the smallest of each place over the ranks, through gloo."""
    values = tensor(numbers)
    dist.all_reduce(values, op=dist.ReduceOp.MIN)
    agreed: list[int] = values.tolist()
    return agreed


def main(rank: int, folder: Path) -> None:
    """Store, look up, prefetch; print what the rank has come to."""
    # Where the test would end a rank that hangs, its output has where.
    faulthandler.dump_traceback_later(0.8 * TIMEOUT_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=len(STORED)
    )
    pages = folder_store(folder / f"rank{rank}", "64MiB")(Namespace())
    exists = pages.exists

    def slow(keys: PageKeys, page_bytes: int) -> int:
        time.sleep(0.05 * rank)
        return exists(keys, page_bytes)

    pages.exists = slow  # type: ignore[method-assign]
    engine = Engine(pages, seed=rank, tp_rank=rank, tp_size=len(STORED), all_reduce_min=smallest)
    with engine:
        future, _ = engine.connector.store_kv_async("w", mapping_of(range(STORED[rank])), TOKENS)
        own = future.result(60)
        matched = engine.connector.num_external_matched_tokens("a", TOKENS, 0)
        free = list(range(20, 40))

        def allocate(count: int) -> list[int]:
            return [free.pop(0) for _ in range(count)]

        queue = AsyncKVPrefetchQueue(
            engine.connector, allocate, free.extend, retrieve_remote_cache_threshold=4
        )
        for name in ("r", "s"):
            queue.add(name, TOKENS)
        polls, ended = 0, []
        while queue:
            ended += [(polls, each.req_id, each.tokens) for each in queue.poll()]
            polls += 1
            time.sleep(0.001)
        right = [engine.page(20 + i) == engine.page(i) for i in range(5)]
        print(json.dumps({"own": own, "matched": matched, "ended": ended, "right": right}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
