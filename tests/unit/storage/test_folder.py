"""The folder of a node: whose lock it is, and what it says of what lies there."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peercache.storage import folder as folders
from peercache.storage.folder import LOCK_ATTEMPTS, FolderBusyError, open_folder
from peercache.storage.layout import FORMAT_VERSION, LOCK_NAME, SUPERBLOCK_NAME
from tests.unit.storage.rig import MIB, Rig


@contextmanager
def held(path: Path, pauses: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Hold the lock of a folder for so many pauses of the process that waits; tell these."""
    paused: list[float] = []
    with (path / LOCK_NAME).open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)

        def pause(seconds: float) -> None:
            paused.append(seconds)
            if len(paused) == pauses:
                fcntl.flock(holder, fcntl.LOCK_UN)

        monkeypatch.setattr(folders.time, "sleep", pause)
        yield paused


def test_a_lock_that_is_held_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that tests whether the folder is in use."""
    with held(tmp_path, LOCK_ATTEMPTS - 1, monkeypatch) as paused:
        folder = open_folder(tmp_path, 16 * MIB)
    assert len(paused) == LOCK_ATTEMPTS - 1
    with (tmp_path / LOCK_NAME).open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder.close()


def test_a_lock_that_stays_held_is_a_running_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        held(tmp_path, LOCK_ATTEMPTS, monkeypatch) as paused,
        pytest.raises(FolderBusyError, match="a running node has"),
    ):
        open_folder(tmp_path, 16 * MIB)
    assert len(paused) == LOCK_ATTEMPTS - 1


def test_a_child_closes_no_lock_that_was_let_go(tmp_path: Path) -> None:
    """Its number may be another file's by then."""
    folder = open_folder(tmp_path, 16 * MIB)
    lock = folder.lock
    folder.close()
    ours = os.open("/dev/null", os.O_RDONLY)
    if ours != lock:
        os.dup2(ours, lock)
        os.close(ours)
    child = os.fork()
    if not child:
        try:
            os.fstat(lock)
        except OSError:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.close(lock)


def test_tools_take_a_folder_as_it_is(tmp_path: Path) -> None:
    """Without a size, a cluster or a log; an empty one, and one of another format, has nothing."""
    (tmp_path / "empty").mkdir()
    with Rig(tmp_path / "disk") as rig:
        rig.spill([1])
        known = rig.store._opened.folder
    empty = open_folder(tmp_path / "empty", None)
    assert (empty.slab_bytes, empty.slab_count, empty.fresh) == (MIB, 0, True)
    told = open_folder(known.path, None)
    assert (told.slab_bytes, told.slab_count, told.fresh) == (known.slab_bytes, 1, False)
    told.close()
    empty.close()
    for version, slab_bytes in ((FORMAT_VERSION, 4 * MIB), (FORMAT_VERSION + 1, MIB)):
        superblock = {"format": version, "slab_bytes": 4 * MIB}
        (known.path / SUPERBLOCK_NAME).write_text(json.dumps(superblock))
        other = open_folder(known.path, None)
        assert (other.slab_bytes, other.fresh) == (slab_bytes, version != FORMAT_VERSION)
        other.close()
