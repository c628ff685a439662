"""A file system that is full when a node starts: it serves what is there, and waits for room."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from peercache.actors.ports import DISK_FULL, DiskOpened, DiskRoom
from peercache.storage import store
from peercache.storage.slab_files import SlabFiles
from tests.descriptors import open_within
from tests.pace import TIMEOUT_S, wait_until
from tests.unit.storage.rig import MIB, Rig

NUMBERS = list(range(20))


def fill(folder: Path) -> Path:
    """Take every free byte of a file system, as another program; return the file."""
    others = folder / "others"
    others.write_bytes(bytes(shutil.disk_usage(folder).free))
    assert shutil.disk_usage(folder).free == 0
    return others


def opening() -> list[str]:
    """Return the threads of this process that open stores."""
    return [each.name for each in threading.enumerate() if each.name == "peercache-disk"]


def leave_as_killed(folder: Path) -> None:
    """Have the index as kill -9 leaves it, its log not folded in."""
    with Rig(folder, size_bytes=32 * MIB) as rig:
        # The answer comes when the index is written; all pages but one stay.
        rig.forget(NUMBERS[:1])
        names = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm")
        left = {name: (folder / "0" / name).read_bytes() for name in names}
    assert left["index.sqlite-wal"]
    for name, said in left.items():
        (folder / "0" / name).write_bytes(said)


@pytest.mark.parametrize("was_killed", [False, True])
@pytest.mark.parametrize("has_index", [True, False])
def test_start_on_a_full_file_system_serves_what_is_there(
    small: Path, was_killed: bool, has_index: bool
) -> None:
    """What needs a new slab is DISK_FULL until there is room; nothing is lost on the way."""
    with Rig(small, size_bytes=32 * MIB) as rig:
        rig.write(NUMBERS)
    there = NUMBERS[was_killed:]
    if was_killed:
        leave_as_killed(small)
    if not has_index:
        (small / "0" / "index.sqlite").unlink()
        there = NUMBERS
    others = fill(small)

    with Rig(small, size_bytes=32 * MIB) as full:
        found = full.load(there)
        # What SQLite maps there would end the process where its blocks cannot be allocated.
        assert not (small / "0" / "index.sqlite-shm").exists()
        refused = full.write([100], 300_000)
        others.unlink()
        taken = full.write([101], 300_000)
        again = full.load([101, *there])

    assert found == ["right"] * len(there)
    assert refused == bytes([DISK_FULL])
    assert taken == bytes(1)
    assert again == ["right"] * (1 + len(there))
    with Rig(small, size_bytes=32 * MIB) as later:
        assert later.load([101, *there]) == ["right"] * (1 + len(there))


def room(rig: Rig, is_wanted: Callable[[int], bool]) -> int:
    """Return the room that is reported, once it is as wanted: it may be looked at meanwhile."""
    while not is_wanted(usable := int(rig.await_fact(DiskRoom).usable_bytes)):
        pass
    return usable


def test_a_file_system_smaller_than_the_store_is_reported(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start with a warning; and again when other programs take the room, or free it."""
    monkeypatch.setattr("peercache.storage.jobs.HOUSEKEEPING_S", 0.05)
    with Rig(small, size_bytes=32 * MIB) as rig:
        first = rig.await_fact(DiskRoom).usable_bytes
        others = fill(small)
        room(rig, lambda usable: usable == 0)
        others.unlink()
        room(rig, lambda usable: usable == first)

        assert 4 * MIB < first < 8 * MIB
        assert rig.log.events().count("disk.size_limited") == 1
    with Rig(small, size_bytes=4 * MIB) as rig:
        assert "disk.size_limited" not in rig.log.events()
        for _ in range(2):
            others = fill(small)
            room(rig, lambda usable: usable == 0)
            others.unlink()
            room(rig, lambda usable: usable > 0)
        assert rig.log.events().count("disk.size_limited") == 1


def test_new_folder_on_a_full_file_system_is_opened_when_there_is_room(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier is not off: it waits, logs it once, and needs no restart."""
    monkeypatch.setattr("peercache.storage.store.ROOM_S", 0.05)
    others = fill(small)

    rig = Rig(small, size_bytes=32 * MIB, opened=False)
    with pytest.raises(AssertionError, match="reported \\[\\]"):
        rig.await_fact(DiskOpened, timeout_s=0.5)
    others.unlink()
    rig.await_fact(DiskOpened)
    rig.store.close()

    assert rig.log.events().count("disk.space_ran_out") == 1


def test_store_that_waits_for_room_is_closed_at_once(small: Path) -> None:
    """The store does not wait for room that may never come, and the folder is free."""
    fill(small)
    rig = Rig(small, size_bytes=32 * MIB, opened=False)

    rig.store.close()
    wait_until(lambda: not opening())


def test_opening_that_fails_again_and_again_keeps_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full file system is tried for hours."""
    with Rig(tmp_path) as rig:
        for begin in (0, 50):
            rig.write(list(range(begin, begin + 50)))
    monkeypatch.setattr(store, "ROOM_S", 0.01)
    tries = threading.Semaphore(0)

    def no_room(files: SlabFiles, log: object) -> None:
        del log
        files.prepare(0, 26)
        tries.release()
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(store, "load_index", no_room)
    failing = Rig(tmp_path, opened=False)
    for _ in range(5):
        assert tries.acquire(timeout=TIMEOUT_S)
    failing.store.close()
    wait_until(lambda: not opening())

    assert not open_within(tmp_path)
