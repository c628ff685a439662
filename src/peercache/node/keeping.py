"""Keeping: a node's watchers go on after an exception of theirs.

A watcher looks at something again and again: members, certificates, connections. What it cannot do
now, for want of a descriptor or a thread, it can do later; the node goes on serving meanwhile.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

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
