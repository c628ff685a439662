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
ATTACKER = Incarnation(0xBAD)
GRANULE = 16384
PAGE_BYTES = 128 * 2**20
CALLS = 40
"""Where a load meets the end of the file, a process dies within the first few."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="plays another user")

ENGINE = """
import sys, time
import numpy as np
from peercache.errors import Rejected
from peercache.memory.attached import AttachedSegment
from peercache.model.ids import Incarnation
from peercache.model.runs import PageRuns
from peercache.trust.sharing import Sharing

path, incarnation, page_bytes, calls, what = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
host = np.zeros(page_bytes, np.uint8)
runs = PageRuns.regular(np.array([[host.ctypes.data]]), np.array([host.size]), 1)
sharing = Sharing.of(share_uids=sys.argv[6:])
begin, slots = np.zeros(1, np.uint64), np.zeros(1000, np.uint64)
print("ready", flush=True)
opened = 0
for _ in range(calls):
    try:
        segment = AttachedSegment.open(
            path, incarnation=Incarnation(incarnation), writable=what == "write", sharing=sharing
        )
    except Rejected:
        time.sleep(0.001)
        continue
    opened += 1
    with segment.in_use():
        if what == "seals":
            for _ in range(200):
                segment.words(slots)
                segment.seals(slots)
        else:
            segment.copy(runs, begin, to_slots=what == "write", deadline=time.monotonic() + 5)
    segment.close(1.0)
sys.exit(0 if opened or not sharing.allows_uid(65534) else 1)
"""


def foreign_segment(folder: Path) -> tuple[Path, int, Layout]:
    """Make a whole segment of another user, which every user may read."""
    layout = Layout.of(PAGE_BYTES, GRANULE)
    path = folder / segment_name(ATTACKER)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.pwrite(file, pack_header(Header(ATTACKER, GRANULE, layout.page_bytes, boot_id())), 0)
    os.ftruncate(file, layout.total_bytes)
    os.fchown(file, STRANGER, STRANGER)
    return path, file, layout


def member_at(path: Path | str) -> Member:
    return Member(
        incarnation=ATTACKER, counter=1, state=ALIVE, head_rank=255, host_name="evil",
        control="127.0.0.1:1", data="127.0.0.1:2", boot_id=boot_id(), segment=str(path),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("what", "sharing", "cut_to"),
    [
        ("read", False, "half"),
        ("read", True, "half"),
        ("write", True, "half"),
        ("seals", True, "nothing"),
    ],
)
def test_a_segment_that_another_user_truncates_ends_no_engine(
    what: str, sharing: bool, cut_to: str
) -> None:
    """A member names a file of its own, and cuts it short while an engine uses it.

    The engine does not map the file of a stranger. That of a user who shares the host it does, and
    then the kernel copies: a load beyond the end of the file would be a bus error.
    """
    numbers = [str(number) for number in (int(ATTACKER), PAGE_BYTES, CALLS)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        Path(name).chmod(0o755)
        path, file, layout = foreign_segment(Path(name))
        short = layout.pages_offset + PAGE_BYTES // 2 if cut_to == "half" else 0
        header = os.pread(file, layout.pages_offset, 0)
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(path), *numbers, what, *[str(STRANGER)] * sharing],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "ready\n"
            while engine.poll() is None:
                os.ftruncate(file, short)
                time.sleep(0.0005)
                os.ftruncate(file, layout.total_bytes)
                os.pwrite(file, header, 0)
                time.sleep(0.004)

            # A bus error would be -7; 1 if the engine never came to use the segment.
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
    """A file system of the attacker's could answer the open late, or never."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        path, file, _ = foreign_segment(Path(name))
        os.close(file)
        os.chown(path, os.geteuid(), -1)
        fabric = ShmFabric(boot_id=boot_id(), folders={"/dev/shm"})

        assert not fabric.reaches(member_at(path))
        assert not fabric.reaches(member_at(path.name))
        assert not fabric.reaches(member_at(f"/dev/shm/../shm/{Path(name).name}/{path.name}"))
        fabric.close()
