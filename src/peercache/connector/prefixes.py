"""The prefixes of requests: a growing prompt is hashed from where it has grown."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import final

import attrs
import numpy as np

from peercache.content.chain import Chain, Digests
from peercache.content.tokens import TokenIds

REQUESTS_MAX = 4096
TOKENS_MAX = 2**25
"""Of all requests together: 128 MiB of token ids, and 16 MiB of digests with pages of 64."""


@attrs.frozen(eq=False)
class _Known:
    """A prefix: the tokens of its whole pages, a copy of the caller's, and their digests."""

    seed: bytes
    tokens: TokenIds
    digests: Digests


@final
class Prefixes:
    """The last prefix of each request, the least recently used forgotten first. Thread-safe.

    The lock is held for a look into a dictionary, never while tokens are hashed: a scheduler's
    thread does not wait for another one's hashing.
    """

    def __init__(self, requests_max: int = REQUESTS_MAX, tokens_max: int = TOKENS_MAX) -> None:
        """Begin with none."""
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._tokens = 0
        self._requests_max = requests_max
        self._tokens_max = tokens_max

    def digests(self, req_id: str, chain: Chain, tokens: TokenIds) -> Digests:
        """Return the digest of each whole page of a request's tokens, (pages, 32) uint8.

        Only what a request has not had at its last call is hashed; a request that comes with other
        tokens, or another chain, is hashed from where they differ.
        """
        tokens = tokens[: len(tokens) // chain.page_tokens * chain.page_tokens]
        with self._lock:
            known = self._known.get(req_id)
        pages = 0
        if known is not None and known.seed == chain.seed:
            pages = _common(known.tokens, tokens) // chain.page_tokens
            if pages * chain.page_tokens == len(tokens):
                return known.digests[:pages]
        begin = pages * chain.page_tokens
        had = known.digests[:pages] if known is not None and pages else None
        new = chain.digests(tokens[begin:], had[-1].tobytes() if had is not None else None)
        digests = new if had is None else np.concatenate([had, new])
        # A copy: the caller may write other tokens into its array.
        self._keep(req_id, _Known(chain.seed, tokens.copy(), digests))
        return digests

    def forget(self, req_id: str) -> None:
        """Drop a request's prefix."""
        with self._lock:
            self._drop(req_id)

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._known)

    def _keep(self, req_id: str, known: _Known) -> None:
        with self._lock:
            self._drop(req_id)
            self._known[req_id] = known
            self._tokens += len(known.tokens)
            while self._known and (
                len(self._known) > self._requests_max or self._tokens > self._tokens_max
            ):
                self._drop(next(iter(self._known)))

    def _drop(self, req_id: str) -> None:
        if (known := self._known.pop(req_id, None)) is not None:
            self._tokens -= len(known.tokens)


def _common(one: TokenIds, other: TokenIds) -> int:
    """Return how many leading tokens are the same."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length
