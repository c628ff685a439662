"""The guard of what a forked child must not touch."""

from __future__ import annotations

import os

from peercache.model.fork_guard import ForkGuard


def test_only_a_fork_is_a_child() -> None:
    """The owner is never a child, also after it has forked."""
    guard = ForkGuard()
    child = os.fork()
    if not child:
        os._exit(7 if guard.is_child else 0)

    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 7
    assert not guard.is_child
