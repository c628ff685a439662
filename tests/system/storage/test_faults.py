"""Disks that fail: each fault is a miss, a line in the log, and an answer in time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STORIES = (
    "read_error",
    "write_error",
    "dead_disk",
    "read_only",
    "late_load",
    "late_write",
    "stuck",
)
WAITING = ("late_load", "late_write", "stuck")
"""Stories that outlast a deadline."""


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compile what makes reads and writes fail."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    source = Path(__file__).with_name("faults.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return str(library)


@pytest.mark.parametrize(
    "story",
    [pytest.param(story, marks=[pytest.mark.slow] * (story in WAITING)) for story in STORIES],
)
def test_disk_that_fails_costs_misses_and_no_more(
    story: str, preloaded: str, tmp_path: Path
) -> None:
    """The stories stand in faulty_process.py, each with what it expects."""
    environment = {
        **os.environ,
        "LD_PRELOAD": preloaded,
        "PEERCACHE_FAULTS": str(tmp_path / "faults"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    module = "tests.system.storage.faulty_process"
    command = [sys.executable, "-m", module, story, str(tmp_path / "disk")]

    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
