"""Flushing: what a node writes to its disk before a graceful stop, within a stated time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from peercache.actors.disk.actor import DiskTier
from peercache.actors.mailboxes import RequestFlush
from peercache.node.disk import NodeDisk

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
