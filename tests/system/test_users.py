"""An engine and a node of different users, as in two containers with shared mounts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.pace import TIMEOUT_S
from tests.system.nodes import NodeProcess

NODE_UID = 65_532
CLUSTER = "users"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="starts processes of other users")

ENTER = """
import encodings.ascii, encodings.idna, encodings.latin_1, importlib, os, pkgutil, sys
from contextlib import suppress
import peercache

# The interpreter may lie where the other user cannot read: all of it is imported before.
for found in pkgutil.walk_packages(peercache.__path__, "peercache."):
    if not found.name.endswith("__main__"):
        with suppress(ImportError):
            importlib.import_module(found.name)
uid, *groups = map(int, sys.argv[1].split("+"))
os.setgroups(groups)
os.setgid(uid)
os.setuid(uid)
"""

NODE = (
    ENTER
    + """
from peercache.cli.node import main
# Before the flags stand the uid and what the node's own command begins with.
sys.argv[1:] = sys.argv[5:]
sys.exit(main())
"""
)

ENGINE = (
    ENTER
    + """
from peercache import Client
settings = dict(setting.split("=", 1) for setting in sys.argv[3:])
page, buffer = bytearray(bytes(range(256)) * 512), bytearray(131072)
with Client.open(cluster="users", home=sys.argv[2], op_timeout_s=20.0, **settings) as client:
    stored = client.batch_set(["key"], [page])
    found = client.batch_get(["key"], [buffer])
    print(stored, found, buffer == page, int(client.stats()["pages_hit_shm"]))
"""
)


COMMAND = (
    ENTER
    + """
from peercache.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
)


@contextmanager
def node_of(uid: int, *flags: str, group: int = 0) -> Iterator[str]:
    """Run a node as a user, with one more group if given; yield its home address."""
    with tempfile.TemporaryDirectory(prefix="pc-") as name:
        os.chown(name, uid, uid)
        Path(name).chmod(0o755)
        home = f"ipc://{name}/shared/n.ipc"
        node = NodeProcess(
            ["--cluster", CLUSTER, "--home", home, "--listen", "127.0.0.1:0", "--pool-size",
             "16MiB", "--metrics-port", "0", "--log-format", "json", *flags],
            before=(sys.executable, "-c", NODE, user(uid, group)),
        )  # fmt: skip
        try:
            yield home
        finally:
            sys.stderr.write(node.said())
            node.end()


def user(uid: int, group: int) -> str:
    """Return what the processes take as their user."""
    return f"{uid}+{group}" if group else str(uid)


def engine_of(
    uid: int, home: str, *settings: str, group: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run an engine as a user: it stores a page and reads it."""
    command: Sequence[str] = [sys.executable, "-c", ENGINE, user(uid, group), home, *settings]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)


def command_of(uid: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `peercache` with these words as a user."""
    return subprocess.run(
        [sys.executable, "-c", COMMAND, str(uid), *words],
        check=False, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip


@pytest.mark.slow
def test_a_root_engine_uses_the_node_of_another_user() -> None:
    """It names the node's uid, whose files it would map; the node trusts root anyway."""
    with node_of(NODE_UID) as home:
        refused = engine_of(0, home)
        done = engine_of(0, home, f"share_uids={NODE_UID}")

    assert "share_uids = 65532" in refused.stderr
    assert done.stdout == "[True] [True] True 1\n", done.stderr


def test_an_engine_of_another_user_uses_a_root_node() -> None:
    """Both name a group, which opens the node's files; the node names the engine's uid."""
    shared = ("--share-group", str(NODE_UID), "--share-uids", str(NODE_UID))
    with node_of(0, *shared) as home:
        done = engine_of(NODE_UID, home, f"share_group={NODE_UID}")
        stranger = engine_of(NODE_UID + 1, home)

    assert done.stdout == "[True] [True] True 1\n", done.stderr
    assert "is not open to uid 65533" in stranger.stderr
    assert "share_uids = 65533" in stranger.stderr


@pytest.mark.slow
def test_two_users_of_one_group_share_a_node() -> None:
    """Each names the group and the other's uid; without the group nothing is open."""
    node_uid, engine_uid, group = 61_002, 61_001, 62_000
    both = ("--share-group", str(group), "--share-uids", str(engine_uid))
    ours = (f"share_group={group}", f"share_uids={node_uid}")
    with node_of(node_uid, *both, group=group) as home:
        done = engine_of(engine_uid, home, *ours, group=group)
        outside = engine_of(engine_uid, home, f"share_uids={node_uid}")

    assert done.stdout == "[True] [True] True 1\n", done.stderr
    assert "is not open to uid 61001" in outside.stderr


def test_an_engine_that_does_not_share_the_host_is_shown_what_to_set() -> None:
    with node_of(0) as home:
        done = engine_of(NODE_UID, home)

    assert done.returncode != 0
    for word in ("ConfigError", "home", "is not open to uid 65532", "share_uids", "share_group"):
        assert word in done.stderr, done.stderr


def test_a_command_of_another_user_names_the_setting_as_a_client_does() -> None:
    """The node listens: that nothing does would send its operator looking for a dead process."""
    with node_of(0) as home:
        asked = command_of(NODE_UID, "status", "--at", home, "--cluster", CLUSTER)
        checked = command_of(NODE_UID, "doctor", "--quick", "--home", home)

    assert asked.returncode == 2
    assert "nothing listens" not in asked.stderr
    assert "is not open to uid 65532" in asked.stderr
    assert "share_uids = 65532" in asked.stderr
    assert checked.returncode == 1
    (line,) = [each for each in checked.stdout.splitlines() if each.startswith("FAIL  home")]
    assert "uid 65532" in line
