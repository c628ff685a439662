"""A host that loses power: what was not synced is gone, and only pages of the last second with it.

No block device can be had in every place where tests run, so a library in front of the C library
(unsynced.c) keeps what each write replaces until the file is synced. Putting that back after a
`kill -9` is the worst that a power loss does to files whose names and sizes last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from peercache.storage.index_file import load_entries, read_index
from tests.pace import wait_until
from tests.unit.storage.rig import Rig

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")

FIRST, LATER, LENGTH = 40, 400, 50_000
HEAD = struct.Struct("<QQQ")

WRITER = """
import sys
from pathlib import Path
from tests.system.storage.test_power_loss import FIRST, LATER, LENGTH
from tests.unit.storage.rig import Rig

rig = Rig(Path(sys.argv[1]))
rig.write(list(range(FIRST)), LENGTH)
print("written", flush=True)
sys.stdin.readline()
for number in range(FIRST, FIRST + LATER, 8):
    rig.write(list(range(number, number + 8)), LENGTH)
    print(number, flush=True)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the stand-in."""
    made = tmp_path_factory.mktemp("library") / "unsynced.so"
    source = Path(__file__).with_name("unsynced.c")
    command = ["gcc", "-O1", "-shared", "-fPIC", "-pthread", source, "-o", made, "-ldl"]
    subprocess.run(command, check=True)
    return made


@contextlib.contextmanager
def writing(folder: Path, undo: Path, library: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the writer in front of the stand-in; it is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "LD_PRELOAD": os.fspath(library),
            "UNSYNCED_FOLDER": os.fspath(folder),
            "UNSYNCED_UNDO": os.fspath(undo),
        },
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def rows_of(folder: Path) -> int:
    """Return how many pages the index has."""
    with contextlib.closing(read_index(folder / "0")) as index:
        return len(load_entries(index))


def lose_power(folder: Path, undo: Path) -> int:
    """Put back what was replaced and not synced, the newest first; return how many writes."""
    paths = {path.stat().st_ino: path for path in folder.rglob("*") if path.is_file()}
    lost = 0
    for log in undo.iterdir():
        packed, at, records = log.read_bytes(), 0, []
        # The last record may be cut short: its write had not begun.
        while at + HEAD.size <= len(packed):
            offset, length, size = HEAD.unpack_from(packed, at)
            at += HEAD.size + length
            if at > len(packed):
                break
            records.append((offset, packed[at - length : at], size))
        if int(log.name) not in paths:
            continue
        with paths[int(log.name)].open("r+b") as file:
            for offset, before, size in reversed(records):
                file.seek(offset)
                file.write(before)
                file.truncate(size)
        lost += len(records)
    return lost


def test_a_power_loss_takes_no_page_that_was_written_a_while_ago(
    tmp_path: Path, library: Path
) -> None:
    """Pages are synced without a stop of the node; those that come back have their own bytes."""
    folder, undo = tmp_path / "disk", tmp_path / "undo"
    folder.mkdir()
    undo.mkdir()
    with writing(folder, undo, library) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        # The rows of pages are written after the pages are synced.
        wait_until(
            lambda: rows_of(folder) == FIRST and not list(undo.iterdir()), "everything is synced"
        )
        print("go on", file=process.stdin, flush=True)
        # Some pages are there whose rows are not committed yet.
        assert process.stdout.readline()

    assert lose_power(folder, undo) > 0, "nothing was lost, so nothing is shown"

    with Rig(folder) as rig:
        held = len(rig.opened.entries)
        assert FIRST <= held < FIRST + LATER
        # `load` fails by itself for one wrong byte.
        assert rig.load(list(range(FIRST))) == ["right"] * FIRST
