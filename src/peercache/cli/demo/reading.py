"""The reads of the demo: in batches, every byte of every hit checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from peercache.cli.demo.content import POISON, checked, segments_of
from peercache.cli.demo.report import Reading
from peercache.cli.demo.screen import Advance

PAGE_BYTES = 2**20
BATCH_PAGES = 32
AGAIN_EVERY_S = 0.05


class Reads(Protocol):
    """The call of a client that the demo reads with."""

    def batch_get_into(
        self, keys: Sequence[str], segments: Sequence[Sequence[tuple[int, int]]]
    ) -> list[bool]:
        """Fill the segments; see `Client`."""


def read(
    client: Reads,
    keys: Sequence[str],
    reading: Reading,
    *,
    check: Callable[[str], None],
    advance: Advance,
    again_s: float = 0.0,
) -> None:
    """Read pages in batches, into poisoned destinations, and check every byte of every hit.

    again_s: how long missed pages are read again before they count as misses.
    """
    found = np.empty((BATCH_PAGES, PAGE_BYTES), np.uint8)
    for batch in batches(keys):
        left, until = batch, time.monotonic() + again_s
        while left:
            check("reading")
            destinations = found[: len(left)]
            destinations.fill(POISON)
            started = time.monotonic()
            answers = client.batch_get_into(left, segments_of(destinations))
            ended = time.monotonic()
            is_last = all(answers) or ended >= until
            result = checked(left, answers, destinations)
            reading.add(result, ended - started, is_last=is_last)
            if is_last:
                break
            left = [key for key, hit in zip(left, answers, strict=True) if not hit]
            time.sleep(AGAIN_EVERY_S)
        advance(len(batch))


def batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    """Cut keys into the batches of one call each."""
    for first in range(0, len(keys), BATCH_PAGES):
        yield keys[first : first + BATCH_PAGES]
