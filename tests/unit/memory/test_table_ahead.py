"""The thread that loads a directory table's memory before its owner comes to it."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from peercache.actors.directory import table as directory_table
from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.directory.table import DirectoryTable
from peercache.model.records import RECORD, Records
from sims.tables import header_of
from tests.unit.actors.table_check import check_table

A = 11
AHEAD_BYTES = 2**21
"""Of rows, as `_table_ahead.c` has it."""
WAIT_S = 5.0


@pytest.fixture
def file() -> Iterator[int]:
    made = os.memfd_create("table")
    yield made
    os.close(made)


def table_in(file: int, slots_min: int = 512) -> DirectoryTable:
    table = DirectoryTable(
        bytes(16), told_max=8, rows_max=10**6, slots_min=slots_min, file=file, loads_ahead=True
    )
    assert table.begin(A, is_served=True) == 0
    return table


def records(count: int) -> Records:
    made = np.zeros(count, RECORD)
    made["key"] = np.frombuffer(np.random.default_rng(5).bytes(16 * count), "V16")
    made["holder"], made["generation"] = A, 2
    return made


def size_of(file: int) -> int:
    return os.fstat(file).st_blocks * 512


def has_come(happened: Callable[[], bool]) -> bool:
    until = time.monotonic() + WAIT_S
    while not (has := happened()) and time.monotonic() < until:
        time.sleep(0.001)
    return has


def threads() -> set[Path]:
    """Return those of all tables, a failed test's included."""
    tasks = Path("/proc/self/task").iterdir()
    return {each for each in tasks if (each / "comm").read_text().strip() == "peercache-table"}


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
    table = table_in(file)
    before = threads()
    child = os.fork()
    if child == 0:
        del table
        gc.collect()
        os._exit(0)

    ended = has_come(lambda: os.waitpid(child, os.WNOHANG) != (0, 0))
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended
    assert threads() == before
    check_table(table)


def test_a_node_has_the_thread_and_private_memory_has_none(file: int) -> None:
    before = threads()
    private = DirectoryShard(incarnation=A)
    asked = DirectoryTable(bytes(16), told_max=8, rows_max=1000, loads_ahead=True)
    assert threads() == before
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
