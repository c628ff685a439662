"""The pages of the demo: their content, and reads that check every byte of every hit.

The content of a page follows from its key, so a check needs no copy of what was stored. A
destination is poisoned before each read, so a hit that wrote nothing shows.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

PAGE_BYTES = 2**20
BATCH_PAGES = 32
AGAIN_EVERY_S = 0.05

POISON = 0xA5
"""Fills destinations before a read. Content is uniform, so 255 of 256 unwritten bytes differ."""


def key_of(page: int, *, run: str) -> str:
    """Return the key of a page, in the form of SGLang's page hashes; `run` makes it unique."""
    return hashlib.sha256(f"{run}/{page}".encode()).hexdigest()


def content_of(key: str, page_bytes: int = PAGE_BYTES, out: Words | None = None) -> Pages:
    """Return the bytes of a page, of whole words: noise, XORed with a word of the key.

    Two pages differ in every word of eight bytes, and no page looks like itself at another offset.
    out: the words to put them into.
    """
    words = np.bitwise_xor(_noise(page_bytes // 8), np.uint64(int(key[:16], 16)), out=out)
    content: Pages = words.view(np.uint8)
    return content


@functools.cache
def _noise(words: int) -> Words:
    return np.random.SFC64(0).random_raw(words)


@attrs.define
class Reading:
    """A row of the table: the pages that one step read over one fabric.

    hits_expected, misses_expected: the expected counts; None if any mixture is right.
    again: pages that were missed at first and read again.
    """

    step: str
    fabric: str
    hits_expected: int | None
    misses_expected: int | None
    hits: int = 0
    misses: int = 0
    wrong_pages: int = 0
    wrong_bytes: int = 0
    verified_bytes: int = 0
    read_s: float = 0.0
    longest_call_s: float = 0.0
    again: int = 0

    def check(self, keys: Sequence[str], answers: Sequence[bool], found: Pages) -> None:
        """Compare every byte of every hit with the content of its key, and count.

        answers: whether each key was a hit; found: (keys, page bytes), the destinations.
        Raises ValueError unless there is one answer for each key: a short list must not count as
        misses.
        """
        if len(answers) != len(keys) or len(found) != len(keys):
            raise ValueError(f"{len(keys)} keys, {len(answers)} answers, {len(found)} destinations")
        # One buffer for all pages: populating fresh memory takes ten times as long as filling it.
        scratch = np.empty(found.shape[1] // 8, np.uint64)
        for key, is_hit, page in zip(keys, answers, found, strict=True):
            if is_hit:
                right = content_of(key, page.size, scratch)
                wrong_bytes = int(np.count_nonzero(page != right))
                self.hits += 1
                self.wrong_pages += wrong_bytes > 0
                self.wrong_bytes += wrong_bytes
                self.verified_bytes += page.size

    @property
    def gb_s(self) -> float:
        """Verified bytes divided by the time spent in calls, in 10^9 bytes a second."""
        return self.verified_bytes / self.read_s / 1e9 if self.read_s else 0.0

    @property
    def is_whole(self) -> bool:
        """Whether every page had to be a hit, so that its speed is meaningful."""
        return self.misses_expected == 0 and self.hits_expected is not None

    def problems(self, *, op_timeout_s: float) -> list[str]:
        """Return its problems, one sentence each."""
        hits, misses = self.hits_expected, self.misses_expected
        looked_for = {
            f"{self.wrong_bytes} wrong bytes in {self.wrong_pages} hits": self.wrong_bytes > 0,
            f"{self.hits} hits, {hits} were expected": hits not in (None, self.hits),
            f"{self.misses} misses, {misses} were expected": misses not in (None, self.misses),
            "nothing was read at all": not self.hits + self.misses,
            f"a call took {self.longest_call_s:.2f} s": self.longest_call_s > op_timeout_s,
        }
        return [
            f"{self.step}, {self.fabric}: {what}" for what, is_so in looked_for.items() if is_so
        ]


def read(
    get: Callable[[Sequence[str], Sequence[Pages]], list[bool]],
    keys: Sequence[str],
    reading: Reading,
    *,
    check: Callable[[str], None],
    again_s: float = 0.0,
) -> None:
    """Read pages in batches, into poisoned destinations, and check every byte of every hit.

    get:     `Client.batch_get`.
    check: an exception of it ends the reading.
    again_s: how long missed pages are read again before they count as misses.
    """
    memory = np.empty((BATCH_PAGES, PAGE_BYTES), np.uint8)
    for first in range(0, len(keys), BATCH_PAGES):
        left, until = keys[first : first + BATCH_PAGES], time.monotonic() + again_s
        while True:
            check("reading")
            found = memory[: len(left)]
            found.fill(POISON)
            started = time.monotonic()
            answers = get(left, list(found))
            ended = time.monotonic()
            reading.read_s += ended - started
            reading.longest_call_s = max(reading.longest_call_s, ended - started)
            reading.check(left, answers, found)
            left = [key for key, hit in zip(left, answers, strict=True) if not hit]
            if not left or ended >= until:
                break
            reading.again += len(left)
            time.sleep(AGAIN_EVERY_S)
        reading.misses += len(left)
