"""The index on disk: rows come and go in order, and a failure of it is reported."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from peercache.actors.disk.index import DiskIndex
from peercache.actors.ports import DISK_ENTRY, DISK_UNTRIED
from peercache.storage.check import check
from peercache.storage.index_file import IndexWriter, load_entries, open_index, remove_index
from tests.pace import TIMEOUT_S
from tests.unit.storage.rig import Log, Rig

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
    assert done.wait(TIMEOUT_S)


def rows_in(folder: Path) -> np.ndarray:
    """Return what another process would find, by place."""
    with closing(open_index(folder, bytes_max=2**30)) as connection:
        return np.sort(load_entries(connection), order="place")


def test_rows_are_kept_in_the_order_of_the_calls(tmp_path: Path) -> None:
    """Put, drop and put again of one place leaves the last; what was used records when."""
    index = IndexWriter(open_index(tmp_path, bytes_max=BYTES_MAX), failed=print, log=Log())

    index.put(entries_of([1, 2, 3]))
    index.drop(places(2, 3))
    index.put(entries_of([3], sequence=9))
    index.use(places(1), np.array([77], np.int64))
    wait_for(index)
    assert index.close(TIMEOUT_S)

    found = rows_in(tmp_path)
    assert found["place"].tolist() == [1, 3]
    assert found["sequence"].tolist() == [1, 9]
    assert found["used"].tolist() == [77, 0]


def test_index_that_is_behind_has_no_room_until_it_has_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It logs it once; what goes is kept all the same, and what was used is left out."""
    monkeypatch.setattr("peercache.storage.index_file.BACKLOG_ROWS_MAX", 4)
    log = Log()
    index = IndexWriter(open_index(tmp_path, bytes_max=2**30), failed=print, log=log)
    with index._changed:  # Its thread is paused.
        index.put(entries_of([1, 2, 3]))
        before = index.has_room()
        index.put(entries_of([4]))
        behind = [index.has_room(), index.has_room()]
        index.drop(places(2))
        index.use(places(1), np.array([5], np.int64))
    wait_for(index)
    after = index.has_room()
    assert index.close(TIMEOUT_S)

    assert (before, *behind, after) == (True, False, False, True)
    found = rows_in(tmp_path)
    assert found["place"].tolist() == [1, 3, 4]
    assert found["used"].tolist() == [0] * 3
    assert log.lines == [("warning", "disk.index_fell_behind", {"rows": 4})]


def test_nothing_is_written_while_the_index_does_not_keep_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of an index that is stuck do not grow with its slabs; no page is wrong for it."""
    monkeypatch.setattr("peercache.storage.index_file.BACKLOG_ROWS_MAX", 10)
    with Rig(tmp_path) as rig:
        rig.write([1, 2])
        rig.forget([1])
        index, go_on = rig.parts.index, threading.Event()
        # Rows that it takes once it goes on would make room again, at any moment.
        wait_for(index)
        write = index._write
        index._write = lambda *taken: go_on.wait(TIMEOUT_S) and write(*taken)

        outcomes = [rig.write(list(range(at, at + 3))) for at in range(10, 100, 3)]
        waiting = index._backlog
        found = rig.load([2, 10, 11, 12])
        go_on.set()
        taken = outcomes.count(bytes(3))

        assert outcomes == [bytes(3)] * taken + [bytes([DISK_UNTRIED]) * 3] * (30 - taken)
        assert 10 <= waiting <= 10 + 3
        assert found == ["right"] * 4
        rig.forget([2])
        assert rig.write([100]) == bytes(1), "it has caught up"
    written = [2, *range(10, 10 + 3 * taken), 100][1:]
    with Rig(tmp_path) as again:
        assert len(again.opened.entries) == len(written)
        assert again.load(written) == ["right"] * len(written)


def test_failure_is_reported_and_no_caller_waits_forever(tmp_path: Path) -> None:
    """An index that grows over its part of the cap breaks; a waiting caller gets the error, too."""
    failures: list[str] = []
    index = IndexWriter(
        open_index(tmp_path, bytes_max=64 * 1024), failed=failures.append, log=Log()
    )

    index.put(entries_of(list(range(20_000))))
    wait_for(index)

    assert len(failures) == 1
    assert "full" in failures[0]
    wait_for(index)
    assert index.close(TIMEOUT_S)


def test_index_of_another_format_is_refused(tmp_path: Path) -> None:
    """Its rows are not read; the next open makes a new one."""
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
    open_index(tmp_path, bytes_max=BYTES_MAX, entries=entries_of([1, 2, 3])).close()

    open_index(tmp_path, bytes_max=BYTES_MAX, entries=entries_of([7])).close()

    assert rows_in(tmp_path)["place"].tolist() == [7]


KILLED = """
import itertools, os, shutil, sqlite3, sys
from pathlib import Path
from tests.unit.storage.rig import Rig

real = sqlite3.connect

def opened(folder, statements):
    class Killed(sqlite3.Connection):
        left = statements
        def execute(self, *arguments):
            Killed.left -= 1
            if Killed.left < 0:
                os._exit(9)
            return super().execute(*arguments)
    sqlite3.connect = lambda *a, **k: real(*a, factory=Killed, **k)
    Rig(Path(folder))
    os._exit(0)

for statements in itertools.count():
    folder = f"{sys.argv[1]}-{statements}"
    shutil.copytree(sys.argv[1], folder)
    child = os.fork()
    if not child:
        opened(folder, statements)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
    print(folder)
"""


@pytest.mark.parametrize("pages", [0, 5])
def test_a_kill_while_the_index_is_created_loses_no_page_and_is_no_damage(
    tmp_path: Path, pages: int
) -> None:
    """Before each of its statements: what is left is an index with all rows, or none."""
    folder = tmp_path / "store"
    with Rig(folder) as rig:
        if pages:
            rig.write(list(range(pages)))
    remove_index(folder / "0")

    done = subprocess.run(
        [sys.executable, "-c", KILLED, folder],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True,
    )  # fmt: skip

    left = done.stdout.split()
    assert len(left) > 8
    for killed in left:
        copy = f"{killed}-checked"
        shutil.copytree(killed, copy)
        result = check(Path(copy) / "0", lambda _: None, Log())
        assert (result.pages, result.damaged, result.unreadable) == (pages, (), ())
        assert result.is_whole or (pages and result.index == "missing"), killed
        with Rig(Path(killed)) as rig:
            assert rig.load(list(range(pages))) == ["right"] * pages, killed


SLAB = 64 * 1024


def test_entries_touched_since_are_reported_coldest_first() -> None:
    """Only those, in the order of their last touch; what is being written is none of them."""
    index = DiskIndex(capacity_bytes=2 * SLAB, slab_bytes=SLAB)
    keys = b"".join(bytes([n]) * 16 for n in range(5))
    ones = np.ones(5, np.uint64)
    begun = index.begin(keys, ones, 3000 * ones, ones, 0)
    index.finish(begun.entries[:4])
    since = index.clock
    zero, one, two, _ = index.find(keys[:64]).tolist()

    index.touch(np.array([two]))
    index.touch(np.array([zero]))
    index.touch(np.array([one]))
    index.touch(np.array([two]))

    assert index.touched_since(since).tolist() == [zero, one, two]
    assert index.touched_since(index.clock).tolist() == []
