"""Kernels with pages of 64 KiB, which are common on aarch64: the same tests, where none of ours has
them, with a library that refuses what such a kernel refuses (`large_pages.c`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a process that sees pages of 64 KiB."""
    library = tmp_path_factory.mktemp("library") / "large_pages.so"
    source = Path(__file__).with_name("large_pages.c")
    subprocess.run(
        [
            "gcc",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-shared",
            "-fPIC",
            "-o",
            library,
            source,
            "-ldl",
        ],
        check=True,
    )
    return {**os.environ, "LD_PRELOAD": str(library)}


def test_the_library_refuses_what_a_kernel_with_large_pages_refuses(
    environment: dict[str, str],
) -> None:
    """Without that the next tests would show nothing."""
    program = """
import ctypes, errno, mmap
assert mmap.PAGESIZE == 65536
libc = ctypes.CDLL(None, use_errno=True)
memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert begin % mmap.PAGESIZE == 0
for call, argument in ((libc.mprotect, mmap.PROT_READ), (libc.madvise, mmap.MADV_NORMAL)):
    assert call(ctypes.c_void_p(begin), ctypes.c_size_t(4096), argument) == 0
    assert call(ctypes.c_void_p(begin + 4096), ctypes.c_size_t(4096), argument) == -1
    assert ctypes.get_errno() == errno.EINVAL
"""
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


TESTS = (
    "memory/test_attached.py::test_writer_writes_pages_and_never_words",
    "memory/test_attached.py::test_populate_ends_where_the_kernel_refuses",
    "actors/test_directory_table.py::test_all_is_found_at_each_step_of_a_growth",
    "actors/test_directory_table.py::test_a_table_takes_less_than_80_bytes_a_record",
    "actors/test_directory_table.py::test_pages_that_come_and_go_leave_the_table_as_large_as_it_was",
)


def test_where_the_kernels_pages_are_large(environment: dict[str, str]) -> None:
    """Segments of any size are mapped, and a directory table gets its memory and returns it."""
    tests = [f"tests/unit/{test}" for test in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout
    assert f"{len(TESTS)} passed" in done.stdout
