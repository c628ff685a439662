"""Keeping: a watcher goes on after an exception of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import trio

from peercache.node.housekeeping import keep


async def test_a_watcher_that_fails_begins_again_and_says_why(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Also where tasks of its own have failed; the node's other tasks notice nothing."""
    said: list[tuple[str, str]] = []
    log: Any = SimpleNamespace(
        error=lambda _, watcher, problem, **__: said.append((watcher, problem))
    )
    began: list[float] = []

    async def fail() -> None:
        raise OSError(24, "Too many open files")

    async def watch() -> None:
        began.append(trio.current_time())
        if len(began) < 3:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail)
        await trio.sleep_forever()

    with trio.move_on_after(60.0) as waited:
        await keep("certificates", watch, log)

    assert waited.cancelled_caught
    assert len(began) == 3
    assert [watcher for watcher, _ in said] == ["certificates"] * 2
    assert all("Too many open files" in problem for _, problem in said)
