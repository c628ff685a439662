"""What the demo's pages hold, and whether what came back is that.

The content of a page follows from its key, so a check needs no copy of what was stored: it makes
the bytes anew. A destination is poisoned before each read, so a hit that wrote nothing shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.uint8]

POISON = 0xA5
"""What a destination is filled with. Content is uniform, so 255 of 256 unwritten bytes differ."""


def key_of(page: int, *, run: str) -> str:
    """Return the key of a page, in the form of SGLang's page hashes; `run` makes it unique."""
    return hashlib.sha256(f"{run}/{page}".encode()).hexdigest()


def content_of(key: str, page_bytes: int) -> Pages:
    """Return the bytes of a page, (page_bytes,) uint8, uniform and different for each key."""
    generator = np.random.SFC64(int(key[:32], 16))
    words = -(-page_bytes // 8)
    return generator.random_raw(words).view(np.uint8)[:page_bytes]


def contents_of(keys: Sequence[str], page_bytes: int) -> Pages:
    """Return the bytes of several pages, (keys, page_bytes) uint8."""
    pages = np.empty((len(keys), page_bytes), np.uint8)
    for row, key in enumerate(keys):
        pages[row] = content_of(key, page_bytes)
    return pages


def segments_of(pages: Pages) -> list[list[tuple[int, int]]]:
    """Return where each row lies in memory: one (address, size) a page."""
    first = pages.ctypes.data
    page_bytes = pages.shape[1]
    return [[(first + row * page_bytes, page_bytes)] for row in range(len(pages))]


@attrs.frozen
class Checked:
    """What one batch came to."""

    hits: int
    misses: int
    wrong_pages: int
    wrong_bytes: int
    verified_bytes: int


def check(keys: Sequence[str], answers: Sequence[bool], found: Pages) -> Checked:
    """Compare every byte of every hit with what the key says it must be.

    answers: what the cache said of each key; found: (keys, page_bytes), the destinations.
    Raises ValueError for answers that are not one a key: a short list must not pass for misses.
    """
    if len(answers) != len(keys) or len(found) != len(keys):
        raise ValueError(f"{len(keys)} keys, {len(answers)} answers, {len(found)} destinations")
    wrong = [
        int(np.count_nonzero(found[row] != content_of(key, found.shape[1])))
        for row, key in enumerate(keys)
        if answers[row]
    ]
    return Checked(
        hits=len(wrong),
        misses=len(keys) - len(wrong),
        wrong_pages=sum(count > 0 for count in wrong),
        wrong_bytes=sum(wrong),
        verified_bytes=len(wrong) * found.shape[1],
    )
