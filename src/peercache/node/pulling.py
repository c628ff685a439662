"""Pulling: reads pages of nodes that are drained into this node's memory, on threads of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import trio

from peercache.actors.effects import Pull
from peercache.actors.handover.actor import TAKINGS_MAX
from peercache.actors.mailboxes import PullDone
from peercache.config.settings import Config
from peercache.fabric.shm import ShmFabric
from peercache.fabric.tcp.client import TcpFabric
from peercache.memory.kernel import hugetlbfs_folders
from peercache.memory.layout import boot_id
from peercache.memory.published import PublishedSegment
from peercache.model.ids import name_of
from peercache.paths.takeover import arrived, reading_of
from peercache.trust.files import LiveTls
from peercache.trust.sharing import Sharing

CHANNELS_MAX: Final = 2
"""Channels to a node that is drained: one is read at a time, one may have just ended."""


@final
class Puller:
    """Performs what the handover actor asks for. Its threads begin with the first offers."""

    def __init__(
        self,
        config: Config,
        segment: PublishedSegment,
        *,
        tls: LiveTls | None,
        sharing: Sharing,
        tell: Callable[[PullDone], None],
        log: Any,
    ) -> None:
        """Read into `segment`; `tell` hears of each Pull once, on the loop. Call on the loop."""
        self._config = config
        self._segment = segment
        self._tls = tls
        self._sharing = sharing
        self._tell = tell
        self._log = log
        self._token = trio.lowlevel.current_trio_token()
        self._fabrics: tuple[ShmFabric | TcpFabric, ...] = ()
        self._opening = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def perform(self, pull: Pull) -> None:
        """Begin to read; never blocks."""
        if self._threads is None:
            # One for each offer that is taken at once: a slow one holds up no other.
            self._threads = ThreadPoolExecutor(TAKINGS_MAX, "peercache-pull")
        self._threads.submit(self._pull, pull)

    def close(self) -> None:
        """End, after the reads that are under way: they are bounded, and write to the segment."""
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
            self._log.error("handover.pull_failed", exc_info=True)
        done = PullDone(pull.job, outcome)
        try:
            self._token.run_sync_soon(self._tell, done)
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
            # The node leaves soon, and its memory lives as long as it is mapped anywhere.
            self._forget(pull.member.incarnation)
        outcome = arrived(pull.records, pull.namespace, fetched)
        self._log.debug(
            "handover.pulled", source=name_of(pull.member.incarnation), fabric=fabric.name,
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
            max_channels_per_peer=CHANNELS_MAX,
        )
        if config.fabric == "tcp":
            return (tcp,)
        return (ShmFabric(boot_id=boot_id(), sharing=self._sharing, folders=folders), tcp)
