"""What a reader of a directory table does not take: each line that keeps it from harm, by itself.

The tables are spoilt in their memory, as no owner writes them, so that one check alone stands
between a look and what is wrong.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from peercache.actors.directory.table import DirectoryTable
from peercache.errors import Rejected
from peercache.memory.layout import table_name
from peercache.memory.published import TableFile
from peercache.memory.table_reading import KEYS_MAX, TORN, AttachedTable, TableReader, Unusable
from peercache.model.ids import Incarnation
from peercache.model.reads import TICK_AGE_MAX_S, Looked
from sims.tables import HOLDER_BYTES, header_of
from tests.descriptors import open_within
from tests.unit.actors.record_cluster import key_of, records_of

NODE = Incarnation(0xD157)
HOLDER = 11
RING, NOW_S = 77, 1000.0
ROW_BYTES, ROWS_MAX, HOLDERS_MAX = 64, 2**27, 16384
STATE_BITS, TOMBSTONE = 3 << 16, 1 << 32
F_OFD_SETLK = 37


@attrs.define
class Shelf:
    """A table with keys 1 to 9 of one holder, and its reader."""

    file: TableFile
    table: DirectoryTable
    reader: AttachedTable
    descriptor: int
    """Of the reader."""

    def words(self, at: int, count: int = 1) -> ctypes.Array[ctypes.c_uint64]:
        """Return words of the table, to be changed in place."""
        return (ctypes.c_uint64 * count).from_address(self.table.place[0] + at)

    def row(self, number: int) -> ctypes.Array[ctypes.c_uint64]:
        """Return the words of a row."""
        return self.words(header_of(self.table).rows_at + number * ROW_BYTES, 8)

    def slots(self) -> ctypes.Array[ctypes.c_uint64]:
        """Return the slots of the index that counts."""
        index = header_of(self.table).index
        return self.words(index[0], index[1])

    def slot_of(self, number: int) -> int:
        """Return where the slot is that names a row."""
        slots = list(self.slots())
        return next(at for at, slot in enumerate(slots) if slot & 0xFFFFFFFF == number)

    def look(self, *names: int, now_s: float = NOW_S) -> Looked:
        """Look for pages."""
        return self.reader.look(b"".join(map(key_of, names)), RING, now_s, 0)

    def count(self, *names: int) -> int:
        """Return how many records are found."""
        return len(self.look(*names).places)


@pytest.fixture(params=["mapped", "by pread"])
def shelf(shm_dir: Path, request: pytest.FixtureRequest) -> Iterator[Shelf]:
    file = TableFile.create(shm_dir, NODE, None)
    table = DirectoryTable(
        bytes(range(16)), answer_max=64, rows_max=ROWS_MAX, slots_min=512, file=file.file,
        incarnation=NODE,
    )  # fmt: skip
    assert table.begin(HOLDER, is_served=True) == 0
    table.put(0, records_of(HOLDER, list(range(1, 10)), [10] * 9).tobytes())
    table.grant(RING.to_bytes(8, "little"))
    table.tick(NOW_S)
    descriptor = os.open(file.path, os.O_RDONLY)
    reader = AttachedTable(descriptor, NODE, by_kernel=request.param == "by pread")
    made = Shelf(file, table, reader, descriptor)
    assert made.count(1, 2, 3) == 3
    yield made
    reader.close()
    file.close()


@pytest.mark.parametrize(
    ("field", "spoilt", "reason"),
    [
        ("magic", lambda magic, _: magic + 1, "foreign"),
        ("version", lambda version, _: version + 1, "other_version"),
        ("incarnation", lambda owner, _: owner + 1, "foreign"),
        ("bytes", lambda size, _: size + 4096, "cut_short"),
        ("rows_at", lambda *_: 0, "malformed"),
        ("rows_at", lambda at, _: at + 4, "malformed"),
        ("rows_at", lambda _, size: size - 8, "malformed"),
        ("rows_ready", lambda *_: ROWS_MAX + 2, "malformed"),
        ("holders_at", lambda *_: 2**64 - 8, "malformed"),
        ("holders_ready", lambda *_: HOLDERS_MAX + 1, "malformed"),
        ("current", lambda *_: 2, "malformed"),
        (0, lambda *_: 2**63, "malformed"),
        (1, lambda capacity, _: capacity - 1, "malformed"),
        (1, lambda *_: 2**32, "malformed"),
        (4, lambda *_: 2**63, "malformed"),
    ],
)
def test_a_header_that_does_not_fit_is_not_believed(
    shelf: Shelf, field: str | int, spoilt: Callable[[int, int], int], reason: str
) -> None:
    """Each batch looks at it again. A number is a place among the words of the two indices."""
    header, saved = header_of(shelf.table), bytes(header_of(shelf.table))
    if isinstance(field, int):
        header.index[field] = spoilt(header.index[field], header.bytes)
    else:
        setattr(header, field, spoilt(getattr(header, field), header.bytes))

    with pytest.raises(Unusable, match=reason):
        shelf.look(1)

    ctypes.memmove(ctypes.addressof(header), saved, len(saved))
    assert shelf.count(1) == 1


@pytest.mark.parametrize(("size", "capacity"), [(4095, 512), (2**46 + 8, 512), (2**40, 2**32 + 8)])
def test_sizes_that_no_table_has_are_refused(size: int, capacity: int) -> None:
    """Sums of places stay far from overflow, and numbers of slots fit into 32 bits."""
    table = DirectoryTable(bytes(16), answer_max=8, rows_max=1000, slots_min=512)
    header = header_of(table)
    reader = TableReader(address=table.place[0], file=-1, size_bytes=size, incarnation=0)
    saved = bytes(header)
    header.bytes, header.index[1] = size, capacity

    with pytest.raises(Unusable, match="malformed"):
        reader.begin(1)
    ctypes.memmove(ctypes.addressof(header), saved, len(saved))


def free(shelf: Shelf) -> None:
    """Its slot was loaded just before the record was removed."""
    shelf.row(1)[0] &= ~STATE_BITS


def beyond_the_rows(shelf: Shelf) -> None:
    """A load from it would be a bus error where the file system is full."""
    ready = header_of(shelf.table).rows_ready
    ctypes.memmove(ctypes.addressof(shelf.row(ready)), bytes(shelf.row(1)), ROW_BYTES)
    at = shelf.slot_of(1)
    shelf.slots()[at] = shelf.slots()[at] & ~0xFFFFFFFF | ready


def of_another_key(shelf: Shelf) -> None:
    """Two keys may have one tag; a row may be given to another key meanwhile."""
    shelf.row(1)[1] ^= 1


def of_a_younger_holder(shelf: Shelf) -> None:
    """Its entry is younger than the batch, and has no memory."""
    header = header_of(shelf.table)
    beyond = header.holders_ready
    at = shelf.words(header.holders_at + beyond * HOLDER_BYTES, 2)
    at[0], at[1] = 99, 2
    shelf.row(1)[0] += beyond


@pytest.mark.parametrize("change", [free, beyond_the_rows, of_another_key, of_a_younger_holder])
def test_a_row_that_is_not_of_a_page_is_not_found(
    shelf: Shelf, change: Callable[[Shelf], None]
) -> None:
    """The other one is."""
    change(shelf)

    assert shelf.count(1, 2) == 1


def test_a_row_that_is_named_twice_is_found_once(shelf: Shelf) -> None:
    """It was moved into the next index between two looks."""
    slots, at = shelf.slots(), shelf.slot_of(1)
    free = next(place for place in range(at, len(slots)) if not slots[place])
    slots[free] = slots[at]

    assert shelf.count(1) == 1


def test_records_of_an_invalid_holder_are_not_found(shelf: Shelf) -> None:
    """No incarnation is zero."""
    shelf.words(header_of(shelf.table).holders_at)[0] = 0

    assert shelf.count(1, 2) == 0


def test_of_more_holders_than_a_reader_lists_some_are_found(shelf: Shelf) -> None:
    """Its memory has room for them, and for no more."""
    for holder in range(100, 220):
        entry = shelf.table.begin(holder, is_served=True)
        assert entry is not None
        shelf.table.put(entry, records_of(holder, [1], [10]).tobytes())

    assert shelf.count(1) == 8


def test_a_reader_without_room_writes_nothing_beyond_it(shelf: Shelf) -> None:
    """Its caller promised memory for fewer records than there are: a bug, and no overflow."""
    reading = shelf.reader._reader
    assert reading is not None
    reading._reading.found_max = 2

    with pytest.raises(KeyError, match="-6"):
        shelf.look(1, 2, 3)


def test_an_index_without_an_empty_slot_is_searched_once(shelf: Shelf) -> None:
    """Each slot was used, and its record is gone: absent all the same."""
    shelf.slots()[:] = [TOMBSTONE] * len(shelf.slots())

    looked = shelf.look(1)

    assert (len(looked.places), looked.is_final) == (0, True)


def test_an_index_without_slots_is_not_looked_into(shelf: Shelf) -> None:
    """It is the one that counts no longer, wherever its header has it."""
    header = header_of(shelf.table)
    header.index[0] += 8 * shelf.slot_of(1)
    header.index[1] = 0

    assert shelf.count(1) == 0


def test_a_file_smaller_than_a_header_is_not_believed(shm_dir: Path) -> None:
    """However right its beginning is."""
    table = DirectoryTable(bytes(16), answer_max=8, rows_max=1000, slots_min=512, incarnation=NODE)
    header_of(table).bytes = 100
    path = shm_dir / table_name(NODE)
    path.write_bytes(bytes(header_of(table))[:100])
    file = os.open(path, os.O_RDONLY)

    for by_kernel, reason in ((True, "cut_short"), (False, "malformed")):
        reader = AttachedTable(os.dup(file), NODE, by_kernel=by_kernel)
        with pytest.raises(Unusable, match=reason):
            reader.look(key_of(1), RING, NOW_S, 0)
        reader.close()
    os.close(file)


def test_private_memory_is_read_without_a_lock() -> None:
    """No file has it, so none can be locked, and nothing of it is given back under a reader."""
    table = DirectoryTable(bytes(16), answer_max=8, rows_max=1000, slots_min=512, incarnation=NODE)
    table.begin(HOLDER, is_served=True)
    table.put(0, records_of(HOLDER, [1], [10]).tobytes())
    address, size = table.place
    reader = TableReader(address=address, file=-1, size_bytes=size, incarnation=NODE)

    assert len(reader.batch(key_of(1), RING, NOW_S, 0).places) == 1


def test_a_tick_from_long_after_the_call_makes_nothing_final(shelf: Shelf) -> None:
    """The reader was stopped after it had looked at its clock, and the owner has stopped since."""
    shelf.table.tick(NOW_S + 1.01 * TICK_AGE_MAX_S)

    looked = shelf.look(77)

    assert (looked.is_final, looked.is_at_work) == (False, False)
    shelf.table.tick(NOW_S + 0.99 * TICK_AGE_MAX_S)
    assert shelf.look(77).is_final


def lock(file: int, kind: int) -> None:
    fcntl.fcntl(file, F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))


def test_a_mapped_table_is_not_read_while_memory_is_given_back(shelf: Shelf) -> None:
    """And its owner is kept from it during a look, not longer."""
    owner = os.open(shelf.file.path, os.O_RDWR)
    lock(owner, fcntl.F_WRLCK)
    if not shelf.reader.by_kernel:
        with pytest.raises(Unusable, match=TORN):
            shelf.look(1)
    else:
        assert shelf.count(1) == 1
    lock(owner, fcntl.F_UNLCK)
    assert shelf.count(1) == 1

    lock(owner, fcntl.F_WRLCK)
    os.close(owner)


class Turns:
    """A lock that knows who has it, and lets an end come while a look has it."""

    def __init__(self, on_taken: Callable[[], None]) -> None:
        """Call `on_taken` each time that it is taken."""
        self.is_held = False
        self._on_taken = on_taken

    def __enter__(self) -> None:
        """Take it."""
        assert not self.is_held, "taken twice"
        self.is_held = True
        self._on_taken()

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self.is_held = False


def test_a_look_and_the_end_of_a_table_take_turns(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapping that ends under a look of another thread is a crash; one that ended is no table."""
    taken: list[str] = []
    turns = Turns(lambda: taken.append("taken"))
    monkeypatch.setattr(shelf.reader, "_lock", turns)
    right_batch, right_close = TableReader.batch, os.close

    def batch(self: TableReader, *arguments: Any) -> Looked:
        assert turns.is_held, "another thread could end the mapping now"
        return right_batch(self, *arguments)

    def close(file: int) -> None:
        assert turns.is_held or file != shelf.descriptor, "a look could be under way"
        right_close(file)

    monkeypatch.setattr(TableReader, "batch", batch)
    monkeypatch.setattr(os, "close", close)

    assert shelf.count(1) == 1
    shelf.reader.close()
    with pytest.raises(Unusable, match="closed"):
        shelf.look(1)
    assert taken == ["taken"] * 3


def test_a_table_is_closed_once(shelf: Shelf) -> None:
    """Its descriptor may be another file's by then."""
    shelf.reader.close()
    other = os.open("/dev/null", os.O_RDONLY)
    shelf.reader.close()

    assert os.fstat(other)
    os.close(other)
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert not [line for line in maps if table_name(NODE) in line and " r--s " in line]


def test_a_file_that_cannot_be_mapped_leaves_no_descriptor(shm_dir: Path) -> None:
    """It is empty: its owner has just made it, or the file system is full."""
    (shm_dir / table_name(NODE)).touch(mode=0o600)

    with pytest.raises(Rejected, match="cannot map"):
        AttachedTable.open(shm_dir, incarnation=NODE)

    assert not open_within(shm_dir)


def test_a_long_batch_is_as_final_as_the_least_of_its_parts(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of them the owner loses its authority, and stops."""
    right = TableReader._part

    def part(self: TableReader, *arguments: Any) -> Looked:
        looked = right(self, *arguments)
        shelf.table.revoke()
        shelf.table.tick(NOW_S - 1.0)
        return looked

    monkeypatch.setattr(TableReader, "_part", part)
    names = [*range(1, KEYS_MAX), 5, 77, 6]

    looked = shelf.look(*names)

    assert (looked.is_final, looked.is_at_work) == (False, False)
    assert looked.places.tolist() == [*range(9), KEYS_MAX - 1, KEYS_MAX + 1]
