"""What all tests share: their order, what is measured, the log, Ctrl-C, an end that comes."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peercache.observability import log
from tests import pace, second_chance
from tests.examples import register_profiles

register_profiles()

# A shell that starts the tests in the background has SIGINT ignored, by all that they start, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The rig sets it in its guest, to the generation of pyverbs. No test is skipped for it there:
# a binding that cannot be imported is a failure.
IN_RDMA_GUEST = "PEERCACHE_RDMA_GUEST" in os.environ

# Example tests of the pure layers: the layers whose coverage pyproject.toml has measured.
MEASURED = tuple(f"tests/unit/{layer}/" for layer in ("actors", "config", "model", "paths", "wire"))

_ENDED = pytest.StashKey[int]()
_LEFT_IN_WORKERS = pytest.StashKey[list[str]]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what cannot run here, say what coverage is measured of, and put long tests first."""
    if not IN_RDMA_GUEST:
        skip_what_needs_devices(items)
    if config.getoption("cov_source", None):
        for item in items:
            if not counts_for_coverage(item):
                item.add_marker("no_cover")
    # A long test that begins last is one that the other workers wait for.
    items.sort(key=lambda item: not is_long(item))


def counts_for_coverage(item: pytest.Item) -> bool:
    """Return whether a test's lines are counted.

    Counting makes Python three times slower. Properties do the same again and again, and what only
    they or whole nodes come to has no test that states what it shall do.
    """
    return item.nodeid.startswith(MEASURED) and item.get_closest_marker("hypothesis") is None


def is_long(item: pytest.Item) -> bool:
    """Return whether a test may take seconds of one core: simulations and properties."""
    return (
        item.nodeid.startswith("tests/sims/") or item.get_closest_marker("hypothesis") is not None
    )


def skip_what_needs_devices(items: list[pytest.Item]) -> None:
    """Skip the tests that need RDMA devices, outside the guest of the rig."""
    skip = pytest.mark.skip(reason="needs RDMA devices: make test-rdma runs it in a guest")
    for item in items:
        if item.get_closest_marker("rdma") is not None:
            item.add_marker(skip)


def threads_left() -> list[str]:
    """Return the names of the threads that would keep this process from ending."""
    left = [one.name for one in threading.enumerate() if not one.daemon]
    left.remove(threading.main_thread().name)
    return left


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Note how it ended, for `pytest_unconfigure`; a worker reports its threads to the main
    process.

    Threads that a worker left behind fail the whole run.
    """
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["threads_left"] = threads_left()
    in_workers = session.config.stash.get(_LEFT_IN_WORKERS, [])
    if in_workers:
        print(f"threads left behind: {', '.join(in_workers)}", file=sys.stderr, flush=True)
        session.exitstatus = exitstatus or pytest.ExitCode.TESTS_FAILED
    session.config.stash[_ENDED] = int(session.exitstatus)


class _Workers:
    """Hooks of pytest-xdist, which are there only where it is."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Keep what a worker that ended left behind."""
        left = getattr(node, "workeroutput", {}).get("threads_left", [])
        node.config.stash.setdefault(_LEFT_IN_WORKERS, []).extend(left)


def pytest_configure(config: pytest.Config) -> None:
    """Receive the reports of workers, where there are some; give second chances in the gate."""
    config.pluginmanager.register(_Workers())
    second_chance.register(config)


def pytest_report_header() -> str:
    """Say how slow this machine is: real-time tests wait that much longer."""
    return f"pace: {pace.FACTOR:g} ({pace.FACTOR_VARIABLE})"


def pytest_unconfigure(config: pytest.Config) -> None:
    """End though a failed test left a thread behind: Python would wait for it forever."""
    left = threads_left()
    if left:
        print(f"threads left behind: {', '.join(left)}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(config.stash.get(_ENDED, 0) or 1)


@pytest.fixture(autouse=True)
def log_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a command does to the log of its process: other tests read warnings there."""
    logger = logging.getLogger(log.LOGGER)
    monkeypatch.setattr(log, "_rendering", dict(log._rendering))
    monkeypatch.setattr(logger, "handlers", list(logger.handlers))
    monkeypatch.setattr(logger, "propagate", logger.propagate)
    level = logger.level
    yield
    logger.setLevel(level)  # Not its attribute: loggers remember which levels they write.


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """Give a folder of its own in shared memory."""
    parent = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=parent if parent.is_dir() else None))
    yield folder
    shutil.rmtree(folder)
