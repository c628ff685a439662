"""Where seccomp forbids the kernel's copy, as some container runtimes do, memmove takes over."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, errno, logging, struct
logging.basicConfig(level=logging.WARNING)
import numpy as np
from peercache.model.runs import PageRuns
from peercache.memory import copying
from peercache.memory.copying import by_memmove, best_mover, copy_pages

# Load the call's number; 310 and 311 are process_vm_readv and process_vm_writev; else allow.
program = b"".join(struct.pack("<HBBI", *line) for line in [
    (0x20, 0, 0, 0), (0x15, 1, 0, 310), (0x15, 0, 1, 311),
    (0x06, 0, 0, 0x0005_0000 | errno.{error}), (0x06, 0, 0, 0x7FFF_0000),
])
instructions = ctypes.create_string_buffer(program, len(program))
filter_ = struct.pack("<HxxxxxxQ", 5, ctypes.addressof(instructions))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
if libc.prctl(22, 2, filter_, 0, 0) != 0:
    raise SystemExit(77)

copying.HAS_SCATTER = False  # What is tested is what comes after the compiled copy.
host, slots = np.zeros((4, 64), np.uint8), np.ones((4, 64), np.uint8)
runs = PageRuns.of([[(row.ctypes.data, 32), (row.ctypes.data + 32, 32)] for row in host])
addresses = np.array([row.ctypes.data for row in slots], np.uint64)
assert copy_pages(runs, addresses, to_slots=False, deadline=1e18) == 4
assert host.all()
assert best_mover() is by_memmove
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of calls are x86-64's")
@pytest.mark.parametrize("error", ["EPERM", "ENOSYS"])
def test_batch_is_copied_where_the_kernel_call_is_forbidden(error: str) -> None:
    """The probe sees the refusal, says so, and every byte still arrives."""
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{error}", error)],
        check=False,
        capture_output=True,
        text=True,
    )

    if finished.returncode == 77:
        pytest.skip("may not install a seccomp filter")
    assert finished.returncode == 0, finished.stderr
    assert "memory.vector_copy_missing" in finished.stderr
    assert error in finished.stderr
