"""A node's disk: the page store on its threads, between the disk actor and the folder.

`flush_disk` writes pages that are only in memory before a graceful stop, within a given time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, final

import attrs
import trio

from peercache.actors.disk.actor import DiskTier
from peercache.actors.disk.open_index import indexed_of
from peercache.actors.mailboxes import DiskIndexed, RequestFlush
from peercache.actors.ports import DiskEffect, DiskEnded, DiskFact, DiskOpened
from peercache.config.settings import Config
from peercache.memory.published import PublishedSegment
from peercache.storage.mover import PoolMemory
from peercache.storage.store import DiskStore

OPENING = "it is being opened"

RECOVERED_S = 10.0
"""How long writes must succeed before it is logged: a full file system sometimes has room."""


@final
class NodeDisk:
    """The page store of a node, from opening in the background to a bounded close.

    problem: why the disk is not usable any more, or not yet; "" while it works.
    """

    def __init__(
        self,
        config: Config,
        segment: PublishedSegment,
        notify: Callable[[DiskFact | DiskIndexed], None],
        log: Any,
    ) -> None:
        """Start to open the folder; the node need not wait. Call on the node's loop.

        notify: passes a message to the disk actor, on the loop.
        """
        self.problem = OPENING
        self._notify = notify
        self._log = log
        self._token = trio.lowlevel.current_trio_token()
        # Deadlines are in the loop's time, which its threads cannot read.
        ahead_s = trio.current_time() - time.perf_counter()
        self._store = DiskStore(
            config.disk_path,
            size_bytes=config.disk_size,
            cluster=config.cluster,
            pool=PoolMemory(segment.pages, segment.words, config.granule),
            notify=self._on_fact,
            free_floor=config.disk_free_floor,
            clock=lambda: time.perf_counter() + ahead_s,
            log=log,
        )
        self._store.start()

    @property
    def is_opening(self) -> bool:
        """Whether the folder is being opened, without an error so far."""
        return self.problem == OPENING and not self._store.waits_for_room

    def perform(self, effect: DiskEffect) -> None:
        """Perform an effect of the disk actor; never blocks."""
        self._store.perform(effect)

    def close(self) -> None:
        """Close the folder, within a few seconds even if the disk hangs."""
        self._store.close()

    def _on_fact(self, fact: DiskFact) -> None:
        """Handle a message from a thread of the store."""
        # Here and not on the loop, which would be blocked meanwhile.
        message = indexed_of(fact) if isinstance(fact, DiskOpened) else fact
        try:
            self._token.run_sync_soon(self._take, message)
        except trio.RunFinishedError:
            return  # The node has stopped, and no actor waits for an answer.

    def _take(self, fact: DiskFact | DiskIndexed) -> None:
        if isinstance(fact, DiskIndexed):
            self.problem = ""
        elif isinstance(fact, DiskEnded):
            self.problem = fact.reason
            self._log.warning("disk.ended", reason=fact.reason)
        self._notify(fact)


@final
@attrs.define(eq=False)
class DiskTroubles:
    """Logs and keeps when an open disk stops accepting pages, and when it accepts them again.

    trouble: returns why it does not, "" if it does. path: `disk_path`.
    """

    _trouble: Callable[[], str]
    _path: str = attrs.field(kw_only=True)
    _log: Any = attrs.field(kw_only=True)
    _clock: Callable[[], float] = attrs.field(default=time.monotonic, kw_only=True)
    _logged: str = attrs.field(default="", init=False)
    _seen_at: float = attrs.field(default=0.0, init=False)

    def look(self) -> None:
        """Log a change; housekeeping calls this once a second."""
        trouble, now = self._trouble(), self._clock()
        if trouble:
            self._seen_at = now
            if trouble != self._logged:
                self._log.warning("disk.writes_failed", path=self._path, why=trouble)
                self._logged = trouble
        elif self._logged and now - self._seen_at >= RECOVERED_S:
            self._log.info("disk.writes_recovered", path=self._path)
            self._logged = ""

    def current(self) -> str:
        """Return why the disk does not accept pages, "" once it has accepted them for a while.

        On a full file system single writes succeed, where an evicted page had its room.
        """
        return self._trouble() or self._logged


def disk_settings_unused(config: Config) -> list[str]:
    """Return the disk settings that are given although the disk tier is disabled."""
    given = attrs.asdict(config, recurse=False)
    default = attrs.asdict(Config.load({}), recurse=False)
    named = ("disk_path", "disk_size", "write_policy")
    return [] if config.disk_enabled else [n for n in named if given[n] != default[n]]


EMBEDDED_S = 1.0
"""The maximum for a node in an engine's process, because it must not delay the exit."""

LOOK_S = 0.02
PROGRESS_S = 1.0


async def flush_disk(
    disk: NodeDisk,
    tier: DiskTier,
    notify: Callable[[RequestFlush], None],
    *,
    within_s: float,
    cut_short: trio.Event,
    log: Any,
) -> None:
    """Write all pages that are only in memory to disk; log the progress once a second.

    notify: passes a message to the disk actor. It ends after `within_s`, or with `cut_short`: pages
          that are not written by then are lost with the memory.
    """
    if disk.problem:
        log.warning("disk.flush_skipped", reason=disk.problem)
        return
    started = logged_at = trio.current_time()
    log.info("disk.flush_started", within_s=within_s)
    notify(RequestFlush())
    left = tier.flush_left()
    while left != 0 and not disk.problem and not cut_short.is_set():
        now = trio.current_time()
        if now - started >= within_s:
            break
        if now - logged_at >= PROGRESS_S:
            logged_at = now
            log.info("disk.flush_progressed", pages_left=left)
        with trio.move_on_after(LOOK_S):
            await cut_short.wait()
        left = tier.flush_left()
    seconds = round(trio.current_time() - started, 3)
    log_end = log.info if left == 0 else log.warning
    log_end("disk.flush_ended", pages_left=left, seconds=seconds, problem=disk.problem)
