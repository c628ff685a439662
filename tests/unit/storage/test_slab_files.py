"""Slab files, their headers, and what an index is made of from them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from peercache.actors.disk.index import DiskIndex
from peercache.actors.disk.slabs import BLOCK_BYTES
from peercache.actors.ports import DISK_ENTRY
from peercache.storage import layout, slab_files
from peercache.storage.folder import Folder, open_folder
from peercache.storage.layout import (
    SlabHeader,
    SlotHeader,
    pack_slab,
    pack_slot,
    parse_slab,
    parse_slot,
    slab_name,
    slab_number,
)
from peercache.storage.slab_files import (
    PROBE_NAME,
    NoRoomError,
    SlabFiles,
    aligned,
    consistent,
)
from tests.descriptors import open_files
from tests.unit.storage.rig import MIB, Log


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    """Return a folder with room for some slabs of a MiB."""
    folder = open_folder(tmp_path, 16 * MIB)
    yield folder
    folder.close()


def files_of(folder: Folder, log: Log | None = None, **settings: Any) -> SlabFiles:
    reported = {"free_floor": 0.0, "log": log or Log(), "read_only": False} | settings
    return SlabFiles(folder, **reported)


def write(files: SlabFiles, number: int, blocks: int = 1) -> None:
    with aligned(blocks) as memory:
        memory[:] = bytes([number]) * len(memory)
        files.write(number * files.folder.slab_bytes + BLOCK_BYTES, [memory])


def open_slabs(folder: Folder) -> list[int]:
    """Return the slabs whose files this process has open, once for each descriptor."""
    slabs = [file for file in open_files() if file.parent == folder.path]
    return sorted(int(slab.name[5:11]) for slab in slabs if slab.name.startswith("slab-"))


def failing(monkeypatch: pytest.MonkeyPatch, call: str, outcome: int | OSError) -> None:
    """Let a call of the operating system return or raise this."""

    def instead(*given: object) -> int:
        # A traceback keeps what a function has, and memory that is lent must come back.
        del given
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    monkeypatch.setattr(os, call, instead)


@pytest.fixture
def files(folder: Folder) -> SlabFiles:
    return files_of(folder)


def test_few_descriptors_are_held(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the slabs that were used last, and of one that a call uses."""
    monkeypatch.setattr(slab_files, "FILES_OPEN_MAX", 2)
    files = files_of(folder)
    files.prepare(0, 1)
    seen: list[list[int]] = []
    real = os.pwritev

    def others_come(*given: Any) -> int:
        monkeypatch.setattr(os, "pwritev", real)
        for number in (1, 2, 3):
            files.prepare(number, 1)
        seen.append(open_slabs(folder))
        return real(*given)

    monkeypatch.setattr(os, "pwritev", others_come)
    write(files, 0)
    assert seen == [[0, 3]]
    for number in (2, 3, 2, 1):
        write(files, number)
    assert open_slabs(folder) == [1, 2]
    files.forget(2)
    assert open_slabs(folder) == [1]
    files.close()
    assert open_slabs(folder) == []


def test_no_descriptor_is_closed_under_a_call(
    files: SlabFiles, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a slab that is forgotten is closed by its last call; the next opens the file again."""
    files.prepare(0, 1)
    used: list[int] = []
    closed: list[int] = []
    write_all, close = os.pwritev, os.close

    def forgotten_meanwhile(file: int, *more: Any) -> int:
        used.append(file)
        if len(used) == 1:
            files.forget(0)
            write(files, 0)
        assert file not in closed
        return write_all(file, *more)

    monkeypatch.setattr(os, "pwritev", forgotten_meanwhile)
    monkeypatch.setattr(os, "close", lambda file: (closed.append(file), close(file)))
    write(files, 0)

    first, again = used
    assert first != again
    assert closed.count(first) == 1


@pytest.mark.parametrize("number", slab_files.NO_ROOM)
def test_a_file_system_that_runs_full_is_reported_as_such(
    files: SlabFiles, folder: Folder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """By a write, too: not every file system keeps what it has allocated."""
    files.prepare(0, 1)
    with monkeypatch.context() as patched:
        failing(patched, "pwritev", OSError(number, "no room"))
        with pytest.raises(NoRoomError):
            write(files, 0)
    write(files, 0)


def test_a_write_that_fails_is_no_write(
    files: SlabFiles, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.prepare(0, 1)
    for outcome in (OSError(errno.EIO, "broken"), BLOCK_BYTES - 1):
        with monkeypatch.context() as patched:
            failing(patched, "pwritev", outcome)
            with pytest.raises(OSError, match=r"broken|wrote 4095 of 4096 bytes"):
                write(files, 0)


def test_a_slab_that_cannot_be_allocated_leaves_no_file(
    files: SlabFiles, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a descriptor; and it is tried again."""
    for error in (*slab_files.NO_ROOM, errno.EIO):
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
    files: SlabFiles, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is removed while it is open, and nothing more goes to it."""
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


def test_a_slab_states_its_slot_size_before_it_has_slots(
    files: SlabFiles, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that fails, its slot size is not known until it is said."""
    files.prepare(0, 1)
    files.prepare(1, 3)
    with monkeypatch.context() as patched:
        failing(patched, "pwritev", OSError(errno.EIO, "broken"))
        with pytest.raises(OSError, match="broken"):
            files.prepare(0, 2)
    assert files.blocks_of == {1: 3}
    files.prepare(0, 2)
    assert files_of(folder).blocks_of == {0: 2, 1: 3}


def test_a_slab_under_the_name_of_another_has_no_slot_size(
    files: SlabFiles, folder: Folder
) -> None:
    """As after a restore from a backup: its slots are another slab's."""
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
    """What is read must be what was written; else, and where it is refused, a line is logged."""
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


SLAB = 64 * BLOCK_BYTES
LENGTH = 9 * BLOCK_BYTES
SLOT = 10 * BLOCK_BYTES
"""Six of them fit into a slab, and three blocks are left over."""

FILES: Any = SimpleNamespace(
    folder=SimpleNamespace(slab_bytes=SLAB), blocks_of={0: 10, 1: 10, 5: 10}
)


def place(slot: int, slab: int = 0) -> int:
    return slab * SLAB + BLOCK_BYTES + slot * SLOT


def row(key: int, at: int, *, sequence: int = 1, length: int = LENGTH, used: int = 0) -> np.ndarray:
    entry = np.zeros(1, DISK_ENTRY)
    entry["key"] = np.void(key.to_bytes(16, "big"))
    entry["place"], entry["sequence"], entry["length"], entry["used"] = at, sequence, length, used
    return entry


def kept(*rows: np.ndarray) -> list[int]:
    """Return the keys that stay, after an index has taken them."""
    entries = consistent(np.concatenate(rows), FILES, slab_count=4)
    DiskIndex(capacity_bytes=4 * SLAB, slab_bytes=SLAB).load(entries)
    return [int.from_bytes(key.tobytes(), "big") for key in entries["key"]]


@pytest.mark.parametrize(
    "wrong",
    [
        row(2, place(6)),
        row(2, place(1) + BLOCK_BYTES),
        row(2, 0),
        row(2, place(0, slab=2)),
        row(2, place(0, slab=5)),
        row(2, 2**63),
        row(2, place(1), length=0),
        row(2, place(1), length=LENGTH + 1),
    ],
    ids=[
        "behind the last slot", "between two slots", "in the slab's own block",
        "in a slab without a size", "beyond the last slab", "beyond all numbers",
        "without a length", "of another size",
    ],
)  # fmt: skip
def test_a_row_that_names_no_slot_is_dropped_and_the_others_stay(wrong: np.ndarray) -> None:
    assert kept(row(1, place(0)), wrong, row(3, place(5, slab=1))) == [1, 3]


def test_of_two_rows_of_one_place_or_one_key_the_newest_stays() -> None:
    rows = [
        row(1, place(0), sequence=5),
        row(2, place(0), sequence=9),
        row(3, place(1), sequence=7),
        row(3, place(2), sequence=6),
    ]

    assert sorted(kept(*rows)) == [2, 3]
    assert sorted(kept(*reversed(rows))) == [2, 3]


def test_rows_are_reported_coldest_first() -> None:
    """Of equal age the one that was written first."""
    rows = [
        row(1, place(0), used=9),
        row(2, place(1), used=3, sequence=8),
        row(3, place(2), used=3, sequence=7),
    ]

    assert kept(*rows) == [3, 2, 1]


SLOT_HEADER = SlotHeader(b"k" * 16, 5, 1000, 8192, 77, 2**63 + 1, 1_800_000_000)
SLAB_HEADER = SlabHeader(3, 257, 256 * 2**20)


def test_headers_are_read_as_they_were_written() -> None:
    """With whatever else the block holds."""
    assert parse_slot(pack_slot(SLOT_HEADER) + b"rest of the block", 8192) == SLOT_HEADER
    assert parse_slab(pack_slab(SLAB_HEADER)) == SLAB_HEADER


def test_every_flipped_bit_of_a_header_is_seen() -> None:
    """Its checksum covers all of it, the checksum included."""
    for packed, parse in (
        (pack_slot(SLOT_HEADER), lambda block: parse_slot(block, 8192)),
        (pack_slab(SLAB_HEADER)[:48], parse_slab),
    ):
        length = len(packed.rstrip(b"\0"))
        for bit in range(8 * length):
            damaged = bytearray(packed)
            damaged[bit // 8] ^= 1 << bit % 8
            assert parse(bytes(damaged)) is None


def test_every_header_that_is_cut_short_is_seen() -> None:
    """What a truncated file has left of it."""
    for end in range(len(pack_slot(SLOT_HEADER))):
        assert parse_slot(pack_slot(SLOT_HEADER)[:end], 8192) is None


def test_header_of_another_place_or_format_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each whole in itself."""
    with monkeypatch.context() as patch:
        patch.setattr(layout, "FORMAT_VERSION", 99)
        slot, slab = pack_slot(SLOT_HEADER), pack_slab(SLAB_HEADER)

    assert parse_slot(pack_slot(SLOT_HEADER), 4096) is None
    assert parse_slot(slot, 8192) is None
    assert parse_slab(slab) is None
    assert parse_slot(pack_slab(SLAB_HEADER), 8192) is None


def test_only_our_own_names_are_slabs() -> None:
    """What is removed is looked for by name."""
    assert slab_number(slab_name(123)) == 123
    for name in ("slab-12.pcs", "slab-000123.pcs.bak", "xslab-000123.pcs", "slab-00012x.pcs"):
        assert slab_number(name) is None
