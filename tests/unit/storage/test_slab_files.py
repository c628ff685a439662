"""Slab files, by themselves: what the file system refuses, and what is left open."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peercache.actors.disk.slabs import BLOCK_BYTES
from peercache.storage import slab_files
from peercache.storage.folder import Folder, open_folder
from peercache.storage.layout import slab_name
from peercache.storage.slab_files import PROBE_NAME, NoRoomError, SlabFiles, aligned
from tests.unit.storage.rig import MIB, Log


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    """Return a folder with room for some slabs of a MiB."""
    folder = open_folder(tmp_path, 16 * MIB)
    yield folder
    folder.close()


def files_of(folder: Folder, log: Log | None = None, **settings: Any) -> SlabFiles:
    told = {"free_floor": 0.0, "log": log or Log(), "read_only": False} | settings
    return SlabFiles(folder, **told)


def write(files: SlabFiles, number: int, blocks: int = 1) -> None:
    with aligned(blocks) as memory:
        memory[:] = bytes([number]) * len(memory)
        files.write(number * files.folder.slab_bytes + BLOCK_BYTES, [memory])


def open_slabs(folder: Folder) -> list[int]:
    """Return the slabs whose files this process has open, once for each descriptor."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = Path(link.readlink())
        except OSError:
            continue
        if target.parent == folder.path and target.name.startswith("slab"):
            found.append(int("".join(filter(str.isdigit, target.name))))
    return sorted(found)


def failing(monkeypatch: pytest.MonkeyPatch, call: str, outcome: int | OSError) -> None:
    """Let a call of the operating system return or raise this."""

    def instead(*given: object) -> int:
        # A traceback keeps what a function has, and memory that is lent must come back.
        del given
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    monkeypatch.setattr(os, call, instead)


def test_few_descriptors_are_held(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the slabs that were used last, and of one that a call uses."""
    monkeypatch.setattr(slab_files, "FILES_OPEN_MAX", 2)
    files = files_of(folder)
    files.prepare(0, 1)
    with files._use(0):
        for number in (1, 2, 3):
            files.prepare(number, 1)
        assert open_slabs(folder) == [0, 3]
    for number in (2, 3, 2, 1):
        write(files, number)
    assert open_slabs(folder) == [1, 2]
    files.forget(2)
    assert open_slabs(folder) == [1]
    files.close()
    assert open_slabs(folder) == []


@pytest.mark.parametrize("number", slab_files.NO_ROOM)
def test_a_file_system_that_runs_full_is_told_as_such(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """By a write, too: not every file system keeps what it has allocated."""
    files = files_of(folder)
    files.prepare(0, 1)
    with monkeypatch.context() as patched:
        failing(patched, "pwritev", OSError(number, "no room"))
        with pytest.raises(NoRoomError):
            write(files, 0)
    write(files, 0)


def test_a_write_that_fails_is_no_write(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(folder)
    files.prepare(0, 1)
    for outcome in (OSError(errno.EIO, "broken"), BLOCK_BYTES - 1):
        with monkeypatch.context() as patched:
            failing(patched, "pwritev", outcome)
            with pytest.raises(OSError, match=r"broken|wrote 4095 of 4096 bytes"):
                write(files, 0)


def test_a_slab_that_cannot_be_allocated_leaves_no_file(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a descriptor; and it is tried again."""
    files = files_of(folder)
    for error in (errno.ENOSPC, errno.EIO):
        with monkeypatch.context() as patched:
            failing(patched, "posix_fallocate", OSError(error, "refused"))
            with pytest.raises((NoRoomError, OSError)) as raised:
                files.prepare(0, 1)
        assert ("refused" in str(raised.value)) == (error == errno.EIO)
        assert not (folder.path / slab_name(0)).exists()
        assert open_slabs(folder) == []
    files.prepare(0, 1)
    write(files, 0)


def test_a_short_slab_that_cannot_be_made_whole_is_not_written(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is removed while it is open, and nothing more goes to it."""
    files = files_of(folder)
    files.prepare(0, 1)
    os.truncate(folder.path / slab_name(0), BLOCK_BYTES)
    with monkeypatch.context() as patched:
        failing(patched, "posix_fallocate", OSError(errno.ENOSPC, "refused"))
        with pytest.raises(NoRoomError):
            files.prepare(0, 2)
    assert open_slabs(folder) == []
    files.prepare(0, 2)
    write(files, 0)
    assert (folder.path / slab_name(0)).stat().st_size == folder.slab_bytes


def test_a_slab_says_its_slot_size_before_it_has_slots(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that fails, its slot size is not known until it is said."""
    files = files_of(folder)
    files.prepare(0, 1)
    files.prepare(1, 3)
    with monkeypatch.context() as patched:
        failing(patched, "pwritev", OSError(errno.EIO, "broken"))
        with pytest.raises(OSError, match="broken"):
            files.prepare(0, 2)
    assert files.blocks_of == {1: 3}
    files.prepare(0, 2)
    assert files_of(folder).blocks_of == {0: 2, 1: 3}


def test_a_slab_under_the_name_of_another_has_no_slot_size(folder: Folder) -> None:
    """As after a restore from a backup: its slots are another slab's."""
    files = files_of(folder)
    files.prepare(0, 1)
    files.prepare(1, 3)
    (folder.path / slab_name(0)).rename(folder.path / slab_name(2))
    assert files_of(folder).blocks_of == {1: 3}


def test_a_slab_that_cannot_be_read_is_logged(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    files_of(folder).prepare(0, 1)
    log = Log()
    failing(monkeypatch, "preadv", OSError(errno.EIO, "broken"))
    assert files_of(folder, log, read_only=True).blocks_of == {}
    assert log.lines == [
        ("warning", "disk.slab_read_failed", {"file": slab_name(0), "error": "[Errno 5] broken"})
    ]


def _writes_directly(path: Path) -> bool:
    """Return whether a file system takes direct I/O; it is asked by calls of our own."""
    try:
        file = os.open(path / "ours", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:
        return False
    try:
        with aligned(1) as memory:
            return os.pwritev(file, [memory], 0) == len(memory)
    except OSError:
        return False
    finally:
        os.close(file)


def test_direct_io_is_used_where_it_works(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is read must be what was written; else, and where it is refused, a line says so."""
    works = _writes_directly(tmp_path)
    log = Log()
    assert files_of(folder, log).is_direct == works
    assert log.events() == ([] if works else ["disk.direct_io_refused"])
    for call, outcome in (
        ("pwritev", OSError(errno.EINVAL, "refused")),
        ("pwritev", 2 * BLOCK_BYTES),
        ("preadv", 2 * BLOCK_BYTES),
    ):
        log = Log()
        with monkeypatch.context() as patched:
            failing(patched, call, outcome)
            assert not files_of(folder, log).is_direct
        assert log.events() == ["disk.direct_io_refused"]
    if works:
        failing(monkeypatch, "pwritev", OSError(errno.EIO, "broken"))
        with pytest.raises(OSError, match="broken"):
            files_of(folder)
    assert not files_of(folder, read_only=True).is_direct
    assert not (folder.path / PROBE_NAME).exists()
