"""What was removed leaves no header behind, and its wipe hits no page that came after it."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from peercache.actors.storage_port import Forget, ForgetDone
from peercache.storage import store
from peercache.storage.slab_files import SlabFiles
from tests.unit.storage.rig import PATIENCE_S, Rig, key_of


def spill_all(rig: Rig, numbers: list[int], length: int) -> None:
    for at in range(0, len(numbers), 50):
        some = numbers[at : at + 50]
        assert rig.spill(some, length) == bytes(len(some))


def forget_unheard(rig: Rig, numbers: list[int]) -> int:
    """Let pages go for good, and wait for nothing; return the job."""
    gone = rig.index.remove(rig.index.find(b"".join(key_of(number) for number in numbers)))
    rig.jobs += 1
    rig.perform(Forget(gone.places, wipe=True, job=rig.jobs))
    return rig.jobs


def rebuilt(path: Path) -> set[bytes]:
    """Return the keys that a node finds there which has lost its index."""
    (path / "0" / "index.sqlite").unlink()
    with Rig(path) as rig:
        return {entry["key"].tobytes() for entry in rig.opened.entries}


def test_wipes_spare_larger_pages_in_the_same_slab(tmp_path: Path) -> None:
    """After a clear the slab has slots of another size: old headers lie within the new pages."""
    with Rig(tmp_path) as rig:
        old, new = list(range(300)), list(range(1000, 1008))
        spill_all(rig, old, 4096)
        index, go = rig.store._opened.index, threading.Event()
        write = index._write
        index._write = lambda *given: go.wait(PATIENCE_S) and write(*given)  # type: ignore[method-assign]
        job = forget_unheard(rig, old)

        assert rig.spill(new, 100_000) == bytes(8)
        slabs = {rig.place_of(number) // rig.opened.slab_bytes for number in new}
        go.set()
        rig.await_fact(ForgetDone, job)

        assert slabs == {0}  # else nothing was tried
        assert rig.load(new) == ["right"] * 8
        assert rig.log.events().count("disk.page_damaged") == 0


def test_a_spill_waits_for_a_wipe_that_has_begun_within_its_page(tmp_path: Path) -> None:
    """Called off it cannot be any more, and it must not end in the middle of a page."""
    with Rig(tmp_path) as rig:
        old = list(range(50))
        spill_all(rig, old, 4096)
        mover, began, go = rig.store._opened.mover, threading.Event(), threading.Event()
        overwrite = mover._overwrite
        stopped: list[int] = []

        def stop_once(place: int) -> None:
            stopped.append(place)
            if len(stopped) == 5:
                began.set()
                assert go.wait(PATIENCE_S)
            overwrite(place)

        mover._overwrite = stop_once  # type: ignore[method-assign]
        job = forget_unheard(rig, old)
        assert began.wait(PATIENCE_S)
        spill = rig.send_spill([1000], 300_000)
        # Time enough for a spill that does not wait; for one that does, none is too short.
        time.sleep(0.1)
        go.set()
        rig.await_fact(ForgetDone, job)

        assert rig.await_fact(store.SpillDone, spill).outcomes == bytes(1)
        place = rig.place_of(1000)
        assert place < stopped[4] < place + 300_000  # else nothing was tried
        assert rig.load([1000]) == ["right"]


def test_more_pages_than_may_wait_are_wiped_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large clear is answered when it has happened, and refuses nobody's load meanwhile."""
    monkeypatch.setattr("peercache.storage.jobs.WAITING_PAGES_MAX", 60)
    with Rig(tmp_path) as rig:
        gone, kept = list(range(300)), [1000]
        spill_all(rig, [*gone, *kept], 4096)
        job = forget_unheard(rig, gone)
        assert rig.load(kept) == ["right"]
        rig.await_fact(ForgetDone, job)

    assert rebuilt(tmp_path) == {key_of(1000)}


def test_stop_wipes_what_was_forgotten(tmp_path: Path) -> None:
    """A next start on a full disk has no index, and makes one from what lies there."""
    with Rig(tmp_path) as rig:
        spill_all(rig, list(range(301)), 4096)
        forget_unheard(rig, list(range(300)))

    assert rebuilt(tmp_path) == {key_of(300)}


def test_stop_gives_up_wipes_that_take_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop is bounded, and what runs at its end is done before the folder is let go."""
    monkeypatch.setattr(store, "CLOSE_S", 0.4)
    with Rig(tmp_path, threads=1) as rig:
        spill_all(rig, list(range(300)), 4096)
        mover, path = rig.store._opened.mover, rig.store._opened.folder.path
        overwrite = mover._overwrite

        def slowly(place: int) -> None:
            time.sleep(0.02)
            overwrite(place)

        mover._overwrite = slowly  # type: ignore[method-assign]
        forget_unheard(rig, list(range(300)))
        started_s = time.monotonic()
        rig.store.close()
        took_s = time.monotonic() - started_s

    assert took_s < 3  # 300 wipes take 6 s
    with Rig(tmp_path) as again:
        assert again.store._opened.folder.path == path  # it was let go, else there is a second one
        assert len(again.opened.entries) == 0


def test_opening_that_fails_again_and_again_keeps_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full file system is tried for hours."""
    with Rig(tmp_path) as rig:
        spill_all(rig, list(range(100)), 100_000)
    monkeypatch.setattr(store, "ROOM_S", 0.01)
    tries = threading.Semaphore(0)

    def no_room(files: SlabFiles, log: object) -> None:
        del log
        files.prepare(0, 26)
        tries.release()
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(store, "load_index", no_room)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count
    failing = Rig(tmp_path, opened=False)
    for _ in range(5):
        assert tries.acquire(timeout=PATIENCE_S)
    failing.store.close()
    failing.store._opening.join(PATIENCE_S)

    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - a count
