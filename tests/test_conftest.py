"""The tests' own conftest: whatever a test leaves behind, the run ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pace import PATIENCE_S

LEAKING = """
import threading

def test_passes():
    threading.Thread(target=threading.Event().wait, name="forgotten").start()
"""


@pytest.mark.parametrize("workers", [[], ["-n1"]], ids=["one process", "workers"])
def test_thread_that_is_left_behind_is_named_and_delays_no_exit(
    workers: list[str], tmp_path: Path
) -> None:
    """Python would wait for it for ever, and so would the caller of the tests."""
    leaking = tmp_path / "test_leaking.py"
    leaking.write_text(LEAKING)
    ours = [f"--rootdir={tmp_path}", "-c", os.devnull, "-p", "conftest"]
    environment = {name: v for name, v in os.environ.items() if "XDIST" not in name}

    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *ours, *workers, os.fspath(leaking)],
        env={**environment, "PYTHONPATH": os.fspath(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert "1 passed" in ended.stdout
    assert "threads left behind: forgotten" in ended.stderr
    assert ended.returncode == 1
