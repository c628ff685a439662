"""The compiled reader of directory tables: what it finds, when absent is final, what it refuses."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from peercache.actors.directory.table import DirectoryTable
from peercache.errors import ConfigError, PeerUnreachable, Rejected
from peercache.memory.layout import table_name
from peercache.memory.published import TableFile, remove_leftovers
from peercache.memory.table_reading import TORN, AttachedTable, TableReader, Unusable
from peercache.model.ids import Incarnation
from peercache.model.reads import TICK_AGE_MAX_S
from peercache.model.records import RECORD, Records, from_bytes
from peercache.trust.sharing import Sharing
from sims.tables import header_of, make_index_again
from tests.children import in_child
from tests.unit.actors.record_cluster import drops_of, key_of, records_of

NODE = Incarnation(0xBE51DE)
A, B = 11, 12
RING = 77
NOW = 1000.0
F_OFD_SETLK = 37
"""Python names it since 3.9 only where the C library did when it was built."""

Shelf = tuple[DirectoryTable, AttachedTable]


@pytest.fixture(params=["mapped", "by pread"])
def opened(shm_dir: Path, request: pytest.FixtureRequest) -> Iterator[Shelf]:
    """A table of two holders, and its reader."""
    file = TableFile.create(shm_dir, NODE, None)
    table = table_in(file.file)
    descriptor = os.open(file.path, os.O_RDONLY)
    reader = AttachedTable(descriptor, NODE, by_kernel=request.param == "by pread")
    yield table, reader
    reader.close()
    file.close()


def table_in(file: int) -> DirectoryTable:
    table = DirectoryTable(
        bytes(range(16)), answer_max=4096, rows_max=10**5, slots_min=512, file=file,
        incarnation=NODE,
    )  # fmt: skip
    assert table.is_shared
    assert [table.begin(holder, is_served=True) for holder in (A, B)] == [0, 1]
    return table


def put(table: DirectoryTable, holder: int, names: list[int], generation: int = 10) -> Records:
    made = records_of(holder, names, [generation] * len(names))
    assert table.put(0 if holder == A else 1, made.tobytes()).refused == 0
    return made


def keys(*names: int) -> bytes:
    return b"".join(key_of(name) for name in names)


def reported(reader: AttachedTable, *names: int) -> list[tuple[int, int]]:
    """Return (holder, generation) of what is found, in order."""
    found = from_bytes(reader.look(keys(*names), RING, NOW, 0).records)
    pairs: list[tuple[int, int]] = list(
        zip(found["holder"].tolist(), found["generation"].tolist(), strict=True)
    )
    return pairs


# --- what is found ------------------------------------------------------------------------------


def test_a_batch_finds_what_the_owner_would_report(opened: Shelf) -> None:
    """All holders of each key, in key order, byte for byte."""
    table, reader = opened
    put(table, A, list(range(300)))
    put(table, B, list(range(0, 300, 3)))
    asked = keys(5, 3, 900, 6, 299)

    looked = reader.look(asked, RING, NOW, 0)

    assert looked.records == table.locate(asked, 0, 8)[1]
    assert len(looked.records) == 6 * RECORD.itemsize


def test_a_long_batch_is_one_of_parts(opened: Shelf) -> None:
    """More keys than one compiled call takes."""
    table, reader = opened
    made = put(table, A, list(range(5000)))

    assert reader.look(made["key"].tobytes(), RING, NOW, 0).records == made.tobytes()


def test_records_come_and_go_with_their_owners_word(opened: Shelf) -> None:
    """Newer ones, removed ones, a holder that is served no more, and its entry given again."""
    table, reader = opened
    put(table, A, [1, 2])
    put(table, A, [1], 14)
    first = reported(reader, 1, 2)
    table.drop(0, drops_of([2], [10]).tobytes())
    second = reported(reader, 1, 2)
    table.serve(0, is_served=False)
    third = reported(reader, 1, 2)
    while table.sweep(0, 1):
        pass
    assert table.begin(99, is_served=True) == 0
    table.put(0, records_of(99, [2], [20]).tobytes())

    assert (first, second, third) == ([(A, 14), (A, 10)], [(A, 14)], [])
    assert reported(reader, 1, 2) == [(99, 20)]


def test_of_many_holders_askers_read_different_ones(shm_dir: Path) -> None:
    """As with questions: no copy is read by all."""
    file = TableFile.create(shm_dir, NODE, None)
    table = table_in(file.file)
    for holder in range(20, 40):
        entry = table.begin(holder, is_served=True)
        assert entry is not None
        table.put(entry, records_of(holder, [1], [10]).tobytes())
    reader = AttachedTable.open(shm_dir, incarnation=NODE)

    seen = [
        set(from_bytes(reader.look(keys(1), RING, NOW, asker).records)["holder"].tolist())
        for asker in range(20)
    ]

    assert {len(each) for each in seen} == {8}
    assert set.union(*seen) == set(range(20, 40))
    reader.close()
    file.close()


def test_all_is_found_through_growth(opened: Shelf) -> None:
    """Both indices count while one grows out of the other; the old one's memory goes back."""
    table, reader = opened
    rng = np.random.default_rng(4)
    made = np.zeros(40_000, RECORD)
    made["key"] = np.frombuffer(rng.bytes(16 * len(made)), "V16")
    made["holder"], made["generation"] = A, 2
    epochs = set()
    for begin in range(0, len(made), 500):
        table.put(0, made[begin : begin + 500].tobytes())
        epochs.add(table.figures().epoch)
        known = made[rng.integers(0, begin + 500, 50)]
        assert reader.look(known["key"].tobytes(), RING, NOW, 0).records == known.tobytes()

    assert len(epochs) > 5


# --- when absent is final -----------------------------------------------------------------------


def test_absent_is_final_with_authority_for_this_ring_and_a_young_tick(opened: Shelf) -> None:
    """Each of the conditions by itself is needed."""
    table, reader = opened

    def finality(ring: int, now_s: float) -> tuple[bool, bool]:
        looked = reader.look(keys(1), ring, now_s, 0)
        return looked.is_final, looked.is_at_work

    never = finality(RING, NOW), finality(0, NOW)
    table.tick(NOW)
    ticked = finality(RING, NOW), finality(0, NOW)
    table.grant(RING.to_bytes(8, "little"))
    granted = finality(RING, NOW), finality(RING, NOW + TICK_AGE_MAX_S * 0.99)
    refused = finality(RING + 1, NOW), finality(RING, NOW + TICK_AGE_MAX_S * 1.01)
    table.revoke()

    assert never == ((False, False), (False, False))
    assert ticked == ((False, True), (False, True))
    assert granted == ((True, True), (True, True))
    assert refused == ((False, True), (False, False))
    assert finality(RING, NOW) == (False, True)


@pytest.mark.parametrize("late", ["grant", "tick", "both"])
def test_authority_is_that_of_the_batchs_beginning(opened: Shelf, late: str) -> None:
    """A grant or a tick in the middle of a batch does not affect what was looked for before it."""
    table, _ = opened
    address, size = table.place
    reader = TableReader(address=address, file=-1, size_bytes=size, incarnation=NODE)
    if late == "grant":
        table.tick(NOW)
    elif late == "tick":
        table.grant(RING.to_bytes(8, "little"))
    reader.begin(1)
    reader.look(keys(1), 0, 0)
    put(table, A, [1])
    table.grant(RING.to_bytes(8, "little"))
    table.tick(NOW)

    looked = reader.end(RING, NOW)

    assert (looked.records, looked.is_final) == (b"", False)


# --- between two parts of a batch -----------------------------------------------------------------


def test_an_index_made_again_ends_the_batch(opened: Shelf) -> None:
    """The old one forgets what the reader looks for in it."""
    table, _ = opened
    put(table, A, [1])
    address, size = table.place
    reader = TableReader(address=address, file=-1, size_bytes=size, incarnation=NODE)
    reader.begin(1)

    make_index_again(table)
    reader.look(keys(1), 0, 0)

    with pytest.raises(Unusable, match=TORN):
        reader.end(RING, NOW)


def test_an_entry_given_to_another_holder_ends_the_batch(opened: Shelf) -> None:
    """Its row was found as that of the holder before."""
    table, _ = opened
    put(table, A, [1])
    address, size = table.place
    reader = TableReader(address=address, file=-1, size_bytes=size, incarnation=NODE)
    reader.begin(1)
    reader.look(keys(1), 0, 0)

    table.serve(0, is_served=False)
    while table.sweep(0, 100) == 100:
        pass
    assert table.begin(99, is_served=True) == 0

    with pytest.raises(Unusable, match=TORN):
        reader.end(RING, NOW)


def test_a_row_that_is_written_forever_makes_nothing_final(opened: Shelf) -> None:
    """Its owner was stopped between two stores. The other keys are found."""
    table, reader = opened
    put(table, A, [1, 2])
    table.grant(RING.to_bytes(8, "little"))
    table.tick(NOW)
    address = table.place[0] + header_of(table).rows_at + 64
    word = ctypes.c_uint64.from_address(address)
    assert reader.look(keys(1, 2), RING, NOW, 0).is_final
    whole = word.value

    word.value = whole & ~(3 << 16) | 2 << 16
    torn = reader.look(keys(1, 2), RING, NOW, 0)
    word.value = whole

    assert from_bytes(torn.records)["key"].tolist() == [key_of(2)]
    assert (torn.is_final, torn.is_at_work) == (False, True)
    assert len(reported(reader, 1, 2)) == 2
    assert reader.look(keys(1, 2), RING, NOW, 0).is_final


# --- the memory of a table ------------------------------------------------------------------------


def test_memory_is_given_back_only_while_no_reader_is_in_a_batch(shm_dir: Path) -> None:
    """A stopped reader's next load would have no memory: it keeps it, and the table still grows."""
    file = TableFile.create(shm_dir, NODE, None)
    table = table_in(file.file)
    held = os.open(file.path, os.O_RDONLY)
    fcntl.fcntl(held, F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    rng = np.random.default_rng(5)

    def grow(count: int) -> int:
        made = np.zeros(count, RECORD)
        made["key"] = np.frombuffer(rng.bytes(16 * count), "V16")
        made["generation"] = 2
        for begin in range(0, count, 1000):
            assert table.put(0, made[begin : begin + 1000].tobytes()).refused == 0
            while table.tend(2**16):
                pass
        return table.figures().size_bytes - 64 * table.figures().records

    kept, blocks = grow(40_000), os.fstat(file.file).st_blocks
    os.close(held)
    given_back = grow(1000)

    header = header_of(table)
    assert given_back < kept
    assert os.fstat(file.file).st_blocks < blocks
    assert header.index_ready[1 - header.current] == 0
    file.close()


def test_a_full_file_system_refuses_a_batch(small_tmpfs: Path) -> None:
    """No store meets memory that is not there, which would be a bus error."""
    file = TableFile.create(small_tmpfs, NODE, None)
    table = table_in(file.file)
    reader = AttachedTable.open(small_tmpfs, incarnation=NODE)
    rng = np.random.default_rng(6)
    refused = 0
    held = np.zeros(0, RECORD)
    for _ in range(100):
        made = np.zeros(1000, RECORD)
        made["key"] = np.frombuffer(rng.bytes(16 * 1000), "V16")
        made["holder"], made["generation"] = A, 2
        change = table.put(0, made.tobytes())
        refused += change.refused
        if not change.refused:
            held = np.concatenate([held, made])

    assert refused > 0
    assert 5000 < len(held) < 60_000
    for begin in range(0, len(held), 1000):
        part = held[begin : begin + 1000]
        assert reader.look(part["key"].tobytes(), RING, NOW, 0).records == part.tobytes()
    reader.close()
    file.close()


def test_a_table_without_room_for_its_header_is_private(small_tmpfs: Path) -> None:
    """A node serves all the same."""
    file = TableFile.create(small_tmpfs, NODE, None)
    filler = small_tmpfs / "filler"
    with filler.open("wb") as full:
        os.posix_fallocate(full.fileno(), 0, os.statvfs(small_tmpfs).f_bavail * 4096)

    table = DirectoryTable(bytes(16), answer_max=8, file=file.file, incarnation=NODE)

    assert not table.is_shared
    assert table.begin(A, is_served=True) == 0
    assert table.put(0, records_of(A, [1], [10]).tobytes()).fresh == 1
    file.close()


# --- the file -------------------------------------------------------------------------------------


def test_a_readers_table_outlives_its_file(shm_dir: Path) -> None:
    """The owner has gone: what is mapped can be read, and a new reader finds no file."""
    file = TableFile.create(shm_dir, NODE, None)
    table = table_in(file.file)
    put(table, A, [1])
    reader = AttachedTable.open(shm_dir, incarnation=NODE)
    del table
    file.close()

    assert reported(reader, 1) == [(A, 10)]
    assert list(shm_dir.iterdir()) == []
    with pytest.raises(PeerUnreachable):
        AttachedTable.open(shm_dir, incarnation=NODE)
    reader.close()
    with pytest.raises(Unusable, match="closed"):
        reader.look(keys(1), RING, NOW, 0)


def test_a_living_owners_file_stays_and_a_dead_ones_goes(shm_dir: Path) -> None:
    """As with segments: the lock shows it."""
    file = TableFile.create(shm_dir, NODE, None)
    (shm_dir / table_name(5)).touch()

    assert remove_leftovers(shm_dir) == [table_name(5)]
    assert [path.name for path in shm_dir.iterdir()] == [table_name(NODE)]
    file.close()


def test_a_file_that_cannot_be_opened_to_the_group_does_not_stay(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node goes on without it, and nothing names it any more."""

    def refuse(*_: object) -> None:
        raise ConfigError("share_group", "no such group")

    monkeypatch.setattr(Sharing, "open_to_group", refuse)

    with pytest.raises(ConfigError):
        TableFile.create(shm_dir, NODE, Sharing.of())
    assert list(shm_dir.iterdir()) == []


def test_a_file_is_removed_once_and_by_its_own_process(shm_dir: Path) -> None:
    """A forked child ends without an effect on its parent's table."""
    file = TableFile.create(shm_dir, NODE, None)
    assert in_child(file.close) == 0
    kept = file.path.exists()

    file.close()
    file.close()

    assert (kept, file.path.exists()) == (True, False)


def test_a_group_may_read_a_table_and_not_write_it(shm_dir: Path) -> None:
    """The owner alone keeps the directory."""
    group = os.getegid()
    file = TableFile.create(shm_dir, NODE, Sharing.of(share_group=str(group)))

    mode, owner = file.path.stat().st_mode & 0o777, file.path.stat().st_gid

    assert (oct(mode), owner) == ("0o640", group)
    file.close()


@pytest.mark.parametrize("spoil", ["folder", "link", "world"])
def test_what_is_no_file_of_a_sharing_user_is_not_opened(shm_dir: Path, spoil: str) -> None:
    """Not even looked into."""
    path = shm_dir / table_name(NODE)
    if spoil == "folder":
        path.mkdir()
    elif spoil == "link":
        path.symlink_to("/etc/passwd")
    else:
        path.touch()
        path.chmod(0o666)

    with pytest.raises(Rejected):
        AttachedTable.open(shm_dir, incarnation=NODE)


def test_a_file_that_is_cut_short_is_not_read(opened: Shelf, shm_dir: Path) -> None:
    """A mapped one is looked at before each batch; by the kernel a load beyond its end is none."""
    _, reader = opened
    os.truncate(shm_dir / table_name(NODE), 4096)

    with pytest.raises(Unusable, match="cut_short"):
        reader.look(keys(1), RING, NOW, 0)


def test_a_search_without_an_end_is_given_up(opened: Shelf) -> None:
    """An index in which each slot names a row has no empty one to end at.

    Batches before it have left it nothing of what they were allowed.
    """
    table, reader = opened
    put(table, A, [1])
    for _ in range(10):
        assert not reader.look(keys(*range(1000, 3000)), RING, NOW, 0).records
    header = header_of(table)
    slots = (ctypes.c_uint64 * header.index[1]).from_address(table.place[0] + header.index[0])
    saved = bytes(slots)
    for at in range(len(slots)):
        slots[at] = 1 << 32 | 1

    with pytest.raises(Unusable, match=TORN):
        reader.look(keys(*range(2000)), RING, NOW, 0)
    ctypes.memmove(ctypes.addressof(slots), saved, len(saved))

    assert reported(reader, 1) == [(A, 10)]
