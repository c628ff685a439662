"""What of a read goes over which rail: the plans, and the memory that they borrow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import attrs

from peercache.model.reads import PeerRead
from peercache.observability.reasons import DEADLINE, NO_MEMORY
from peercache.rdma.blocks import Block, Blocks
from peercache.rdma.channel import Channel
from peercache.rdma.key_table import KeyTable
from peercache.rdma.leasing import Reserved
from peercache.rdma.plan import (
    PORTION_BYTES,
    Missing,
    Plan,
    Published,
    bounced,
    opened,
    plan,
    stripes,
)
from peercache.rdma.progress import Pages, Progress
from peercache.rdma.reading import Transfer


class Unprepared(Exception):
    """A read cannot begin; `failure` says why."""

    def __init__(self, failure: str) -> None:
        """Give up with this failure."""
        super().__init__(failure)
        self.failure = failure


@attrs.frozen(eq=False)
class Leased:
    """A connected channel that a read uses."""

    reserved: Reserved
    channel: Channel


@final
@attrs.define(eq=False)
class Share:
    """The part of a read that goes over one rail. borrowed: what `give_back` returns."""

    leased: Leased
    pages: Pages
    transfer: Transfer
    borrowed: list[tuple[Blocks, Block]]

    def give_back(self) -> None:
        """Return what was borrowed: the channel has ended its work, or is destroyed."""
        while self.borrowed:
            blocks, block = self.borrowed.pop()
            blocks.give_back(block)


def shares_of(
    progress: Progress,
    leased: Sequence[Leased],
    *,
    refresh: Callable[[Leased], None],
    between: Callable[[], None] | None,
    clock: Callable[[], float],
) -> list[Share]:
    """Deal what is left of a read out to connected channels; raise Unprepared.

    refresh: asks a peer again what it has registered, if it was not asked just now.
    """
    published = _published(leased[0])
    left = progress.keep_inside(progress.left(), published)
    lengths = progress.read.lengths[left]
    shares: list[Share] = []
    try:
        for each, dealt in zip(leased, stripes(lengths, len(leased), PORTION_BYTES), strict=True):
            share = _share(progress, each, left[dealt], refresh, between, clock)
            if share is not None:
                shares.append(share)
    except BaseException:
        for share in shares:
            share.give_back()
        raise
    return shares


def _share(
    progress: Progress,
    leased: Leased,
    pages: Pages,
    refresh: Callable[[Leased], None],
    between: Callable[[], None] | None,
    clock: Callable[[], float],
) -> Share | None:
    if not len(pages):
        return None
    side = leased.reserved.side
    part = progress.part(pages)
    table = side.rail.regions.table
    made = _plan(leased, part, table)
    if made is Missing.THEIRS:
        refresh(leased)
        good = opened(_published(leased), part.offsets, part.lengths)
        progress.unopened[pages[~good]] = True
        pages = pages[good]
        if not len(pages):
            return None
        part = progress.part(pages)
        made = _plan(leased, part, table)
    borrowed: list[tuple[Blocks, Block]] = []
    try:
        words = _borrow(side.words, progress, borrowed, clock)
        bounce = None
        if made is Missing.OURS:
            bounce = _borrow(side.bounce, progress, borrowed, clock)
            own = KeyTable.of([(0, int(part.lengths.sum()), bounce.key)])
            made = _plan(leased, attrs.evolve(part, runs=bounced(part.runs)), own)
        assert isinstance(made, Plan), made
        transfer = Transfer(
            leased.channel,
            made,
            words_block=words,
            bounce=bounce,
            runs=part.runs,
            between=between,
            deadline=progress.deadline,
            clock=clock,
        )
    except BaseException:
        for blocks, block in borrowed:
            blocks.give_back(block)
        raise
    return Share(leased, pages, transfer, borrowed)


def _plan(leased: Leased, part: PeerRead, table: KeyTable) -> Plan | Missing:
    limits = leased.channel.limits
    return plan(_published(leased), part.offsets, part.runs, table, limits)


def _published(leased: Leased) -> Published:
    published = leased.channel.published
    assert published is not None, "a channel that was never connected"
    return published


def _borrow(
    blocks: Blocks,
    progress: Progress,
    borrowed: list[tuple[Blocks, Block]],
    clock: Callable[[], float],
) -> Block:
    block = blocks.lend(progress.deadline)
    if block is None:
        raise Unprepared(DEADLINE if clock() >= progress.deadline else NO_MEMORY)
    borrowed.append((blocks, block))
    return block
