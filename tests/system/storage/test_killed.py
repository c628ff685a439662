"""kill -9 at any moment under load: the folder opens, no page is wrong, no byte is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from peercache.actors.ports import DISK_DAMAGED, DISK_REPLACED
from tests.system.storage.killed_process import KEYS, SIZE_BYTES
from tests.unit.storage.rig import Rig, key_of

MOMENT_S_MAX = 0.4
"""Up to here a writer lives: before, within and after its first commits of the index."""


class Writers:
    """Starts writers, one at a time, and kills them."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.storage.killed_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip

    def kill_one(self, folder: Path, seed: int, after_s: float) -> None:
        """Let a writer write for a while and kill it, whatever it is doing."""
        self.process.stdin.write(f"{folder} {seed}\n")
        self.process.stdin.flush()
        reported = {self.process.stdout.readline().strip() for _ in range(2)}
        assert "writing" in reported, reported
        (pid,) = reported - {"writing"}
        time.sleep(after_s)  # the random moment itself, which nothing waits for
        os.kill(int(pid), signal.SIGKILL)
        assert self.process.stdout.readline().strip() == f"ended {-signal.SIGKILL}"

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def writers() -> Iterator[Writers]:
    """Have one at hand."""
    found = Writers()
    yield found
    found.close()


def check_opens_whole(folder: Path, rng: random.Random) -> tuple[int, int]:
    """Open, load everything, account for every byte; return pages that were right, and damaged."""
    if rng.random() < 0.3:
        (folder / "0" / "index.sqlite").unlink(missing_ok=True)
    with Rig(folder, size_bytes=SIZE_BYTES) as rig:
        held = [n for n in range(KEYS) if rig.index.find(key_of(n))[0] >= 0]
        assert len(held) == len(rig.opened.entries)
        found: list[str] = []
        for begin in range(0, len(held), 16):
            # `load` fails by itself for one wrong byte.
            found += rig.load(held[begin : begin + 16])
        # A kill leaves half a page, or the row of one whose place another page has now.
        lost = (str(DISK_DAMAGED), str(DISK_REPLACED))
        damaged = [n for n, what in zip(held, found, strict=True) if what in lost]
        assert found.count("right") + len(damaged) == len(held), found
        rig.index.remove(rig.index.find(b"".join(key_of(n) for n in damaged)))
        rig.index.check()
        figures = rig.index.figures()
        rows = rig.index.entries(rig.index.hottest_first())
        slots = int(rows["slot"].astype(np.int64).sum()) * 4096
        assert figures["disk_bytes_used"] == slots
        assert figures["disk_bytes_used"] + figures["disk_bytes_free"] == figures["disk_bytes"]
        assert figures["disk_bytes"] == rig.opened.usable_bytes
        files = list((folder / "0").iterdir())
        assert sum(file.stat().st_blocks * 512 for file in files) <= SIZE_BYTES
        slabs = [file.stat().st_size for file in files if file.suffix == ".pcs"]
        assert len(slabs) * rig.opened.slab_bytes <= rig.opened.usable_bytes
        assert rig.log.errors() == []
    return found.count("right"), len(damaged)


def kill_in_a_loop(writers: Writers, folder: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    right = 0
    for number in range(rounds):
        writers.kill_one(folder, seed * 1000 + number, rng.uniform(0, MOMENT_S_MAX))
        some, _ = check_opens_whole(folder, rng)
        right += some
    # A loop that found nothing on disk would be content with anything. A slow machine needs longer.
    for number in range(rounds, rounds + 10):
        if right > 10 * rounds:
            break
        writers.kill_one(folder, seed * 1000 + number, MOMENT_S_MAX * (number - rounds + 2))
        some, _ = check_opens_whole(folder, rng)
        right += some
    assert right > 10 * rounds, right


def test_killed_store_opens_whole(writers: Writers, tmp_path: Path) -> None:
    """Eight random moments on one folder, each on what the one before left."""
    kill_in_a_loop(writers, tmp_path, 8, seed=1)


@pytest.mark.slow
def test_store_killed_two_hundred_times_opens_whole(writers: Writers, tmp_path: Path) -> None:
    """The same for two hundred moments."""
    kill_in_a_loop(writers, tmp_path, 200, seed=2)
