"""The cost of the connector compared with the client's own batch calls, and the speed of hashing.

    python -m benchmarks.connector [--json]

One embedded node, pages in its own memory. Gets and sets of the same pages by the client and by the
connector in turns, with prebuilt keys and runs for the client; the ratio is that of the medians,
and 1 means equally fast. Then `num_external_matched_tokens` of a known prompt, and content
addresses compared with one BLAKE3 call over the same bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TypeAlias

import numpy as np
from blake3 import blake3

from peercache.client.client import Client
from peercache.connector import ConnectorMetadata, RemoteKVConnector
from peercache.connector.connector import KVBuffers
from peercache.connector.metadata import ClientPages
from peercache.content.chain import Chain, in_namespace
from peercache.model.keys import Namespace, PageKeys
from peercache.model.runs import I64

PAGES = 128
PAGE_TOKENS = 64
BUFFERS = 64
"""K and V of 32 layers."""
ITEM_BYTES = 8192
ROUNDS = 31
WARM_UP = 10
"""Rounds that do not count: until the pool has been written once, a set also pays for that."""
PROMPT_TOKENS = 32_768

Step: TypeAlias = tuple[str, int, Callable[[], int]]
"""Its name, what it must return, and the call."""


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def measured(client: Client) -> dict[str, float]:
    """Return the figures by name."""
    layers = [np.ones((PAGES, ITEM_BYTES), np.uint8) for _ in range(BUFFERS)]
    kv_args = SimpleNamespace(
        kv_data_ptrs=[layer.ctypes.data for layer in layers],
        kv_data_lens=[layer.nbytes for layer in layers],
        kv_item_lens=[ITEM_BYTES] * BUFFERS,
    )
    spaces: list[Namespace] = []

    def opened(namespace: Namespace) -> ClientPages:
        spaces.append(namespace)
        return ClientPages(client)

    metadata = ConnectorMetadata(
        model="bench", dtype="bfloat16", page_tokens=PAGE_TOKENS, store=opened, timeout_s=60.0
    )
    connector = RemoteKVConnector(metadata)
    connector.register_kv_buffers(kv_args)
    chain, runs = metadata.chain(), KVBuffers(kv_args).runs(np.arange(PAGES))
    mapping = [(i, slice(i * PAGE_TOKENS, (i + 1) * PAGE_TOKENS)) for i in range(PAGES)]
    times: dict[str, list[float]] = {}

    def add(name: str, pages: int, call: Callable[[], int]) -> None:
        answers: list[int] = []
        times.setdefault(name, []).append(timed(lambda: answers.append(call())))
        assert answers == [pages], f"{name} moved {answers}: the figures mean nothing"

    for number in range(WARM_UP + ROUNDS):
        tokens = np.arange(PAGES * PAGE_TOKENS, dtype=np.int64) + number * 100_000
        own = tokens + 50_000
        keys = in_namespace(chain.keys(own), spaces[0].digest())
        whole = PAGES * PAGE_TOKENS

        def stored(tokens: I64 = tokens) -> int:
            return connector.store_kv_async("s", mapping, tokens)[0].result()

        def read(tokens: I64 = tokens) -> int:
            return connector.retrieve_kv_async("r", mapping, tokens).result()

        def client_set(keys: PageKeys = keys) -> int:
            return sum(client.batch_set_from(keys, runs))

        def client_get(keys: PageKeys = keys) -> int:
            return sum(client.batch_get_into(keys, runs))

        sets: list[Step] = [("client_set", PAGES, client_set), ("connector_set", whole, stored)]
        gets: list[Step] = [("client_get", PAGES, client_get), ("connector_get", whole, read)]
        for step in (sets if number % 2 else sets[::-1]) + (gets if number % 2 else gets[::-1]):
            add(*step)
    figures = {
        f"{name}_ms": statistics.median(each[WARM_UP:]) * 1e3 for name, each in times.items()
    }
    for kind in ("set", "get"):
        figures[f"{kind}_ratio"] = figures[f"client_{kind}_ms"] / figures[f"connector_{kind}_ms"]
    figures |= _prompt(connector)
    connector.close()
    return figures


def _prompt(connector: RemoteKVConnector) -> dict[str, float]:
    """Return the time of a known prompt's lookup, and the rates of hashing."""
    prompt = np.arange(PROMPT_TOKENS, dtype=np.int64)
    pages = PROMPT_TOKENS // PAGE_TOKENS
    for begin in range(0, pages, PAGES):
        mapping = [
            (i, slice((begin + i) * PAGE_TOKENS, (begin + i + 1) * PAGE_TOKENS))
            for i in range(PAGES)
        ]
        future, _ = connector.store_kv_async("p", mapping, prompt)
        assert future.result() == PAGES * PAGE_TOKENS
    asked, ask = [], connector.num_external_matched_tokens
    for number in range(200):
        found: list[int] = []
        asked.append(timed(lambda f=found: f.append(ask("p", prompt, 0))))  # type: ignore[misc]
        assert found == [PROMPT_TOKENS], f"lookup {number} found {found}"
    chain = Chain("bench", "bfloat16", PAGE_TOKENS)
    tokens = np.random.default_rng(0).integers(0, 150_000, 2**18)
    raw = tokens.astype(np.uint32).tobytes()
    hashing = min(timed(lambda: chain.digests(tokens)) for _ in range(7))
    at_once = min(timed(lambda: blake3(raw).digest()) for _ in range(7))
    return {
        "matched_32k_ms": statistics.median(asked) * 1e3,
        "matched_32k_p95_ms": sorted(asked)[len(asked) * 95 // 100] * 1e3,
        "hashed_tokens_per_s": len(tokens) / hashing,
        "one_call_tokens_per_s": len(tokens) / at_once,
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        Client.open(
            embedded=True, pool_size="1GiB", listen="127.0.0.1:0", shm_dir=folder, op_timeout_s=60.0
        ) as client,
    ):
        figures = measured(client)
    if args.json:
        print(json.dumps(figures))
        return
    for name, figure in figures.items():
        print(f"{name:24}{figure:14,.3f}")


if __name__ == "__main__":
    main()
