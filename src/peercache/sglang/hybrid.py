"""SGLang's storage interface for hybrid models (v2): one batch for all pools of a call.

Owns    nothing: it turns transfers into the keys and runs of one batch, and its answer back.
Keeps   one bool a key of each transfer, whatever is wrong with it; a pool that is not served, a
        wrong number of indices, a page of another size are misses, counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

import attrs
import numpy as np

from peercache.model.keys import PageKeys, page_keys, page_keys_of
from peercache.model.prefix import BLOCK_GROUPS, Prefix, SidePages, prefix_of
from peercache.model.runs import PageRuns
from peercache.observability import reasons
from peercache.sglang.attached import KV_POOL, Attachment, pool_name
from peercache.sglang.pages import (
    BATCH_PAGES,
    FlatPages,
    HostPages,
    StagedPages,
    UnusableBatch,
)

Refuse = Callable[[str, int, str], None]
"""Counts pages that are not served: reason, pages, and a sentence for the log."""


@attrs.frozen(eq=False)
class Part:
    """Pages of one transfer in a batch.

    place:  of the transfer in the call. begin: the first of its pages that is meant.
    staged: copies of the pages, where the pool needs some.
    """

    place: int
    begin: int
    keys: PageKeys
    runs: PageRuns
    staged: StagedPages | None = None


def move(
    at: Attachment,
    transfers: Sequence[Any],
    refuse: Refuse,
    batch: Callable[[PageKeys, PageRuns, list[Part]], list[bool]],
    within_s: float,
) -> list[list[bool]]:
    """Move the pages of all transfers; return one bool a key of each.

    within_s: no batch begins so long after the call, so it takes less than twice that.
    batch: moves one batch of parts, and returns one bool a page. The pages that lie where they are
    moved from or to are one batch. Pages that must be copied are batches of BATCH_PAGES, so that
    the copies stay small.
    """
    answer = [[False] * len(each.keys or ()) for each in transfers]
    until = monotonic() + within_s
    for parts in _batches(at, transfers, refuse, answer):
        if monotonic() >= until:
            late = sum(len(part.keys) for part in parts)
            refuse(reasons.DEADLINE, late, "earlier batches of the call took its time")
            continue
        keys = np.concatenate([part.keys for part in parts])
        flags = batch(keys, PageRuns.joined([part.runs for part in parts]), parts)
        for part in parts:
            count = len(part.keys)
            answer[part.place][part.begin : part.begin + count] = flags[:count]
            flags = flags[count:]
    return answer


def _batches(
    at: Attachment, transfers: Sequence[Any], refuse: Refuse, answer: list[list[bool]]
) -> Iterator[list[Part]]:
    in_place: list[Part] = []
    to_copy: list[tuple[int, FlatPages, list[int], PageKeys]] = []
    for place, each in enumerate(transfers):
        keys = list(each.keys or ())
        if not keys:
            continue
        try:
            pages, digest = _pool_of(at, each.name)
            if pages is None:
                # Its KV pages have no bytes: nothing is to be moved.
                answer[place] = [True] * len(keys)
            elif isinstance(pages, HostPages):
                runs = pages.runs(each.host_indices, len(keys))
                in_place.append(Part(place, 0, page_keys(keys, digest), runs))
            else:
                slots = pages.slots(each.host_indices, len(keys))
                to_copy.append((place, pages, slots, page_keys(keys, digest)))
        except UnusableBatch as unusable:
            refuse(unusable.reason, len(keys), f"{pool_name(each.name)}: {unusable}")
    if in_place:
        yield in_place
    for place, pages, slots, names in to_copy:
        for begin in range(0, len(slots), BATCH_PAGES):
            some = slice(begin, begin + BATCH_PAGES)
            staged = pages.staged(slots[some])
            yield [Part(place, begin, names[some], staged.runs(), staged)]


def exists(at: Attachment, keys: Sequence[str], transfers: Sequence[Any], refuse: Refuse) -> Prefix:
    """Return how far all pools have a prefix, asked for in one batch.

    What is found is touched, page for page in all pools: the tail of a prefix is evicted first.
    """
    digests: list[bytes] = []
    rows: list[int | PageKeys | None] = []
    if at.pages is not None:
        digests.append(at.digest)
    for each in transfers:
        try:
            _, digest = _pool_of(at, each.name)
        except UnusableBatch as unusable:
            refuse(unusable.reason, len(keys), f"{pool_name(each.name)}: {unusable}")
            rows.append(None)
            continue
        if _policy(each) == BLOCK_GROUPS:
            rows.append(page_keys(list(each.keys or ()), digest))
        else:
            rows.append(len(digests))
            digests.append(digest)
    along = page_keys_of(keys, digests).T.reshape(-1)
    grouped = [row for row in rows if isinstance(row, np.ndarray)]
    asked = np.concatenate([along, *grouped])
    answer = at.client.touch(asked) if len(asked) else []
    if not isinstance(answer, list) or len(answer) != len(asked):
        raise ValueError(f"exists of {len(asked)} keys answered {answer!r:.80}")
    found = np.array(answer, np.bool_)
    table = found[: len(along)].reshape(len(keys), len(digests))
    rest = found[len(along) :]
    sides: list[SidePages] = []
    for each, row in zip(transfers, rows, strict=True):
        if isinstance(row, np.ndarray):
            present, rest = rest[: len(row)], rest[len(row) :]
        elif row is None:
            present = np.zeros(len(keys), np.bool_)
        else:
            present = table[:, row]
        sides.append(
            SidePages(
                _policy(each),
                present,
                max(1, len(each.keys or ())),
                int(getattr(each, "block_pages", 0) or 0),
                int(getattr(each, "group_pages", 0) or 0),
            )
        )
    return prefix_of(None if at.pages is None else table[:, 0], len(keys), sides)


def _pool_of(at: Attachment, name: Any) -> tuple[HostPages | FlatPages | None, bytes]:
    """Return a pool's pages and its digest; no pages for KV that holds no bytes."""
    text = pool_name(name)
    if text == KV_POOL:
        return at.pages, at.digest
    side = at.sides.get(text)
    if side is None:
        raise UnusableBatch(reasons.UNSUPPORTED, "this pool is not served")
    return side.pages, side.digest


def _policy(transfer: Any) -> str:
    policy = transfer.hit_policy
    return str(getattr(policy, "value", policy))
