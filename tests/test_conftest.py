"""The tests' own conftest: what a run measures, its order, and that it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pace import TIMEOUT_S

HERE = Path(__file__).parent
LEAKING = """
import threading

def test_passes():
    threading.Thread(target=threading.Event().wait, name="forgotten").start()
"""


MEASURED = """
def stated():
    return 1

def tried():
    return 2

def passed_through():
    return 3
"""
STATES = """
from measured import stated, tried

def test_states():
    assert stated() == 1
"""
TRIES = """
from hypothesis import given, strategies
from measured import tried

@given(strategies.booleans())
def test_tries(_):
    assert tried() == 2
"""
PASSES = """
from measured import passed_through

def test_passes():
    assert passed_through() == 3
"""


def pytest_of_its_own(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of a folder with our conftest and no other settings of ours."""
    ours = [f"--rootdir={folder}", "-c", os.devnull, "-p", "conftest"]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))
    }
    return subprocess.run(
        [sys.executable, "-m", "pytest", *ours, *words],
        env={**environment, "PYTHONPATH": f"{HERE}:{HERE.parent}:{folder}"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("workers", [[], ["-n1"]], ids=["one process", "workers"])
def test_thread_that_is_left_behind_is_named_and_delays_no_exit(
    workers: list[str], tmp_path: Path
) -> None:
    """Python would wait for it forever, and so would the caller of the tests."""
    leaking = tmp_path / "test_leaking.py"
    leaking.write_text(LEAKING)

    ended = pytest_of_its_own(tmp_path, *workers, os.fspath(leaking))

    assert "1 passed" in ended.stdout
    assert "threads left behind: forgotten" in ended.stderr
    assert ended.returncode == 1


def test_coverage_is_that_of_the_example_tests_of_the_pure_layers(tmp_path: Path) -> None:
    """Lines that only a property or another room's test comes to are missed. Long ones begin."""
    (tmp_path / "measured.py").write_text(MEASURED)
    for room, name, source in (
        ("actors", "test_a_states", STATES),
        ("actors", "test_b_tries", TRIES),
        ("net", "test_c_passes", PASSES),
    ):
        folder = tmp_path / "tests/unit" / room
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text(source)

    ended = pytest_of_its_own(
        tmp_path, "tests", "-v", "-p", "no:randomly",
        "--cov=measured", "--cov-report=term-missing",
    )  # fmt: skip

    ran = re.findall(r"::(test_\w+) PASSED", ended.stdout)
    (missed,) = re.findall(r"^measured.py .*%\s+(.*)$", ended.stdout, re.MULTILINE)
    assert ran == ["test_tries", "test_states", "test_passes"], ended.stdout + ended.stderr
    assert missed == "6, 9"
