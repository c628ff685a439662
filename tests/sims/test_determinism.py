"""One seed, one run: in this process, in another, whatever Python's hashes are."""

from __future__ import annotations

import importlib
import random

import pytest
import trio

from sims import determinism
from sims.canaries import SET_ORDER, digests_of
from sims.clock import VirtualClock
from sims.play import play
from sims.swarm import smaller

SCHEDULER = importlib.import_module("trio._core._run")
"""What a simulation changes, and gives back."""

SEED = 5
SEEDS = (5, pytest.param(103, marks=pytest.mark.slow))
HASH_SEEDS = (1, 2)


async def _race() -> list[int]:
    """Return the order in which tasks that wake together come."""
    order: list[int] = []

    async def runner(number: int) -> None:
        await trio.sleep(1.0)
        order.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(runner, number)
    return order


def test_the_scheduler_follows_its_seed() -> None:
    """The same seed gives one order of tasks that wake together, another seed another."""
    orders = [
        tuple(determinism.run(_race, seed=seed, clock=VirtualClock())) for seed in (1, 1, 2, 3, 4)
    ]

    assert orders[0] == orders[1]
    assert len(set(orders)) > 2


def test_the_scheduler_is_left_as_it_was() -> None:
    """A run of the simulation changes nothing for other users of trio in the process."""
    private = vars(SCHEDULER)
    before = private[determinism.FLAG]

    determinism.run(_race, seed=1, clock=VirtualClock())

    assert private[determinism.FLAG] == before


def test_a_trio_without_the_private_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Better no simulation than one that cannot be replayed."""
    monkeypatch.delattr(SCHEDULER, determinism.GENERATOR)

    with pytest.raises(RuntimeError, match="has no"):
        determinism.run(_race, seed=1, clock=VirtualClock())


def test_parts_of_a_run_draw_from_streams_of_their_own() -> None:
    """One more draw in one part does not reshuffle another."""
    first = determinism.stream(7, "network")
    second = determinism.stream(7, "nemesis")
    again = determinism.stream(7, "nemesis")
    first.random()

    assert isinstance(first, random.Random)
    assert second.random() == again.random()


def test_virtual_time_passes_without_real_time() -> None:
    """An hour is over at once, to the second."""

    async def an_hour() -> float:
        await trio.sleep(3600.0)
        return trio.current_time()

    assert determinism.run(an_hour, seed=1, clock=VirtualClock()) == 3600.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_has_one_digest_whatever_the_hashes_are(seed: int) -> None:
    """Processes with different PYTHONHASHSEED, and this one, see the very same run."""
    digests = set(digests_of(seed, "", HASH_SEEDS))

    assert digests == {play(seed, change=smaller).digest}


def test_the_order_of_a_set_is_noticed() -> None:
    """Planted: whom to ask is taken from a set of strings; then the digests differ."""
    digests = set(digests_of(SEED, SET_ORDER, HASH_SEEDS))

    assert len(digests) > 1
