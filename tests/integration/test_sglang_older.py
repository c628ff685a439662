"""Older SGLang: the tests of this folder, run with the interface, pools and controllers of each."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.integration.older_sglang import VERSIONS, place, variables
from tests.integration.processes import HERE, ROOT, environment

# Each version is a process that imports SGLang.
pytestmark = pytest.mark.slow

STORE = ("test_sglang_store.py", "test_sglang_operators.py")
SUITES = {
    "0.5.12": ((*STORE, "test_sglang_plugin.py"), 84),
    "0.5.16": ((*STORE, "test_sglang_plugin.py"), 84),
    # Controllers and server before 0.5.20 are built in other ways than those tests know.
    "0.5.20": (
        (*STORE, "test_sglang_plugin.py", "test_sglang_names.py", "test_sglang_controllers.py"),
        159,
    ),
}
"""Files that run with a version, and how many of their tests at least."""

RUN_S = 900.0
"""Far longer than such a run takes, on any machine."""


def run(version: str, report: Path, *files: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run test files with a version of SGLang; `more` changes the environment."""
    missing = [each for each in VERSIONS if not place(each).exists()]
    if missing:
        script = (HERE / "older_sglang.py").relative_to(ROOT)
        pytest.skip(f"NOT RUN: SGLang {', '.join(missing)} is not there: run {script}")
    pytest_flags = ("-q", "-m", "sglang", "-p", "no:cacheprovider", f"--junitxml={report}")
    return subprocess.run(
        [sys.executable, "-m", "pytest", *pytest_flags, *(str(HERE / file) for file in files)],
        cwd=ROOT,
        env=environment(**{**variables(version), **more}),
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S,
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_the_store_keeps_its_contract_with_an_older_sglang(version: str, tmp_path: Path) -> None:
    """The tests pass, as many as are meant, and the interface is that of the version."""
    files, least = SUITES[version]

    done = run(version, tmp_path / "report.xml", *files)

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    suite = next(ET.parse(tmp_path / "report.xml").iter("testsuite"))
    reported = {each.get("name"): each.get("value", "") for each in suite.iter("property")}
    assert reported["sglang"] == version
    assert Path(reported["interface"]).is_relative_to(place(version))
    assert int(suite.get("tests", 0)) - int(suite.get("skipped", 0)) >= least


def test_another_version_than_the_wanted_one_is_an_error(tmp_path: Path) -> None:
    """Were the wheel not found first, the tests would pass with the environment's SGLang."""
    done = run("0.5.12", tmp_path / "report.xml", *STORE, PYTHONPATH_FIRST="")

    assert done.returncode != 0
    assert "and 0.5.12 is wanted" in done.stderr
