"""A sandbox that forbids the probe of addresses, as some container runtimes do, stops no copy."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, errno, os, struct
import numpy as np
from peercache.model.runs import PageRuns
from peercache.memory.copying import copy_pages, kernel_copies

# Load the call's number; 310 and 311 are process_vm_readv and process_vm_writev; else allow.
program = b"".join(struct.pack("<HBBI", *line) for line in [
    (0x20, 0, 0, 0), (0x15, 1, 0, 310), (0x15, 0, 1, 311),
    (0x06, 0, 0, 0x0005_0000 | errno.{error}), (0x06, 0, 0, 0x7FFF_0000),
])
instructions = ctypes.create_string_buffer(program, len(program))
filter_ = struct.pack("<HxxxxxxQ", 5, ctypes.addressof(instructions))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
if libc.prctl(22, 2, filter_, 0, 0) != 0:
    raise SystemExit(77)

assert libc.process_vm_readv(os.getpid(), None, 0, None, 0, 0) == -1
assert ctypes.get_errno() == errno.{error}
host, slots = np.zeros((4, 64), np.uint8), np.ones((4, 64), np.uint8)
runs = PageRuns.of([[(row.ctypes.data, 32), (row.ctypes.data + 32, 32)] for row in host])
addresses = np.array([row.ctypes.data for row in slots], np.uint64)
assert copy_pages(runs, addresses, to_slots=False, deadline=1e18) == 4
assert host.all()
slots[:] = 0
assert copy_pages(runs, addresses, to_slots=True, deadline=1e18) == 4
assert slots.all()
assert not kernel_copies()
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of calls are x86-64's")
@pytest.mark.parametrize("error", ["EPERM", "ENOSYS"])
def test_batch_is_copied_where_the_probe_is_forbidden(error: str) -> None:
    """The refused call tells nothing about the addresses, and every byte still arrives."""
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{error}", error)],
        check=False,
        capture_output=True,
        text=True,
    )

    if finished.returncode == 77:
        pytest.skip("may not install a seccomp filter")
    assert finished.returncode == 0, finished.stderr
