"""One second chance, in the open, for real-time tests whose time ran out.

Where PEERCACHE_SECOND_CHANCE names a file, as in the gate (`.ci/gate.py`), a failed test is written
there instead of failing its run if both are true:

* it stands in tests/real_time.txt, with the cause that once made it fail;
* it failed because a time ran out (`tests.pace.TimedOut`, a process that did not end), and not
  because of what it saw. So wrong bytes, a hit after a removal, an exception out of a call and a
  dead node (`tests.system.nodes.NodeDied`) never get a second chance.

The gate runs what is in the file once more, alone, and reports FLAKY where it passes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pace import TimedOut

VARIABLE = "PEERCACHE_SECOND_CHANCE"
LISTED = Path(__file__).parent / "real_time.txt"
FAILURE_CHARACTERS = 300


def listed(path: Path = LISTED) -> dict[str, str]:
    """Return the listed tests, each with its cause."""
    tests = {}
    for line in path.read_text().splitlines():
        test, _, cause = line.partition("  # ")
        if test and not test.startswith("#"):
            tests[test.strip()] = cause.strip()
    return tests


def ran_out_of_time(error: BaseException) -> bool:
    """Return whether this is all that an error states."""
    if inner := getattr(error, "exceptions", ()):
        return all(ran_out_of_time(each) for each in inner)
    # Playwright is not there in every environment, and its errors share a name with Python's own.
    is_browsers = type(error).__module__.startswith("playwright.")
    return isinstance(error, (TimedOut, subprocess.TimeoutExpired)) or (
        is_browsers and type(error).__name__ == "TimeoutError"
    )


class SecondChance:
    """The plugin of a run: in the workers it looks at errors, in the main process it decides."""

    def __init__(self, path: Path, tests: dict[str, str]) -> None:
        """Write to `path` which of the `tests` are to run again."""
        self._path = path
        self._tests = tests
        self._failed: list[Any] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Note in the report whether time ran out."""
        report = yield
        if call.excinfo is not None:
            report.ran_out_of_time = ran_out_of_time(call.excinfo.value)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what failed, in whichever process it ran."""
        if report.failed:
            self._failed.append(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Let the run pass where nothing else has failed, coverage included."""
        is_worker = hasattr(session.config, "workerinput")
        if is_worker or session.exitstatus != pytest.ExitCode.TESTS_FAILED:
            return
        if session.testsfailed != len(self._failed) or not all(map(self._may_again, self._failed)):
            return
        with self._path.open("a") as file:
            for report in self._failed:
                failure = str(getattr(report.longrepr, "reprcrash", None) or report.longrepr)
                line = {"test": report.nodeid, "failure": failure[:FAILURE_CHARACTERS]}
                file.write(json.dumps(line) + "\n")
        session.exitstatus = pytest.ExitCode.OK

    def _may_again(self, report: pytest.TestReport) -> bool:
        is_listed = report.nodeid in self._tests or report.nodeid.partition("[")[0] in self._tests
        return is_listed and getattr(report, "ran_out_of_time", False)


def register(config: pytest.Config, tests: dict[str, str] | None = None) -> None:
    """Give a run second chances where the gate asks for them. tests: instead of the listed ones."""
    if path := os.environ.get(VARIABLE):
        config.pluginmanager.register(SecondChance(Path(path), tests or listed()))
