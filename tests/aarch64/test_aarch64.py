"""What `make aarch64` prints where it cannot run, its table, and its stand-in for calls."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests import second_chance
from tests.aarch64 import parts

ROOT = Path(__file__).parents[2]


def test_without_qemu_it_is_not_run_and_reports_what_is_missing(tmp_path: Path) -> None:
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


SOME_TESTS = """
import os, signal
import pytest
def test_one(): pass
def test_two(): assert False
def test_three(): pytest.skip("not here")
@pytest.mark.parametrize("n", [1, 2])
def test_four(n): assert False
@pytest.mark.parametrize("n", [1, 2])
def test_five(n): assert n == 1
"""
KILLED = """
import os, signal
def test_one(): pass
def test_two(): os.kill(os.getpid(), signal.SIGKILL)
def test_three(): pass
"""


def some_parts(
    checkout: Path, folders: dict[str, str], left_out: str
) -> Callable[[Sequence[str], Path], int]:
    """Make a checkout with unit tests; return what starts pytest there."""
    for name, text in folders.items():
        (checkout / "tests" / "unit" / name).mkdir(parents=True)
        (checkout / "tests" / "unit" / name / f"test_{name}.py").write_text(text)
    listed = checkout / "tests" / "aarch64" / "left_out.txt"
    listed.parent.mkdir()
    listed.write_text(left_out)
    (checkout / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow:\n  rdma:\n")
    (checkout / "conftest.py").write_text(
        "from tests.examples import register_profiles\nregister_profiles()\n"
    )

    def begin(arguments: Sequence[str], output: Path) -> int:
        command = ["env", "-C", str(checkout), sys.executable, "-m", "pytest", *arguments]
        flags = os.O_WRONLY | os.O_CREAT
        return os.posix_spawnp(
            "env",
            command,
            {**os.environ, "PYTHONPATH": str(ROOT)},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 1, str(output), flags, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
        )

    return begin


def test_each_test_of_each_part_is_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an emulator that is killed did not run is counted, and is no success."""
    begin = some_parts(
        tmp_path,
        {"some": SOME_TESTS, "killed": KILLED},
        "tests/unit/some/test_some.py::test_four  # both\n"
        "tests/unit/some/test_some.py::test_five[2]  # one of them\n",
    )

    status = parts.run(begin, tmp_path, tmp_path / "kept", at_once=2)

    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert status == 1
    assert rows["some"][1:6] == ["2", "1", "1", "3", "0"]
    assert rows["killed"][1:6] == ["1", "0", "0", "0", "2"]
    assert rows["killed"][-3:] == ["ended", "with", "-9"]
    assert rows["all"][1:6] == ["3", "1", "1", "3", "2"]
    assert rows["FAILED"] == ["FAILED", "tests/unit/some/test_some.py::test_two"]
    assert "assert False" in (tmp_path / "kept" / "some.log").read_text()


def test_only_parts_that_ran_and_passed_are_a_success(tmp_path: Path) -> None:
    """A part whose tests cannot be imported has none."""
    well = some_parts(tmp_path / "a", {"well": "def test_one(): pass"}, "")
    broken = some_parts(tmp_path / "b", {"broken": "import no_such_module"}, "")

    assert parts.run(well, tmp_path / "a", tmp_path / "kept", at_once=1) == 0
    assert parts.run(broken, tmp_path / "b", tmp_path / "kept", at_once=1) == 1


def test_what_is_left_out_exists_and_has_a_reason() -> None:
    """A renamed test would run again, and fail there."""
    for test, reason in second_chance.listed(ROOT / parts.LEFT_OUT).items():
        file, _, name = test.partition("::")
        function = name.partition("[")[0].rpartition("::")[2]
        assert f"def {function}(" in (ROOT / file).read_text(), test
        assert len(reason) > 20, test
