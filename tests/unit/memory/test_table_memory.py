"""The memory of a directory table: where it is refused, and the thread that loads it ahead."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from peercache.actors.directory import table as directory_table
from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.directory.table import DirectoryTable
from peercache.model.records import RECORD, RECORD_BYTES, Records
from sims.tables import header_of
from tests.children import fork
from tests.descriptors import open_files
from tests.pace import TIMEOUT_S
from tests.unit.actors.table_check import check_table
from tests.unit.memory.watched import WatchedWriter

A = 11
PART = 1000

Make = Callable[..., DirectoryTable]


@pytest.fixture(params=["shared", "private"])
def make(request: pytest.FixtureRequest, watched_writer: WatchedWriter) -> Iterator[Make]:
    del watched_writer
    files = []

    def made(rows_max: int = 50_000, slots_min: int = 512) -> DirectoryTable:
        file = -1
        if request.param == "shared":
            files.append(file := os.memfd_create("table"))
        table = DirectoryTable(
            bytes(range(16)), answer_max=PART, rows_max=rows_max, slots_min=slots_min, file=file
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


def reported(table: DirectoryTable, held: Records) -> bytes:
    parts = [held[at : at + PART] for at in range(0, len(held), PART)]
    return b"".join(table.locate(part["key"].tobytes(), 0, 8)[1] for part in parts)


def test_a_batch_without_memory_changes_nothing_and_comes_in_later(
    watched_writer: WatchedWriter, make: Make
) -> None:
    """Rows, the next index and a holder's entry: each request fails once, in a table of its own."""
    held = records(12 * PART)
    refused, turn, requests = 0, 0, 1
    while turn < requests:
        turn += 1
        watched_writer.requests = 0
        table = make()
        watched_writer.is_full = lambda at=turn: watched_writer.requests == at  # type: ignore[misc]
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
        requests = watched_writer.requests
        assert reported(table, held) == held.tobytes()
    assert turn > 5
    assert refused > 3


def test_a_growth_without_memory_gives_back_what_it_has(
    watched_writer: WatchedWriter, make: Make
) -> None:
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

    watched_writer.is_full = lambda: True
    for _ in range(4):
        table.tend(2**17)
        check_table(table)

    assert header.index_ready[1 - header.current] == 0
    assert reported(table, held[:22_000]) == held[:22_000].tobytes()


def test_an_index_for_a_batch_that_was_refused_is_not_made(
    watched_writer: WatchedWriter, make: Make
) -> None:
    """It would be given up again at once."""
    table = make()
    assert table.begin(A, is_served=True) == 0
    held = records(2 * PART)
    assert table.put(0, held[:100].tobytes()).refused == 0
    epoch, capacity = table.figures().epoch, table.figures().slots

    watched_writer.is_full = lambda: True
    assert table.put(0, held[:PART].tobytes()).refused == PART
    watched_writer.is_full = lambda: False
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
    assert reported(table, held[100:]) == held[100:].tobytes()
    assert table.place == place
    assert header_of(table).rows_ready == 101
    assert len(held.tobytes()) == 200 * RECORD_BYTES


def test_a_file_is_as_long_as_its_table(watched_writer: WatchedWriter) -> None:
    """A reader does not believe another length."""
    del watched_writer
    for rows_max in (60, 100, 5000, 20_000):
        file = os.memfd_create("table")
        table = DirectoryTable(bytes(16), answer_max=8, rows_max=rows_max, slots_min=512, file=file)
        assert table.begin(A, is_served=True) == 0
        held = records(rows_max)
        for at in range(0, rows_max, PART):
            assert table.put(0, held[at : at + PART].tobytes()).refused == 0
        assert os.fstat(file).st_size == table.place[1]
        os.close(file)


@pytest.mark.parametrize("make", ["shared"], indirect=True)
def test_a_signal_refuses_no_batch(watched_writer: WatchedWriter, make: Make) -> None:
    """The file system is asked again."""
    table = make()
    watched_writer.is_interrupted = lambda: watched_writer.requests % 2 == 1

    assert table.begin(A, is_served=True) == 0
    assert table.put(0, records(3 * PART).tobytes()).refused == 0
    assert watched_writer.requests > 3
    check_table(table)


def maps_and_descriptors() -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return maps.count("memfd:nothing"), str(open_files()).count("memfd:nothing")


def test_a_table_whose_first_index_has_no_memory_is_not_made(watched_writer: WatchedWriter) -> None:
    """A smaller one is tried, and then private memory; what was tried leaves nothing."""
    file = os.memfd_create("nothing")
    before = maps_and_descriptors()

    watched_writer.is_full = lambda: True
    with pytest.raises(MemoryError, match="no address space"):
        DirectoryTable(bytes(16), answer_max=1, rows_max=4000, slots_min=512, file=file)
    after = maps_and_descriptors()
    watched_writer.requests = 0
    watched_writer.is_full = lambda: watched_writer.requests == 1
    table = DirectoryTable(bytes(16), answer_max=1, rows_max=4000, slots_min=512, file=file)

    assert after == before
    assert table.is_shared
    assert header_of(table).rows_max == 2000
    del table
    assert maps_and_descriptors() == before
    os.close(file)


AHEAD_BYTES = 2**21
"""Of rows, as `_table_ahead.c` has it."""


@pytest.fixture
def file() -> Iterator[int]:
    made = os.memfd_create("table")
    yield made
    os.close(made)


def table_in(file: int, slots_min: int = 512) -> DirectoryTable:
    table = DirectoryTable(
        bytes(16), answer_max=8, rows_max=10**6, slots_min=slots_min, file=file, loads_ahead=True
    )
    assert table.begin(A, is_served=True) == 0
    return table


def size_of(file: int) -> int:
    return os.fstat(file).st_blocks * 512


def has_come(happened: Callable[[], bool]) -> bool:
    until = time.monotonic() + TIMEOUT_S
    while not (has := happened()) and time.monotonic() < until:
        time.sleep(0.001)
    return has


def threads() -> set[Path]:
    """Return those of all tables, a failed test's included."""
    found = set()
    for each in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # It has ended meanwhile.
            if (each / "comm").read_text().strip() == "peercache-table":
                found.add(each)
    return found


def busy_ns(thread: Path) -> int:
    return int((thread / "schedstat").read_text().split()[0])


def test_rows_are_loaded_before_they_are_used(file: int) -> None:
    table = table_in(file)
    before = size_of(file)

    assert table.put(0, records(100).tobytes()).fresh == 100

    assert has_come(lambda: size_of(file) >= before + AHEAD_BYTES)
    time.sleep(0.02)
    assert size_of(file) < before + AHEAD_BYTES + 2**19, "an idle table takes more and more"
    assert header_of(table).rows_ready * 64 < AHEAD_BYTES, "readers look only at the owner's own"
    check_table(table)


def test_the_next_index_is_loaded_while_it_is_made_ready(file: int) -> None:
    table = table_in(file)
    assert table.put(0, records(100).tobytes()).fresh == 100
    assert has_come(lambda: size_of(file) >= AHEAD_BYTES)
    header = header_of(table)

    # Indices take turns in two places.
    for other in (1, 0):
        before = size_of(file)
        header.moved, header.next_capacity = 0, 2**19
        assert table.tend(512)
        assert has_come(lambda size=before: size_of(file) >= size + 2**22 - 2**18)  # type: ignore[misc]
        assert header.index_ready[other] == 2**18
        while header.current != other or header.index[4 * (1 - other) + 1]:
            table.tend(2**12)
        check_table(table)


def test_memory_that_is_refused_is_asked_for_again(file: int) -> None:
    """No bus error: beyond its end a file is as one whose file system is full."""
    before = threads()
    table = table_in(file, slots_min=2**14)
    (thread,) = threads() - before
    made = records(4600)
    assert table.put(0, made[:100].tobytes()).fresh == 100
    assert has_come(lambda: size_of(file) >= AHEAD_BYTES)
    header = header_of(table)
    size = os.fstat(file).st_size

    # Rows of one piece stay, which are the owner's already.
    os.ftruncate(file, header.rows_at + 2**18)
    short = size_of(file)
    for at in range(100, 3100, 1000):
        assert table.put(0, made[at : at + 1000].tobytes()).fresh == 1000
        time.sleep(0.002)
    assert size_of(file) == short
    began = busy_ns(thread)
    time.sleep(0.1)
    assert busy_ns(thread) - began < 10**7, "it tries again and again"
    os.ftruncate(file, size)
    assert table.put(0, made[3100:].tobytes()).fresh == 1500

    assert has_come(lambda: size_of(file) >= short + 2**18 + 2**16)
    check_table(table)


def test_the_thread_ends_with_its_table(file: int) -> None:
    before = threads()
    for _ in range(20):
        table = table_in(file)
        table.put(0, records(5000).tobytes())
        assert len(threads() - before) == 1
        del table
        gc.collect()
        assert threads() <= before
        os.ftruncate(file, 0)


def test_the_thread_takes_no_signal(file: int) -> None:
    """One that came to it would wake no task of the node."""
    before = threads()
    table = table_in(file)
    (thread,) = threads() - before

    status = (thread / "status").read_text()

    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigBlk"))
    # All but two that the C library keeps, and those that cannot be blocked.
    assert int(mask, 16) | 1 << 8 | 1 << 18 | 3 << 31 == 2**64 - 1
    check_table(table)


def test_a_fork_lets_go_of_the_table(file: int) -> None:
    """It has no such thread, which it would wait for."""
    before = threads()
    table = table_in(file)
    (thread,) = threads() - before

    def let_go() -> None:
        nonlocal table
        del table
        gc.collect()

    child = fork(let_go)

    ended = has_come(lambda: os.waitpid(child, os.WNOHANG) != (0, 0))
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended
    assert thread in threads()
    check_table(table)


def test_a_node_has_the_thread_and_private_memory_has_none(file: int) -> None:
    before = threads()
    private = DirectoryShard(incarnation=A)
    asked = DirectoryTable(bytes(16), answer_max=8, rows_max=1000, loads_ahead=True)
    assert threads() <= before
    shared = DirectoryShard(incarnation=A, table_file=file)
    assert len(threads() - before) == 1
    del private, asked, shared


def test_a_table_without_its_thread_is_the_same(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has no more threads."""
    monkeypatch.setattr(directory_table, "_ahead_new", lambda table: None)
    table = table_in(file)
    made = records(5000)

    assert table.put(0, made.tobytes()).fresh == 5000

    check_table(table)
    assert table.read(0, made["key"][0].tobytes()[0])
