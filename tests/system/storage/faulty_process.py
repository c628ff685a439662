"""What test_faults runs in a process of its own, with faults.c preloaded: one function a story."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

from peercache.actors.ports import (
    DISK_FAILED,
    DISK_LATE,
    DISK_UNTRIED,
    DiskEnded,
    LateEnded,
    LoadDone,
    WriteDone,
)
from tests.pace import PROMPT_S, assert_within
from tests.unit.storage.rig import Rig

LATE_S = 3.0
"""Until then a job that hangs has begun, also where the machine hangs itself for a while."""

FAULTS = Path(os.environ["PEERCACHE_FAULTS"])


def fault(what: str) -> None:
    """Say what happens from now on; the calls see the old file or the new one."""
    fresh = FAULTS.with_suffix(".new")
    fresh.write_text(what)
    fresh.replace(FAULTS)


def read_error(folder: Path) -> None:
    """EIO at a read is a miss for each page, named in the log; the tier stays."""
    with Rig(folder) as rig:
        rig.write([1, 2, 3])
        fault(f"r {errno.EIO}")

        assert rig.load([1, 2]) == [str(DISK_FAILED)] * 2
        fault("")
        assert rig.load([3]) == ["right"]
        named = [facts["file"] for _, event, facts in rig.log.lines if event == "disk.call_failed"]
        assert len(named) == 2, named
        assert all("slab-" in name for name in named), named


def write_error(folder: Path) -> None:
    """EIO at a write fails those pages, and none of them is in the index after a restart."""
    with Rig(folder) as rig:
        rig.write([1])
        fault(f"w {errno.EIO}")
        assert rig.write([2, 3]) == bytes([DISK_FAILED]) * 2
        fault("")
        assert rig.write([4]) == bytes(1)
    with Rig(folder) as again:
        assert len(again.opened.entries) == 2
        assert again.load([1, 4]) == ["right"] * 2


def dead_disk(folder: Path) -> None:
    """A disk that answers nothing but errors is given up; what is asked then is answered."""
    with Rig(folder) as rig:
        rig.write([1])
        fault(f"b {errno.EIO}")
        for _ in range(70):
            rig.load([1])
        assert "failed" in rig.ended()
        assert rig.load([1]) == [str(DISK_UNTRIED)]


def read_only(folder: Path) -> None:
    """A file system that turned read-only ends the tier."""
    with Rig(folder) as rig:
        rig.write([1])
        fault(f"w {errno.EROFS}")
        assert rig.write([2]) == bytes([DISK_FAILED])
        assert "read-only" in rig.ended()


def late_load(folder: Path) -> None:
    """A read that hangs is late at its deadline; when it returns, its slot is named as free."""
    with Rig(folder, stuck_s=60.0) as rig:
        rig.write([1, 2])
        fault("r hang")
        job, _ = rig.send_load([1], until_s=LATE_S)
        started = time.monotonic()
        done = rig.await_fact(LoadDone, job)
        assert done.outcomes == bytes([DISK_LATE])
        assert_within(time.monotonic() - started, PROMPT_S)
        assert rig.write([3]) == bytes(1), "the other threads go on"
        fault("")
        late = rig.await_fact(LateEnded)
        assert (late.job, late.indices) == (job, (0,))
        assert rig.load([1, 2]) == ["right"] * 2
        assert not [fact for fact in rig.reported if isinstance(fact, (LoadDone, LateEnded))]


def late_write(folder: Path) -> None:
    """A write that hangs is late; it gets no index row, even if it is done in the end."""
    with Rig(folder, stuck_s=60.0) as rig:
        rig.write([1])
        fault("w hang")
        job = rig.send_write([2, 3], until_s=LATE_S)
        assert rig.await_fact(WriteDone, job).outcomes == bytes([DISK_LATE]) * 2
        assert rig.load([1]) == ["right"]
        fault("")
        assert rig.await_fact(LateEnded).indices == (0, 1)
    with Rig(folder) as again:
        assert len(again.opened.entries) == 1


def stuck(folder: Path) -> None:
    """All threads hang: every job is answered by its deadline, the tier ends, close returns."""
    rig = Rig(folder, threads=2, stuck_s=LATE_S)
    rig.write([1, 2, 3, 4])
    fault("b hang")
    jobs = [rig.send_load([number], until_s=LATE_S)[0] for number in (1, 2, 3, 4)]
    outcomes = [rig.await_fact(LoadDone, job).outcomes for job in jobs]
    assert sorted(outcomes) == [bytes([DISK_LATE])] * 2 + [bytes([DISK_UNTRIED])] * 2, outcomes
    assert "stuck" in rig.await_fact(DiskEnded).reason
    assert rig.write([5]) == bytes([DISK_UNTRIED])
    started = time.monotonic()
    rig.store.close()
    assert_within(time.monotonic() - started, PROMPT_S)
    # The folder stays locked as long as a call may write there: another store takes the next.
    fault("")
    with Rig(folder):
        assert (folder / "1").is_dir()


def main(name: str, folder: str) -> None:
    """Run one story."""
    fault("")
    globals()[name](Path(folder))
    fault("")


if __name__ == "__main__":
    main(*sys.argv[1:])
