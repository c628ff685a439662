"""A directory table whose memory is refused, at each time that it asks for some."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from peercache.actors.directory.table import DirectoryTable
from peercache.model.records import RECORD, RECORD_BYTES, Records
from sims.tables import header_of
from tests.unit.actors.table_check import check_table
from tests.unit.memory.watched_writer import WatchedWriter, compiled, put_in_place

A = 11
PART = 1000

Make = Callable[..., DirectoryTable]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("watched"))


@pytest.fixture
def watched(library: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedWriter:
    made = WatchedWriter(library)
    put_in_place(made, monkeypatch)
    return made


@pytest.fixture(params=["shared", "private"])
def make(request: pytest.FixtureRequest, watched: WatchedWriter) -> Iterator[Make]:
    del watched
    files = []

    def made(rows_max: int = 50_000, slots_min: int = 512) -> DirectoryTable:
        file = -1
        if request.param == "shared":
            files.append(file := os.memfd_create("table"))
        table = DirectoryTable(
            bytes(range(16)), told_max=PART, rows_max=rows_max, slots_min=slots_min, file=file
        )
        assert table.is_shared == (file >= 0)
        return table

    yield made
    for file in files:
        os.close(file)


def records(count: int, seed: int = 4) -> Records:
    made = np.zeros(count, RECORD)
    made["key"] = np.frombuffer(np.random.default_rng(seed).bytes(16 * count), "V16")
    made["holder"], made["generation"] = A, 2
    return made


def told(table: DirectoryTable, held: Records) -> bytes:
    parts = [held[at : at + PART] for at in range(0, len(held), PART)]
    return b"".join(table.locate(part["key"].tobytes(), 0, 8)[1] for part in parts)


def test_a_batch_without_memory_changes_nothing_and_comes_in_later(
    watched: WatchedWriter, make: Make
) -> None:
    """Rows, the next index and a holder's entry: each request fails once, in a table of its own."""
    held = records(12 * PART)
    refused, turn, requests = 0, 0, 1
    while turn < requests:
        turn += 1
        watched.requests = 0
        table = make()
        watched.is_full = lambda at=turn: watched.requests == at  # type: ignore[misc]
        entry = table.begin(A, is_served=True)
        if entry is None:
            entry = table.begin(A, is_served=True)
        assert entry == 0
        for at in range(0, len(held), PART):
            before = table.figures().records, table.content(0)[1].tolist()
            change = table.put(0, held[at : at + PART].tobytes())
            if change.refused:
                refused += 1
                assert change == (0, 0, PART)
                assert before == (table.figures().records, table.content(0)[1].tolist())
                check_table(table)
                change = table.put(0, held[at : at + PART].tobytes())
            assert change == (PART, 0, 0)
            check_table(table)
        requests = watched.requests
        assert told(table, held) == held.tobytes()
    assert turn > 5
    assert refused > 3


def test_a_growth_without_memory_gives_back_what_it_has(watched: WatchedWriter, make: Make) -> None:
    """A file system that is full does not stay so for an index that is not made."""
    table = make()
    assert table.begin(A, is_served=True) == 0
    held = records(40_000)
    for at in range(0, 22_000, PART):
        assert table.put(0, held[at : at + PART].tobytes()).refused == 0
        while table.tend(2**20):
            pass
    header = header_of(table)
    # The next index takes two pieces of memory.
    header.moved, header.next_capacity = 0, 2**16
    assert table.tend(2**14 + 100)
    assert header.index_ready[1 - header.current] > 0

    watched.is_full = lambda: True
    for _ in range(4):
        table.tend(2**17)
        check_table(table)

    assert header.index_ready[1 - header.current] == 0
    assert told(table, held[:22_000]) == held[:22_000].tobytes()


def test_an_index_for_a_batch_that_was_refused_is_not_made(
    watched: WatchedWriter, make: Make
) -> None:
    """It would be given up again at once."""
    table = make()
    assert table.begin(A, is_served=True) == 0
    held = records(2 * PART)
    assert table.put(0, held[:100].tobytes()).refused == 0
    epoch, capacity = table.figures().epoch, table.figures().slots

    watched.is_full = lambda: True
    assert table.put(0, held[:PART].tobytes()).refused == PART
    watched.is_full = lambda: False
    while table.tend(2**20):
        pass

    assert (table.figures().epoch, table.figures().slots) == (epoch, capacity)


def test_a_table_in_which_every_row_was_used_takes_what_was_freed(make: Make) -> None:
    """It asks for no memory beyond its end, which would make its file longer."""
    table = make(rows_max=100)
    assert table.begin(A, is_served=True) == 0
    held = records(200)
    place = table.place
    assert table.put(0, held[:100].tobytes()).refused == 0
    check_table(table)

    for at in range(0, 100, 10):
        drops = held[at : at + 10]
        packed = b"".join(bytes(row)[:16] + bytes(row)[32:40] for row in drops)
        assert table.drop(0, packed).gone == 10
        assert table.put(0, held[100 + at : 110 + at].tobytes()).fresh == 10
        check_table(table)

    assert table.put(0, held[:1].tobytes()).refused == 1
    assert told(table, held[100:]) == held[100:].tobytes()
    assert table.place == place
    assert header_of(table).rows_ready == 101
    assert len(held.tobytes()) == 200 * RECORD_BYTES


def test_a_file_is_as_long_as_its_table(watched: WatchedWriter) -> None:
    """A reader does not believe another length."""
    del watched
    for rows_max in (60, 100, 5000, 20_000):
        file = os.memfd_create("table")
        table = DirectoryTable(bytes(16), told_max=8, rows_max=rows_max, slots_min=512, file=file)
        assert table.begin(A, is_served=True) == 0
        held = records(rows_max)
        for at in range(0, rows_max, PART):
            assert table.put(0, held[at : at + PART].tobytes()).refused == 0
        assert os.fstat(file).st_size == table.place[1]
        os.close(file)


@pytest.mark.parametrize("make", ["shared"], indirect=True)
def test_a_signal_refuses_no_batch(watched: WatchedWriter, make: Make) -> None:
    """The file system is asked again."""
    table = make()
    watched.is_interrupted = lambda: watched.requests % 2 == 1

    assert table.begin(A, is_served=True) == 0
    assert table.put(0, records(3 * PART).tobytes()).refused == 0
    assert watched.requests > 3
    check_table(table)


def maps_and_descriptors() -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return maps.count("memfd:nothing"), len(list(Path("/proc/self/fd").iterdir()))


def test_a_table_whose_first_index_has_no_memory_is_not_made(watched: WatchedWriter) -> None:
    """A smaller one is tried, and then private memory; what was tried leaves nothing."""
    file = os.memfd_create("nothing")
    before = maps_and_descriptors()

    watched.is_full = lambda: True
    with pytest.raises(MemoryError, match="no address space"):
        DirectoryTable(bytes(16), told_max=1, rows_max=4000, slots_min=512, file=file)
    after = maps_and_descriptors()
    watched.requests = 0
    watched.is_full = lambda: watched.requests == 1
    table = DirectoryTable(bytes(16), told_max=1, rows_max=4000, slots_min=512, file=file)

    assert after == before
    assert table.is_shared
    assert header_of(table).rows_max == 2000
    del table
    assert maps_and_descriptors() == before
    os.close(file)
