"""Inspection of a page store without a node: figures, and a check of every byte.

`stats_of` only reads, even while a node runs. `check` needs exclusive access to the folder: it
reads every slot, verifies the checksum of each page, and leaves an index of exactly the valid
pages. Slabs are never written to: a damaged page has no row, and its place is reused.
"""

from __future__ import annotations

import mmap
import sqlite3
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.disk.slabs import BLOCK_BYTES, slot_blocks_of, slots_in
from peercache.actors.ports import DISK_ENTRY
from peercache.errors import ConfigError
from peercache.model.keys import parts_of
from peercache.storage.folder import FolderBusyError, open_folder, slab_files
from peercache.storage.index_file import (
    MISSING,
    load_entries,
    open_index,
    read_index,
    remove_index,
)
from peercache.storage.layout import (
    INDEX_NAME,
    LOCK_NAME,
    SUPERBLOCK_NAME,
    checksum_of,
    parse_slot,
    slab_name,
)
from peercache.storage.slab_files import SlabFiles, consistent

Entries = npt.NDArray[np.void]

PLENTY_BYTES = 2**40
"""No limit for an index that is only read."""


@attrs.frozen
class StoreFigures:
    """The content of a folder, according to its index."""

    folder: str
    in_use: bool
    index: str
    """"ok", or the problem."""
    pages: int
    page_bytes: int
    namespaces: int
    slabs: int
    file_bytes: int
    oldest_use_s: int
    newest_use_s: int


@attrs.frozen
class StoreCheck:
    """The result of a check. pages: the number of valid pages, which are in the index now."""

    folder: str
    index: str
    pages: int
    page_bytes: int
    damaged: tuple[str, ...]
    """FILE:OFFSET of pages that are in the index, and damaged."""
    rows_without_page: int
    pages_without_row: int
    unreadable: tuple[str, ...]
    seconds: float

    @property
    def is_whole(self) -> bool:
        """Return whether there was no problem."""
        wrong = self.damaged or self.unreadable or self.rows_without_page
        return not wrong and self.index == "ok"


def folders_in(path: str) -> list[Path]:
    """Return the node folders at or below a path; raise ConfigError if there is none."""
    root = Path(path)
    if not root.is_dir():
        raise ConfigError("PATH", f"{path} is no folder")
    if _is_ours(root):
        return [root]
    numbered = [entry for entry in root.iterdir() if entry.name.isdecimal() and _is_ours(entry)]
    if not numbered:
        raise ConfigError("PATH", f"there is no page store in {path}")
    return sorted(numbered, key=lambda entry: int(entry.name))


def stats_of(folder: Path) -> StoreFigures:
    """Return the figures of the index and the files of a folder; changes nothing."""
    problem, entries = _entries_of_index(folder, read_index)
    found = list(slab_files(folder).values())
    namespaces = np.unique(entries["namespace"])
    now = int(time.time())
    used = entries["used"].astype(np.int64)
    return StoreFigures(
        folder=str(folder),
        in_use=_is_in_use(folder),
        index=problem or "ok",
        pages=len(entries),
        page_bytes=int(entries["length"].sum(dtype=np.int64)),
        namespaces=len(namespaces),
        slabs=len(found),
        file_bytes=sum(file.stat().st_blocks * 512 for file in folder.iterdir()),
        oldest_use_s=max(0, now - int(used.min())) if len(used) else 0,
        newest_use_s=max(0, now - int(used.max())) if len(used) else 0,
    )


def check(folder: Path, progress: Callable[[str], None], log: Any) -> StoreCheck:
    """Verify every page of a folder that no node uses, and repair its index."""
    started = time.monotonic()
    opened = open_folder(folder, None)
    try:
        problem, indexed = _entries_of_index(folder, partial(read_index, locked=True))
        files = SlabFiles(opened, free_floor=0.0, log=log, read_only=False)
        good: list[Entries] = []
        wrong: list[int] = []
        unreadable: list[str] = []
        numbers = sorted(files.blocks_of)
        unreadable += [
            slab_name(n)
            for n in slab_files(folder)
            if n not in files.blocks_of and not files.is_blank(n)
        ]
        for count, number in enumerate(numbers):
            progress(f"{folder}: slab {count + 1} of {len(numbers)}")
            rows, damaged, failed = _verify_slab(files, number)
            good.append(rows)
            wrong += damaged
            if failed:
                unreadable.append(slab_name(number))
        files.close()
        slots = np.concatenate(good) if good else np.empty(0, DISK_ENTRY)
        kept, extra = _held_against(indexed, slots, trusts_rows=not problem)
        kept = consistent(kept, files, opened.slab_count)
        if problem == MISSING and not (len(kept) or wrong or unreadable):
            # A node that was killed, or stopped, before it had stored a page.
            problem = ""
        _replace_index(folder, kept, is_damaged=bool(problem))
    finally:
        opened.close()
    rows_at = dict.fromkeys(indexed["place"].tolist())
    listed = [place for place in wrong if place in rows_at or problem]
    return StoreCheck(
        folder=str(folder),
        index=problem or "ok",
        pages=len(kept),
        page_bytes=int(kept["length"].sum(dtype=np.int64)),
        damaged=tuple(_name_of(place, opened.slab_bytes) for place in listed),
        rows_without_page=0 if problem else len(indexed) - len(kept) - len(listed),
        pages_without_row=extra,
        unreadable=tuple(unreadable),
        seconds=round(time.monotonic() - started, 3),
    )


def _verify_slab(files: SlabFiles, number: int) -> tuple[Entries, list[int], bool]:
    """Return the entries of valid pages, the places of damaged ones, and whether reading failed."""
    blocks = files.blocks_of[number]
    slot_bytes = blocks * BLOCK_BYTES
    first = number * files.folder.slab_bytes + BLOCK_BYTES
    found: list[tuple[Any, ...]] = []
    damaged: list[int] = []
    failed = False
    with mmap.mmap(-1, slot_bytes) as memory, memoryview(memory) as view:
        for slot in range(slots_in(files.folder.slab_bytes, blocks)):
            place = first + slot * slot_bytes
            try:
                count = files.read(place, [view])
            except OSError:
                failed = True
                continue
            header = parse_slot(view[: min(count, BLOCK_BYTES)], place)
            if header is None or slot_blocks_of(header.length) != blocks:
                continue
            end = BLOCK_BYTES + header.length
            if count < end or checksum_of(view[BLOCK_BYTES:end]) != header.checksum:
                damaged.append(place)
                continue
            found.append(
                (header.key, parts_of(header.namespace), place, header.sequence, header.length,
                 header.written, header.written, blocks)
            )  # fmt: skip
    return np.array(found, DISK_ENTRY), damaged, failed


def _held_against(indexed: Entries, slots: Entries, *, trusts_rows: bool) -> tuple[Entries, int]:
    """Return the entries to keep, and how many valid pages the index did not have.

    With a readable index, a page without a row was evicted: it stays out.
    """
    if not trusts_rows:
        return slots, len(slots)
    of_place = {row["place"].item(): row for row in indexed}
    kept = []
    for index, slot in enumerate(slots):
        row = of_place.get(slot["place"].item())
        if row is not None and row["key"].tobytes() == slot["key"].tobytes():
            slots["used"][index] = row["used"]
            kept.append(index)
    return slots[kept], len(slots) - len(kept)


def _replace_index(folder: Path, entries: Entries, *, is_damaged: bool) -> None:
    if is_damaged:
        remove_index(folder)
    open_index(folder, bytes_max=PLENTY_BYTES, entries=entries).close()


def _entries_of_index(
    folder: Path, opening: Callable[[Path], sqlite3.Connection]
) -> tuple[str, Entries]:
    """Return the problem of the index, or "", and its rows."""
    empty = np.empty(0, DISK_ENTRY)
    if not (folder / INDEX_NAME).exists():
        return MISSING, empty
    try:
        connection = opening(folder)
        try:
            (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            return ("" if result == "ok" else str(result)), load_entries(connection)
        finally:
            connection.close()
    except sqlite3.Error as error:
        return str(error), empty


def _is_in_use(folder: Path) -> bool:
    try:
        open_folder(folder, None).close()
    except FolderBusyError:
        return True
    return False


def _is_ours(path: Path) -> bool:
    return path.is_dir() and ((path / SUPERBLOCK_NAME).exists() or (path / LOCK_NAME).exists())


def _name_of(place: int, slab_bytes: int) -> str:
    number, offset = divmod(place, slab_bytes)
    return f"{slab_name(number)}:{offset}"
