"""The content of pages: a function of key and version, so that bytes identify their page."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Page = npt.NDArray[np.uint8]

LENGTH_MIN = 24
"""A version, and enough bytes after it to detect a mixture of two pages."""

POISON = 0xEE
"""The fill value of destinations and used sources."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def content_of(key: bytes, version: int, length: int) -> Page:
    """Return the bytes of a page: its version, then words that only this page has in this order."""
    assert length >= LENGTH_MIN, length
    seed = hashlib.blake2b(key + version.to_bytes(8, "little"), digest_size=8).digest()
    count = -(-length // 8)
    words = np.frombuffer(seed, "<u8") + np.arange(count, dtype=np.uint64) * _GOLDEN
    words[0] = version
    page: Page = words.view(np.uint8)[:length].copy()
    return page


def version_of(key: bytes, page: Page) -> int | None:
    """Return the version with exactly these bytes as content, or None."""
    version = int(page[:8].view("<u8")[0])
    if version >= 2**48 or not np.array_equal(page, content_of(key, version, len(page))):
        return None
    return version
