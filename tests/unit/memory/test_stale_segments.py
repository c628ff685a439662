"""Only the segments of dead processes are removed, whatever races with their removal."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peercache.memory.attached import AttachedSegment
from peercache.memory.layout import segment_name
from peercache.memory.published import PublishedSegment, remove_leftovers
from peercache.model.ids import Incarnation
from peercache.trust.sharing import Sharing

GRANULE = 16384
NODE = Incarnation(77)


def publish(folder: Path, node: Incarnation = NODE) -> PublishedSegment:
    return PublishedSegment.create(
        folder, incarnation=node, page_bytes=4 * GRANULE, granule=GRANULE
    )


def test_segment_of_a_killed_process_is_removed_and_of_a_live_one_stays(
    shm_dir: Path, start_owner: Callable[..., Any]
) -> None:
    """SIGKILL gives the file free; a process that lives keeps its own, this one's included."""
    dead, alive, mine = start_owner(1), start_owner(2), publish(shm_dir)
    before = remove_leftovers(shm_dir)
    dead.kill()

    removed = remove_leftovers(shm_dir)

    assert before == []
    assert removed == [segment_name(1)]
    assert sorted(shm_dir.iterdir()) == sorted([alive.path, mine.path])
    assert remove_leftovers(shm_dir) == []
    mine.close()


def test_removed_segment_stays_readable_where_it_is_mapped(
    shm_dir: Path, start_owner: Callable[..., Any]
) -> None:
    """Unlinking takes the name only: a reader's mapping keeps bytes and words."""
    owner = start_owner(1)
    owner.tell("fill 0 16384 9")
    owner.tell("store 0 1000")
    segment = AttachedSegment.open(owner.path, incarnation=Incarnation(1), writable=False)
    owner.kill()

    remove_leftovers(shm_dir)

    assert not owner.path.exists()
    assert segment.words(np.zeros(1, np.uint64)).tolist() == [1000]
    assert (segment._pages[:GRANULE] == 9).all()
    segment.close(1.0)


def test_what_is_no_segment_file_stays(shm_dir: Path) -> None:
    """Other names, folders, pipes and links are left alone, and none of them blocks."""
    (shm_dir / "peercache-notes").write_text("mine")
    (shm_dir / segment_name(1)).mkdir()
    os.mkfifo(shm_dir / segment_name(2))
    (shm_dir / segment_name(3)).symlink_to(shm_dir / "peercache-notes")
    before = sorted(shm_dir.iterdir())

    removed = remove_leftovers(shm_dir)

    assert removed == []
    assert sorted(shm_dir.iterdir()) == before


def test_folder_that_is_not_there_has_no_leftovers(tmp_path: Path) -> None:
    """A wrong folder is told elsewhere; here it is only empty."""
    assert remove_leftovers(tmp_path / "nowhere") == []


def test_file_being_created_survives_a_removal_before_its_lock(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 the file is made · 2 another start removes it · 3 its lock is taken: made again."""
    real, events = fcntl.flock, []

    def flock(file: int, operation: int) -> None:
        if not events:
            events.append("removed")
            events.extend(remove_leftovers(shm_dir))
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)

    segment = publish(shm_dir)

    assert events == ["removed", segment_name(NODE)]
    assert os.path.samestat(segment.path.stat(), os.fstat(segment._file))
    assert remove_leftovers(shm_dir) == []
    assert segment.path.exists()
    segment.close()


def test_removal_that_comes_late_does_not_remove_the_successor(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 a remover opens a dead file · 2 it goes, a new one has its name · 3 the remover locks."""
    (shm_dir / segment_name(NODE)).write_bytes(b"of a dead process")
    real, made = fcntl.flock, []

    def flock(file: int, operation: int) -> None:
        if not made:
            made.append("soon")
            (shm_dir / segment_name(NODE)).unlink()
            made.append(publish(shm_dir))
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)

    removed = remove_leftovers(shm_dir)

    segment = made[1]
    assert isinstance(segment, PublishedSegment)
    assert removed == []
    assert segment.path.exists()
    segment.close()


def test_no_created_segment_is_lost_while_others_remove_leftovers(shm_dir: Path) -> None:
    """Two processes remove leftovers without pause while this one creates segments."""
    script = (
        "import sys\n"
        "from peercache.memory.published import remove_leftovers\n"
        "print('ready', flush=True)\n"
        "while True: remove_leftovers(sys.argv[1])\n"
    )
    removers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(shm_dir)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for remover in removers:
        assert remover.stdout is not None
        remover.stdout.readline()

    lost = []
    for number in range(1, 301):
        segment = publish(shm_dir, Incarnation(number))
        if not segment.path.exists() or not os.path.samestat(
            segment.path.stat(), os.fstat(segment._file)
        ):
            lost.append(number)
        segment.close()

    alive = [remover.poll() is None for remover in removers]
    for remover in removers:
        remover.kill()
        remover.wait()
        assert remover.stdout is not None
        remover.stdout.close()
    assert alive == [True, True]
    assert lost == []


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a file of another user")
def test_the_leftover_of_another_uid_stays(shm_dir: Path, start_owner: Callable[..., Any]) -> None:
    """Only files of uids that share the host are this node's to remove."""
    dead = start_owner(1)
    dead.kill()
    os.chown(dead.path, 65_534, -1)

    assert remove_leftovers(shm_dir) == []
    assert dead.path.exists()
    assert remove_leftovers(shm_dir, Sharing.of(share_uids=("65534",))) == [segment_name(1)]
