"""The memory of a node: what it refuses before the kernel would kill it, and what it warns of."""

from __future__ import annotations

from pathlib import Path

import pytest

from peercache.config.settings import Config
from peercache.errors import ConfigError
from peercache.model.ids import Incarnation
from peercache.node import memory
from peercache.node.memory import publish
from tests.system.nodes import capture_logs

MIB = 2**20


def config_of(folder: Path) -> Config:
    """Return a pool of 4 MiB in a folder."""
    return Config.load({"pool_size": 4 * MIB, "shm_dir": str(folder)})


def test_pool_over_the_limit_of_its_cgroup_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernel would kill the node while it populates the pool, without a word."""
    monkeypatch.setattr(memory, "filesystem_of", lambda *_: "tmpfs")
    monkeypatch.setattr(memory, "own_cgroup_memory", lambda: (3 * MIB, 0))

    with pytest.raises(ConfigError, match=r"4\.0 MiB are more than the 3\.0 MiB.*this cgroup may"):
        publish(config_of(tmp_path), Incarnation(7))

    assert list(tmp_path.iterdir()) == [], "no segment is left"


def test_pool_over_the_memory_of_the_host_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A tmpfs may be larger than what there is. Nothing is made before: 64 TiB of pages have so
    many seals that the kernel ended other processes of the host.
    """

    def created(*_: object, **__: object) -> None:
        pytest.fail("the segment was made first")

    monkeypatch.setattr(memory.PublishedSegment, "create", created)
    monkeypatch.setattr(memory, "filesystem_of", lambda *_: "tmpfs")
    monkeypatch.setattr(memory, "host_memory", lambda _: MIB)

    with pytest.raises(ConfigError, match=r"more than the 2\.0 MiB of memory that this host has"):
        publish(config_of(tmp_path), Incarnation(7))


@pytest.mark.parametrize(("kind", "is_reported"), [("ext4", True), ("tmpfs", False)])
def test_pool_on_a_disk_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, *, is_reported: bool
) -> None:
    """It works, and every page is written to that disk."""
    monkeypatch.setattr(memory, "filesystem_of", lambda *_: kind)

    with capture_logs() as lines:
        publish(config_of(tmp_path), Incarnation(7)).close()

    assert any("pool.on_a_disk" in line and "ext4" in line for line in lines) is is_reported
