"""The node's ends of channels: queue pairs over real devices, and the memory that they serve.

Owns    the rails of a node: the registrations of its segment, one queue pair for each channel, and
        one completion queue for each rail, which stays empty because a node posts no requests.
Keeps   `ChannelServer` never waits: it creates a queue pair in a call or two, and threads of
        `Regions` register memory. A peer may only read. A repeated request for a channel keeps its
        queue pair. A request with another queue pair of the client gets a new one; the old one is
        destroyed first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any, final

import attrs
import numpy as np
import trio
from typing_extensions import assert_never

from peercache.actors.ports import (
    DropPair,
    OpenPair,
    PairOpened,
    RdmaAbsent,
    RdmaEffect,
    RdmaFact,
    RdmaServes,
    ServeMemory,
)
from peercache.config.settings import Config
from peercache.errors import ConfigError
from peercache.memory.kernel import address_of
from peercache.memory.published import PublishedSegment
from peercache.model.ids import name_of
from peercache.model.seal import SEAL_BYTES
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics
from peercache.rdma import neighbours
from peercache.rdma.device import ETHERNET
from peercache.rdma.memory import Region
from peercache.rdma.queue_pair import PSN_MAX, QpEnd, QueuePair, Sizes
from peercache.rdma.rail import Rail, open_rails
from peercache.rdma.verbs import outlives_fork
from peercache.wire.messages.session import NO_PATH, NO_RDMA, ChannelOpened, OpenChannel, Refused

SEALS_S = 10.0
"""Longest wait for the registration of the seals: at most 1.6 % of the size of the pool."""

_NOTHING_POSTED = Sizes(work=1, pieces=1)


@attrs.frozen(eq=False)
class _Served:
    """One channel. end: the client's end, which distinguishes a repeated request from a new one."""

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
        """Serve `segment` over `rails`, and register its seals; `close_all` closes the rails."""
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
            seals, pages = segment.seals, segment.pages
            self._regions[rail.name] = (
                rail.regions.add(
                    "seals", address_of(seals.view(np.uint8)), seals.nbytes, remote=True,
                    owner=seals,
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
        """Return the rail to which a rail of the client connects."""
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
        """Wait for the registration of the seals, which are small; return its failures."""
        found = []
        for rail in self.rails:
            seals, _ = self._regions[rail.name]
            rail.regions.wait(seals, SEALS_S)
            if seals.failure:
                found.append(f"{rail.name}: {seals.failure}")
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
        seals, pages = self._regions[served.rail.name]
        regions = [
            (region.address + offset, length, key)
            for region in (seals, pages)
            for offset, length, key in region.remote()
        ]
        layout = self._segment.layout
        assert seals.length == layout.seals_count * SEAL_BYTES, (seals.length, layout)
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
            seals_address=seals.address,
            granule=layout.granule,
            regions=np.array(regions, "<u8").tobytes(),
        )


@final
class DeviceQueuePairs:
    """The port `QueuePairs` over the devices of this host, from their opening to their end.

    It handles one effect per turn of the loop: creating a queue pair takes a millisecond, while
    holding the GIL. If the address of a client does not resolve, that delays the effects behind it
    by `neighbours.RESOLVE_S`, but not the loop.
    """

    def __init__(
        self,
        config: Config,
        segment: PublishedSegment,
        *,
        is_required: bool,
        notify: Callable[[RdmaFact], None],
        rng: random.Random,
        metrics: Metrics,
        log: Any,
    ) -> None:
        """Serve `segment`; `notify` passes a message to the rdma actor.

        is_required: without devices `run` raises ConfigError.
        """
        self._config = config
        self._segment = segment
        self._is_required = is_required
        self._notify = notify
        self._rng = rng
        self._metrics = metrics
        self._log = log
        # Bounded by the actor: PENDING_MAX OpenPair, and a DropPair for each channel.
        self._give, self._effects = trio.open_memory_channel[RdmaEffect](inf)

    def perform(self, effect: RdmaEffect) -> None:
        """Queue an effect; without devices it does nothing."""
        with suppress(trio.BrokenResourceError):
            self._give.send_nowait(effect)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Open the devices, serve until cancelled, close them. Raises ConfigError."""
        # The import of pyverbs, and the opening of each device, take long.
        rails, problems = await trio.to_thread.run_sync(open_rails, self._config)
        if not rails:
            self._end("; ".join(problems))
            task_status.started()
            return
        server: ChannelServer | None = None
        try:
            server = ChannelServer(rails, self._segment, rng=self._rng)
            failures = await trio.to_thread.run_sync(server.failures)
            if failures:
                self._end("; ".join(failures))
                task_status.started()
                return
            self._announce(server, problems)
            task_status.started()
            async for effect in self._effects:
                await self._do(server, effect)
        except (rails[0].verbs.Error, OSError) as error:
            # A device failed, early or late: the node continues, and peers read over tcp.
            self._end(str(error))
        finally:
            if server is not None:
                server.close_all()
            else:
                for rail in rails:
                    rail.close()

    def _end(self, reason: str) -> None:
        self._effects.close()
        if self._is_required:
            raise ConfigError("fabric", f"rdma is required, but not available: {reason}")
        self._log.info("rdma.devices_missing", reason=reason)
        self._notify(RdmaAbsent(reason))

    def _announce(self, server: ChannelServer, problems: tuple[str, ...]) -> None:
        for problem in problems:
            self._log.info("rdma.rail_skipped", problem=problem)
        for rail in server.rails:
            self._log.info(
                "rdma.rail_served", rail=rail.name, gid=rail.chosen.gid.text(),
                gid_index=rail.chosen.gid.index, mtu=128 << rail.abilities.mtu,
            )  # fmt: skip
        self._notify(RdmaServes())

    async def _do(self, server: ChannelServer, effect: RdmaEffect) -> None:
        if isinstance(effect, OpenPair):
            client, channel = effect.origin.identity, effect.wanted.channel
            answer = await self._open(server, effect)
            is_open = isinstance(answer, ChannelOpened)
            if not is_open:
                # The actor forgets the channel, so an older queue pair of it must end too.
                server.close(client, channel)
            self._notify(PairOpened(effect.origin, channel, is_open, answer))
        elif isinstance(effect, DropPair):
            server.close(effect.client, effect.channel)
        elif isinstance(effect, ServeMemory):
            server.grew(effect.usable_bytes)
        else:
            assert_never(effect)
        self._metrics.rdma_channels.set(server.channel_count)
        self._metrics.rdma_registered_bytes.set(server.registered_bytes())

    async def _open(self, server: ChannelServer, effect: OpenPair) -> ChannelOpened | Refused:
        wanted = effect.wanted
        rail = server.rail_for(wanted)
        if rail.link_layer == ETHERNET and len(wanted.gid) == 16:
            neighbours.ask(rail.chosen.gid, wanted.gid)
            with trio.move_on_after(neighbours.RESOLVE_S):
                # The kernel has no event for it.
                while not neighbours.is_known(wanted.gid):  # noqa: ASYNC110
                    await trio.sleep(neighbours.LOOK_S)
            if not neighbours.is_known(wanted.gid):
                what = f"no host answers for your GID {wanted.gid.hex(':', 2)} at {rail.name} here"
                return Refused(wanted.request, NO_PATH, what)
        return server.open(effect.origin.identity, wanted)
