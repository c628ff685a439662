"""One seed, one run: the only file that touches trio's private names.

Trio runs the tasks of one tick in random order. With its own switch for it the order depends on
nothing but the order in which tasks were made and on one random number generator, which is seeded
here. All other parts of a run have random streams of their own, so that one more draw in one part
does not affect the others.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import trio
from trio._core import _run

Result = TypeVar("Result")

FLAG = "_ALLOW_DETERMINISTIC_SCHEDULING"
GENERATOR = "_r"


def stream(seed: int, part: str) -> random.Random:
    """Return the random numbers of one part of a run; a string seed does not depend on hashes."""
    return random.Random(f"{seed}/{part}")


@contextmanager
def _deterministic_scheduling(seed: int) -> Iterator[None]:
    private: Any = _run
    if not isinstance(getattr(private, FLAG, None), bool) or not isinstance(
        getattr(private, GENERATOR, None), random.Random
    ):
        raise RuntimeError(f"trio {trio.__version__} has no {FLAG} and {GENERATOR} any more")
    before = getattr(private, FLAG)
    setattr(private, FLAG, True)
    getattr(private, GENERATOR).seed(f"{seed}/scheduler")
    try:
        yield
    finally:
        setattr(private, FLAG, before)


def run(main: Callable[[], Awaitable[Result]], *, seed: int, clock: trio.abc.Clock) -> Result:
    """Run `main` under trio, in the order that the seed decides."""
    # Finalisers run when the garbage collector runs, which depends on what ran before.
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with _deterministic_scheduling(seed):
            return trio.run(main, clock=clock)
    finally:
        if was_enabled:
            gc.enable()
