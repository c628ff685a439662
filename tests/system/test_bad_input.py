"""What an operator gets wrong, on real file systems and with real nodes: one sentence each.

test_node_process.py has wrong settings, taken ports, few open files and a small /dev/shm;
test_operating.py a taken home, expired certificates and a stopped node; unit/cli/test_operate.py
output that is no terminal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from peercache.cli import main as cli
from tests.pace import TIMEOUT_S, wait_until
from tests.system.nodes import LocalCluster, NodeProcess, keys_of, pages_of

pytestmark = pytest.mark.slow

NODE = (sys.executable, "-m", "peercache", "node", "--listen", "127.0.0.1:0", "--metrics-port=0")


def refused(*flags: str, before: str = "") -> str:
    """Run a node that cannot start, in mounts of its own; return its one sentence."""
    command = ["unshare", "-rm", "sh", "-c", f'{before} exec "$@"', "sh"] if before else []
    done = subprocess.run(
        [*command, *NODE, *flags],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.stderr.startswith("unshare:"):
        pytest.skip("may not make a mount namespace")
    assert done.returncode == 2, done.stderr
    said = [line for line in done.stderr.splitlines() if '"level": "info"' not in line]
    assert len(said) == 1, said
    return said[0]


@pytest.fixture(name="small")
def _small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def disk_of(folder: Path, size: str = "100MB") -> tuple[str, ...]:
    """Return the flags of a disk tier."""
    return ("--disk-enabled", "true", "--disk-path", str(folder), "--disk-size", size)


def status_of(node: NodeProcess, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `peercache status` prints of a node."""
    capsys.readouterr()
    cli.main(["status", "--at", node.ready["home"]])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("mount -t tmpfs none /dev &&", "No such file or directory"),
        ("mount -t tmpfs -o ro none /dev/shm &&", "Read-only file system"),
    ],
    ids=["missing", "read-only"],
)
def test_a_host_without_dev_shm_is_asked_to_mount_it(before: str, why: str) -> None:
    """As in a container that has none."""
    said = refused("--pool-size", "16MiB", before=before)

    assert said == (
        f"peercache: configuration 'shm_dir': cannot use /dev/shm: {why}: mount a tmpfs there "
        "that the node may write to, or name another folder"
    )


def test_a_pool_larger_than_memory_is_refused() -> None:
    """Where /dev/shm would take it: the kernel would end the node later, without a word."""
    if os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > 400 * 2**30:
        pytest.skip("this host has nearly as much memory")
    said = refused("--pool-size", "500GiB", before="mount -t tmpfs -o size=900g none /dev/shm &&")

    assert said.startswith("peercache: configuration 'pool_size': 500.0 GiB are more than the ")
    assert said.endswith(" of memory that this host has: lower pool_size")


def test_nodes_that_share_a_disk_folder_have_a_part_each(tmp_path: Path) -> None:
    """A disk_path may be that of all nodes of a host; each locks the first free folder below it."""
    with LocalCluster() as cluster:
        nodes = [cluster.start(flags=disk_of(tmp_path)) for _ in range(2)]
        clients = [cluster.client(node) for node in nodes]
        for place, node in enumerate(nodes):
            wait_until(lambda node=node: '"disk.opened"' in node.said())  # type: ignore[misc]
            keys = keys_of(f"of {place}", 4)
            assert clients[place].batch_set(keys, pages_of(keys)) == [True] * 4
        folders = [
            json.loads(line)["folder"]
            for node in nodes
            for line in node.said().splitlines()
            if '"disk.opened"' in line
        ]
        assert folders == [f"{tmp_path}/0", f"{tmp_path}/1"]
        assert cli.main(["disk", "check", str(tmp_path)]) == 2
        for node in nodes:
            assert node.terminate() == 0

    assert cli.main(["disk", "check", str(tmp_path)]) == 0


def test_a_read_only_disk_costs_the_tier_and_is_shown(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The node serves its memory, and reports what is wrong with the disk and what to do."""
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    with LocalCluster() as cluster:
        node = cluster.start(flags=disk_of(small))
        wait_until(lambda: '"disk.open_failed"' in node.said())
        keys = keys_of("kept", 2)
        assert cluster.client(node).batch_set(keys, pages_of(keys)) == [True] * 2
        shown = " ".join(status_of(node, capsys).split())

    assert "degraded" in shown
    assert (
        f"the disk tier of {small}: {small}/0: Read-only file system: make it a folder that the "
        "node may write to, or name another disk_path, and restart the node"
    ) in shown


def test_a_full_disk_is_shown_with_its_folder(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pages stay in memory; what is wrong is seen once, in the status."""
    with LocalCluster() as cluster:
        node = cluster.start(flags=disk_of(small))
        wait_until(lambda: '"disk.opened"' in node.said())
        with (small / "other").open("wb") as other:
            os.posix_fallocate(other.fileno(), 0, os.statvfs(small).f_bavail * 4096)
        client = cluster.client(node)
        keys = keys_of("kept", 4)
        assert client.batch_set(keys, pages_of(keys)) == [True] * 4
        wait_until(lambda: "is full" in status_of(node, capsys))
        shown = " ".join(status_of(node, capsys).split())
        assert client.batch_exists(keys) == 4

    assert "degraded" in shown
    assert (
        f"the disk tier of {small}: the file system is full, or at disk_free_floor: free some "
        "room, or lower disk_size"
    ) in shown


def test_settings_of_a_disk_that_is_not_enabled_are_reported(tmp_path: Path) -> None:
    """The node would keep nothing on disk, and the operator would learn it at the next restart."""
    with LocalCluster() as cluster:
        node = cluster.start(flags=disk_of(tmp_path)[2:])
        reported = next(line for line in node.said().splitlines() if "disk.not_enabled" in line)

    said = json.loads(reported)
    assert (said["settings"], said["remedy"]) == (["disk_path", "disk_size"], "disk_enabled = true")
