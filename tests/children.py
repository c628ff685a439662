"""Forked children of a test's process."""

from __future__ import annotations

import os
from collections.abc import Callable


def fork(act: Callable[[], object]) -> int:
    """Do this in a child, which then ends with status 0; 1 where it returns False, 2 if it raises.

    Return the child.
    """
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = int(act() is False)
        finally:
            os._exit(status)
    return child


def in_child(act: Callable[[], object]) -> int:
    """Do this in a child; return its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(act), 0)[1])
