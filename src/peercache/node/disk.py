"""A node's disk: the page store on its threads, between the disk actor and the folder.

`flush_disk` writes what is only in memory before a graceful stop, within a stated time.
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
"""How long writes must succeed before the log says so: a full file system has room now and then."""


@final
class NodeDisk:
    """The page store of a node, from opening in the background to a bounded close.

    problem: why there is no disk any more, or not yet; "" while it works.
    """

    def __init__(
        self,
        config: Config,
        segment: PublishedSegment,
        tell: Callable[[DiskFact | DiskIndexed], None],
        log: Any,
    ) -> None:
        """Begin to open the folder; the node need not wait. Call on the node's loop.

        tell: hands a fact to the disk actor, on the loop.
        """
        self.problem = OPENING
        self._tell = tell
        self._log = log
        self._token = trio.lowlevel.current_trio_token()
        # Deadlines are in the loop's time, which its threads cannot ask for.
        ahead_s = trio.current_time() - time.perf_counter()
        self._store = DiskStore(
            config.disk_path,
            size_bytes=config.disk_size,
            cluster=config.cluster,
            pool=PoolMemory(segment.pages, segment.words, config.granule),
            tell=self._hear,
            free_floor=config.disk_free_floor,
            clock=lambda: time.perf_counter() + ahead_s,
            log=log,
        )
        self._store.start()

    @property
    def is_opening(self) -> bool:
        """Whether the folder is being opened, and nothing is in the way of it."""
        return self.problem == OPENING and not self._store.waits_for_room

    def perform(self, effect: DiskEffect) -> None:
        """Do what the disk actor says; never blocks."""
        self._store.perform(effect)

    def close(self) -> None:
        """Let go of the folder, within a few seconds whatever the disk does."""
        self._store.close()

    def _hear(self, fact: DiskFact) -> None:
        """Take a fact from a thread of the store."""
        # Here and not on the loop: it would are paused meanwhile.
        told = indexed_of(fact) if isinstance(fact, DiskOpened) else fact
        try:
            self._token.run_sync_soon(self._take, told)
        except trio.RunFinishedError:
            return  # The node has stopped, and no actor waits for an answer.

    def _take(self, fact: DiskFact | DiskIndexed) -> None:
        if isinstance(fact, DiskIndexed):
            self.problem = ""
        elif isinstance(fact, DiskEnded):
            self.problem = fact.reason
            self._log.warning("disk.ended", reason=fact.reason)
        self._tell(fact)


@final
@attrs.define(eq=False)
class DiskTroubles:
    """Logs that pages begin not to get to a disk that is open, and that they do again.

    trouble: returns why they do not now, "" if they do. path: `disk_path`.
    """

    _trouble: Callable[[], str]
    _path: str = attrs.field(kw_only=True)
    _log: Any = attrs.field(kw_only=True)
    _clock: Callable[[], float] = attrs.field(default=time.monotonic, kw_only=True)
    _told: str = attrs.field(default="", init=False)
    _seen_at: float = attrs.field(default=0.0, init=False)

    def look(self) -> None:
        """Log what has changed; housekeeping looks once a second."""
        trouble, now = self._trouble(), self._clock()
        if trouble:
            self._seen_at = now
            if trouble != self._told:
                self._log.warning("disk.writes_failed", path=self._path, why=trouble)
                self._told = trouble
        elif self._told and now - self._seen_at >= RECOVERED_S:
            self._log.info("disk.writes_recovered", path=self._path)
            self._told = ""


def disk_settings_unused(config: Config) -> list[str]:
    """Return the settings of a disk tier that are given, where none is asked for."""
    given = attrs.asdict(config, recurse=False)
    default = attrs.asdict(Config.load({}), recurse=False)
    named = ("disk_path", "disk_size", "write_policy")
    return [] if config.disk_enabled else [n for n in named if given[n] != default[n]]


EMBEDDED_S = 1.0
"""The most for a node in an engine's process, whose exit it must not hold up."""

LOOK_S = 0.02
PROGRESS_S = 1.0


async def flush_disk(
    disk: NodeDisk,
    tier: DiskTier,
    tell: Callable[[RequestFlush], None],
    *,
    within_s: float,
    cut_short: trio.Event,
    log: Any,
) -> None:
    """Have all pages written that are only in memory; log how far it came, once a second.

    tell: hands a message to the disk actor. It ends after `within_s`, or with `cut_short`: what is
    not written by then is lost with the memory.
    """
    if disk.problem:
        log.warning("disk.flush_skipped", reason=disk.problem)
        return
    started = told_at = trio.current_time()
    log.info("disk.flush_started", within_s=within_s)
    tell(RequestFlush())
    left = tier.flush_left()
    while left != 0 and not disk.problem and not cut_short.is_set():
        now = trio.current_time()
        if now - started >= within_s:
            break
        if now - told_at >= PROGRESS_S:
            told_at = now
            log.info("disk.flush_progressed", pages_left=left)
        with trio.move_on_after(LOOK_S):
            await cut_short.wait()
        left = tier.flush_left()
    seconds = round(trio.current_time() - started, 3)
    tell_end = log.info if left == 0 else log.warning
    tell_end("disk.flush_ended", pages_left=left, seconds=seconds, problem=disk.problem)
