"""SGLang's storage interface for hybrid models (v2): one batch for all pools of a call.

Owns    nothing: it converts transfers into the keys and runs of one batch, and the result back.
Keeps   each transfer gets one bool per key, even if it is invalid; a pool that is not served, a
        wrong number of indices, or a page of another size are counted misses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

import attrs
import numpy as np

from peercache.model.keys import PageKeys
from peercache.model.prefix import BLOCK_GROUPS, Mask, Prefix, SidePages, prefix_of
from peercache.model.runs import I64, PageRuns
from peercache.observability import reasons
from peercache.sglang.namespace import PageSpaces
from peercache.sglang.pages import (
    BATCH_PAGES,
    KV_POOL,
    Attachment,
    FlatPages,
    HostPages,
    StagedPages,
    UnusableBatch,
    object_keys,
    pool_name,
)

Refuse = Callable[[str, int, str], None]
"""Counts pages that are not served: reason, pages, and a sentence for the log."""


@attrs.frozen(eq=False)
class Part:
    """Pages of one transfer in a batch.

    place:  index of the transfer in the call. begin: the first of its pages.
    pages: their number. keys, runs: those of their objects, page by page.
    staged: copies of the pages, if the pool needs them.
    """

    place: int
    begin: int
    pages: int
    keys: PageKeys
    runs: PageRuns
    staged: StagedPages | None = None


def move(
    at: Attachment,
    transfers: Sequence[Any],
    refuse: Refuse,
    batch: Callable[[PageKeys, PageRuns, I64, list[Part]], list[bool]],
    within_s: float,
) -> list[list[bool]]:
    """Move the pages of all transfers; return one bool per key of each.

    within_s: no batch begins later than this after the call, so the call takes less than twice
              that.
    batch: moves one batch of parts, and returns one bool per page of each part; its third argument
           is the number of objects of each page. Pages that are moved in place are one batch. Pages
           that must be copied are moved in batches of BATCH_PAGES, so that the copies stay small.
    """
    answer = [[False] * len(each.keys or ()) for each in transfers]
    until = monotonic() + within_s
    for parts in _batches(at, transfers, refuse, answer):
        if monotonic() >= until:
            late = sum(part.pages for part in parts)
            refuse(reasons.DEADLINE, late, "earlier batches of the call took its time")
            continue
        keys = np.concatenate([part.keys for part in parts])
        objects = np.concatenate([np.full(p.pages, len(p.keys) // p.pages) for p in parts])
        flags = batch(keys, PageRuns.joined([part.runs for part in parts]), objects, parts)
        for part in parts:
            answer[part.place][part.begin : part.begin + part.pages] = flags[: part.pages]
            flags = flags[part.pages :]
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
            pages, spaces = _pool_of(at, each.name)
            named = object_keys(keys, spaces.digests)
            if pages is None:
                # Its KV pages have no bytes: there is nothing to move.
                answer[place] = [True] * len(keys)
            elif isinstance(pages, HostPages):
                runs = pages.runs(each.host_indices, len(keys))
                in_place.append(Part(place, 0, len(keys), named, runs))
            else:
                slots = pages.slots(each.host_indices, len(keys))
                to_copy.append((place, pages, slots, named))
        except UnusableBatch as unusable:
            refuse(unusable.reason, len(keys), f"{pool_name(each.name)}: {unusable}")
    if in_place:
        yield in_place
    for place, pages, slots, names in to_copy:
        for begin in range(0, len(slots), BATCH_PAGES):
            some = slice(begin, begin + BATCH_PAGES)
            staged = pages.staged(slots[some])
            yield [Part(place, begin, len(staged.slots), names[some], staged.runs(), staged)]


def exists(
    at: Attachment,
    keys: Sequence[str],
    transfers: Sequence[Any],
    refuse: Refuse,
    compute_s: float | None = None,
) -> Prefix:
    """Return how far all pools have a prefix, with one batch.

    compute_s: seconds to compute a page, if pages that take longer to read are to be missing.

    Found pages are touched, page by page in all pools: the tail of a prefix is evicted first.
    """
    digests: list[bytes] = []
    rows: list[slice | PageKeys | None] = []
    widths: list[int] = []
    if at.pages is not None:
        digests.extend(at.spaces.digests)
    for each in transfers:
        try:
            _, spaces = _pool_of(at, each.name)
        except UnusableBatch as unusable:
            refuse(unusable.reason, len(keys), f"{pool_name(each.name)}: {unusable}")
            rows.append(None)
            widths.append(0)
            continue
        widths.append(len(spaces.digests))
        if _policy(each) == BLOCK_GROUPS:
            rows.append(object_keys(list(each.keys or ()), spaces.digests))
        else:
            rows.append(slice(len(digests), len(digests) + len(spaces.digests)))
            digests.extend(spaces.digests)
    along = object_keys(keys, digests)
    grouped = [row for row in rows if isinstance(row, np.ndarray)]
    asked = np.concatenate([along, *grouped]) if grouped else along
    answer = at.client.touch(asked) if len(asked) else []
    if not isinstance(answer, list) or len(answer) != len(asked):
        raise ValueError(f"exists of {len(asked)} keys answered {answer!r:.80}")
    found = np.array(answer, np.bool_)
    table = found[: len(along)].reshape(len(keys), len(digests))
    if compute_s is not None and len(along):
        worth = at.client.worth_reading(along, compute_s=compute_s / len(digests))
        table[worth // len(digests) :] = False
    rest = found[len(along) :]
    sides: list[SidePages] = []
    for each, row, width in zip(transfers, rows, widths, strict=True):
        if isinstance(row, np.ndarray):
            present, rest = rest[: len(row)], rest[len(row) :]
            present = _whole(present.reshape(len(each.keys or ()), width))
        elif row is None:
            present = np.zeros(len(keys), np.bool_)
        else:
            present = _whole(table[:, row])
        sides.append(
            SidePages(
                _policy(each),
                present,
                max(1, len(each.keys or ())),
                int(getattr(each, "block_pages", 0) or 0),
                int(getattr(each, "group_pages", 0) or 0),
            )
        )
    kv = None if at.pages is None else _whole(table[:, : len(at.spaces.digests)])
    return prefix_of(kv, len(keys), sides)


def _pool_of(at: Attachment, name: Any) -> tuple[HostPages | FlatPages | None, PageSpaces]:
    """Return a pool's pages and their namespaces; no pages for KV without bytes."""
    text = pool_name(name)
    if text == KV_POOL:
        return at.pages, at.spaces
    side = at.sides.get(text)
    if side is None:
        raise UnusableBatch(reasons.UNSUPPORTED, "this pool is not served")
    return side.pages, side.spaces


def _whole(present: Mask) -> Mask:
    """Return which pages exist, (pages,), from which objects exist, (pages, objects)."""
    whole: Mask = present[:, 0] if present.shape[1] == 1 else np.logical_and.reduce(present, axis=1)
    return whole


def _policy(transfer: Any) -> str:
    policy = transfer.hit_policy
    return str(getattr(policy, "value", policy))
