"""A plugin of pytest for one part: leave out what the emulator cannot do, and note each result.

A result is written as soon as its test ends: what an emulator that is killed has run is counted.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import second_chance


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two files: what to leave out, and where results go."""
    parser.addoption("--left-out", type=Path, help="tests to leave out, each with its reason")
    parser.addoption("--results", type=Path, help="where each result goes, as lines of JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Note results where that is asked for."""
    if path := config.getoption("--results"):
        config.pluginmanager.register(Results(path))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is listed: a test with its parameters, or all of a function."""
    if path := config.getoption("--left-out"):
        listed = set(second_chance.listed(path))
        gone = [each for each in items if {each.nodeid, each.nodeid.partition("[")[0]} & listed]
        config.hook.pytest_deselected(items=gone)
        items[:] = [each for each in items if each not in gone]
        for each in config.pluginmanager.get_plugins():
            if isinstance(each, Results):
                each.left_out = [one.nodeid for one in gone]


class Results:
    """The results of one run, in a file."""

    def __init__(self, path: Path) -> None:
        """Write to `path`."""
        self._path = path
        self._outcome = "passed"
        self.left_out: list[str] = []

    def _write(self, **line: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note how many tests there are to run."""
        self._write(collected=len(session.items), left_out=self.left_out)

    def pytest_runtest_logstart(self) -> None:
        """Begin with a test of which nothing is known."""
        self._outcome = "passed"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst outcome of setup, call and teardown."""
        if self._outcome != "failed" and report.outcome != "passed":
            self._outcome = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write what became of a test."""
        self._write(test=nodeid, outcome=self._outcome)
