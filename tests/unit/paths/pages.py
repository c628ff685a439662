"""Pages with readable names, their bytes, and what a get of them came to."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import attrs
import numpy as np

from peercache.model.keys import PageKeys, page_keys
from peercache.model.runs import PageRuns
from sims.content import Page

PAGE = 512


class Clock:
    """A time that is set."""

    now = 5.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def named(*names: str) -> PageKeys:
    """Return page keys for readable names."""
    return page_keys(names, bytes(16))


def content_of(name: str, size: int = PAGE) -> Page:
    """Return bytes that show whose they are."""
    unit = f"<{name}>".encode()
    content: Page = np.frombuffer((unit * (size // len(unit) + 1))[:size], np.uint8).copy()
    return content


def runs_of(pages: Sequence[Page]) -> PageRuns:
    """Return the runs of pages that are one piece each."""
    return PageRuns.of([[(page.ctypes.data, page.nbytes)] for page in pages])


@attrs.frozen(eq=False)
class Got:
    """What a get came to."""

    hits: list[bool]
    reasons: list[str]
    pages: list[Page]
    pages_by_fabric: dict[str, int]
    mirrored: int
    tier: str = ""

    def content(self, place: int = 0) -> bytes:
        """Return the bytes in one destination."""
        return self.pages[place].tobytes()

    def is_untouched(self, place: int = 0) -> bool:
        """Return whether nothing was written to one destination."""
        return bool((self.pages[place] == 0xEE).all())


def scatter(runs: PageRuns, page: int, content: Page) -> None:
    """Store the bytes of a page into its runs."""
    position = 0
    for run in range(int(runs.starts[page]), int(runs.starts[page + 1])):
        size = int(runs.sizes[run])
        piece = content[position : position + size].tobytes()
        ctypes.memmove(int(runs.addresses[run]), piece, size)
        position += size
