"""Damage to what is on disk: never wrong bytes, a line that names the file, and it goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from peercache.actors.ports import DISK_DAMAGED, DISK_FULL, DISK_REPLACED
from tests.unit.storage.rig import MIB, Rig, key_of

DAMAGED = str(DISK_DAMAGED)
REPLACED = str(DISK_REPLACED)


def flip(file: Path, offset: int) -> None:
    """Flip one bit."""
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 0x10]))


# Where a bit may flip, from the slot's beginning, and what is logged of it.
FLIPS = {
    "magic": (0, "no header of ours"),
    "version": (8, "no header of ours"),
    "key": (20, "no header of ours"),
    "checksum": (60, "no header of ours"),
    "first byte": (4096, "its checksum is wrong"),
    "in the middle": (4096 + 50_000, "its checksum is wrong"),
    "last byte": (4096 + 99_999, "its checksum is wrong"),
}


@pytest.mark.parametrize("where", FLIPS)
def test_flipped_bit_is_a_miss(tmp_path: Path, where: str) -> None:
    """One bit in a header or in the bytes: that page is damaged, its neighbours are right."""
    offset, problem = FLIPS[where]
    with Rig(tmp_path) as rig:
        rig.write([1, 2, 3])
        file, at = rig.file_of(2)
        flip(file, at + offset)

        assert rig.load([1, 2, 3]) == ["right", DAMAGED, "right"]
        said = [facts for _, event, facts in rig.log.lines if event == "disk.page_damaged"]
        assert [(facts["file"], facts["problem"]) for facts in said] == [(str(file), problem)]
    # The row of a damaged page is gone: it is not asked for again.
    with Rig(tmp_path) as again:
        assert len(again.opened.entries) == 2


def test_page_that_is_in_anothers_place_is_a_miss(tmp_path: Path) -> None:
    """A whole slot copied over another is not taken for it: a header names its place."""
    with Rig(tmp_path) as rig:
        rig.write([1, 2])
        file, first = rig.file_of(1)
        _, second = rig.file_of(2)
        bytes_all = bytearray(file.read_bytes())
        bytes_all[second : second + 102_400] = bytes_all[first : first + 102_400]
        with file.open("r+b") as opened:
            opened.write(bytes_all)

        assert rig.load([1, 2]) == ["right", DAMAGED]
    (tmp_path / "0" / "index.sqlite").unlink()
    with Rig(tmp_path) as again:
        # The copy is not page 1 either, though it has its key and its bytes.
        assert again.opened.entries["place"].tolist() == [first]


def test_truncated_slab_is_a_miss_and_takes_pages_again(tmp_path: Path) -> None:
    """What was behind the cut is damaged; new pages may be written there."""
    with Rig(tmp_path) as rig:
        rig.write(list(range(5)))
        file, at = rig.file_of(2)
        with file.open("r+b") as opened:
            opened.truncate(at + 6000)

        assert rig.load([0, 1, 2, 3, 4]) == ["right"] * 2 + [DAMAGED] * 3
        rig.index.remove(rig.index.find(b"".join(key_of(n) for n in (2, 3, 4))))
        assert rig.write([2, 3, 4]) == bytes(3)
        assert rig.load([2, 3, 4]) == ["right"] * 3


def test_missing_slab_is_a_miss_and_is_made_again(tmp_path: Path) -> None:
    """A slab file that was removed while the node runs."""
    with Rig(tmp_path) as rig:
        rig.write([1, 2])
        file, _ = rig.file_of(1)
        file.unlink()
        rig.parts.files.forget(0)

        assert rig.load([1]) == [DAMAGED]
        rig.index.remove(rig.index.find(key_of(1) + key_of(2)))
        assert rig.write([3, 4]) == bytes(2)
        assert rig.load([3, 4]) == ["right"] * 2
        assert file.exists()


def test_nothing_is_written_to_a_slab_without_a_name(tmp_path: Path) -> None:
    """One that was removed while it is open: what it takes would be gone after a restart."""
    with Rig(tmp_path) as rig:
        rig.write([1, 2])
        file, _ = rig.file_of(1)
        file.unlink()
        assert rig.load([1]) == ["right"], "it is open, and has its pages"

        assert rig.write([3, 4]) == bytes(2)
        assert ("warning", "disk.slab_missing", {"file": str(file)}) in rig.log.lines
        assert rig.load([3, 4]) == ["right"] * 2
        assert rig.load([2]) == [DAMAGED]
    with Rig(tmp_path) as again:
        assert again.load([3, 4]) == ["right"] * 2


def test_slab_that_is_missing_at_start_takes_its_pages_with_it(tmp_path: Path) -> None:
    """Only pages of slabs that are there are reported, and the rest serve."""
    with Rig(tmp_path) as rig:
        for begin in range(0, 60, 20):
            rig.write(list(range(begin, begin + 20)))
        file, _ = rig.file_of(0)
    file.unlink()

    with Rig(tmp_path) as again:
        left = [n for n in range(60) if again.index.find(key_of(n))[0] >= 0]
        assert 0 < len(left) < 60
        assert 0 not in left
        assert again.load(left) == ["right"] * len(left)
        assert "disk.entries_dropped" in again.log.events()


def _remove(index: Path) -> None:
    index.unlink()


def _overwrite(index: Path) -> None:
    index.write_bytes(b"no database at all" * 1000)


def _cut(index: Path) -> None:
    index.write_bytes(index.read_bytes()[: index.stat().st_size // 2])


def _scramble(index: Path) -> None:
    whole = bytearray(index.read_bytes())
    for at in range(4096, len(whole)):
        whole[at] ^= 0x5A
    index.write_bytes(whole)


@pytest.mark.parametrize("damage", [_remove, _overwrite, _cut, _scramble])
def test_index_is_made_from_the_slots_when_it_is_lost(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Missing, overwritten, cut or scrambled: all pages are found, none twice, all right."""
    with Rig(tmp_path) as rig:
        rig.write(list(range(30)))
        rig.write(list(range(100, 120)), 20_000)
    damage(tmp_path / "0" / "index.sqlite")

    with Rig(tmp_path) as again:
        numbers = [*range(30), *range(100, 120)]
        assert len(again.opened.entries) == 50
        assert again.load(numbers) == ["right"] * 50
        assert "disk.index_rebuild_started" in again.log.events()


def test_rebuilt_index_has_the_newest_page_of_a_key(tmp_path: Path) -> None:
    """Two slots with one key: the page that was evicted, and the one that was written later."""
    with Rig(tmp_path) as rig:
        rig.write([1, 2], 100_000)
        rig.forget([1])
        rig.write([1], 20_000)
    (tmp_path / "0" / "index.sqlite").unlink()

    with Rig(tmp_path) as again:
        assert sorted(again.opened.entries["length"].tolist()) == [20_000, 100_000]
        assert again.load([1, 2]) == ["right"] * 2


def test_old_index_with_newer_slots_gives_no_wrong_page(tmp_path: Path) -> None:
    """An index from before (a restored copy) names places that have other pages now."""
    with Rig(tmp_path) as rig:
        rig.write([1, 2, 3])
    index = tmp_path / "0" / "index.sqlite"
    old = index.read_bytes()
    with Rig(tmp_path) as rig:
        rig.forget([1, 2, 3])
        rig.write([4, 5, 6])
    index.write_bytes(old)

    with Rig(tmp_path) as again:
        assert again.load([1, 2, 3]) == [REPLACED] * 3
        # It is what a kill leaves behind, and no fault of the disk.
        assert "disk.page_damaged" not in again.log.events()
    with Rig(tmp_path) as after:
        assert len(after.opened.entries) == 0


@pytest.mark.parametrize("how", ["link", "link to nothing", "pipe"])
def test_a_slab_that_is_a_link_or_a_pipe_is_not_read_and_not_written_through(
    tmp_path: Path, how: str
) -> None:
    """Its pages are gone; the node makes a file in its place and goes on."""
    with Rig(tmp_path / "disk") as rig:
        rig.write([1, 2, 3])
        file, _ = rig.file_of(1)
    elsewhere = tmp_path / "elsewhere"
    if how == "pipe":
        file.unlink()
        os.mkfifo(file)
    else:
        file.rename(elsewhere)
        file.symlink_to(elsewhere)
    before = elsewhere.read_bytes() if how == "link" else b""
    if how == "link to nothing":
        elsewhere.unlink()

    with Rig(tmp_path / "disk") as again:
        assert len(again.opened.entries) == 0
        assert again.write([4, 5]) == bytes(2)
        assert again.load([4, 5]) == ["right"] * 2
        assert not again.log.errors()
    assert file.is_file()
    assert not file.is_symlink()
    assert elsewhere.exists() == (how == "link")
    if how == "link":
        assert elsewhere.read_bytes() == before


@pytest.mark.parametrize(
    "garbage",
    [
        b"{",
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b'{"format": 1e999, "slab_bytes": 1e999}',
        b"[" * 10_000,
        b"5",
        None,
    ],
    ids=["cut", "nested", "no text", "infinite", "lists", "a number", "pipe"],
)
def test_lost_superblock_loses_no_page(tmp_path: Path, garbage: bytes | None) -> None:
    """Every slab states how large slabs are."""
    with Rig(tmp_path, size_bytes=64 * MIB) as rig:
        rig.write([1, 2])
        size = rig.opened.slab_bytes
    superblock = tmp_path / "0" / "store.json"
    superblock.unlink()
    if garbage is None:
        os.mkfifo(superblock)
    else:
        superblock.write_bytes(garbage)

    with Rig(tmp_path, size_bytes=256 * MIB) as again:
        assert again.opened.slab_bytes == size
        assert again.load([1, 2]) == ["right"] * 2


def test_store_of_another_format_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of another version are no entries; their room is used again, and the rest is left."""
    with Rig(tmp_path) as rig:
        rig.write([1, 2])
    (tmp_path / "0" / "notes.txt").write_text("another program's")
    for module in ("layout", "folder", "index_file"):
        monkeypatch.setattr(f"peercache.storage.{module}.FORMAT_VERSION", 99)

    with Rig(tmp_path) as again:
        assert len(again.opened.entries) == 0
        assert "disk.format_dropped" in again.log.events()
        assert again.write([1]) == bytes(1)
        assert again.load([1]) == ["right"]
    assert (tmp_path / "0" / "notes.txt").read_text() == "another program's"


def test_full_file_system_refuses_new_slabs_and_serves_old_pages(small: Path) -> None:
    """ENOSPC is DISK_FULL for what needs a new slab; nothing half made is left behind."""
    with Rig(small, size_bytes=32 * MIB) as rig:
        (small / "others").write_bytes(bytes(3 * MIB))
        outcomes = [rig.write(list(range(begin, begin + 9))) for begin in range(0, 90, 9)]
        good = [n for n in range(90) if outcomes[n // 9][n % 9] == 0]

        assert bytes([DISK_FULL]) * 9 in outcomes
        assert len(good) >= 27
        assert rig.load(good) == ["right"] * len(good)
        sizes = {file.stat().st_size for file in (small / "0").glob("slab-*")}
        assert sizes == {rig.opened.slab_bytes}
        (small / "others").unlink()
        assert rig.write([200]) == bytes(1), "there is room again"


def test_floor_of_free_space_is_left(small: Path) -> None:
    """No slab is made that would leave less than the floor."""
    with Rig(small, size_bytes=32 * MIB, free_floor=0.5) as rig:
        for begin in range(0, 90, 9):
            rig.write(list(range(begin, begin + 9)))

        free, total = rig.parts.folder.free_bytes()
        assert free >= total // 2
        assert len(list((small / "0").glob("slab-*"))) >= 2
