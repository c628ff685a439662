"""A short run of `make soak`: two minutes, with every gate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pace import FACTOR

MINUTES = 2


@pytest.mark.slow
def test_two_minutes_of_soak_pass_every_gate(tmp_path: Path) -> None:
    """The hour is `make soak`; what shows in two minutes shows here."""
    command = [
        sys.executable, "-m", "tests.system.endurance", "--minutes", str(MINUTES), "--keep",
        str(tmp_path / "soak"),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=(MINUTES + 4) * 60 * FACTOR
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout
