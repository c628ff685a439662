"""x"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, final

import attrs
import numpy as np

from peercache.actors.channels.actor import ChannelPool, Lease
from peercache.memory.layout import GRANULE_BYTES_MIN
from peercache.observability.reasons import CLOSED, DEADLINE
from peercache.rdma.key_table import MemoryKeys
from peercache.rdma.memory import Blocks
from peercache.rdma.plan import (
    PORTION_BYTES,
    PORTION_WORK_MAX,
    WORD_BYTES,
    WORD_GAP_BYTES,
    Limits,
    Portion,
    Published,
    ReadProgress,
)
from peercache.rdma.queue_pair import PSN_MAX, Completions, QpEnd, Sizes
from peercache.rdma.rail import Rail
from peercache.wire.messages.rdma import ChannelOpened, ChannelsHeld, OpenChannel

PORTIONS_AT_ONCE = 2
"""One is under way while the next waits behind it, so that the pipe never runs dry."""

PIECES_MAX = 16
"""Scatter entries of a READ: every entry is room in each work request of the queue."""


@final
class Channel:
    """One connection over one rail. `number` is ours, and unique for the client."""

    def __init__(self, rail: Rail, number: int, *, psn: int) -> None:
        """Make its parts. Raises verbs.Error or OSError."""
        abilities = rail.abilities
        self.rail = rail
        self.number = number
        self.published: Published | None = None
        self.asked_at = float("-inf")
        self._psn = psn
        work = min(PORTIONS_AT_ONCE * PORTION_WORK_MAX, abilities.work)
        sizes = Sizes(work=work, pieces=min(PIECES_MAX, abilities.pieces))
        self.limits = Limits(pieces=sizes.pieces, work=work // PORTIONS_AT_ONCE)
        self._completions = Completions(rail.verbs, rail.context, work + 1)
        try:
            self._pair = rail.queue_pair(self._completions.queue, sizes)
        except BaseException:
            self._completions.close()
            raise
        self._entries: list[Any] = [rail.verbs.SGE(0, 0, 0) for _ in range(sizes.pieces)]
        self._signaled = int(rail.verbs.enums.IBV_SEND_SIGNALED)
        self._fence = int(rail.verbs.enums.IBV_SEND_FENCE)
        self.descriptor = self._completions.descriptor
        self.take = self._completions.take
        self.arm = self._completions.arm
        self.acknowledge = self._completions.acknowledge

    def end(self) -> QpEnd:
        """Return what the node needs to know of this end."""
        return self.rail.end(self._pair, self._psn)

    def connect(self, other: QpEnd, *, mtu: int, reads_at_once: int, published: Published) -> None:
        """Connect to the node's end. Raises verbs.Error."""
        path = self.rail.path(mtu=mtu, reads_at_once=reads_at_once)
        self._pair.connect(path, other, psn=self._psn)
        self.published = published

    def post(self, portion: Portion, number: int, *, shift: int, words_at: int, key: int) -> None:
        """Post a whole portion with one doorbell: its READs, then its words behind a fence.

        number:  what its completion will be called.
        shift:   added to every destination address.
        words_at, key: where its words go, and what opens that memory.
        """
        self._chain(number, portion, shift, words_at=words_at, key=key)

    def post_bytes(self, portion: Portion, number: int, *, shift: int) -> None:
        """Post only the READs of a portion."""
        self._chain(number, portion, shift)

    def post_words(self, portion: Portion, number: int, *, words_at: int, key: int) -> None:
        """Post only the words of a portion, whose READs have completed."""
        self._chain(number, portion, 0, words_at=words_at, key=key, with_bytes=False)

    def close(self) -> None:
        """Destroy everything; when this returns, nothing of it writes to memory any more."""
        if not self.rail.is_ours():
            return
        entries, self._entries = self._entries, []
        try:
            self._pair.destroy()
        finally:
            self._completions.close()
            for entry in entries:
                entry.close()

    def _chain(
        self,
        number: int,
        portion: Portion,
        shift: int,
        *,
        words_at: int | None = None,
        key: int = 0,
        with_bytes: bool = True,
    ) -> None:
        pair = self._pair.posting
        words = portion.words if words_at is not None else None
        has_words = words is not None and bool(words.remote)
        pair.wr_start()
        try:
            pair.wr_id = number
            pair.wr_flags = 0
            if with_bytes:
                self._add_reads(pair, portion, shift, is_last=not has_words)
            if words is not None and has_words:
                self._add_words(pair, words, words_at or 0, key)
        except BaseException:
            pair.wr_abort()
            raise
        pair.wr_complete()

    def _add_reads(self, pair: Any, portion: Portion, shift: int, *, is_last: bool) -> None:
        entry, read, set_entry = self._entries[0], pair.wr_rdma_read, pair.wr_set_sge
        pieces = zip(portion.addresses, portion.sizes, portion.local_keys, strict=True)
        left = len(portion.remote)
        known_key = -1
        for remote, key, count in zip(portion.remote, portion.keys, portion.pieces, strict=True):
            left -= 1
            if is_last and not left:
                pair.wr_flags = self._signaled
            read(key, remote)
            if count == 1:
                address, size, local_key = next(pieces)
                entry.addr, entry.length = address + shift, size
                if local_key != known_key:
                    entry.lkey = known_key = local_key
                set_entry(entry)
                continue
            for other in self._entries[:count]:
                address, size, local_key = next(pieces)
                other.addr, other.length, other.lkey = address + shift, size, local_key
            known_key = int(entry.lkey)
            pair.wr_set_sge_list(count, self._entries)

    def _add_words(self, pair: Any, words: Any, words_at: int, key: int) -> None:
        entry, left = self._entries[0], len(words.remote)
        entry.lkey = key
        # Only the first waits for the READs before it; what follows is begun after it.
        flags = self._fence
        rows = zip(words.remote, words.keys, words.at, words.lengths, strict=True)
        for remote, remote_key, at, length in rows:
            left -= 1
            pair.wr_flags = flags if left else flags | self._signaled
            flags = 0
            pair.wr_rdma_read(remote_key, remote)
            entry.addr, entry.length = words_at + at, length
            pair.wr_set_sge(entry)


WORDS_BLOCKS_MAX = 64
"""Reads at once over one rail: more than an engine has threads."""

BOUNCE_BLOCKS_MAX = 4
"""Reads at once into memory that is not registered; 32 MiB each, made when they are needed."""

LINK_LOOK_S = 0.01
"""How long a look at the link is believed: it is a system call or three."""

BACKOFF_S = 0.25
"""How long a rail that failed is left out, at least. Its return costs a read one stall at most."""

_WORDS_HALF_BYTES = (PORTION_WORK_MAX + 1) * (WORD_GAP_BYTES + WORD_BYTES)


@final
class ClientRail:
    """One rail of a client. Its `pool` and `channels` are guarded by the fabric's lock."""

    def __init__(
        self,
        rail: Rail,
        index: int,
        *,
        max_channels_per_peer: int,
        rng: random.Random,
        clock: Callable[[], float],
        has_fallback: bool,
    ) -> None:
        """Open nothing yet.

        index:        which rail of the client's it is.
        has_fallback: whether another fabric can read what this one has no memory for.
        """
        self.rail = rail
        self.index = index
        self.pool = ChannelPool(max_channels_per_peer=max_channels_per_peer)
        self.channels: dict[int, Channel] = {}
        self.words = Blocks(
            rail.regions, "words read", clock=clock, blocks_max=WORDS_BLOCKS_MAX,
            block_bytes=PORTIONS_AT_ONCE * _WORDS_HALF_BYTES, has_fallback=has_fallback,
        )  # fmt: skip
        self.bounce = Blocks(
            rail.regions, "bounce", clock=clock, blocks_max=BOUNCE_BLOCKS_MAX,
            block_bytes=PORTIONS_AT_ONCE * PORTION_BYTES, has_fallback=has_fallback,
        )  # fmt: skip
        self._rng = rng
        self._looked_at = float("-inf")
        self._was_up = False
        self._left_out_until = float("-inf")

    def is_usable(self, now: float) -> bool:
        """Return whether to read over this rail now."""
        if now < self._left_out_until:
            return False
        if now - self._looked_at >= LINK_LOOK_S:
            self._looked_at, self._was_up = now, self.rail.is_up()
        return self._was_up

    def leave_out(self, now: float) -> None:
        """Do not use this rail for a while."""
        self._left_out_until = now + BACKOFF_S

    def new_channel(self, number: int) -> Channel:
        """Return a channel that is not connected yet. Raises verbs.Error or OSError."""
        return Channel(self.rail, number, psn=self._rng.randrange(PSN_MAX + 1))

    def question(self, channel: Channel) -> OpenChannel:
        """Return what to ask a node for the other end, or again for its regions."""
        end = channel.end()
        return OpenChannel(
            request=0,
            channel=channel.number,
            rail=self.index,
            link_layer=self.rail.link_layer,
            qp_num=end.qp_num,
            psn=end.psn,
            lid=end.lid,
            gid=end.gid,
            mtu=self.rail.abilities.mtu,
            reads_at_once=self.rail.reads_started,
        )

    def close(self) -> None:
        """Close the rail; every channel is closed already."""
        self.rail.close()


def published_by(answer: ChannelOpened) -> Published:
    """Return the node's memory as its answer describes it; raise ValueError for nonsense."""
    granule = answer.granule
    if granule < GRANULE_BYTES_MIN or granule & (granule - 1):
        raise ValueError(f"a granule of {granule} bytes")
    regions = np.frombuffer(answer.regions, "<u8").reshape(-1, 3)
    return Published(
        pages_address=answer.pages_address,
        page_bytes=answer.page_bytes,
        words_address=answer.words_address,
        granule=answer.granule,
        keys=MemoryKeys.of([(row[0], row[1], row[2]) for row in regions.tolist()]),
    )


def end_of(answer: ChannelOpened) -> QpEnd:
    """Return the node's end of a channel; raise ValueError for nonsense."""
    if len(answer.gid) != 16:
        raise ValueError(f"a GID of {len(answer.gid)} bytes")
    return QpEnd(answer.qp_num, answer.psn, answer.lid, answer.gid)


CLOSE_MARGIN_S = 1.0
"""What `close` waits beyond the last deadline it knows."""

HELD_S = 20.0
"""How often the channels held are listed to a node where none has changed: a third of the time
after which a node ends what nobody lists."""

STRIPE_BYTES_MIN = 2**20
"""A smaller read goes over one rail: another doorbell and wake-up cost more than they save."""


@attrs.frozen(eq=False)
class Reserved:
    """The right to use one channel of one rail. number: what the peer knows it by."""

    side: ClientRail
    lease: Lease
    number: int


@final
class Channels:
    """The channels of one client. Thread-safe."""

    def __init__(self, sides: Sequence[ClientRail], clock: Callable[[], float]) -> None:
        """Start with none."""
        self._sides = tuple(sides)
        self._clock = clock
        # Guards everything below; whoever waits on it waits for a channel to come free.
        self._changed = threading.Condition()
        self._numbers: dict[tuple[int, int], tuple[int, int]] = {}
        self._newest = 0
        self._listed: dict[int, tuple[tuple[int, ...], float]] = {}
        self._last_deadline = 0.0
        self._turn = 0
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Return whether nothing is leased any more."""
        return self._closed

    def reserve(self, progress: ReadProgress) -> tuple[list[Reserved], str]:
        """Lease a channel of every rail, or of one for a small read, waiting until there is one.

        Returns none, and why, where that cannot be; "" is: no rail is left.
        """
        with self._changed:
            while True:
                now = self._clock()
                if self._closed:
                    return [], CLOSED
                if now >= progress.deadline:
                    return [], DEADLINE
                sides = [
                    side
                    for side in self._sides
                    if side.index not in progress.avoided and side.is_usable(now)
                ]
                if not sides:
                    return [], ""
                wanted = len(sides)
                if progress.total_bytes < STRIPE_BYTES_MIN:
                    # In turn; but a rail that is busy is not waited for beside one that is free.
                    self._turn += 1
                    first, wanted = self._turn % len(sides), 1
                    sides = sides[first:] + sides[:first]
                free = (
                    Reserved(side, lease, self._number(side, lease))
                    for side in sides
                    if (lease := side.pool.lease(progress.peer)) is not None
                )
                reserved = list(islice(free, wanted))
                if reserved:
                    self._last_deadline = max(self._last_deadline, progress.deadline)
                    return reserved, ""
                self._changed.wait(progress.deadline - now)

    def has_spare(self, progress: ReadProgress, reserved: Sequence[Reserved]) -> bool:
        """Return whether a small read that does not get on over its rail could go over another.

        A large one that has a single rail waits: nothing tells how long it may take.
        """
        is_small = progress.total_bytes < STRIPE_BYTES_MIN
        if not is_small or len(self._sides) == 1 or len(reserved) > 1:
            return False
        now, busy = self._clock(), {reserved[0].side.index, *progress.avoided}
        return any(side.index not in busy and side.is_usable(now) for side in self._sides)

    def idle(self, reserved: Reserved) -> Channel | None:
        """Return the channel of a lease, None if it is to be made."""
        with self._changed:
            return reserved.side.channels.get(reserved.lease.channel)

    def end(self, reserved: Reserved, channel: Channel | None, *, works: bool) -> None:
        """End a lease: the channel is closed first, unless it works."""
        side, lease = reserved.side, reserved.lease
        try:
            if channel is not None and not works:
                channel.close()
        finally:
            with self._changed:
                if channel is not None and works:
                    side.channels[lease.channel] = channel
                    self._drop(side, side.pool.give_back(lease, self._clock()))
                else:
                    side.channels.pop(lease.channel, None)
                    self._numbers.pop((side.index, lease.channel), None)
                    side.pool.destroy(lease)
                self._changed.notify_all()

    def retire(self, side: ClientRail, peer: int) -> None:
        """Close the idle channels to a peer: one of them was just found dead."""
        with self._changed:
            self._drop(side, side.pool.retire_idle(peer))

    def forget(self, peer: int) -> None:
        """Close the channels to a member that is dead, those in use when their reads end."""
        with self._changed:
            for side in self._sides:
                self._drop(side, side.pool.forget(peer))
            self._changed.notify_all()

    def held(self) -> list[tuple[int, ChannelsHeld]]:
        """Return what to tell nodes about their channels now, and close idle ones; each second."""
        now = self._clock()
        with self._changed:
            for side in self._sides:
                self._drop(side, side.pool.on_tick(now))
            by_peer: dict[int, list[int]] = {peer: [] for peer in self._listed}
            for peer, number in self._numbers.values():
                by_peer.setdefault(peer, []).append(number)
            newest = self._newest
        told = []
        for peer, numbers in by_peer.items():
            current = tuple(sorted(numbers))
            before, at = self._listed.get(peer, ((), float("-inf")))
            if current != before or now - at >= HELD_S:
                told.append((peer, ChannelsHeld(newest, current)))
                self._listed[peer] = (current, now)
            if not current:
                self._listed.pop(peer, None)
        return told

    def close(self) -> bool:
        """Lease nothing any more, close idle channels, wait for the others; return if all are."""
        with self._changed:
            self._closed = True
            for side in self._sides:
                self._drop(side, side.pool.close())
            self._changed.notify_all()
            until = max(self._last_deadline, self._clock()) + CLOSE_MARGIN_S
            while self._numbers and self._clock() < until:
                self._changed.wait(until - self._clock())
            return not self._numbers

    def _number(self, side: ClientRail, lease: Lease) -> int:
        """Return what a channel is called to its peer; the caller holds the lock."""
        key = (side.index, lease.channel)
        if lease.is_new:
            self._newest += 1
            self._numbers[key] = (lease.peer, self._newest)
        return self._numbers[key][1]

    def _drop(self, side: ClientRail, channels: Sequence[int]) -> None:
        """Close idle channels; the caller holds the lock."""
        for channel in channels:
            side.channels.pop(channel).close()
            self._numbers.pop((side.index, channel), None)
