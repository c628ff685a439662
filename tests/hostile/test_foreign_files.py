"""Files of another user of the host, where PeerCache looks: none of them ends a process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from peercache.fabric.shm import ShmFabric
from peercache.memory.layout import Header, Layout, boot_id, pack_header, segment_name
from peercache.model.ids import Incarnation
from peercache.model.member import ALIVE, Member

STRANGER = 65_534
LIAR = Incarnation(0xBAD)
GRANULE = 16384
PAGE_BYTES = 128 * 2**20
CALLS = 200

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="plays another user")

ENGINE = """
import sys, time
import numpy as np
from peercache.errors import Rejected
from peercache.memory.attached import AttachedSegment
from peercache.memory.copying import copy_pages
from peercache.model.ids import Incarnation
from peercache.model.runs import PageRuns

host = np.zeros(int(sys.argv[3]), np.uint8)
runs = PageRuns.regular(np.array([[host.ctypes.data]]), np.array([host.size]), 1)
print("ready", flush=True)
for _ in range(int(sys.argv[4])):
    try:
        segment = AttachedSegment.open(
            sys.argv[1], incarnation=Incarnation(int(sys.argv[2])), writable=False
        )
    except Rejected:
        time.sleep(0.001)
        continue
    with segment.in_use():
        address = np.array([segment.pages_address], np.uint64)
        copy_pages(runs, address, to_slots=False, deadline=time.monotonic() + 5)
    segment.close(1.0)
"""


def foreign_segment(folder: Path) -> tuple[Path, int, Layout]:
    """Make a whole segment of another user, which every user may read."""
    layout = Layout.of(PAGE_BYTES, GRANULE)
    path = folder / segment_name(LIAR)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.pwrite(file, pack_header(Header(LIAR, GRANULE, layout.page_bytes, boot_id())), 0)
    os.ftruncate(file, layout.total_bytes)
    os.fchown(file, STRANGER, STRANGER)
    return path, file, layout


def member_at(path: Path | str) -> Member:
    return Member(
        incarnation=LIAR, counter=1, state=ALIVE, head_rank=255, host_name="evil",
        control="127.0.0.1:1", data="127.0.0.1:2", boot_id=boot_id(), segment=str(path),
    )  # fmt: skip


def test_a_segment_that_another_user_truncates_ends_no_engine() -> None:
    """A member names a file of its own, and cuts it short while an engine copies from it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        Path(name).chmod(0o755)
        path, file, layout = foreign_segment(Path(name))
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(path), str(int(LIAR)), str(PAGE_BYTES), str(CALLS)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "ready\n"
            while engine.poll() is None:
                os.ftruncate(file, layout.pages_offset + PAGE_BYTES // 2)
                time.sleep(0.0005)
                os.ftruncate(file, layout.total_bytes)
                time.sleep(0.004)

            # A bus error would be -7.
            assert engine.returncode == 0
        finally:
            engine.kill()
            engine.communicate()
            os.close(file)


def test_a_segment_of_another_user_is_a_miss() -> None:
    """The member is read over the network instead, and is not asked for again at once."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        path, file, _ = foreign_segment(Path(name))
        os.close(file)
        fabric = ShmFabric(boot_id=boot_id(), folders={name})

        assert not fabric.reaches(member_at(path))

        os.chown(path, os.geteuid(), -1)
        again = ShmFabric(boot_id=boot_id(), folders={name})
        assert again.reaches(member_at(path))
        for each in (fabric, again):
            each.close()


def test_a_segment_is_looked_for_in_folders_of_this_host_only() -> None:
    """A file system of the liar's could answer the open late, or never."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        path, file, _ = foreign_segment(Path(name))
        os.close(file)
        os.chown(path, os.geteuid(), -1)
        fabric = ShmFabric(boot_id=boot_id(), folders={"/dev/shm"})

        assert not fabric.reaches(member_at(path))
        assert not fabric.reaches(member_at(path.name))
        assert not fabric.reaches(member_at(f"/dev/shm/../shm/{Path(name).name}/{path.name}"))
        fabric.close()
