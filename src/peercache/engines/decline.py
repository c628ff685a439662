"""Which found pages an adapter reports, if the engine asks for more than the pages of one prefix.

`Client.worth_reading` judges a prefix, page by page. Some engines ask at once for the pages of all
ranks and groups of layers, one after the other, and also for pages after a missing one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from peercache.config.settings import Config
from peercache.model.keys import PageKeys


def worth_reporting(
    client: Any,
    config: Config,
    names: PageKeys,
    found: Sequence[bool],
    rows: Sequence[Hashable],
    ends: Sequence[int] | None = None,
) -> list[bool]:
    """Return `found` without the chunks that take less time to compute than to read.

    A chunk takes `page_compute_ms` to compute, for all its pages.

    rows: what is equal for the pages of one rank and group. A row without its first chunk is that
          of a sliding window, which needs only its last chunks: it does not end the prefix.
    ends: where the chunk of each page ends in the prompt. None: each row has all chunks in order.
    """
    if config.decline == "off":
        return list(found)
    places = np.array(_counted(rows) if ends is None else ends, np.int64)
    held = np.array(found, np.bool_)
    firsts: dict[Hashable, int] = {}
    gaps: dict[Hashable, int] = {}
    for row, place, is_held in zip(rows, places.tolist(), found, strict=True):
        firsts[row] = min(place, firsts.get(row, place))
        if not is_held:
            gaps[row] = min(place, gaps.get(row, place))
    # Pages that no prefix reaches are not read, so they save no computing.
    reaches = [gap for row, gap in gaps.items() if gap > firsts[row]]
    if not reaches and len(gaps) == len(firsts):
        return list(found)
    order = np.argsort(places, kind="stable")
    if reaches:
        order = order[places[order] < min(reaches)]
    page_s = config.page_compute_ms / 1000 * len(np.unique(places[order])) / len(order)
    worth = client.worth_reading(names[order], compute_s=page_s)
    if worth < len(order):
        held &= places < places[order[worth]]
    flags: list[bool] = held.tolist()
    return flags


def _counted(rows: Sequence[Hashable]) -> list[int]:
    """Return the number of each page in its row."""
    counts: Counter[Hashable] = Counter()
    numbers = []
    for row in rows:
        numbers.append(counts[row])
        counts[row] += 1
    return numbers
