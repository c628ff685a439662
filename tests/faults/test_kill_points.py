"""A few of the kill points: `make kill-points` takes all of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import kill_points
from tests.faults.kill_points import FILES, KEYS, MESSAGES, STORIES, Killer, Known, problems_at
from tests.system.nodes import LocalCluster, pages_of

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")

CHANGES = """
import os, socket, sys
os.mkdir(f"{sys.argv[1]}/made")
file = os.open(f"{sys.argv[1]}/made/file", os.O_CREAT | os.O_WRONLY)
os.write(file, b"written")
os.rename(f"{sys.argv[1]}/made/file", f"{sys.argv[1]}/made/renamed")
open(os.devnull, "w").write("not counted")
ends = socket.socketpair()
ends[0].send(b"first")
ends[0].sendmsg([b"second"])
sys.stdout.write(str(ends[1].recv(100)))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library."""
    return kill_points.compiled(tmp_path_factory.mktemp("library"))


@pytest.mark.parametrize(
    ("kind", "number", "calls", "left"),
    [
        (FILES, 0, 4, ["made", "renamed"]),
        (FILES, 1, 1, []),
        (FILES, 2, 2, ["made"]),
        (FILES, 4, 4, ["file", "made"]),
        (MESSAGES, 0, 2, ["made", "renamed"]),
        (MESSAGES, 2, 2, ["made", "renamed"]),
    ],
)
def test_a_process_is_killed_before_the_call(
    tmp_path: Path, library: Path, kind: str, number: int, calls: int, left: list[str]
) -> None:
    """What it did before has happened, and nothing else."""
    place, folder = tmp_path / "place", tmp_path / "folder"
    place.mkdir()
    folder.mkdir()
    killer = Killer(library, place, number, kind)

    done = subprocess.run(
        [*killer.before(folder), sys.executable, "-c", CHANGES, folder],
        check=False, capture_output=True, text=True,
    )  # fmt: skip

    assert done.returncode == (-9 if number else 0), done.stderr
    assert killer.count == calls
    assert sorted(path.name for path in folder.rglob("*")) == left
    if not number:
        assert done.stdout == "b'firstsecond'"


def test_a_page_that_is_lost_or_back_is_a_problem() -> None:
    """And so is a page with the bytes of another one; a node that works has none."""
    with LocalCluster() as cluster:
        client = cluster.client(cluster.start(pool="16MiB"))
        assert all(client.batch_set(KEYS[:8], pages_of(KEYS[:8])))
        assert problems_at(client, Known(set(KEYS[:8]), set(KEYS[8:]))) == []
        assert problems_at(client, Known(kept=set(KEYS[6:9]))) == ["1 of 3 sure pages are lost"]
        assert problems_at(client, Known(removed=set(KEYS[7:]))) == ["1 removed pages are back"]

        client.batch_set(KEYS[8:9], pages_of(KEYS[:1]))
        assert problems_at(client, Known()) == [f"wrong bytes under {KEYS[8]}"]


def test_a_node_that_does_not_start_passes_for_none_that_was_killed(
    tmp_path: Path, library: Path
) -> None:
    """In the run in which the calls are counted: otherwise no kill would follow, and no failure."""
    with LocalCluster() as cluster, pytest.raises(AssertionError, match="did not start"):
        kill_points.start(cluster, Killer(library, tmp_path), flags=["--no-such-flag"])


@pytest.mark.parametrize("number", [40, 85, 120])
def test_a_node_with_a_disk_is_killed_and_starts_again(library: Path, number: int) -> None:
    """While it starts, while it writes, and while it evicts: among some 135 calls."""
    assert kill_points.run("disk", number, library)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STORIES if name != "disk"])
def test_a_process_is_killed_before_some_of_its_messages(library: Path, name: str) -> None:
    """Six of them."""
    calls, problems = kill_points.run(name, 0, library)
    assert problems == []
    for number in range(1, calls, calls // 6 + 1):
        assert kill_points.run(name, number, library)[1] == [], number
