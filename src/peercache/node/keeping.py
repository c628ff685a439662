"""Keeping: a node's watchers go on after an exception of theirs; and what an exception says.

A watcher looks at something again and again: members, certificates, connections. What it cannot do
now, for want of a descriptor or a thread, it can do later; the node goes on serving meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import trio

if sys.version_info < (3, 11):  # pragma: no cover - trio brings it there
    from exceptiongroup import BaseExceptionGroup

AGAIN_S = 1.0
"""Pause after an exception: what is missing does not come back within less."""


async def keep(name: str, watch: Callable[[], Awaitable[None]], log: Any) -> None:
    """Run a watcher until cancelled; log each exception of it, and begin it again.

    name: says in the log which one it is.
    """
    while True:
        try:
            await watch()
        except Exception as error:
            log.error("node.watcher_failed", watcher=name, problem=repr(error), exc_info=True)
        else:
            return
        await trio.sleep(AGAIN_S)


def describe(error: BaseException) -> list[BaseException]:
    """Return the errors that people should read out of nested exception groups."""
    if isinstance(error, BaseExceptionGroup):
        return [inner for group in error.exceptions for inner in describe(group)]
    return [error]
