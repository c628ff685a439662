"""The content of the demo's pages, and the check of the bytes that came back.

The content of a page follows from its key, so a check needs no copy of what was stored: it makes
the bytes anew. A destination is poisoned before each read, so a hit that wrote nothing shows.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.uint8]

POISON = 0xA5
"""Fills destinations before a read. Content is uniform, so 255 of 256 unwritten bytes differ."""


def key_of(page: int, *, run: str) -> str:
    """Return the key of a page, in the form of SGLang's page hashes; `run` makes it unique."""
    return hashlib.sha256(f"{run}/{page}".encode()).hexdigest()


def content_of(key: str, page_bytes: int, out: Pages | None = None) -> Pages:
    """Return the bytes of a page, (page_bytes,) uint8: noise, XORed with a word of the key.

    Two pages differ in every word of eight bytes, and no page looks like itself at another offset.
    out: where to put them; (page_bytes,) uint8, of whole words.
    """
    noise = _noise(-(-page_bytes // 8))
    word = np.uint64(int(key[:16], 16))
    if out is not None:
        np.bitwise_xor(noise, word, out=out.view(np.uint64))
        return out
    page: Pages = (noise ^ word).view(np.uint8)[:page_bytes]
    return page


@functools.cache
def _noise(words: int) -> npt.NDArray[np.uint64]:
    return np.random.SFC64(0).random_raw(words)


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
    """The result of one batch."""

    hits: int
    misses: int
    wrong_pages: int
    wrong_bytes: int
    verified_bytes: int


def checked(keys: Sequence[str], answers: Sequence[bool], found: Pages) -> Checked:
    """Compare every byte of every hit with the content of its key.

    answers: whether each key was a hit; found: (keys, page_bytes), the destinations.
    Raises ValueError for answers that are not one a key: a short list must not pass for misses.
    """
    if len(answers) != len(keys) or len(found) != len(keys):
        raise ValueError(f"{len(keys)} keys, {len(answers)} answers, {len(found)} destinations")
    page_bytes = found.shape[1]
    # One buffer for all pages: to populate fresh memory takes longer than to fill it.
    scratch = np.empty(page_bytes, np.uint8) if page_bytes % 8 == 0 else None
    wrong = [
        _wrong_bytes(found[row], content_of(key, page_bytes, scratch))
        for row, key in enumerate(keys)
        if answers[row]
    ]
    return Checked(
        hits=len(wrong),
        misses=len(keys) - len(wrong),
        wrong_pages=sum(count > 0 for count in wrong),
        wrong_bytes=sum(wrong),
        verified_bytes=len(wrong) * page_bytes,
    )


def _wrong_bytes(found: Pages, expected: Pages) -> int:
    # Almost always nothing is wrong, and to compare takes a third of the time of counting.
    if np.array_equal(found, expected):
        return 0
    return int(np.count_nonzero(found != expected))
