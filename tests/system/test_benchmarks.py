"""The benchmarks of developers: they measure what they say, from a checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.null_device import instant_fabric
from benchmarks.own_time import BATCH, GRANULE, PAGE_BYTES, Batch, own_time_us
from peercache.model.seal import SEAL

ROOT = Path(__file__).parents[2]


def test_own_time_a_page_is_a_few_microseconds() -> None:
    """On a quiet machine it is 4 to 5; several times that is a bug."""
    for _ in range(20):  # Other processes make single runs slow.
        figures = own_time_us()
        slowest_us = max(figures.values())
        if slowest_us < 30 and figures["cpu_us_page_fabric"] < figures["cpu_us_page"]:
            break

    assert min(figures.values()) > 0
    assert slowest_us < 30, figures
    assert figures["cpu_us_page_fabric"] < figures["cpu_us_page"]


@pytest.mark.parametrize("apart", [1, 2])
def test_what_is_timed_is_a_get_whose_every_page_is_a_hit(apart: int) -> None:
    """Seals arrive and are judged; a path that ended early would be quick, and worth nothing."""
    target = np.zeros(2 * BATCH * PAGE_BYTES, np.uint8)
    seals = np.zeros(target.nbytes // GRANULE, SEAL)
    fabric = instant_fabric(page_bytes=target.nbytes, granule=GRANULE, seals=seals)
    fabric.register("bench", int(target.ctypes.data), target.nbytes, target)
    places = np.arange(BATCH, dtype=np.uint64) * np.uint64(apart)

    batch = Batch(fabric, target, seals, places)
    batch.commit()
    outcome = batch.get()
    fabric.close()

    assert outcome.hits.all()
    assert outcome.pages_by_fabric == {"rdma": BATCH}


WALK_MAX = {
    "get, warm, tcp": (12, 40),
    "get, cold, tcp": (16, 70),
    "get, warm, shm": (13, 50),
    "set": (14, 70),
}
"""Files that a call enters, and its moves between them: what a reader has to follow."""


@pytest.mark.slow  # it traces calls of three processes
def test_a_call_walks_through_few_files() -> None:
    """A step more is seen here, and is worth a thought."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.walk", "--json"],
        capture_output=True, text=True, check=False, timeout=300, cwd=ROOT,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    walks = json.loads(done.stdout)
    assert walks.keys() == WALK_MAX.keys()
    for call, (files, moves) in WALK_MAX.items():
        assert walks[call]["files"] <= files, (call, walks[call])
        assert walks[call]["moves"] <= moves, (call, walks[call])


@pytest.mark.slow  # it measures time, which tests beside it would spoil
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="wants two processors")
def test_tax_prints_the_loss_of_each_shape() -> None:
    """A small run through real processes; the reader verifies every byte that it is served."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tax", "--json", "--pages", "8", "--batch", "4",
         "--page-bytes", "64KiB", "--seconds", "0.1"],
        capture_output=True, text=True, check=False, timeout=600, cwd=ROOT,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    for shape in ("embedded", "standalone"):
        assert figures[f"tax_{shape}"] < 1
        assert figures[f"tax_{shape}_floor"] < 1
        assert figures[f"tax_{shape}_served_gb_s"] > 0
