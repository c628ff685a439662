"""What another cluster left behind is not read: an address, a disk folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pace import wait_until
from tests.system.nodes import LocalCluster, free_port, keys_of, pages_of, read

KEYS = keys_of("reused", 8)


@pytest.mark.slow
def test_a_node_at_a_reused_address_is_no_member() -> None:
    """Another cluster's node takes the address of a lost member: the others dial it in vain."""
    port = free_port()
    with LocalCluster() as red, LocalCluster() as blue:
        first = red.start()
        second = red.start(flags=["--listen", f"127.0.0.1:{port}"])
        red.wait_for_members(first, 2)
        second.kill()
        red.wait_for_members(first, 1)
        other = blue.start(flags=["--listen", f"127.0.0.1:{port}"])
        assert all(blue.client(other).batch_set(KEYS, pages_of(KEYS)))

        reader = red.client(first)
        wait_until(lambda: "node.peer_refused" in first.said() + other.said())

        assert read(reader, KEYS) == [False] * len(KEYS)
        assert reader.stats()["home_members_alive"] == 1
        assert blue.client(other).stats()["home_members_alive"] == 1


def test_a_disk_folder_of_another_cluster_is_not_served(tmp_path: Path) -> None:
    """The node takes the next folder, reports whose the first one is, and leaves it as it was."""
    flags = ["--disk-enabled", "true", "--disk-path", str(tmp_path), "--disk-size", "64MiB",
             "--disk-free-floor", "0"]  # fmt: skip
    with LocalCluster() as red:
        node = red.start(flags=flags)
        client = red.client(node)
        assert all(client.batch_set(KEYS, pages_of(KEYS)))
        wait_until(lambda: client.stats().get("home_disk_pages", 0) == len(KEYS))
        assert node.terminate() == 0
    kept = {file: file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()}

    with LocalCluster() as blue:
        node = blue.start(flags=flags)
        client = blue.client(node)
        wait_until(lambda: "disk.folder_passed_over" in node.said())
        assert read(client, KEYS) == [False] * len(KEYS)
        assert client.stats().get("home_disk_pages", 0) == 0

    assert {file: file.stat().st_size for file in kept} == kept
