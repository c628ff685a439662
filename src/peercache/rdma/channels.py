"""A client's channels: the connections over each rail to every peer, and the leases of them.

Owns    the queue pairs of a client, and the blocks of memory that it lends to reads.
Keeps   one read uses a channel at a time. After an error a channel is destroyed, never used again,
        and it is closed before its lease ends. Numbers of channels increase over all rails, and
        none is used twice, so that a node can distinguish a dropped channel from one that is newer
        than the list it gets. Scatter entries are freed exactly once: pyverbs never frees them, and
        a second free corrupts memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, final

import attrs
import numpy as np

from peercache.actors.channels.actor import ChannelLeased
from peercache.fabric.channels import ChannelDriver
from peercache.memory.layout import GRANULE_BYTES_MIN
from peercache.model.seal import SEAL_BYTES
from peercache.rdma.key_table import MemoryKeys
from peercache.rdma.memory import Blocks
from peercache.rdma.plan import (
    PORTION_BYTES,
    PORTION_WORK_MAX,
    SEAL_GAP_BYTES,
    Limits,
    Look,
    Portion,
    Published,
    ReadProgress,
)
from peercache.rdma.queue_pair import PSN_MAX, Completions, QpEnd, Sizes
from peercache.rdma.rail import Rail
from peercache.wire.messages.session import ChannelOpened, ChannelsHeld, OpenChannel

PORTIONS_AT_ONCE = 2
"""One portion is in flight while the next is queued behind it, so the link never idles."""

PIECES_MAX = 16
"""Scatter entries of a READ. Each entry takes room in every work request of the queue."""


@final
class Channel:
    """One connection to one node over one rail. `number` is unique for the client."""

    def __init__(self, rail: Rail, number: int, *, psn: int) -> None:
        """Create the queue pair and its completion queue. Raises verbs.Error or OSError."""
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
        """Return this end, for the node."""
        return self.rail.end(self._pair, self._psn)

    def connect(self, other: QpEnd, *, mtu: int, reads_at_once: int, published: Published) -> None:
        """Connect to the node's end. Raises verbs.Error."""
        path = self.rail.path(mtu=mtu, reads_at_once=reads_at_once)
        self._pair.connect(path, other, psn=self._psn)
        self.published = published

    def post(
        self,
        portion: Portion,
        number: int,
        *,
        shift: int,
        seals_at: int,
        key: int,
        with_last_look: bool = True,
    ) -> None:
        """Post a portion with one doorbell: READs of the first seals, fence, bytes, fence, last
        seals.

        number: the number of its completion.
        shift:   added to every destination address.
        seals_at, key: destination of its seals, and the key of that memory.
        """
        last = portion.last if with_last_look else None
        with self._chain(number) as pair:
            has_last = last is not None and bool(last.remote)
            self._add_look(pair, portion.first, seals_at, key, flags=0, is_end=False)
            self._add_reads(pair, portion, shift, is_end=not has_last)
            if last is not None and has_last:
                at = seals_at + portion.first.buffer_bytes
                self._add_look(pair, last, at, key, flags=self._fence, is_end=True)

    def post_last_look(self, portion: Portion, number: int, *, seals_at: int, key: int) -> None:
        """Post the READs of the last seals of a portion, after its other READs have completed."""
        with self._chain(number) as pair:
            at = seals_at + portion.first.buffer_bytes
            self._add_look(pair, portion.last, at, key, flags=self._fence, is_end=True)

    def close(self) -> None:
        """Destroy the channel; after the return no request of it writes to memory."""
        if not self.rail.is_ours():
            return
        entries, self._entries = self._entries, []
        try:
            self._pair.destroy()
        finally:
            self._completions.close()
            for entry in entries:
                entry.close()

    @contextmanager
    def _chain(self, number: int) -> Iterator[Any]:
        """Collect work requests, and post them with one doorbell."""
        pair = self._pair.posting
        pair.wr_start()
        try:
            pair.wr_id = number
            yield pair
        except BaseException:
            pair.wr_abort()
            raise
        pair.wr_complete()

    def _add_reads(self, pair: Any, portion: Portion, shift: int, *, is_end: bool) -> None:
        entry, read, set_entry = self._entries[0], pair.wr_rdma_read, pair.wr_set_sge
        pieces = zip(portion.addresses, portion.sizes, portion.local_keys, strict=True)
        left = len(portion.remote)
        # Only the first waits for the first look: the device starts the next ones after it.
        flags = self._fence if portion.first.remote else 0
        known_key = -1
        for remote, key, count in zip(portion.remote, portion.keys, portion.pieces, strict=True):
            left -= 1
            pair.wr_flags = flags | self._signaled if is_end and not left else flags
            flags = 0
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

    def _add_look(
        self, pair: Any, look: Look, seals_at: int, key: int, *, flags: int, is_end: bool
    ) -> None:
        """Add the READs of some seals. flags: of the first one."""
        entry, left = self._entries[0], len(look.remote)
        entry.lkey = key
        rows = zip(look.remote, look.keys, look.at, look.lengths, strict=True)
        for remote, remote_key, at, length in rows:
            left -= 1
            pair.wr_flags = flags | self._signaled if is_end and not left else flags
            flags = 0
            pair.wr_rdma_read(remote_key, remote)
            entry.addr, entry.length = seals_at + at, length
            pair.wr_set_sge(entry)


SEALS_BLOCKS_MAX = 64
"""The most concurrent reads over one rail: more than an engine has threads."""

BOUNCE_BLOCKS_MAX = 4
"""Concurrent reads into memory that is not registered; 32 MiB each, allocated on first use."""

LINK_LOOK_S = 0.01
"""How long the state of a link is cached: reading it takes three system calls."""

BACKOFF_S = 0.25
"""The minimum time that a failed rail is skipped. Its return costs a read one stall at most."""

_SEALS_HALF_BYTES = (PORTION_WORK_MAX + 1) * (SEAL_GAP_BYTES + SEAL_BYTES)


@final
class ClientRail:
    """One rail of a client, and the memory that it lends to reads.

    If its link is down, or it stalls while another rail does not, it is skipped until its link is
    up and its back-off is over.
    """

    def __init__(
        self,
        rail: Rail,
        index: int,
        *,
        rng: random.Random,
        clock: Callable[[], float],
        has_fallback: bool,
    ) -> None:
        """Start without lent memory.

        index:        the number of the rail at this client.
        has_fallback: another fabric serves a read that gets no block of memory.
        """
        self.rail = rail
        self.index = index
        self.seals = Blocks(
            rail.regions, "seals read", clock=clock, blocks_max=SEALS_BLOCKS_MAX,
            block_bytes=PORTIONS_AT_ONCE * _SEALS_HALF_BYTES, has_fallback=has_fallback,
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
        """Return whether reads may use this rail now."""
        if now < self._left_out_until:
            return False
        if now - self._looked_at >= LINK_LOOK_S:
            self._looked_at, self._was_up = now, self.rail.is_up()
        return self._was_up

    def leave_out(self, now: float) -> None:
        """Skip this rail for BACKOFF_S."""
        self._left_out_until = now + BACKOFF_S

    def new_channel(self, number: int) -> Channel:
        """Create a channel, not yet connected. Raises verbs.Error or OSError."""
        return Channel(self.rail, number, psn=self._rng.randrange(PSN_MAX + 1))

    def question(self, channel: Channel) -> OpenChannel:
        """Return the message that asks a node for the other end, or for its newer regions."""
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


def published_by(answer: ChannelOpened) -> Published:
    """Return the published memory of a node; raise ValueError for a malformed answer."""
    granule = answer.granule
    if granule < GRANULE_BYTES_MIN or granule & (granule - 1):
        raise ValueError(f"a granule of {granule} bytes")
    regions = np.frombuffer(answer.regions, "<u8").reshape(-1, 3)
    return Published(
        pages_address=answer.pages_address,
        page_bytes=answer.page_bytes,
        seals_address=answer.seals_address,
        granule=answer.granule,
        keys=MemoryKeys.of([(row[0], row[1], row[2]) for row in regions.tolist()]),
    )


def end_of(answer: ChannelOpened) -> QpEnd:
    """Return the node's end of a channel; raise ValueError for a malformed answer."""
    if len(answer.gid) != 16:
        raise ValueError(f"a GID of {len(answer.gid)} bytes")
    return QpEnd(answer.qp_num, answer.psn, answer.lid, answer.gid)


HELD_S = 20.0
"""Interval at which a client lists unchanged channels to a node: a third of the time after which
the node drops channels that are not listed."""

STRIPE_BYTES_MIN = 2**20
"""A smaller read uses one rail: a second doorbell and wake-up cost more than they save."""


@attrs.frozen(eq=False)
class Reserved:
    """The lease of one channel of one rail."""

    side: ClientRail
    lease: ChannelLeased


@final
class Channels:
    """All channels of one client. Thread-safe. driver: their leases, by rail."""

    def __init__(
        self,
        sides: Sequence[ClientRail],
        *,
        max_channels_per_peer: int,
        clock: Callable[[], float],
    ) -> None:
        """Start without channels; a peer has max_channels_per_peer on each rail."""
        self._sides = tuple(sides)
        self._clock = clock
        self.driver: ChannelDriver[Channel] = ChannelDriver(
            max_channels_per_peer=max_channels_per_peer, clock=clock
        )
        self._listed: dict[int, tuple[tuple[int, ...], float]] = {}
        self._turn = 0

    def reserve(self, progress: ReadProgress) -> tuple[list[Reserved], str]:
        """Lease a channel of every rail, or of one rail for a small read; wait only for the first.

        Returns [] and the reason if there is no lease; the reason "" means that no rail is left.
        """

        def choose(now: float) -> list[Reserved] | None:
            sides = [
                side
                for side in self._sides
                if side.index not in progress.avoided and side.is_usable(now)
            ]
            if not sides:
                return []
            wanted = len(sides)
            if progress.total_bytes < STRIPE_BYTES_MIN:
                # Rails take turns; a busy rail is skipped while another is free.
                self._turn += 1
                first, wanted = self._turn % len(sides), 1
                sides = sides[first:] + sides[:first]
            free = (
                Reserved(side, lease)
                for side in sides
                if (lease := self.driver.lease_now(progress.peer, side.index, now)) is not None
            )
            return list(islice(free, wanted)) or None

        reserved = self.driver.choose(choose, progress.deadline)
        return ([], reserved) if isinstance(reserved, str) else (reserved, "")

    def has_spare(self, progress: ReadProgress, reserved: Sequence[Reserved]) -> bool:
        """Return whether a small read that stalls on its rail could use another one.

        A large read on a single rail keeps waiting: its duration has no bound.
        """
        is_small = progress.total_bytes < STRIPE_BYTES_MIN
        if not is_small or len(self._sides) == 1 or len(reserved) > 1:
            return False
        now, busy = self._clock(), {reserved[0].side.index, *progress.avoided}
        return any(side.index not in busy and side.is_usable(now) for side in self._sides)

    def held(self) -> list[tuple[int, ChannelsHeld]]:
        """Close idle channels; return the lists that nodes must get now. Call it every second."""
        now = self._clock()
        newest, channels = self.driver.list_channels()
        by_peer: dict[int, list[int]] = {peer: [] for peer in self._listed}
        for peer, number in channels:
            by_peer.setdefault(peer, []).append(number)
        reports = []
        for peer, numbers in by_peer.items():
            current = tuple(sorted(numbers))
            before, at = self._listed.get(peer, ((), float("-inf")))
            if current != before or now - at >= HELD_S:
                reports.append((peer, ChannelsHeld(newest, current)))
                self._listed[peer] = (current, now)
            if not current:
                self._listed.pop(peer, None)
        return reports
