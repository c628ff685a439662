"""One short run with faults, of a seed that stays: `make faults` takes others, and longer ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.__main__ import why_not

SEED, MINUTES = 82, 0.75
"""Nodes are killed, one is partitioned, another one receives nothing; a flapping and a lossy link;
disks are slow, full or fail; /dev/shm is full, memory and descriptors are few."""
LIMIT_S = 600.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made"),
]


def test_run_with_faults_keeps_every_promise() -> None:
    """The output of a run that fails names its faults, its violations, and where its logs are."""
    command = [sys.executable, "-m", "tests.faults", f"--seed={SEED}", f"--minutes={MINUTES}"]

    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "\n0 violations\n" in ended.stdout
