"""What a reader finds in the middle of its owner's changes: after every store of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from peercache.actors.directory.table import DirectoryTable
from peercache.memory.published import TableFile
from peercache.memory.table_reading import AttachedTable
from peercache.model.ids import Incarnation
from peercache.model.records import RECORD_BYTES, Records
from sims.tables import header_of, make_index_again
from tests.unit.actors.record_cluster import drops_of, key_of, told_apart
from tests.unit.memory.watched_writer import WatchedWriter, compiled, put_in_place

NODE = Incarnation(0x5704)
A, B, NEXT = 11, 12, 99
RING, NOW_S = 77, 1000.0
MANY = list(range(100, 300))
ASKED = [*range(1, 8), *MANY[::7]]


@attrs.define
class Shelf:
    """A table in which A has pages 1 to 5 and B has page 1, too; and its reader."""

    table: DirectoryTable
    reader: AttachedTable

    def told(self) -> tuple[frozenset[bytes], bool]:
        """Return what a reader finds, and whether what it does not find is absent."""
        looked = self.reader.look(b"".join(map(key_of, ASKED)), RING, NOW_S, 0)
        packed = looked.records
        records = [packed[at : at + RECORD_BYTES] for at in range(0, len(packed), RECORD_BYTES)]
        assert len(set(records)) == len(records), "a record was told twice"
        return frozenset(records), looked.is_final

    def put(self, entry: int, records: Records) -> None:
        assert self.table.put(entry, records.tobytes()).refused == 0

    def drop(self, names: list[int], generation: int) -> None:
        self.table.drop(0, drops_of(names, [generation] * len(names)).tobytes())


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("watched"))


@pytest.fixture
def watched(library: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedWriter:
    made = WatchedWriter(library)
    put_in_place(made, monkeypatch)
    return made


@pytest.fixture(params=[False, True], ids=["mapped", "by pread"])
def shelf(shm_dir: Path, request: pytest.FixtureRequest, watched: WatchedWriter) -> Iterator[Shelf]:
    del watched
    file = TableFile.create(shm_dir, NODE, None)
    table = DirectoryTable(
        bytes(range(16)), told_max=64, rows_max=2000, slots_min=512, file=file.file,
        incarnation=NODE,
    )  # fmt: skip
    for entry, holder in enumerate((A, B)):
        assert table.begin(holder, is_served=True) == entry
    reader = AttachedTable(os.open(file.path, os.O_RDONLY), NODE, by_kernel=request.param)
    made = Shelf(table, reader)
    made.put(0, told_apart(A, [1, 2, 3, 4, 5], [10] * 5))
    made.put(1, told_apart(B, [1], [20]))
    table.grant(RING.to_bytes(8, "little"))
    table.tick(NOW_S)
    yield made
    reader.close()
    file.close()


def told_newer(shelf: Shelf) -> None:
    shelf.put(0, told_apart(A, [1, 3], [14, 16]))


def stored(shelf: Shelf) -> None:
    shelf.put(0, told_apart(A, [6, 7], [14, 16]))


def removed(shelf: Shelf) -> None:
    shelf.drop([2, 4], 10)


def repaired(shelf: Shelf) -> None:
    """An older record, a page less, one more: in all buckets at once."""
    records = told_apart(A, [1, 2, 3, 5, 6], [8, 10, 10, 10, 10])
    shelf.table.replace(0, bytes(range(256)), records.tobytes())


def row_given_to_another_page(shelf: Shelf) -> None:
    shelf.drop([4], 10)
    shelf.put(0, told_apart(A, [7], [16]))


def index_made_again(shelf: Shelf) -> None:
    shelf.put(0, told_apart(A, MANY, [10] * len(MANY)))
    epoch = shelf.table.figures().epoch
    make_index_again(shelf.table)
    assert shelf.table.figures().epoch >= epoch + 2


def changed_while_the_index_moves(shelf: Shelf) -> None:
    shelf.put(0, told_apart(A, MANY, [10] * len(MANY)))
    header = header_of(shelf.table)
    header.moved, header.next_capacity = 0, 1024
    epoch = header.epoch
    while header.epoch == epoch:
        assert shelf.table.tend(512)
    assert shelf.table.tend(500)
    assert 0 < header.moved < header.index[4 * (1 - header.current) + 1]
    shelf.put(0, told_apart(A, MANY, [12] * len(MANY)))
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
    shelf.put(0, told_apart(NEXT, [1, 3], [30, 30]))


CHANGES = (
    told_newer, stored, removed, repaired, row_given_to_another_page, index_made_again,
    changed_while_the_index_moves, served_no_more, entry_given_to_another_holder,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_reader_finds_whole_records_after_every_store(
    watched: WatchedWriter, shelf: Shelf, change: Callable[[Shelf], None]
) -> None:
    """What a change leaves as it is, is found all the time; of the rest the old or the new."""
    seen: list[tuple[frozenset[bytes], bool]] = [shelf.told()]

    watched.watch(lambda: change(shelf), lambda: seen.append(shelf.told()))

    before, after = seen[0][0], shelf.told()[0]
    between = _made_between(change)
    assert watched.stores > 0
    for told, is_final in seen:
        assert told <= before | after | between, "what never was is told"
        # A repair writes every row of its buckets again: what is not read then is not absent.
        is_doubted = change is repaired and not is_final
        assert is_doubted or before & after <= told, "what does not change was lost"
        keys = {record[:16] for record in told}
        both = {record[:16] for record in before} & {record[:16] for record in after}
        if change in (told_newer, repaired):
            assert not is_final or both <= keys, "a page that is told again was absent"


def _made_between(change: Callable[[Shelf], None]) -> frozenset[bytes]:
    """Return the records that a change makes and ends again."""
    if change is not changed_while_the_index_moves:
        return frozenset()
    names = [name for name in ASKED if name in MANY]
    made = [told_apart(A, names, [generation] * len(names)) for generation in (10, 12)]
    return frozenset(record.tobytes() for records in made for record in records)
