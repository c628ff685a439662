"""The index on disk: rows come and go in order, in batches, and a failure of it is heard."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import numpy as np
import pytest

from peercache.disk.index_file import (
    BACKLOG_ROWS_MAX,
    IndexWriter,
    load_entries,
    open_index,
    store_entries,
)
from peercache.disk_state.ports import DISK_ENTRY
from tests.disk.rig import PATIENCE_S, Log

BYTES_MAX = 16 * 2**20


def entries_of(places: list[int], sequence: int = 1) -> np.ndarray:
    """Return rows of pages at these places."""
    rows = np.zeros(len(places), DISK_ENTRY)
    rows["place"] = places
    rows["key"] = np.array(places, "<u8").repeat(2).view("V16")
    rows["length"], rows["sequence"] = 1000, sequence
    return rows


def places(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


def wait_for(index: IndexWriter) -> None:
    """Return once everything before is written."""
    done = threading.Event()
    index.drop(places(), done.set)
    assert done.wait(PATIENCE_S)


def test_rows_are_kept_in_the_order_of_the_calls(tmp_path: Path) -> None:
    """Put, drop and put again of one place leaves the last; what was used says when."""
    index = IndexWriter(open_index(tmp_path, bytes_max=BYTES_MAX), failed=print, log=Log())

    index.put(entries_of([1, 2, 3]))
    index.drop(places(2, 3))
    index.put(entries_of([3], sequence=9))
    index.use(places(1), 77)
    wait_for(index)
    assert index.close(PATIENCE_S)

    found = np.sort(load_entries(open_index(tmp_path, bytes_max=BYTES_MAX)), order="place")
    assert found["place"].tolist() == [1, 3]
    assert found["sequence"].tolist() == [1, 9]
    assert found["used"].tolist() == [77, 0]


def test_rows_beyond_the_backlog_are_left_out_and_said(tmp_path: Path) -> None:
    """A disk that cannot keep up costs pages at the next restart, and no memory."""
    log = Log()
    connection = open_index(tmp_path, bytes_max=2**30)
    connection.execute("BEGIN IMMEDIATE")
    index = IndexWriter(connection, failed=lambda problem: None, log=log)
    with index._changed:
        index.put(entries_of([1, 2]))
        index._backlog = BACKLOG_ROWS_MAX
        index.put(entries_of([2, 3], sequence=9))
        index.use(places(1), 5)
        index._backlog = 4
        connection.execute("COMMIT")
    wait_for(index)
    assert index.close(PATIENCE_S)

    found = load_entries(open_index(tmp_path, bytes_max=2**30))
    assert found["place"].tolist() == [1], "nor does an old row stand for the new page"
    assert found["used"].tolist() == [0]
    assert ("warning", "disk.index_behind", {"pages_left_out": 2}) in log.lines


def test_failure_is_heard_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    """An index that grows over its part of the cap breaks; who waited for it hears, too."""
    heard: list[str] = []
    index = IndexWriter(open_index(tmp_path, bytes_max=64 * 1024), failed=heard.append, log=Log())

    index.put(entries_of(list(range(20_000))))
    wait_for(index)

    assert len(heard) == 1
    assert "full" in heard[0]
    wait_for(index)
    assert index.close(PATIENCE_S)


def test_index_of_another_format_is_refused(tmp_path: Path) -> None:
    """Its rows are not read; whoever opens it makes a new one."""
    connection = open_index(tmp_path, bytes_max=BYTES_MAX)
    connection.execute("PRAGMA user_version = 99")
    connection.close()

    with pytest.raises(sqlite3.DatabaseError, match="format 99"):
        open_index(tmp_path, bytes_max=BYTES_MAX)


@pytest.mark.parametrize(
    ("entry", "used"), [(b"0", 0), ("text", 0), (bytes(56), "text"), (bytes(56), 2.5e300)]
)
def test_rows_that_are_not_ours_are_damage(tmp_path: Path, entry: object, used: object) -> None:
    """SQLite takes any value in any column; none of them is believed in part."""
    connection = open_index(tmp_path, bytes_max=BYTES_MAX)
    connection.execute("INSERT INTO slots VALUES (1, ?, ?)", (entry, used))

    with pytest.raises(sqlite3.DatabaseError):
        load_entries(connection)
    connection.close()


def test_whole_table_is_replaced(tmp_path: Path) -> None:
    """After a rebuild nothing of before is there."""
    connection = open_index(tmp_path, bytes_max=BYTES_MAX)
    store_entries(connection, entries_of([1, 2, 3]))

    store_entries(connection, entries_of([7]))

    assert load_entries(connection)["place"].tolist() == [7]
    connection.close()
