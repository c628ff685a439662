"""The node's ends of channels: queue pairs over real devices, and the memory that they serve.

Owns    the rails of a node: the registrations of its segment, one queue pair for each channel, and
        one completion queue for each rail, which stays empty because a node posts no requests.
Keeps   `ChannelServer` never waits: it makes a queue pair in a call or two, and threads of
        `Regions` register memory. A peer may read, and do nothing else.
        A repeated question for a channel keeps its queue pair. A question with another queue pair
        of the client gets a new one; the old one is destroyed first.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, final

import attrs
import numpy as np

from peercache.actors.rdma.actor import NO_PATH, NO_RDMA
from peercache.memory.kernel import address_of
from peercache.memory.published import PublishedSegment
from peercache.model.ids import name_of
from peercache.observability.log import get_logger
from peercache.rdma.memory import Region
from peercache.rdma.plan import WORD_BYTES
from peercache.rdma.queue_pair import PSN_MAX, QpEnd, QueuePair, Sizes
from peercache.rdma.rail import Rail
from peercache.rdma.verbs import outlives_fork
from peercache.wire.messages.rdma import ChannelOpened, OpenChannel
from peercache.wire.messages.session import Refused

WORDS_S = 10.0
"""Longest wait for the registration of the words: at most 0.5 % of the size of the pool."""

_NOTHING_POSTED = Sizes(work=1, pieces=1)


@attrs.frozen(eq=False)
class _Served:
    """One channel. end: the client's end, which tells a repeated question from a new one."""

    rail: Rail
    pair: QueuePair
    ours: QpEnd
    end: QpEnd
    mtu: int
    reads_at_once: int


@final
class ChannelServer:
    """The node's end of every channel. Used by one task."""

    def __init__(
        self,
        rails: Sequence[Rail],
        segment: PublishedSegment,
        *,
        rng: random.Random,
    ) -> None:
        """Serve `segment` over `rails`, and register its words; `close_all` closes the rails."""
        self.rails = tuple(rails)
        self._segment = segment
        self._rng = rng
        self._log = get_logger(actor="rdma")
        self._served: dict[tuple[int, int], _Served] = {}
        self._queues: dict[str, Any] = {}
        self._regions: dict[str, tuple[Region, Region]] = {}
        for rail in self.rails:
            # The smallest queue: a node posts no requests, so none completes.
            self._queues[rail.name] = outlives_fork(rail.verbs.CQ(rail.context, 1))
            words, pages = segment.words, segment.pages
            self._regions[rail.name] = (
                rail.regions.add(
                    "words", address_of(words.view(np.uint8)), words.nbytes, remote=True,
                    owner=words,
                ),
                rail.regions.add(
                    "pages", address_of(pages), pages.nbytes, remote=True,
                    ready_bytes=0, owner=pages,
                ),
            )  # fmt: skip

    def grew(self, usable_bytes: int) -> None:
        """Register the populated part of the page memory."""
        is_final = usable_bytes >= self._segment.layout.page_bytes
        for rail in self.rails:
            _, pages = self._regions[rail.name]
            rail.regions.grow(pages, usable_bytes, is_final=is_final)

    @property
    def channel_count(self) -> int:
        """Return the number of channels."""
        return len(self._served)

    def rail_for(self, wanted: OpenChannel) -> Rail:
        """Return the rail that a rail of the client connects to."""
        return self.rails[wanted.rail % len(self.rails)]

    def open(self, client: int, wanted: OpenChannel) -> ChannelOpened | Refused:
        """Return the node's end of a channel, or the refusal."""
        rail = self.rail_for(wanted)
        if rail.link_layer != wanted.link_layer:
            what = f"your port is {wanted.link_layer}, {rail.name} here is {rail.link_layer}"
            return Refused(wanted.request, NO_RDMA, what)
        if len(wanted.gid) != 16 or not 1 <= wanted.mtu <= 5 or wanted.psn > PSN_MAX:
            return Refused(wanted.request, "malformed", "no queue pair has such an end")
        theirs = QpEnd(wanted.qp_num, wanted.psn, wanted.lid, wanted.gid)
        key = (client, wanted.channel)
        served = self._served.get(key)
        if served is None or served.end != theirs:
            self.close(client, wanted.channel)
            try:
                served = self._connect(rail, theirs, wanted)
            except (rail.verbs.Error, OSError, OverflowError) as error:
                self._log.warning("rdma.channel_refused", peer=name_of(client), problem=str(error))
                return Refused(wanted.request, NO_PATH, str(error))
            self._served[key] = served
        return self._opened(wanted, served)

    def failures(self) -> list[str]:
        """Wait for the registration of the words, which are small; return its failures."""
        found = []
        for rail in self.rails:
            words, _ = self._regions[rail.name]
            rail.regions.wait(words, WORDS_S)
            if words.failure:
                found.append(f"{rail.name}: {words.failure}")
        return found

    def close(self, client: int, channel: int) -> None:
        """Destroy a channel if it exists."""
        served = self._served.pop((client, channel), None)
        if served is None:
            return
        try:
            served.pair.destroy()
        except served.rail.verbs.Error as error:
            # The device was removed: the kernel has ended its queue pairs.
            self._log.warning("rdma.channel_close_failed", peer=name_of(client), problem=str(error))

    def close_all(self) -> None:
        """Destroy every channel, end every registration, close the devices."""
        if not all(rail.is_ours() for rail in self.rails):
            return
        for client, channel in list(self._served):
            self.close(client, channel)
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            queue.close()
        for rail in self.rails:
            rail.close()

    def registered_bytes(self) -> int:
        """Return the bytes of page memory that every rail serves."""
        return min(pages.registered_bytes for _, pages in self._regions.values())

    def _connect(self, rail: Rail, theirs: QpEnd, wanted: OpenChannel) -> _Served:
        pair = rail.queue_pair(self._queues[rail.name], _NOTHING_POSTED)
        try:
            psn = self._rng.randrange(PSN_MAX + 1)
            reads = rail.reads_served(wanted.reads_at_once)
            path = rail.path(mtu=wanted.mtu, reads_at_once=reads)
            ours = rail.end(pair, psn)
            pair.connect(path, theirs, psn=psn)
        except BaseException:
            pair.destroy()
            raise
        return _Served(rail, pair, ours, theirs, path.mtu, reads)

    def _opened(self, wanted: OpenChannel, served: _Served) -> ChannelOpened:
        end = served.ours
        words, pages = self._regions[served.rail.name]
        regions = [
            (region.address + offset, length, key)
            for region in (words, pages)
            for offset, length, key in region.remote()
        ]
        layout = self._segment.layout
        assert words.length == layout.words_count * WORD_BYTES, (words.length, layout)
        return ChannelOpened(
            request=wanted.request,
            channel=wanted.channel,
            qp_num=end.qp_num,
            psn=end.psn,
            lid=end.lid,
            gid=end.gid,
            mtu=served.mtu,
            reads_at_once=served.reads_at_once,
            pages_address=pages.address,
            page_bytes=layout.page_bytes,
            words_address=words.address,
            granule=layout.granule,
            regions=np.array(regions, "<u8").tobytes(),
        )
