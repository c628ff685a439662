"""What a get of the scripted cluster came to, and how bytes reach its destinations."""

from __future__ import annotations

import ctypes

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.runs import PageRuns

Page = npt.NDArray[np.uint8]


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
