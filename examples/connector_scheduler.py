"""A scheduler loop that prefetches waiting requests and stores what it has computed.

    peercache node --insecure &
    python examples/connector_scheduler.py insecure=true

The arguments are settings of PeerCache, here those for a node without certificates.

The model is a function that fills a page from its tokens, so that every byte can be checked. The
lines with `prefetches` and `stores` are what a scheduler has to do for the connector.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from types import SimpleNamespace

import numpy as np

from peercache.connector import (
    AsyncKVPrefetchQueue,
    AsyncKVStoreQueue,
    ConnectorMetadata,
    RemoteKVConnector,
    cluster_store,
)

PAGE_TOKENS = 16
LAYERS = 4
ITEM_BYTES = 4096
STEP_S = 0.001
"""The duration of one step of the model."""


class Pool:
    """The engine's KV pages: one buffer for each layer, and the free indices."""

    def __init__(self, pages: int) -> None:
        """Allocate buffers for this number of pages."""
        self.layers = [np.zeros((pages, ITEM_BYTES), np.uint8) for _ in range(LAYERS)]
        self.free = deque(range(pages))

    def allocate(self, count: int) -> list[int] | None:
        """Return indices of free pages, None if there are too few."""
        if count > len(self.free):
            return None
        return [self.free.popleft() for _ in range(count)]

    def release(self, pages: list[int]) -> None:
        """Free pages."""
        self.free.extend(pages)

    def kv_args(self) -> SimpleNamespace:
        """Return the buffers as SGLang's KVArgs name them."""
        return SimpleNamespace(
            kv_data_ptrs=[layer.ctypes.data for layer in self.layers],
            kv_data_lens=[layer.nbytes for layer in self.layers],
            kv_item_lens=[ITEM_BYTES] * LAYERS,
        )

    def compute(self, page: int, tokens: list[int]) -> None:
        """Simulate the model: the tokens determine the bytes of each layer."""
        for number, layer in enumerate(self.layers):
            layer[page] = (sum(tokens) + number) % 251

    def is_right(self, page: int, tokens: list[int]) -> bool:
        """Return whether a page holds what the model would compute."""
        return all(
            bool((layer[page] == (sum(tokens) + number) % 251).all())
            for number, layer in enumerate(self.layers)
        )


class Scheduler:
    """Runs requests: prefetch, compute the rest, store.

    longest_poll_s: of both queues. reused, computed: tokens. wrong: pages with wrong bytes.
    """

    def __init__(self, connector: RemoteKVConnector, pool: Pool, threshold: int = 32) -> None:
        """Register the pool's pages."""
        connector.register_kv_buffers(pool.kv_args())
        self.connector = connector
        self.pool = pool
        self.prefetches = AsyncKVPrefetchQueue(
            connector, pool.allocate, pool.release, retrieve_remote_cache_threshold=threshold
        )
        self.stores = AsyncKVStoreQueue(connector)
        self.prompts: dict[str, list[int]] = {}
        self.polls_s: list[float] = []
        self.reused = self.computed = self.wrong = 0

    def submit(self, req_id: str, tokens: list[int]) -> None:
        """Accept a request, and look up its prefix."""
        self.prompts[req_id] = tokens
        if not self.prefetches.add(req_id, tokens):
            self._run(req_id, [])

    def step(self) -> None:
        """Poll both queues, then run a step of the model."""
        begun = time.perf_counter()
        prefetched = self.prefetches.poll()
        stored = self.stores.poll()
        self.polls_s.append(time.perf_counter() - begun)
        for store in stored:
            self.pool.release(store.pages)
        for request in prefetched:
            self._run(request.req_id, request.pages)
        time.sleep(STEP_S)

    def is_idle(self) -> bool:
        """Return whether no transfer is in progress."""
        return not self.prefetches and not self.stores

    def _run(self, req_id: str, had: list[int]) -> None:
        """Compute the tokens that were not prefetched, and store them."""
        tokens = self.prompts.pop(req_id)
        whole = len(tokens) // PAGE_TOKENS
        parts = [tokens[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS] for i in range(whole)]
        self.wrong += sum(
            not self.pool.is_right(page, part) for page, part in zip(had, parts, strict=False)
        )
        self.pool.release(had)
        self.reused += len(had) * PAGE_TOKENS
        new = self.pool.allocate(whole - len(had)) or []
        self.computed += len(new) * PAGE_TOKENS
        mapping = []
        for place, page in enumerate(new, start=len(had)):
            self.pool.compute(page, parts[place])
            mapping.append((page, slice(place * PAGE_TOKENS, (place + 1) * PAGE_TOKENS)))
        if not self.stores.add(req_id, mapping, tokens):
            self.pool.release(new)


def main(**settings: str) -> None:
    """Run the same prompts twice."""
    store = cluster_store(**settings)
    metadata = ConnectorMetadata(
        model="example", dtype="bfloat16", page_tokens=PAGE_TOKENS, store=store
    )
    connector = RemoteKVConnector(metadata)
    scheduler = Scheduler(connector, Pool(4096))
    prompts = [[seed * 1000 + i for i in range(1024)] for seed in range(20)]
    for turn in ("first", "second"):
        scheduler.reused = scheduler.computed = 0
        for number, prompt in enumerate(prompts):
            scheduler.submit(f"{turn}-{number}", prompt)
        while not scheduler.is_idle():
            scheduler.step()
        print(f"{turn}: {scheduler.reused} tokens reused, {scheduler.computed} computed")
    connector.close()
    polls = sorted(scheduler.polls_s)
    print(f"a poll took {polls[len(polls) // 2] * 1e6:.0f} us, at most {polls[-1] * 1e6:.0f}")
    if scheduler.wrong:
        sys.exit(f"{scheduler.wrong} pages were wrong")


if __name__ == "__main__":
    if not all("=" in argument for argument in sys.argv[1:]):
        sys.exit("usage: python examples/connector_scheduler.py [SETTING=VALUE …]")
    main(**dict(argument.split("=", 1) for argument in sys.argv[1:]))
