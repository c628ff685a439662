"""What `make aarch64` says where it cannot run, and its stand-in for calls that qemu lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_without_qemu_it_is_not_run_and_says_what_is_missing(tmp_path: Path) -> None:
    """Nothing is installed, and nothing passes silently."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.aarch64"],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0
    assert done.stdout.startswith("NOT RUN: aarch64: ")
    assert "qemu-user-static mmdebstrap" in done.stdout or os.uname().machine != "x86_64"


COPIES = """
import ctypes, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
class Piece(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]
def call(name, source, target, size):
    function = getattr(libc, name)
    function.restype = ctypes.c_ssize_t
    pieces = [ctypes.byref(Piece(at, size)) for at in (source, target)]
    local, remote = pieces if name == "process_vm_writev" else pieces[::-1]
    ctypes.set_errno(0)
    done = function(os.getpid(), local, ctypes.c_ulong(1), remote, ctypes.c_ulong(1), 0)
    return done, ctypes.get_errno()
def begin_of(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc.mmap.restype = ctypes.c_void_p
read_only = libc.mmap(None, ctypes.c_size_t(8192), mmap.PROT_READ, 0x22, -1, ctypes.c_long(0))
ours, theirs = mmap.mmap(-1, 16384), mmap.mmap(-1, 16384)
file = os.memfd_create("cut")
os.truncate(file, 8192)
cut = mmap.mmap(file, 8192)
os.truncate(file, 4096)
ours[:] = bytes(range(256)) * 64
a, b, c = map(begin_of, (ours, theirs, cut))
for name in ("process_vm_writev", "process_vm_readv"):
    done = call(name, a + 5, b + 9, 9000)
    print(done, theirs[:16384] == bytes(9) + ours[5:9005] + bytes(7375))
    theirs[:] = bytes(16384)
    for source, target in ((a, read_only), (16, b), (a, 16), (a, c), (a, c + 4096), (c + 4096, a)):
        print(call(name, source, target, 8))
"""


def test_its_copies_are_those_of_the_kernel(tmp_path: Path) -> None:
    """Addresses that are not mapped, not writable or beyond the end of a file give EFAULT."""
    library = tmp_path / "process_vm.so"
    source = Path(__file__).with_name("process_vm.c")
    subprocess.run(
        ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, source],
        check=True,
    )

    kernels, ours = (
        subprocess.run(
            [sys.executable, "-S", "-c", COPIES],
            env={**os.environ, "LD_PRELOAD": preloaded},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for preloaded in ("", str(library))
    )

    assert ours == kernels
    assert "(9000, 0) True" in ours
