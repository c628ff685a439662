"""Whose a folder on disk is: its lock, its cluster, its user, and what it records of itself."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peercache.actors.ports import DiskEnded
from peercache.storage import folder as folders
from peercache.storage.folder import LOCK_ATTEMPTS, FolderBusyError, open_folder
from peercache.storage.layout import FORMAT_VERSION, LOCK_NAME, SUPERBLOCK_NAME
from tests.children import in_child
from tests.contracts.frozen.record import FOLDER
from tests.unit.storage.rig import MIB, Rig, key_of

STRANGER = 65_534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes folders of another user")


def folder_name(rig: Rig) -> str:
    return rig.parts.folder.path.name


def passed_over(rig: Rig) -> list[str]:
    return [
        facts["problem"] for _, event, facts in rig.log.lines if event == "disk.folder_passed_over"
    ]


def filled(path: Path, **more: str) -> None:
    """Leave one page in a folder, as a node that has stopped."""
    with Rig(path, **more) as rig:
        rig.write([1])


def test_another_cluster_s_folder_is_passed_over(tmp_path: Path) -> None:
    """Red's page is no hit for blue; each cluster finds its own folder again."""
    filled(tmp_path, cluster="red")

    with Rig(tmp_path, cluster="blue") as blue:
        assert len(blue.opened.entries) == 0
        assert folder_name(blue) == "1"
        assert passed_over(blue) == [f"{tmp_path}/0 belongs to cluster 'red', this node to 'blue'"]
        blue.write([2])

    for cluster, name, number in (("red", "0", 1), ("blue", "1", 2)):
        with Rig(tmp_path, cluster=cluster) as again:
            assert folder_name(again) == name
            assert again.opened.entries["key"].tobytes() == key_of(number)


def test_a_folder_without_pages_is_free_for_every_cluster(tmp_path: Path) -> None:
    """A name alone keeps no folder from others."""
    with Rig(tmp_path, cluster="red"):
        pass
    with Rig(tmp_path, cluster="blue") as blue:
        assert folder_name(blue) == "0"
        blue.write([1])
    with Rig(tmp_path, cluster="red") as red:
        assert folder_name(red) == "1"


def test_the_folder_of_an_earlier_version_is_adopted_once(tmp_path: Path) -> None:
    """It names no cluster: the first that finds it keeps its pages, and logs it."""
    with zipfile.ZipFile(FOLDER / f"disk-{FORMAT_VERSION}.zip") as packed:
        packed.extractall(tmp_path)
    disk = tmp_path / "disk"
    (disk / "0" / LOCK_NAME).write_text("")

    with Rig(disk, cluster="red") as red:
        pages = len(red.opened.entries)
        assert (folder_name(red), pages > 0) == ("0", True)
        assert "disk.folder_adopted" in red.log.events()
    with Rig(disk, cluster="blue") as blue:
        assert (folder_name(blue), len(blue.opened.entries)) == ("1", 0)
    with Rig(disk, cluster="red") as red:
        assert len(red.opened.entries) == pages
        assert "disk.folder_adopted" not in red.log.events()


@pytest.mark.parametrize(
    ("said", "mode", "why"),
    [
        *((said, 0o700, "unknown cluster") for said in ("garbage", "{}", "[]")),
        ('{"cluster": "red", "uid": "x"}', 0o700, "unknown cluster"),
        # A copied folder has our uid as its owner, and names the one that wrote the pages.
        (json.dumps({"cluster": "red", "uid": STRANGER}), 0o700, f"uid {STRANGER}"),
        ("", 0o777, "chmod o-w"),
    ],
)
def test_a_folder_that_may_have_another_s_pages_is_passed_over(
    tmp_path: Path, said: str, mode: int, why: str
) -> None:
    """Its pages are neither served nor removed."""
    filled(tmp_path, cluster="red")
    if said:
        (tmp_path / "0" / LOCK_NAME).write_text(said)
    (tmp_path / "0").chmod(mode)
    before = sorted(path.name for path in (tmp_path / "0").iterdir())

    with Rig(tmp_path, cluster="red") as rig:
        assert folder_name(rig) == "1"
        assert why in passed_over(rig)[0]

    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == before


@needs_root
def test_a_folder_of_another_uid_ends_no_tier(tmp_path: Path) -> None:
    """Its owner could change what it holds, at any time."""
    filled(tmp_path)
    os.chown(tmp_path / "0", STRANGER, STRANGER)

    with Rig(tmp_path) as rig:
        assert folder_name(rig) == "1"
        assert f"belongs to uid {STRANGER}" in passed_over(rig)[0]


def test_a_folder_that_this_user_may_not_open_ends_no_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may open all, so the refusal is played."""
    filled(tmp_path)
    real = os.open

    def refuse(path: str | Path, flags: int, *more: int, **named: int) -> int:
        if str(path) == f"{tmp_path}/0":
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(folders.os, "open", refuse)
    with Rig(tmp_path) as rig:
        assert folder_name(rig) == "1"
        assert "may not open" in passed_over(rig)[0]


def test_links_lead_nowhere(tmp_path: Path) -> None:
    """Neither a folder nor a lock file may be a link: what it leads to is not ours to write."""
    (tmp_path / "elsewhere").mkdir()
    filled(tmp_path / "elsewhere")
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "0").symlink_to(tmp_path / "elsewhere" / "0")

    with Rig(disk) as rig:
        assert folder_name(rig) == "1"


def test_when_every_folder_is_foreign_the_reason_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "FOLDERS_MAX", 1)
    filled(tmp_path, cluster="red")

    with Rig(tmp_path, cluster="blue", opened=False) as blue:
        ended = blue.await_fact(DiskEnded)
    assert "disk_path" in ended.reason
    assert "another cluster" in ended.reason


@needs_root
@pytest.mark.parametrize("which", ["the path", "a parent"])
@pytest.mark.parametrize(
    ("uid", "mode", "problem"),
    [
        (0, 0o755, ""),
        (0, 0o1777, ""),
        (0, 0o777, "chmod"),
        (STRANGER, 0o755, f"belongs to uid {STRANGER}"),
    ],
)
def test_a_path_that_another_user_may_change_is_reported_and_used(
    tmp_path: Path, which: str, uid: int, mode: int, problem: str
) -> None:
    """That user can take a node's folder away, and put none of its own there."""
    path = tmp_path / "parent" / "disk"
    path.mkdir(parents=True)
    judged = path if which == "the path" else path.parent
    os.chown(judged, uid, -1)
    judged.chmod(mode)

    with Rig(path) as rig:
        reported = [
            facts["problem"] for _, event, facts in rig.log.lines
            if event == "disk.path_open_to_others"
        ]  # fmt: skip
        rig.write([1])
        assert folder_name(rig) == "0"

    assert len(reported) == bool(problem)
    assert all(problem in each and str(judged) in each for each in reported)


@contextmanager
def held(path: Path, pauses: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Hold the lock of a folder for so many pauses of this thread, which waits; yield these."""
    paused: list[float] = []
    waiting, sleep = threading.current_thread(), time.sleep
    with (path / LOCK_NAME).open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)

        def pause(seconds: float) -> None:
            if threading.current_thread() is not waiting:
                sleep(seconds)  # `time` is one module for all threads.
                return
            paused.append(seconds)
            if len(paused) == pauses:
                fcntl.flock(holder, fcntl.LOCK_UN)

        monkeypatch.setattr(folders.time, "sleep", pause)
        yield paused


def test_a_lock_that_is_held_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that tests whether the folder is in use."""
    with held(tmp_path, LOCK_ATTEMPTS - 1, monkeypatch) as paused:
        folder = open_folder(tmp_path, 16 * MIB)
    assert len(paused) == LOCK_ATTEMPTS - 1
    with (tmp_path / LOCK_NAME).open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder.close()


def test_a_lock_that_stays_held_is_a_running_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        held(tmp_path, LOCK_ATTEMPTS, monkeypatch) as paused,
        pytest.raises(FolderBusyError, match="a running node has"),
    ):
        open_folder(tmp_path, 16 * MIB)
    assert len(paused) == LOCK_ATTEMPTS - 1


def test_a_child_closes_no_lock_that_was_let_go(tmp_path: Path) -> None:
    """Its number may be another file's by then."""
    folder = open_folder(tmp_path, 16 * MIB)
    lock = folder.lock
    folder.close()
    ours = os.open("/dev/null", os.O_RDONLY)
    if ours != lock:
        os.dup2(ours, lock)
        os.close(ours)
    assert in_child(lambda: os.fstat(lock)) == 0
    os.close(lock)


def test_tools_take_a_folder_as_it_is(tmp_path: Path) -> None:
    """Without a size, a cluster or a log; an empty one, and one of another format, has nothing."""
    (tmp_path / "empty").mkdir()
    with Rig(tmp_path / "disk") as rig:
        rig.write([1])
        known = rig.parts.folder
    empty = open_folder(tmp_path / "empty", None)
    assert (empty.slab_bytes, empty.slab_count, empty.fresh) == (MIB, 0, True)
    reported = open_folder(known.path, None)
    assert (reported.slab_bytes, reported.slab_count, reported.fresh) == (
        known.slab_bytes,
        1,
        False,
    )
    reported.close()
    empty.close()
    for version, slab_bytes in ((FORMAT_VERSION, 4 * MIB), (FORMAT_VERSION + 1, MIB)):
        superblock = {"format": version, "slab_bytes": 4 * MIB}
        (known.path / SUPERBLOCK_NAME).write_text(json.dumps(superblock))
        other = open_folder(known.path, None)
        assert (other.slab_bytes, other.fresh) == (slab_bytes, version != FORMAT_VERSION)
        other.close()
