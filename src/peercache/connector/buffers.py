"""The engine's KV buffers: where each page of each layer lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from peercache.errors import InvalidRequest
from peercache.model.runs import I64, U64, PageRuns

BUFFERS_MAX = 4096
"""Of one engine: K and V of 2,048 layers."""


class KVBuffers:
    """Buffers of equally many pages, one a layer and part: page i lies at i * item length in each.

    pages: that every buffer has. page_bytes: of one page over all buffers.
    """

    def __init__(self, kv_args: Any) -> None:
        """Take `kv_data_ptrs`, `kv_data_lens` and `kv_item_lens`: bytes, one number a buffer.

        InvalidRequest: what makes no buffers.
        """
        pointers = _numbers(kv_args, "kv_data_ptrs")
        lengths = _numbers(kv_args, "kv_data_lens")
        items = _numbers(kv_args, "kv_item_lens")
        if not len(pointers) == len(lengths) == len(items):
            raise InvalidRequest(
                f"{len(pointers)} kv_data_ptrs, {len(lengths)} kv_data_lens and {len(items)} "
                "kv_item_lens: each buffer has one of each"
            )
        for place, (length, item) in enumerate(zip(lengths, items, strict=True)):
            if item > length or length % item:
                raise InvalidRequest(
                    f"buffer {place} has {length} bytes, which are no pages of {item} bytes"
                )
        self.regions = list(zip(pointers, lengths, strict=True))
        self.pages = min(length // item for length, item in zip(lengths, items, strict=True))
        self.page_bytes = sum(items)
        self._pointers: U64 = np.array(pointers, np.uint64)
        self._items: U64 = np.array(items, np.uint64)

    def check(self, pages: I64) -> None:
        """Raise InvalidRequest for page indices, (n,) int64, that no buffer has."""
        if len(pages) and not 0 <= (low := int(pages.min())) <= (high := int(pages.max())):
            raise InvalidRequest(f"page index {low} is no page of {self.pages}")
        if len(pages) and high >= self.pages:
            raise InvalidRequest(f"page index {high} is no page of {self.pages}")

    def runs(self, pages: I64) -> PageRuns:
        """Return where these pages lie: each has a run in every buffer, in their order."""
        addresses = pages.astype(np.uint64)[:, None] * self._items
        addresses += self._pointers
        sizes = np.broadcast_to(self._items, addresses.shape)
        return PageRuns.regular(addresses, sizes, len(pages))


def _numbers(kv_args: Any, name: str) -> list[int]:
    values = getattr(kv_args, name, None)
    if not isinstance(values, (Sequence, np.ndarray)) or isinstance(values, (str, bytes)):
        raise InvalidRequest(f"{name} is a list of numbers, not {values!r:.60}")
    if not 1 <= len(values) <= BUFFERS_MAX:
        raise InvalidRequest(f"{name} has 1 to {BUFFERS_MAX} numbers, not {len(values)}")
    for place, value in enumerate(values):
        is_number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not is_number or not 0 < value < 2**63:
            raise InvalidRequest(f"{name}[{place}] is {value!r:.40}: no address, no length")
    return [int(value) for value in values]
