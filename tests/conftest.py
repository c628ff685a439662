"""What all tests share: Hypothesis on a busy machine, Ctrl-C, and an end that comes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import pytest

from tests.examples import register_profiles

register_profiles()

# A shell that starts the tests in the background has SIGINT ignored, by all that they start, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The rig sets it in its guest, to the generation of pyverbs. No test is skipped for it there:
# a binding that cannot be imported is a failure.
IN_RDMA_GUEST = "PEERCACHE_RDMA_GUEST" in os.environ

_ENDED = pytest.StashKey[int]()
_LEFT_IN_WORKERS = pytest.StashKey[list[str]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need RDMA devices, outside the guest of the rig."""
    if IN_RDMA_GUEST:
        return
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
    """Note how it ended, for `pytest_unconfigure`; a worker tells its threads to the main process.

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
    """Hear the workers, where there are some."""
    config.pluginmanager.register(_Workers())


def pytest_unconfigure(config: pytest.Config) -> None:
    """End though a failed test left a thread behind: Python would wait for it for ever."""
    left = threads_left()
    if left:
        print(f"threads left behind: {', '.join(left)}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(config.stash.get(_ENDED, 0) or 1)
