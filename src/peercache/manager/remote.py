"""RemoteKVManager: the prefix index in a process of its own, for routers and schedulers.

    with Client.open() as client:
        manager = RemoteKVManager(client)
        found = manager.find_tokens(tokens, Chain("llama-3-8b", "bfloat16", 64))
        found.stored_tokens, [(node.node, node.prefix_tokens) for node in found.nodes]

It has no copy of the stores: each answer comes from the directory, via the home node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, final

import numpy as np

from peercache.config.entries import EngineEvents
from peercache.content.chain import Chain, Tokens, in_namespace, token_ids
from peercache.manager.engine_follower import EngineFollower
from peercache.manager.gpu_blocks import FoundPrefix, GpuBlocks, prefix_of
from peercache.model.keys import Key, Namespace, PageKeys
from peercache.model.prefix import Overlap


class Store(Protocol):
    """The source of answers: a `Client`."""

    namespace: Namespace

    def overlap(self, keys: Sequence[Key] | PageKeys) -> Overlap:
        """Return which members hold these pages."""

    def member_addresses(self) -> Mapping[int, str]:
        """Return HOST:PORT of each member, by incarnation."""


@final
class RemoteKVManager:
    """Finds out where which part of a prompt is stored. Thread-safe."""

    def __init__(self, client: Store, *, engines: Sequence[EngineEvents] = ()) -> None:
        """Use a client and its namespace; follow the events of these engines.

        ConfigError: engines without the extra `events`.
        """
        self._client = client
        self._digest = client.namespace.digest()
        self._gpu = GpuBlocks(engine.name for engine in engines)
        self._follower = EngineFollower(engines, self._gpu) if engines else None

    def find_tokens(self, tokens: Tokens, chain: Chain, *, lora: str = "") -> FoundPrefix:
        """Return where which part of a prompt is, in whole pages, also on GPUs.

        tokens: a list of int or a one-dimensional integer array.
        chain:  the chain of the stored pages' names. lora: the adapter, as engines name it.
        InvalidRequest: invalid tokens.
        """
        ids = token_ids(tokens)
        # The same keys as those of the connector, and of a client that gets the keys as text.
        keys = in_namespace(chain.keys(ids), self._digest)
        engines = self._gpu.find(ids.astype(np.uint32, copy=False), lora)
        return prefix_of(
            self._client.overlap(keys),
            page_tokens=chain.page_tokens,
            named=self._named,
            engines=engines,
        )

    def find_hashes(self, hashes: Sequence[Key] | PageKeys) -> FoundPrefix:
        """Return where which part of a prompt is, by its page hashes; without GPUs.

        hashes: keys as in a client: SGLang's page hashes, any names, or page keys (n,) V16.
        """
        overlap = self._client.overlap(hashes)
        return prefix_of(overlap, page_tokens=0, named=self._named)

    def close(self) -> None:
        """Stop to follow engines. The client stays open for its owner. May be repeated."""
        if self._follower is not None:
            self._follower.close()

    def __enter__(self) -> RemoteKVManager:
        """Return the manager."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _named(self, incarnation: int) -> str:
        return self._client.member_addresses().get(incarnation, "")
