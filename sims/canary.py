"""The type of a planted bug: `sims.canaries` has all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from sims.swarm import Options, smaller

Patch = tuple[Any, str, Callable[[Any], Any]]
"""An object, its attribute, and the function that returns a wrong value for the correct one."""


@attrs.frozen
class Canary:
    """One planted bug.

    seeds_max: within how many seeds it must be found. change: modifies the options of those seeds.
    story: a story that is played with each seed instead of a run; it returns the checker that found
           it.
    """

    name: str
    what: str
    seeds_max: int
    patches: tuple[Patch, ...] = ()
    plant: str = ""
    change: Callable[[Options], Options] = smaller
    story: Callable[[int], str] | None = None
