"""One run from its seed: a world, faults, and the check that everything heals."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import attrs
import trio

from sims import determinism
from sims.clock import Deadlock, TooSlow, VirtualClock
from sims.liveness import Liveness
from sims.nemesis import Nemesis
from sims.swarm import Options, draw
from sims.trace import Trace, Violation
from sims.world import WALL_LIMIT_S, World

VIRTUAL_LIMIT_S = 300.0
"""Longest run: its phases take less than half of it."""

QUIET_S = 25.0
"""How long calls may take to end after the last one began: that of a paused client takes as
long."""


@attrs.frozen(kw_only=True)
class Outcome:
    """The result of a run. checker: "" if nothing was found."""

    seed: int
    checker: str
    detail: str
    digest: str
    messages: int
    steps: int
    virtual_s: float
    wall_s: float
    healed_s: float
    counts: dict[str, int]
    last_lines: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.checker


async def _phases(world: World) -> float:
    """Inject faults, then check that everything heals; return how long it took."""
    with trio.fail_after(VIRTUAL_LIMIT_S):
        async with trio.open_nursery() as nursery:
            world.nursery = nursery
            nursery.start_soon(world.network.run)
            nursery.start_soon(_watch, world)
            nursery.start_soon(world.people)
            harm = trio.CancelScope()
            nursery.start_soon(_harm, world, harm)
            await trio.sleep(world.options.safety_s)
            harm.cancel()
            await calm_down(world)
            world.trace.line("phase", "liveness")
            healed_s = await Liveness(world, world.stream("liveness")).demand()
            nursery.cancel_scope.cancel()
    return healed_s


async def _harm(world: World, scope: trio.CancelScope) -> None:
    with scope:
        await trio.sleep(1.0)
        await Nemesis(world, world.stream("nemesis")).run()


async def _watch(world: World) -> None:
    while True:
        await trio.sleep(1.0)
        if world.clock.overrun:
            raise TooSlow(f"more than {WALL_LIMIT_S} s of real time")
        if world.clock.deadlocked:
            raise Deadlock("no task waits for a time")


async def calm_down(world: World) -> None:
    """End every fault, and let running calls end."""
    world.is_safety = False
    world.network.heal()
    await trio.sleep_until(max(place.paused_until for place in world.places.values()))
    with trio.move_on_after(QUIET_S):
        while world.calls.now_in_flight:
            await trio.sleep(0.1)
    if world.calls.now_in_flight:
        raise Violation("deadline", f"{world.calls.now_in_flight} calls never ended")


def play(
    seed: int,
    *,
    show: Callable[[str], None] | None = None,
    change: Callable[[Options], Options] | None = None,
) -> Outcome:
    """Run a seed. show: called with each line of the trace; change: alters the drawn options."""
    options = draw(determinism.stream(seed, "swarm"), seed)
    if change is not None:
        options = change(options)
    clock = VirtualClock(wall_s=WALL_LIMIT_S)
    trace = Trace(clock.current_time, show=show)
    for line in options.lines():
        trace.line("option", line.strip())
    worlds: list[World] = []

    healed_s = 0.0

    async def main() -> None:
        nonlocal healed_s
        worlds.append(World(options, clock, trace))
        healed_s = await _phases(worlds[0])

    started = time.monotonic()
    checker = detail = ""
    try:
        determinism.run(main, seed=seed, clock=clock)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        checker, detail = explained(error)
        trace.line("failed", checker, detail)
    made = worlds[0]
    return Outcome(
        seed=seed,
        checker=checker,
        detail=detail,
        digest=trace.digest(),
        messages=made.network.delivered_count,
        steps=sum(w.steps for node in made.nodes.values() for w in node.watched.values()),
        virtual_s=clock.current_time(),
        wall_s=time.monotonic() - started,
        healed_s=healed_s,
        counts=made.calls.counts | {"spilled": made.truth.spilled},
        last_lines=tuple(trace.last),
    )


def staged(
    options: Options,
    act: Callable[[World], Awaitable[None]],
    *,
    show: Callable[[str], None] | None = None,
) -> tuple[str, str]:
    """Play a story in a world of its own; return the checker that has found something, and a
    sentence; "" for nothing. show: called with each line of the trace.
    """
    clock = VirtualClock(wall_s=WALL_LIMIT_S)
    world = World(options, clock, Trace(clock.current_time, show=show))
    try:
        determinism.run(partial(act, world), seed=options.seed, clock=clock)
    except Exception as error:
        return explained(error)
    return "", ""


def explained(error: BaseException) -> tuple[str, str]:
    """Return the checker and the message of the error that ended a run."""
    leaves = list(_leaves(error))
    found = [leaf for leaf in leaves if isinstance(leaf, Violation)]
    if found:
        return found[0].checker, found[0].detail
    leaf = leaves[0]
    place = leaf.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place is not None else ""
    kind = "assertion" if isinstance(leaf, AssertionError) else type(leaf).__name__
    return kind, f"{leaf} ({where})"


def _leaves(error: BaseException) -> list[BaseException]:
    inner = getattr(error, "exceptions", None)
    return [error] if inner is None else [leaf for one in inner for leaf in _leaves(one)]
