"""A table's reader and its owner at each moment: before every load, and after every store."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from peercache.actors.directory.table import DirectoryTable
from peercache.memory.layout import table_name
from peercache.memory.published import TableFile
from peercache.memory.table_reading import TORN, AttachedTable, Unusable
from peercache.model.ids import Incarnation
from peercache.model.reads import Looked
from peercache.model.records import RECORD_BYTES, Records
from sims.tables import header_of, make_index_again
from tests.unit.actors.record_cluster import distinguished, drops_of, key_of
from tests.unit.memory.table_fuzzer import data_of
from tests.unit.memory.watched import WatchedReader, WatchedWriter

NODE = Incarnation(0x3040)
A, B, NEXT = 11, 12, 99
RING, NOW_S = 77, 1000.0
ROW_BYTES = 64
STATE_BITS, WRITING = 3 << 16, 2 << 16
MANY = list(range(100, 300))
"""Pages that have slots all over a small index."""
ASKED = [*range(1, 8), *MANY[::7]]


@attrs.define
class Shelf:
    """A table in which A has pages 1 to 5 and B has page 1, too; and its reader."""

    file: TableFile
    table: DirectoryTable
    reader: AttachedTable

    def look(self, *names: int) -> Looked:
        return self.reader.look(b"".join(map(key_of, names)), RING, NOW_S, 0)

    def found(self) -> tuple[frozenset[bytes], bool]:
        """Return what a reader finds, and whether what it does not find is absent."""
        looked = self.look(*ASKED)
        records = split(looked.records)
        assert len(set(records)) == len(records), "a record was found twice"
        return frozenset(records), looked.is_final

    def row(self, number: int) -> Any:
        """Return the words of a row, to be changed in place."""
        at = self.table.place[0] + header_of(self.table).rows_at + number * ROW_BYTES
        return (ctypes.c_uint64 * 8).from_address(at)

    def put(self, entry: int, records: Records) -> None:
        assert self.table.put(entry, records.tobytes()).refused == 0

    def drop(self, names: list[int], generation: int) -> None:
        self.table.drop(0, drops_of(names, [generation] * len(names)).tobytes())

    def close(self) -> None:
        self.reader.close()
        self.file.close()


@pytest.fixture(params=[False, True], ids=["mapped", "by pread"])
def make(shm_dir: Path, request: pytest.FixtureRequest) -> Callable[[], Shelf]:
    def made() -> Shelf:
        file = TableFile.create(shm_dir, NODE, None)
        table = DirectoryTable(
            bytes(range(16)), answer_max=64, rows_max=2000, slots_min=512, file=file.file,
            incarnation=NODE,
        )  # fmt: skip
        for entry, holder in enumerate((A, B)):
            assert table.begin(holder, is_served=True) == entry
        descriptor = os.open(file.path, os.O_RDONLY)
        shelf = Shelf(file, table, AttachedTable(descriptor, NODE, by_kernel=request.param))
        shelf.put(0, distinguished(A, [1, 2, 3, 4, 5], [10] * 5))
        shelf.put(1, distinguished(B, [1], [20]))
        table.grant(RING.to_bytes(8, "little"))
        table.tick(NOW_S)
        return shelf

    return made


def reported_newer(shelf: Shelf) -> None:
    shelf.put(0, distinguished(A, [1, 3], [14, 16]))


def stored(shelf: Shelf) -> None:
    shelf.put(0, distinguished(A, [6, 7], [14, 16]))


def removed(shelf: Shelf) -> None:
    shelf.drop([2, 4], 10)


def repaired(shelf: Shelf) -> None:
    """An older record, a page less, one more: in all buckets at once."""
    records = distinguished(A, [1, 2, 3, 5, 6], [8, 10, 10, 10, 10])
    shelf.table.replace(0, bytes(range(256)), records.tobytes())


def row_given_to_another_page(shelf: Shelf) -> None:
    shelf.drop([4], 10)
    shelf.put(0, distinguished(A, [7], [16]))


def index_made_again(shelf: Shelf) -> None:
    shelf.put(0, distinguished(A, MANY, [10] * len(MANY)))
    epoch = shelf.table.figures().epoch
    make_index_again(shelf.table)
    assert shelf.table.figures().epoch >= epoch + 2


def changed_while_the_index_moves(shelf: Shelf) -> None:
    shelf.put(0, distinguished(A, MANY, [10] * len(MANY)))
    header = header_of(shelf.table)
    header.moved, header.next_capacity = 0, 1024
    epoch = header.epoch
    while header.epoch == epoch:
        assert shelf.table.tend(512)
    assert shelf.table.tend(500)
    assert 0 < header.moved < header.index[4 * (1 - header.current) + 1]
    shelf.put(0, distinguished(A, MANY, [12] * len(MANY)))
    shelf.drop(MANY[::2], 12)
    while shelf.table.tend(4096):
        pass


def served_no_more(shelf: Shelf) -> None:
    shelf.table.serve(0, is_served=False)


def entry_given_to_another_holder(shelf: Shelf) -> None:
    shelf.table.serve(0, is_served=False)
    while shelf.table.sweep(0, 2) == 2:
        pass
    assert shelf.table.begin(NEXT, is_served=True) == 0
    shelf.put(0, distinguished(NEXT, [1, 3], [30, 30]))


def split(packed: bytes) -> list[bytes]:
    return [packed[at : at + RECORD_BYTES] for at in range(0, len(packed), RECORD_BYTES)]


def at_each_moment(
    watched_reader: WatchedReader,
    make: Callable[[], Shelf],
    change: Callable[[Shelf], None],
    names: tuple[int, ...],
    prepare: Callable[[Shelf], None] = lambda _: None,
) -> Iterator[Looked]:
    """Yield what a batch finds with a change before its first load, its second one, and so on."""
    moment, loads = 0, 1
    while moment < loads:  # None is after the last one.
        moment += 1
        shelf = make()
        try:
            prepare(shelf)
            with watched_reader.at(moment, lambda at=shelf: change(at)):  # type: ignore[misc]
                looked = shelf.look(*names)
            loads = watched_reader.loads
        finally:
            shelf.close()
        yield looked
    assert moment > 15, "a batch has fewer loads than its header needs"


@pytest.mark.parametrize(
    ("change", "page", "later"),
    [
        (reported_newer, 1, distinguished(A, [1], [14])),
        (removed, 2, None),
        (row_given_to_another_page, 4, None),
        (lambda shelf: make_index_again(shelf.table), 1, distinguished(A, [1], [10])),
        (entry_given_to_another_holder, 1, distinguished(NEXT, [1], [30])),
    ],
)
def test_a_batch_finds_what_was_there_before_a_change_or_after_it(
    watched_reader: WatchedReader,
    make: Callable[[], Shelf],
    change: Callable[[Shelf], None],
    page: int,
    later: Any,
) -> None:
    """Never a mixture of both; and what the change does not concern is found all the time."""
    before, other = distinguished(A, [page], [10]).tobytes(), distinguished(B, [1], [20]).tobytes()
    after = None if later is None else later.tobytes()
    seen = set()
    names = tuple(sorted({1, page, 5, 900}))

    for looked in at_each_moment(watched_reader, make, change, names):
        found = split(looked.records)
        assert other in found
        found.remove(other)
        of_page = [record for record in found if record[:16] == key_of(page)]
        assert len(of_page) <= 1
        seen.add(of_page[0] if of_page else None)
        assert looked.is_final
        if change is not entry_given_to_another_holder:
            assert distinguished(A, [5], [10]).tobytes() in found

    assert seen == {before, after}


def test_what_moves_into_the_next_index_is_found(
    watched_reader: WatchedReader, make: Callable[[], Shelf]
) -> None:
    """A slot is in the next index before the old one loses it: the old one is looked at first."""

    def begin_to_grow(shelf: Shelf) -> None:
        shelf.table.put(0, distinguished(A, MANY[:100], [10] * 100).tobytes())
        header = header_of(shelf.table)
        header.moved, header.next_capacity = 0, 2 * header.index[4 * header.current + 1]
        epoch = header.epoch
        while header.epoch == epoch:
            assert shelf.table.tend(512)

    def go_on(shelf: Shelf) -> None:
        header = header_of(shelf.table)
        epoch, old = header.epoch, header.index[4 * (1 - header.current) + 1]
        assert shelf.table.tend(old)
        assert old // 4 < header.moved < old
        assert header.epoch == epoch, "a new epoch would have it looked at again"

    names = tuple(MANY[:100:8])
    for looked in at_each_moment(watched_reader, make, go_on, names, begin_to_grow):
        assert looked.places.tolist() == list(range(len(names)))


def test_a_row_that_is_written_during_a_look_is_looked_at_again(
    watched_reader: WatchedReader, make: Callable[[], Shelf]
) -> None:
    """Its owner is between its first store and its last one for a while."""
    for began in range(1, 80):
        shelf = make()
        row = shelf.row(1)
        assert row[4] == 10

        def write(load: int, _: int | None, row: Any = row, began: int = began) -> None:
            if load == began:
                row[0] = row[0] & ~STATE_BITS | WRITING
                row[4] = 14  # The generation.
            elif load == began + 6:
                row[0] = (row[0] & ~STATE_BITS | 1 << 16) + (1 << 18)
                row[3] = 4242  # Its place.

        with watched_reader.acting(write):
            looked = shelf.look(1)
        shelf.close()

        found = [record for record in split(looked.records) if record[16] == A]
        assert looked.is_final
        assert len(found) == 1
        generation, offset = found[0][32:40], found[0][24:32]
        is_new = generation == (14).to_bytes(8, "little")
        assert (offset == (4242).to_bytes(8, "little")) == is_new


def test_every_load_is_within_the_table(
    watched_reader: WatchedReader, make: Callable[[], Shelf]
) -> None:
    """Also where an index has no slots, and begins where the table ends."""
    shelf = make()
    # The owner's mapping can be written to, the reader's cannot.
    maps = Path("/proc/self/maps").read_text().splitlines()
    areas = [line.split()[0] for line in maps if table_name(NODE) in line and " r--s " in line]
    begin, end = (int(part, 16) for part in areas[0].split("-")) if areas else (0, 0)

    def check(_: int, place: int | None) -> None:
        if place is not None:
            assert begin <= place <= end - 8

    header = header_of(shelf.table)
    counts = []
    for places in (list(header.index), [header.bytes, 0, 0, 0] * 2):
        header.index[:] = places
        with watched_reader.acting(check):
            counts.append(len(shelf.look(1, 2, 3, 900).places))
    shelf.close()

    assert counts == [4, 0]


@pytest.mark.parametrize("make", [True], ids=["by pread"], indirect=True)
def test_a_file_that_is_cut_short_during_a_batch_ends_it(
    watched_reader: WatchedReader, make: Callable[[], Shelf]
) -> None:
    """What could not be read is not taken for absent, whichever load met the end of the file.

    A file that another user may cut short is never mapped.
    """
    shelf = make()
    header = header_of(shelf.table)
    ends = sorted({0, 64, header.rows_at + 70, header.holders_at + 4, header.index[0] + 64})
    with watched_reader.acting(lambda *_: None):
        whole = shelf.look(1, 2).records
    loads = watched_reader.loads
    file = os.open(shelf.file.path, os.O_RDWR)
    size = os.fstat(file).st_size
    areas = data_of(file, size)
    del header
    shelf.table = None  # type: ignore[assignment]  # It is mapped there no more.
    reasons = set()
    for end in ends:
        for moment in range(1, loads + 1):
            with watched_reader.at(moment, lambda at=end: os.truncate(file, at)):  # type: ignore[misc]
                try:
                    assert shelf.look(1, 2).records == whole
                    assert end, "a load has failed, whichever it was"
                except Unusable as unusable:
                    reasons.add(unusable.reason)
            os.truncate(file, size)
            for at, data in areas:
                os.pwrite(file, data, at)
    os.close(file)
    shelf.close()

    assert reasons <= {"cut_short", TORN}
    assert "cut_short" in reasons


CHANGES = (
    reported_newer, stored, removed, repaired, row_given_to_another_page, index_made_again,
    changed_while_the_index_moves, served_no_more, entry_given_to_another_holder,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_reader_finds_whole_records_after_every_store(
    watched_writer: WatchedWriter, make: Callable[[], Shelf], change: Callable[[Shelf], None]
) -> None:
    """What a change leaves as it is, is found all the time; of the rest the old or the new."""
    shelf = make()
    seen: list[tuple[frozenset[bytes], bool]] = [shelf.found()]

    watched_writer.watch(lambda: change(shelf), lambda: seen.append(shelf.found()))

    before, after = seen[0][0], shelf.found()[0]
    shelf.close()
    between = _made_between(change)
    assert watched_writer.stores > 0
    for found, is_final in seen:
        assert found <= before | after | between, "what never was is found"
        # A repair writes every row of its buckets again: what is not read then is not absent.
        is_doubted = change is repaired and not is_final
        assert is_doubted or before & after <= found, "what does not change was lost"
        keys = {record[:16] for record in found}
        both = {record[:16] for record in before} & {record[:16] for record in after}
        if change in (reported_newer, repaired):
            assert not is_final or both <= keys, "a page that is published again was absent"


def _made_between(change: Callable[[Shelf], None]) -> frozenset[bytes]:
    """Return the records that a change makes and ends again."""
    if change is not changed_while_the_index_moves:
        return frozenset()
    names = [name for name in ASKED if name in MANY]
    made = [distinguished(A, names, [generation] * len(names)) for generation in (10, 12)]
    return frozenset(record.tobytes() for records in made for record in records)
