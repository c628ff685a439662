"""One read over one or several channels, driven by the caller's thread.

A read is split into shares, one for each channel. The transfer of a share posts its plan, two
portions at a time. It uses the seals of a portion only after a successful completion that follows
all READs of that portion: completions of a queue pair arrive in order, so an earlier failure would
arrive first.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Sequence
from math import ceil, inf
from typing import final

import attrs
import numpy as np

from peercache.memory.copying import copy_pages
from peercache.model.reads import PeerRead
from peercache.model.runs import PageRuns
from peercache.model.seal import ODD, SEAL_BYTES, Seals, unread_seals
from peercache.observability.reasons import (
    DEADLINE,
    INTERNAL,
    LINK_DOWN,
    NO_MEMORY,
    PEER_UNREACHABLE,
    REFUSED,
)
from peercache.rdma.channels import PORTIONS_AT_ONCE, Channel, Reserved
from peercache.rdma.key_table import MemoryKeys
from peercache.rdma.memory import Block, Blocks
from peercache.rdma.plan import (
    PORTION_BYTES,
    Missing,
    PageIndices,
    Portion,
    Published,
    ReadPlan,
    ReadProgress,
    bounced,
    clipped,
    opened,
    plan,
    rows_of,
    stripes,
)
from peercache.rdma.queue_pair import REMOTE_ACCESS_ERROR, SUCCESS, Completion

SLICE_S = 0.01
"""Interval between two checks of the links, and longest wait: an event may be lost."""

STOPPED_S = 0.1
"""The longest time between two checks that counts as time without progress."""

RAIL_STALL_S = 0.04
"""A rail without progress for this time, and for several times the time of a portion, is skipped if
another rail makes progress: within 50 ms, although the device itself retries longer."""

RAIL_STALL_PORTIONS = 4

_CHANGED = np.uint64(1)
"""Makes a word odd, as the node does before it changes a slot."""


@final
class Transfer:
    """The part of a read that goes over one channel.

    done:     the number of complete portions.
    is_stuck: the device has forgotten its requests; another channel may do.
    failure:  "" or why the transfer ended early; then the channel must be closed.
    seen:     (n,) SEAL, the last look at complete pages, else a word that is ODD.
    complete: (n,) bool, the pages whose portion is complete.
    """

    def __init__(
        self,
        channel: Channel,
        plan: ReadPlan,
        *,
        seals_block: Block,
        bounce: Block | None,
        runs: PageRuns,
        between: Callable[[], None] | None,
        deadline: float,
        clock: Callable[[], float],
    ) -> None:
        """Read according to `plan`.

        seals_block: destination of the seals, with room for PORTIONS_AT_ONCE portions.
        bounce:      first destination of the bytes, with the same room; None: `runs` directly.
        between:     called after the bytes and before the last look of a portion; only for tests.
        """
        self.channel = channel
        pages = len(runs)
        self.seen: Seals = unread_seals(pages)
        self.complete = np.zeros(pages, np.bool_)
        self.failure = ""
        self.done = 0
        self.fastest_s = inf
        self.progress_at = clock()
        self._plan = plan
        self._seals_block = seals_block
        self._bounce = bounce
        self._runs = runs
        self._seen_rows = rows_of(self.seen)
        self._first_look = rows_of(unread_seals(pages))
        self._between = between
        self._deadline = deadline
        self._clock = clock
        self.is_stuck = False
        self._stood_s = 0.0
        self._next = 0
        self._under_way: deque[int] = deque()
        self._awaits_last_look = False
        self._seal_rows = rows_of(seals_block.memory)

    @property
    def is_over(self) -> bool:
        """Return whether the transfer is complete or failed."""
        return bool(self.failure) or self.done == len(self._plan.portions)

    def advance(self) -> bool:
        """Take completions and post portions; return whether there were any."""
        moved = False
        if self._under_way:
            for completion in self.channel.take():
                moved = True
                self._completed(completion)
        depth = PORTIONS_AT_ONCE if self._between is None else 1
        while not self.is_over and len(self._under_way) < depth and self._has_more():
            self._post(self._next)
            self._under_way.append(self._next)
            self._next += 1
            moved = True
        return moved

    def stand(self, seconds: float) -> None:
        """Note a time without progress; end the transfer if the device has forgotten it.

        By then it should have sent a completion or an error. Soft-RoCE sends neither about once in
        five thousand reads on a busy machine; the cause is not known.
        """
        self._stood_s += seconds
        if self._under_way and self._stood_s >= self.channel.rail.gives_up_s:
            self.failure, self.is_stuck = PEER_UNREACHABLE, True

    def _has_more(self) -> bool:
        return self._next < len(self._plan.portions)

    def _post(self, number: int) -> None:
        portion = self._plan.portions[number]
        half = self._seals_of(number)
        # Odd before the post: a word that never arrives must not equal a generation.
        self._seal_rows[half : half + portion.buffer_bytes // SEAL_BYTES, 0] = ODD
        shift = self._shift(number)
        at, key = self._seals_block.address + half * SEAL_BYTES, self._seals_block.key
        with_last = self._between is None
        self.channel.post(
            portion, number, shift=shift, seals_at=at, key=key, with_last_look=with_last
        )

    def _post_last_look(self, number: int) -> None:
        at = self._seals_block.address + self._seals_of(number) * SEAL_BYTES
        portion = self._plan.portions[number]
        self.channel.post_last_look(portion, number, seals_at=at, key=self._seals_block.key)

    def _completed(self, completion: Completion) -> None:
        if self.failure:
            return
        if completion.status != SUCCESS:
            is_refusal = completion.status == REMOTE_ACCESS_ERROR
            self.failure = REFUSED if is_refusal else PEER_UNREACHABLE
            return
        number = self._under_way[0]
        assert completion.number == number, (completion.number, number)
        portion = self._plan.portions[number]
        if self._between is not None and not self._awaits_last_look and portion.last.remote:
            self._between()
            self._awaits_last_look = True
            self._post_last_look(number)
            return
        self._awaits_last_look = False
        self._under_way.popleft()
        if not self._in_place(portion, number):
            return
        self._take_seals(portion, self._seals_of(number))
        self.done += 1
        self._stood_s = 0.0
        now = self._clock()
        self.fastest_s = min(self.fastest_s, now - self.progress_at)
        self.progress_at = now

    def _in_place(self, portion: Portion, number: int) -> bool:
        """Copy a bounced portion to its destination; return whether all of it is there."""
        if self._bounce is None:
            return True
        runs = clipped(self._runs, portion.begin, portion.end)
        source = np.array([portion.begin + self._shift(number)], np.uint64)
        until = self._deadline
        if copy_pages(runs, source, to_slots=False, deadline=until, clock=self._clock):
            return True
        # In time but not copied: a destination of the caller is not mapped.
        self.failure = DEADLINE if self._clock() >= until else INTERNAL
        return False

    def _take_seals(self, portion: Portion, half: int) -> None:
        """Take both looks of a portion, from `half` in the block of seals on."""
        first, last = portion.first, portion.last
        self._first_look[first.pages] = self._seal_rows[half + first.slots]
        half += first.buffer_bytes // SEAL_BYTES
        pages = last.pages
        late = self._seal_rows[half + last.slots]
        # Whole seals: within one READ the device guarantees no order of key and word.
        same = (self._first_look[pages] == late).all(axis=1)
        # A last word alone proves nothing: replace it by one that no record has.
        late[~same, 0] |= _CHANGED
        self._seen_rows[pages] = late
        self.complete[pages] = True

    def _seals_of(self, number: int) -> int:
        """Return the begin of a portion's seals in the block, in seals."""
        per_portion = len(self._seal_rows) // PORTIONS_AT_ONCE
        return number % PORTIONS_AT_ONCE * per_portion

    def _shift(self, number: int) -> int:
        """Return the offset of a portion's addresses: a bounced plan counts from address 0."""
        if self._bounce is None:
            return 0
        half = len(self._bounce.memory) // PORTIONS_AT_ONCE * (number % PORTIONS_AT_ONCE)
        return self._bounce.address + half - self._plan.portions[number].begin


def drive(
    transfers: Sequence[Transfer],
    deadline: float,
    clock: Callable[[], float],
    *,
    has_spare: bool,
    leave_out: Callable[[Transfer], None],
    poller: select.poll,
) -> None:
    """Advance the transfers until each is over; at the deadline the failure is DEADLINE.

    has_spare: another rail can take over from a stalled one.
    leave_out: called as soon as a rail is found dead, because the others may continue for long.
    """
    by_descriptor = {transfer.channel.descriptor: transfer for transfer in transfers}
    for descriptor in by_descriptor:
        poller.register(descriptor, select.POLLIN)
    next_look = transfers[0].progress_at + SLICE_S if transfers else inf
    while pending := [transfer for transfer in transfers if not transfer.is_over]:
        moved = _advance(pending)
        # In a guest a clock read may cost as much as ten pages, and progress has just made one.
        now = max(each.progress_at for each in transfers) if moved else clock()
        timeout_s = _timeout_s(transfers)
        dead = [
            each
            for each in pending
            if now >= each.progress_at + timeout_s and (has_spare or _others_go_on(each, transfers))
        ]
        if now >= next_look:
            dead += [each for each in pending if not each.channel.rail.is_up()]
            # A paused process has not checked, and the device may have been paused, too.
            since_look_s = min(now - next_look + SLICE_S, STOPPED_S)
            for transfer in pending:
                transfer.stand(since_look_s)
            next_look = now + SLICE_S
        for transfer in dead:
            if not transfer.is_over:
                transfer.failure = LINK_DOWN
                leave_out(transfer)
        if now >= deadline:
            # The deadline holds although completions keep arriving: many small pages take long.
            for transfer in pending:
                if not transfer.is_over:
                    transfer.failure = DEADLINE
            return
        if moved or dead:
            continue
        for transfer in pending:
            transfer.channel.arm()
        # A completion before the queue was armed creates no event.
        if _advance(pending):
            continue
        judged = [at for each in pending if (at := each.progress_at + timeout_s) > now]
        # Rounded up: a wait of 0 ms would spin.
        wait_ms = ceil((min(deadline, next_look, *judged) - now) * 1000)
        for descriptor, _ in poller.poll(max(1, wait_ms)):
            by_descriptor[descriptor].channel.acknowledge()


def _advance(transfers: Sequence[Transfer]) -> bool:
    # A list: `any` of a generator would stop at the first that moved.
    moved = [transfer.advance() for transfer in transfers]
    return any(moved)


def _timeout_s(transfers: Sequence[Transfer]) -> float:
    """Return how long a rail may make no progress."""
    fastest_s = min(transfer.fastest_s for transfer in transfers)
    return RAIL_STALL_S if fastest_s == inf else max(RAIL_STALL_S, RAIL_STALL_PORTIONS * fastest_s)


def _others_go_on(transfer: Transfer, transfers: Sequence[Transfer]) -> bool:
    """Return whether another transfer made progress since this one did, or is complete.

    If all rails stall, the cause may be the peer or this process, not a rail.
    """
    return any(
        other.done
        and not other.failure
        and (other.is_over or other.progress_at > transfer.progress_at)
        for other in transfers
        if other is not transfer
    )


class Unprepared(Exception):
    """A read cannot start; `failure` says why."""

    def __init__(self, failure: str) -> None:
        """Set the failure."""
        super().__init__(failure)
        self.failure = failure


@attrs.frozen(eq=False)
class Leased:
    """A lease with its connected channel."""

    reserved: Reserved
    channel: Channel


@final
@attrs.define(eq=False)
class Share:
    """The part of a read that goes over one rail. borrowed: the blocks that it uses."""

    leased: Leased
    pages: PageIndices
    transfer: Transfer
    borrowed: list[tuple[Blocks, Block]]

    def give_back(self) -> None:
        """Return the borrowed blocks, after the channel has ended its work or is destroyed."""
        while self.borrowed:
            blocks, block = self.borrowed.pop()
            blocks.give_back(block)


def shares_of(
    progress: ReadProgress,
    leased: Sequence[Leased],
    *,
    refresh: Callable[[Leased], None],
    between: Callable[[], None] | None,
    clock: Callable[[], float],
) -> list[Share]:
    """Split the rest of a read into shares, one for each connected channel; raise Unprepared.

    refresh: requests a peer's registered memory again, unless that was done just now.
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
    progress: ReadProgress,
    leased: Leased,
    pages: PageIndices,
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
        seals = _borrow(side.seals, progress, borrowed, clock)
        bounce = None
        if made is Missing.OURS:
            bounce = _borrow(side.bounce, progress, borrowed, clock)
            own = MemoryKeys.of([(0, int(part.lengths.sum()), bounce.key)])
            made = _plan(leased, attrs.evolve(part, runs=bounced(part.runs)), own)
        assert isinstance(made, ReadPlan), made
        transfer = Transfer(
            leased.channel,
            made,
            seals_block=seals,
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


def _plan(leased: Leased, part: PeerRead, table: MemoryKeys) -> ReadPlan | Missing:
    limits = leased.channel.limits
    return plan(_published(leased), part.offsets, part.runs, table, limits)


def _published(leased: Leased) -> Published:
    published = leased.channel.published
    assert published is not None, "a channel that was never connected"
    return published


def _borrow(
    blocks: Blocks,
    progress: ReadProgress,
    borrowed: list[tuple[Blocks, Block]],
    clock: Callable[[], float],
) -> Block:
    block = blocks.lend(progress.deadline)
    if block is None:
        raise Unprepared(DEADLINE if clock() >= progress.deadline else NO_MEMORY)
    borrowed.append((blocks, block))
    return block
