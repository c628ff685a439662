"""Keys without a topology, which SGLang's `hicache_key_scheme` makes and no option uses yet.

Such a key names what an object holds, a range of layers and a group of heads of a page, and not
which rank wrote it. To PeerCache it is a name like any other, in a namespace without ranks.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peercache.client.client import Client
from peercache.config.settings import Config
from peercache.model.keys import Namespace, page_keys
from tests.integration.processes import StandaloneNode
from tests.integration.sglang_pools import page_hash
from tests.pace import TIMEOUT_S, timeout

scheme = pytest.importorskip("sglang.srt.mem_cache.hicache_key_scheme")  # since 0.5.23

__all__ = ["timeout"]

HEADS, LAYERS, PAGES = 8, 4, 3
OBJECT_BYTES = 4096
SPACE = Namespace.of("org/model", {}, {})


def keys_of(tp_rank: int, tp_size: int, layers: tuple[int, int] = (0, LAYERS)) -> list[str]:
    """Return the keys of all objects of a rank's pages, page by page."""
    plan = scheme.plan_unified_kv(
        model_id="org/model", dtype="bfloat16", page_size=64, rank_replicated=False,
        local_kv_heads=HEADS // tp_size, attn_tp_rank=tp_rank, attn_tp_size=tp_size, attn_cp_size=1,
        start_layer=layers[0], end_layer=layers[1], is_final_stage=layers[1] == LAYERS,
        head_group=2, layer_partition=2,
    )  # fmt: skip
    pages = [page_hash(number) for number in range(PAGES)]
    return [f"{page}_{suffix}" for page, suffix in itertools.product(pages, plan.suffixes)]


def bytes_under(key: str) -> bytes:
    """Return what an object holds, whichever rank writes it."""
    return np.random.default_rng(list(key.encode())).bytes(OBJECT_BYTES)


def open_client(node: StandaloneNode) -> Client:
    """Return a client of one rank; the namespace names the model only."""
    patient = {"op_timeout_s": TIMEOUT_S, "exists_timeout_s": TIMEOUT_S}
    return Client.open(Config.load({"home": node.home, **patient}), namespace=SPACE)


def test_ranks_of_other_topologies_read_what_ranks_wrote(tmp_path: Path) -> None:
    """Four ranks of two pipeline stages each write, two ranks of one stage read all of it."""
    stages = ((0, 2), (2, 4))
    with StandaloneNode(tmp_path) as node, open_client(node) as reader:
        written: list[str] = []
        for rank, layers in itertools.product(range(4), stages):
            keys = keys_of(rank, 4, layers)
            with open_client(node) as writer:
                assert all(writer.batch_set(keys, [bytes_under(key) for key in keys]))
            written += keys
        read: list[str] = []
        for rank in range(2):
            keys = keys_of(rank, 2)
            targets: list[Any] = [bytearray(OBJECT_BYTES) for _ in keys]
            assert reader.batch_exists(keys) == len(keys)
            assert all(reader.batch_get(keys, targets))
            assert [bytes(each) for each in targets] == [bytes_under(key) for key in keys]
            read += keys

    assert sorted(read) == sorted(written)
    assert len(set(page_keys(written, SPACE.digest()).tolist())) == len(written)


def test_a_page_hash_with_and_without_a_coordinate_are_two_pages() -> None:
    """Neither is cut off or read as digits of the other."""
    page = page_hash(1)
    names = [page, page + "_", *keys_of(0, 4)[:2], keys_of(0, 4)[0].upper()]

    assert len(set(page_keys(names, SPACE.digest()).tolist())) == len(names)
