"""The work actor that keeps a node's devices: it opens them, and does what the actor rdma says.

Owns    the node's rails and its ends of channels, through `ChannelServer`.
Hears   WantPair and DropPair from rdma; PoolGrew from the node.
Says    RdmaServes or RdmaAbsent once the devices have been looked for; PairOpened.
Limits  a queue pair a turn: making one takes a millisecond or so, under the interpreter's lock;
        `neighbours.RESOLVE_S` for a client whose address nobody has, while others wait.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, final

import trio
from typing_extensions import assert_never

from peercache.actors.mailboxes import (
    DropPair,
    PairOpened,
    PoolGrew,
    RdmaAbsent,
    RdmaHears,
    RdmaServes,
    VerbsHears,
    WantPair,
)
from peercache.actors.rdma.actor import NO_PATH
from peercache.actors.runtime import Mailbox
from peercache.errors import ConfigError
from peercache.memory.published import PublishedSegment
from peercache.observability.metrics import Metrics
from peercache.rdma import neighbours
from peercache.rdma.device import ETHERNET
from peercache.rdma.rail import Settings, open_rails
from peercache.rdma.serving import ChannelServer
from peercache.wire.messages.rdma import ChannelOpened
from peercache.wire.messages.session import Refused


@final
class RdmaServing:
    """A node's rdma, from the first look at its devices to their end."""

    def __init__(
        self,
        settings: Settings,
        segment: PublishedSegment,
        mailbox: Mailbox[VerbsHears],
        *,
        is_required: bool,
        tell: Callable[[RdmaHears], None],
        rng: random.Random,
        metrics: Metrics,
        log: Any,
    ) -> None:
        """Serve `segment`; `tell` hands a fact to the actor rdma.

        is_required: `fabric = rdma` makes the absence of a device an error.
        """
        self._settings = settings
        self._segment = segment
        self._mailbox = mailbox
        self._is_required = is_required
        self._tell = tell
        self._rng = rng
        self._metrics = metrics
        self._log = log
        self._server: ChannelServer | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Open the devices, then serve until cancelled; close them. May raise ConfigError."""
        # The first import of pyverbs, and each open, take a while.
        rails, problems = await trio.to_thread.run_sync(open_rails, self._settings)
        if not rails:
            self._is_absent("; ".join(problems))
            task_status.started()
            self._mailbox.close()
            return
        try:
            self._server = ChannelServer(rails, self._segment, rng=self._rng)
            failures = await trio.to_thread.run_sync(self._server.failures)
            if failures:
                self._is_absent("; ".join(failures))
                self._mailbox.close()
                task_status.started()
                return
            self._serve(self._server, problems)
            task_status.started()
            await self._work(self._server)
        except (rails[0].verbs.Error, OSError) as error:
            # Before anything is served, or in mid-air: what peers read over tcp goes on.
            self._is_absent(str(error))
            self._mailbox.close()
        finally:
            server, self._server = self._server, None
            if server is not None:
                server.close_all()
            else:
                for rail in rails:
                    rail.close()

    async def _work(self, server: ChannelServer) -> None:
        while True:
            await self._mailbox.wait()
            received = self._mailbox.take()
            if received is not None:
                await self._do(server, received[1])
            await trio.lowlevel.checkpoint()

    def _is_absent(self, reason: str) -> None:
        if self._is_required:
            raise ConfigError("fabric", f"rdma is asked for, and there is none: {reason}")
        self._log.info("rdma.devices_missing", reason=reason)
        self._tell(RdmaAbsent(reason))

    def _serve(self, server: ChannelServer, problems: tuple[str, ...]) -> None:
        for problem in problems:
            self._log.info("rdma.rail_skipped", problem=problem)
        for rail in server.rails:
            self._log.info(
                "rdma.rail_served", rail=rail.name, gid=rail.chosen.gid.text(),
                gid_index=rail.chosen.gid.index, mtu=128 << rail.abilities.mtu,
            )  # fmt: skip
        # What was populated while the devices were opened is told by nobody else.
        server.grew(self._segment.usable_bytes)
        self._tell(RdmaServes())

    async def _do(self, server: ChannelServer, fact: VerbsHears) -> None:
        if isinstance(fact, WantPair):
            answer = await self._open(server, fact)
            is_open = isinstance(answer, ChannelOpened)
            if not is_open:
                # One that was open, and was asked for anew: from now on nobody would end it.
                server.close(fact.origin.identity, fact.wanted.channel)
            self._tell(PairOpened(fact.origin, fact.wanted.channel, is_open, answer))
        elif isinstance(fact, DropPair):
            server.close(fact.client, fact.channel)
        elif isinstance(fact, PoolGrew):
            server.grew(fact.usable_bytes)
        else:
            assert_never(fact)
        self._metrics.rdma_channels.set(server.channel_count)
        self._metrics.rdma_registered_bytes.set(server.registered_bytes())

    async def _open(self, server: ChannelServer, want: WantPair) -> ChannelOpened | Refused:
        wanted = want.wanted
        rail = server.rail_for(wanted)
        if rail.link_layer == ETHERNET and len(wanted.gid) == 16:
            neighbours.ask(rail.chosen.gid, wanted.gid)
            with trio.move_on_after(neighbours.RESOLVE_S):
                # The kernel tells no event for it.
                while not neighbours.is_known(wanted.gid):  # noqa: ASYNC110
                    await trio.sleep(neighbours.LOOK_S)
            if not neighbours.is_known(wanted.gid):
                what = f"nobody answers for your GID {wanted.gid.hex(':', 2)} at {rail.name} here"
                return Refused(wanted.request, NO_PATH, what)
        return server.open(want.origin.identity, wanted)
