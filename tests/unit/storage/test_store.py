"""The page store on the file system of this machine: what comes back is what was written."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest

from peercache.actors.ports import (
    DISK_CHANGED,
    DISK_DAMAGED,
    DISK_REPLACED,
    DISK_UNTRIED,
    DiskEnded,
    Forget,
    LoadDone,
    NoteUse,
    WriteDone,
)
from peercache.storage import ring
from tests.children import fork
from tests.unit.storage.rig import MIB, Rig, key_of


def test_many_small_pages_of_one_job_come_back(tmp_path: Path) -> None:
    """More of them than one call takes: each has a header block of its own."""
    with Rig(tmp_path) as rig:
        numbers = list(range(200))

        assert rig.write(numbers, 4096) == bytes(200)
        assert rig.load(numbers) == ["right"] * 200
        assert rig.log.errors() == []


@pytest.mark.parametrize("length", [1, 4096, 4097, 65_536, 300_001, MIB])
def test_pages_of_every_length_come_back(tmp_path: Path, length: int) -> None:
    """A length that is no whole block, and one that is, and one in a slot with room to spare."""
    with Rig(tmp_path, size_bytes=64 * MIB) as rig:
        rig.write([1, 2, 3], length)

        assert rig.load([3, 1, 2]) == ["right"] * 3


def test_neighbours_are_moved_by_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots next to each other, whose pages fill them, are one write, and one read by a call."""
    monkeypatch.setattr(ring, "_open", lambda _setting: None)
    with Rig(tmp_path) as rig:
        calls: list[int] = []
        files = rig.parts.files
        write, read = files.write, files.read
        files.write = lambda place, buffers: calls.append(len(buffers)) or write(place, buffers)
        files.read = lambda place, buffers: calls.append(-len(buffers)) or read(place, buffers)

        rig.write(list(range(12)), 65_536)
        found = rig.load(list(range(12)))

        assert found == ["right"] * 12
        # The first write is the slab's own block.
        assert calls == [1, 24, -24]


def test_restart_reports_the_coldest_page_first(tmp_path: Path) -> None:
    """What was used last comes last, so that an index that loads it in order knows its age."""
    with Rig(tmp_path) as rig:
        rig.write([1, 2, 3])
        rig.write([4])
    # Seconds are coarse: the index is shown that they have passed.
    with sqlite3.connect(tmp_path / "0" / "index.sqlite") as index:
        index.execute("UPDATE slots SET used = used - 100")
    index.close()
    with Rig(tmp_path) as second:
        now = np.array([int(time.time())], np.int64)
        second.perform(NoteUse(np.array([second.place_of(2)], np.uint64), now))

    with Rig(tmp_path) as third:
        keys = [entry["key"].tobytes() for entry in third.opened.entries]

        assert keys[-2:] == [key_of(4), key_of(2)]


def test_forgotten_page_does_not_come_back_after_a_graceful_stop(tmp_path: Path) -> None:
    """`close` writes the pending rows first, however many there are."""
    with Rig(tmp_path) as rig:
        for begin in range(0, 300, 50):
            rig.write(list(range(begin, begin + 50)), 4096)
        gone = rig.index.remove(rig.index.find(b"".join(key_of(n) for n in range(299))))
        rig.perform(Forget(gone.places))

    with Rig(tmp_path) as again:
        assert {entry["key"].tobytes() for entry in again.opened.entries} == {key_of(299)}


def test_index_made_from_slots_finds_a_forgotten_page_with_its_own_bytes(tmp_path: Path) -> None:
    """A slot is not overwritten when its page goes, so a lost index may bring the page back."""
    with Rig(tmp_path) as rig:
        rig.write([1, 2, 3])
        rig.forget([2])
    (tmp_path / "0" / "index.sqlite").unlink()

    with Rig(tmp_path) as again:
        keys = {entry["key"].tobytes() for entry in again.opened.entries}
        assert keys == {key_of(1), key_of(2), key_of(3)}
        assert again.load([1, 2, 3]) == ["right"] * 3


def test_page_that_is_evicted_while_it_is_written_is_not_there(tmp_path: Path) -> None:
    """The word is looked at after the write too, and the header is overwritten."""
    with Rig(tmp_path) as rig:
        rig.write([9], 65_536)
        files = rig.parts.files
        write = files.write

        def write_and_evict(place: int, buffers: list[memoryview]) -> None:
            if len(buffers) > 1:
                rig.pool.memory[int(rig.records[1]["offset"])] ^= 1
                rig.pool.evict(rig.records[1])
            write(place, buffers)

        files.write = write_and_evict
        said = rig.write([1, 2, 3], 65_536)
        files.write = write

        assert said == bytes([0, DISK_CHANGED, 0])
        assert rig.load([1, 3, 2]) == ["right", "right", str(DISK_DAMAGED)]
    (tmp_path / "0" / "index.sqlite").unlink()
    with Rig(tmp_path) as again:
        # A lost index finds the torn page's header; its checksum keeps the page from readers.
        assert len(again.opened.entries) == 4
        assert again.load([1, 3, 2]) == ["right", "right", str(DISK_DAMAGED)]


def test_page_whose_bytes_are_not_those_of_its_record_is_not_written(tmp_path: Path) -> None:
    """A checksum that the record contains is compared with what is in the pool."""
    from peercache.model.records import HAS_CHECKSUM

    with Rig(tmp_path) as rig:
        commit = rig.pool.commit

        def with_wrong_checksum(keys: list[bytes], lengths: list[int]) -> np.ndarray:
            records = commit(keys, lengths)
            records["flags"][0] |= HAS_CHECKSUM
            records["checksum"][0] = 12345
            return records

        rig.pool.commit = with_wrong_checksum

        assert rig.write([1, 2]) == bytes([DISK_CHANGED, 0])


def test_load_of_another_namespace_is_refused(tmp_path: Path) -> None:
    """Key, namespace and length in the header must be those that are asked for."""
    with Rig(tmp_path) as rig:
        rig.write([1], namespace=5)

        assert rig.load([1], namespace=6) == [str(DISK_REPLACED)]


def test_job_whose_deadline_has_passed_touches_nothing(tmp_path: Path) -> None:
    """Every page is DISK_UNTRIED, so its slot may be used at once."""
    with Rig(tmp_path) as rig:
        rig.write([1])
        before = rig.pool.memory.copy()

        job, _ = rig.send_load([1], until_s=-1.0)
        done = rig.await_fact(LoadDone, job)

        assert done.outcomes == bytes([DISK_UNTRIED])
        assert np.array_equal(before, rig.pool.memory)
        assert rig.write([2], until_s=-1.0) == bytes([DISK_UNTRIED])


def test_forked_child_keeps_no_lock(tmp_path: Path) -> None:
    """A child that an engine forks outlives the node, and the folder is free all the same."""
    with Rig(tmp_path) as rig:
        rig.write([1])
        child = fork(signal.pause)
    try:
        with Rig(tmp_path) as again:
            assert again.parts.folder.path.name == "0"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    """A folder 0 with another program's files stays as it is."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "slab-000000.pcs").write_bytes(b"another program's")

    with Rig(tmp_path) as rig:
        rig.write([1])

        assert rig.parts.folder.path.name == "1"
    assert (tmp_path / "0" / "slab-000000.pcs").read_bytes() == b"another program's"
    assert [entry.name for entry in (tmp_path / "0").iterdir()] == ["slab-000000.pcs"]


def test_lower_cap_takes_the_slabs_beyond_it(tmp_path: Path) -> None:
    """A restart with a smaller disk_size keeps what fits, and frees the rest of the files."""
    with Rig(tmp_path, size_bytes=32 * MIB) as rig:
        for begin in range(0, 200, 50):
            rig.write(list(range(begin, begin + 50)))
    before = len(list((tmp_path / "0").glob("slab-*")))

    with Rig(tmp_path, size_bytes=12 * MIB) as again:
        kept = len(again.opened.entries)
        files = list((tmp_path / "0").glob("slab-*"))

        assert 0 < len(files) < before
        assert sum(file.stat().st_size for file in files) <= 12 * MIB
        assert 0 < kept < 200
        numbers = [n for n in range(200) if again.index.find(key_of(n))[0] >= 0]
        assert again.load(numbers[:20]) == ["right"] * 20


def test_raised_cap_keeps_everything(tmp_path: Path) -> None:
    """A restart with a larger disk_size finds all pages, and has more room."""
    with Rig(tmp_path, size_bytes=16 * MIB) as rig:
        rig.write(list(range(20)))
        before = rig.opened.usable_bytes

    with Rig(tmp_path, size_bytes=64 * MIB) as again:
        assert again.load(list(range(20))) == ["right"] * 20
        assert again.opened.usable_bytes > before


def test_files_stay_below_the_cap(tmp_path: Path) -> None:
    """Slabs, index and all: the folder never takes more than its size, however much is written."""
    size_bytes = 16 * MIB
    with Rig(tmp_path, size_bytes=size_bytes) as rig:
        for begin in range(0, 600, 30):
            assert rig.write(list(range(begin, begin + 30))) == bytes(30)
            taken = sum(f.stat().st_blocks * 512 for f in (tmp_path / "0").iterdir())
            assert taken <= size_bytes
        rig.index.check()
        figures = rig.index.figures()
        assert figures["disk_bytes_used"] + figures["disk_bytes_free"] == figures["disk_bytes"]


def test_cap_below_one_slab_ends_the_tier(tmp_path: Path) -> None:
    """A disk_size that holds nothing is said, not guessed around."""
    rig = Rig(tmp_path, size_bytes=1000, opened=False)

    assert "disk_size" in rig.ended()
    rig.store.close()


def test_store_that_is_not_open_answers_at_once(tmp_path: Path) -> None:
    """Jobs after the end are DISK_UNTRIED, one answer each."""
    rig = Rig(tmp_path)
    rig.write([1])
    rig.parts.workers.end("a test")
    rig.await_fact(DiskEnded)

    said = rig.write([2])
    rig.store.close()
    after = rig.write([3])

    assert said == after == bytes([DISK_UNTRIED])


def test_jobs_beyond_the_bound_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue does not grow with a disk that is slower than the writer."""
    monkeypatch.setattr("peercache.storage.jobs.WAITING_PAGES_MAX", 10)
    with Rig(tmp_path) as rig:
        assert rig.write(list(range(11)), 4096) == bytes([DISK_UNTRIED]) * 11
        job = rig.send_write(list(range(20, 30)), 4096)
        assert rig.await_fact(WriteDone, job).outcomes == bytes(10)


def test_file_system_without_direct_io_is_used_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged once, and everything else is the same."""
    opened = os.open

    def refuse_direct(path: object, flags: int, *more: int, **rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *more, **rest)

    monkeypatch.setattr("peercache.storage.slab_files.os.open", refuse_direct)
    with Rig(tmp_path) as rig:
        rig.write([1, 2])

        assert rig.load([2, 1]) == ["right"] * 2
        assert rig.log.events().count("disk.direct_io_refused") == 1
