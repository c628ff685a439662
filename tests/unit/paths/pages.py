"""Pages with readable names, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from peercache.model.keys import PageKeys, page_keys
from peercache.model.runs import PageRuns
from sims.content import Page

PAGE = 512


def named(*names: str) -> PageKeys:
    """Return page keys for readable names."""
    return page_keys(names, bytes(16))


def content_of(name: str, size: int = PAGE) -> Page:
    """Return bytes that tell whose they are."""
    unit = f"<{name}>".encode()
    content: Page = np.frombuffer((unit * (size // len(unit) + 1))[:size], np.uint8).copy()
    return content


def runs_of(pages: Sequence[Page]) -> PageRuns:
    """Return the runs of pages that are one piece each."""
    return PageRuns.of([[(page.ctypes.data, page.nbytes)] for page in pages])
