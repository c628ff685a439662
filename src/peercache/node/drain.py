"""A drain: an operator takes a node out; it hands its pages over first, and then leaves.

At the nodes that stay, `Puller` reads the pages into their memory, on threads of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, final

import attrs
import numpy as np
import trio

from peercache.actors.effects import Pull
from peercache.actors.mailboxes import DrainBegan, DrainCancelled, PullDone
from peercache.actors.placement.offers import (
    HANDED_OVER,
    HANDING_OVER,
    SERVING,
    Giving,
)
from peercache.actors.placement.takings import (
    TAKINGS_MAX,
)
from peercache.config.settings import Config
from peercache.fabric.shm import ShmFabric
from peercache.fabric.tcp.client import TcpFabric
from peercache.memory.kernel import hugetlbfs_folders
from peercache.memory.layout import boot_id
from peercache.memory.published import PublishedSegment
from peercache.model import status
from peercache.model.ids import name_of
from peercache.paths.takeover import arrived, reading_of
from peercache.trust.files import LiveTls
from peercache.trust.sharing import Sharing
from peercache.wire.messages.membership import CancelDrain, DrainNode, RequestDrainState

LEAVING: Final = "leaving"
"""After the hand-over: the node sends Goodbye, and stops."""

WITHIN_MAX_S: Final = 24 * 3600.0

LOOK_S: Final = 0.05
PROGRESS_S: Final = 1.0

NOTIFY_S: Final = 1.0
"""Between the last page that is handed over and the goodbye: owners of records learn of the new
holders meanwhile, and an operator who watches sees the end."""


@final
@attrs.define(eq=False, kw_only=True)
class Drainer:
    """The drain of one node.

    giving:   the progress of the placement actor.
    others:   returns the number of other live nodes.
    within_s: the time limit, unless the operator gives another one.
    leave:    begins the graceful stop.
    """

    giving: Giving = attrs.field(kw_only=False)
    notify: Callable[[DrainBegan | DrainCancelled], None]
    others: Callable[[], int]
    within_s: float
    leave: Callable[[], None]
    nursery: trio.Nursery
    log: Any
    _scope: trio.CancelScope | None = None
    _is_leaving: bool = False
    _was_alone: bool = False

    @property
    def state(self) -> str:
        """Return serving, handing_over or leaving."""
        if self._is_leaving:
            return LEAVING
        return HANDING_OVER if self._scope is not None else SERVING

    def answer(
        self, message: DrainNode | CancelDrain | RequestDrainState
    ) -> dict[str, int | float | str]:
        """Handle an operator's request; return the progress, and the problem if there is one."""
        problem = ""
        if isinstance(message, DrainNode):
            self._begin(message.within_s)
        elif isinstance(message, CancelDrain):
            problem = self._cancel()
        if self._was_alone and not problem:
            problem = "no other live node takes its pages: this is the last node of its cluster"
        progress = self.giving.progress
        return {"state": self.state, "problem": problem, **attrs.asdict(progress)}

    def status(self) -> status.Draining:
        """Return the progress of the drain, as a status reports it."""
        if self.state == SERVING:
            return status.Draining()
        progress = self.giving.progress
        done = progress.given + progress.there
        bytes_done = progress.given_bytes + progress.there_bytes
        return status.Draining(
            active=True,
            phase=self.state,
            pages=done + progress.lost + progress.left,
            pages_done=done,
            bytes=bytes_done + progress.lost_bytes + progress.left_bytes,
            bytes_done=bytes_done,
        )

    def _begin(self, within_s: float) -> None:
        """Begin, unless it has begun: a second drain joins the first one."""
        if self._scope is not None or self._is_leaving:
            return
        within_s = min(within_s, WITHIN_MAX_S) if within_s > 0 else self.within_s
        self._was_alone = self.others() == 0
        self._scope = trio.CancelScope()
        self.nursery.start_soon(self._run, self._scope, within_s)

    def _cancel(self) -> str:
        """Take it back; return why not."""
        if self._is_leaving:
            return "too late to cancel: the node is leaving"
        if self._scope is None:
            return "this node is not being drained"
        self._scope.cancel()
        self._scope = None
        self._was_alone = False
        self.notify(DrainCancelled())
        self.log.info("drain.cancelled", given=self.giving.progress.given)
        return ""

    async def _run(self, scope: trio.CancelScope, within_s: float) -> None:
        with scope:
            began = logged_at = trio.current_time()
            self.log.info("drain.began", within_s=within_s, other_nodes=self.others())
            self.notify(DrainBegan(began + within_s))
            # The actor begins when it learns of it, and ends by itself.
            while self.giving.state != HANDED_OVER:
                await trio.sleep(LOOK_S)
                now = trio.current_time()
                if now - logged_at >= PROGRESS_S:
                    logged_at = now
                    self.log.info("drain.progressed", **attrs.asdict(self.giving.progress))
            self._is_leaving = True
            self.log.info(
                "drain.ended",
                seconds=round(trio.current_time() - began, 3),
                **attrs.asdict(self.giving.progress),
            )
            await trio.sleep(NOTIFY_S)
            self.leave()


CHANNELS_MAX: Final = 2
"""Channels to a node that offers pages: one is read at a time, one may have just ended."""


@final
@attrs.define(eq=False)
class Puller:
    """Performs the Pull effects of the placement actor. Its threads start with the first Pull.

    It is made on the loop, and reads into `segment`; `notify` is called once per Pull, on the loop.
    """

    _config: Config
    _segment: PublishedSegment
    _tls: LiveTls | None = attrs.field(kw_only=True)
    _sharing: Sharing = attrs.field(kw_only=True)
    _notify: Callable[[PullDone], None] = attrs.field(kw_only=True)
    _log: Any = attrs.field(kw_only=True)
    _token: trio.lowlevel.TrioToken = attrs.field(
        factory=trio.lowlevel.current_trio_token, init=False
    )
    _fabrics: tuple[ShmFabric | TcpFabric, ...] = attrs.field(default=(), init=False)
    _mapped: dict[int, None] = attrs.field(factory=dict, init=False)
    """Nodes whose memory stays mapped, as they are read again and again."""
    _opening: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _threads: ThreadPoolExecutor | None = attrs.field(default=None, init=False)

    def follow(self, live: Collection[int]) -> None:
        """Unmap the memory of nodes that are not members any more."""
        for gone in [one for one in list(self._mapped) if one not in live]:
            del self._mapped[gone]
            self._forget(gone)

    def perform(self, pull: Pull) -> None:
        """Start the read of a Pull; never blocks."""
        if self._threads is None:
            # One for each offer that is taken at once: a slow one holds up no other.
            self._threads = ThreadPoolExecutor(TAKINGS_MAX, "peercache-pull")
        self._threads.submit(self._pull, pull)

    def close(self) -> None:
        """Stop, after the reads in progress: they are bounded, and write to the segment."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for fabric in self._fabrics:
            fabric.close()

    def _pull(self, pull: Pull) -> None:
        outcome = bytes(len(pull.records))
        try:
            outcome = self._read(pull)
        except Exception:
            # The slots are given back all the same, or the pool would lose them.
            self._log.error("placement.pull_failed", exc_info=True)
        done = PullDone(pull.job, outcome)
        try:
            self._token.run_sync_soon(self._notify, done)
        except trio.RunFinishedError:
            return  # The node has stopped, and its pool with it.

    def _read(self, pull: Pull) -> bytes:
        with self._opening:
            self._fabrics = self._fabrics or self._open_fabrics()
        begin = np.uint64(self._segment.pages.__array_interface__["data"][0])
        reading = reading_of(pull.member, pull.records, pull.offsets + begin)
        fabric = next(fabric for fabric in self._fabrics if fabric.reaches(pull.member))
        try:
            fetched = fabric.read(reading, time.monotonic() + pull.within_s)
        finally:
            if pull.is_leaving:
                # Its memory lives as long as it is mapped anywhere.
                self._forget(pull.member.incarnation)
            else:
                self._mapped[pull.member.incarnation] = None
        outcome = arrived(pull.records, pull.namespace, fetched)
        self._log.debug(
            "placement.pulled", source=name_of(pull.member.incarnation), fabric=fabric.name,
            pages=outcome.count(1), offered=len(outcome), failure=fetched.failure,
        )  # fmt: skip
        return outcome

    def _forget(self, incarnation: int) -> None:
        for fabric in self._fabrics:
            fabric.forget(incarnation)

    def _open_fabrics(self) -> tuple[ShmFabric | TcpFabric, ...]:
        """Return what reads, the best first. tcp is left where it is asked for."""
        config = self._config
        named = [folder for folder in (config.shm_dir, config.hugepages_dir) if folder]
        folders = {str(Path(folder)) for folder in (*hugetlbfs_folders(), *named)}
        tcp = TcpFabric(
            cluster=config.cluster,
            granule=config.granule,
            tls=self._tls,
            sharing=self._sharing,
            max_channels_per_peer=CHANNELS_MAX,
        )
        if config.fabric == "tcp":
            return (tcp,)
        return (ShmFabric(boot_id=boot_id(), sharing=self._sharing, folders=folders), tcp)
