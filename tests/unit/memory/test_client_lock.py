"""The lock of a client: held while its process lives, whatever else happens to it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peercache.errors import ConfigError, Rejected
from peercache.memory import client_lock
from peercache.memory.client_lock import (
    ClientLock,
    LockProbe,
    folder_of,
    lock_name,
    make_folder,
    remove_dead_locks,
    remove_folder,
)
from peercache.trust.sharing import Sharing
from tests.descriptors import open_within
from tests.pace import wait_until

CLIENT = 0xABCDEF
OURS = Sharing.of()

HOLDER = """
import os, sys
from peercache.memory.client_lock import ClientLock
from peercache.trust.sharing import Sharing
lock = ClientLock(sys.argv[1], int(sys.argv[2]), Sharing.of())
print(lock.name, flush=True)
for line in sys.stdin:
    if line == "fork\\n":
        child = os.fork()
        if not child:
            os.close(lock._fd)
            os._exit(0)
        os.waitpid(child, 0)
    elif line == "fork and stay\\n":
        if not os.fork():
            # Until the standard input ends; the parent may die meanwhile.
            sys.stdin.read()
            os._exit(0)
    elif line == "release\\n":
        lock.release()
    print("done", flush=True)
"""


@pytest.fixture
def home(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/node.ipc"


@contextmanager
def holder(home: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds the lock; lines are further commands."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, home, str(CLIENT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == lock_name(CLIENT)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def send(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


@contextmanager
def probing(home: str) -> Iterator[LockProbe]:
    probe = LockProbe(home, lock_name(CLIENT), OURS)
    yield probe
    probe.close(remove=False)


def test_a_lock_survives_a_stopped_process(home: str) -> None:
    """Stopped in the middle of a copy, it may go on an hour later."""
    with holder(home) as process, probing(home) as probe:
        process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

        assert probe.is_held()


def test_a_forked_child_neither_takes_nor_drops_the_lock(home: str) -> None:
    """Even one that closes the file: the lock is the parent's."""
    with holder(home) as process, probing(home) as probe:
        send(process, "fork")

        assert probe.is_held()


def test_a_forked_child_that_lives_on_does_not_keep_the_lock(home: str) -> None:
    """Its parent has died, and no process is left that could write."""
    with holder(home) as process, probing(home) as probe:
        send(process, "fork and stay")
        process.kill()
        process.wait()

        assert not probe.is_held()


def test_a_lock_whose_file_was_removed_is_still_held(home: str) -> None:
    """Cleaning the folder does not end a client: the probe has its file open."""
    with holder(home) as process, probing(home) as probe:
        (folder_of(home) / lock_name(CLIENT)).unlink()

        assert probe.is_held()
        process.kill()
        process.wait()
        assert not probe.is_held()


def test_release_lets_go_and_removes_the_file(home: str) -> None:
    """Nothing will be written any more."""
    with holder(home) as process, probing(home) as probe:
        send(process, "release")

        assert not probe.is_held()
        assert not list(folder_of(home).iterdir())


def test_a_starting_node_removes_the_locks_of_the_dead_only(home: str) -> None:
    """Live clients keep their files; files with other names are left alone."""
    with holder(home), probing(home) as probe:
        folder = folder_of(home)
        (folder / lock_name(5)).touch()
        (folder / "notes.lock").touch()

        remove_dead_locks(home, OURS)

        left = sorted(path.name for path in folder.iterdir())
        assert left == [lock_name(CLIENT), "notes.lock"]
        assert probe.is_held()


def test_a_home_without_clients_has_nothing_to_remove(home: str) -> None:
    """Its folder is not there yet."""
    remove_dead_locks(home, OURS)

    assert not folder_of(home).exists()


def test_a_client_waits_for_a_node_that_is_just_removing_its_file(home: str) -> None:
    """The node holds the lock for that moment; then the client makes the file again."""
    folder = folder_of(home)
    folder.mkdir()
    path = folder / lock_name(CLIENT)
    script = (
        "import sys; from peercache.memory.client_lock import LockProbe\n"
        "from peercache.trust.sharing import Sharing\n"
        "probe = LockProbe(sys.argv[1], sys.argv[2], Sharing.of())\n"
        "assert probe.take(); print('taken', flush=True); sys.stdin.readline()\n"
        "probe.close(remove=True); print('removed', flush=True); sys.stdin.readline()\n"
    )
    path.touch()
    node = subprocess.Popen(
        [sys.executable, "-c", script, home, path.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert node.stdout is not None
    assert node.stdin is not None
    assert node.stdout.readline() == "taken\n"

    def let_go() -> None:
        assert node.stdin is not None
        node.stdin.write("\n")
        node.stdin.flush()

    threading.Timer(0.1, let_go).start()
    lock = ClientLock(home, CLIENT, OURS)

    assert node.stdout.readline() == "removed\n"
    # What it holds is what a node would look at.
    assert _is_locked_for_others(path)
    lock.release()
    node.communicate("\n")


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_file_removed_before_its_lock_is_looked_at_is_made_again(
    home: str, monkeypatch: pytest.MonkeyPatch, *, is_locked: bool
) -> None:
    """To hold the lock of a file without a name is to hold nothing that a node could find."""
    path = folder_of(home) / lock_name(CLIENT)
    real = fcntl.lockf
    interleaved = iter([path.unlink])

    def lockf(file: int, operation: int) -> None:
        # Once: a starting node has just found it unlocked, or has taken it for a dead one's.
        if is_locked:
            real(file, operation)
        next(interleaved, lambda: None)()
        if not is_locked:
            real(file, operation)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    lock = ClientLock(home, CLIENT, OURS)

    assert _is_locked_for_others(path)
    assert path.read_bytes() == lock.secret
    lock.release()
    assert not open_within(folder_of(home))


def test_a_folder_that_cannot_be_used_is_a_clear_error(tmp_path: Path) -> None:
    """It names the setting and the path; no descriptor is left behind."""
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"home.*file"):
        ClientLock(f"ipc://{tmp_path}/file/node.ipc", CLIENT, OURS)

    assert not open_within(tmp_path)


@pytest.mark.parametrize(
    "name", ["", "x", "../../etc/passwd", "0" * 16, "0" * 16 + ".lock/..", "G" * 16 + ".lock"]
)
def test_only_names_of_locks_are_opened(home: str, name: str) -> None:
    """The name comes from the connecting process."""
    with pytest.raises(Rejected, match="lock"):
        LockProbe(home, name, OURS)


def test_a_lock_that_is_not_there_or_a_link_is_refused(home: str, tmp_path: Path) -> None:
    """A link could lead anywhere."""
    folder_of(home).mkdir()
    secret = tmp_path / "secret"
    secret.touch()
    (folder_of(home) / lock_name(1)).symlink_to(secret)

    for client in (1, 2):
        with pytest.raises(Rejected, match="cannot open"):
            LockProbe(home, lock_name(client), OURS)


def test_the_files_are_for_their_owner_alone(home: str) -> None:
    """A process that could open one could hold it for a dead client."""
    lock = ClientLock(home, CLIENT, OURS)

    assert folder_of(home).stat().st_mode & 0o777 == 0o700
    assert (folder_of(home) / lock.name).stat().st_mode & 0o777 == 0o600
    lock.release()


def _is_locked_for_others(path: Path) -> bool:
    script = (
        "import fcntl, os, sys\n"
        "file = os.open(sys.argv[1], os.O_RDWR)\n"
        f"fcntl.lockf(file, {fcntl.LOCK_EX | fcntl.LOCK_NB})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], check=False, capture_output=True
    )
    return b"BlockingIOError" in done.stderr


def test_the_folder_goes_with_the_node_and_not_with_a_client(tmp_path: Path) -> None:
    """It is the node's: made by the next client of another uid, the node could not enter it."""
    home = f"ipc://{tmp_path}/home"
    make_folder(home, OURS)
    first = ClientLock(home, 1, OURS)
    remove_folder(home)
    assert folder_of(home).is_dir()

    first.release()
    assert folder_of(home).is_dir()

    remove_folder(home)
    assert not folder_of(home).exists()
    ClientLock(home, 3, OURS).release()
    assert folder_of(home).is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of another user")
def test_a_folder_or_a_file_of_another_uid_is_refused_with_a_sentence(home: str) -> None:
    """A stranger could remove our lock, or read the secret of its own."""
    folder = folder_of(home)
    make_folder(home, OURS)
    path = folder / lock_name(CLIENT)
    path.touch(0o600)
    os.chown(path, 65_534, -1)
    with pytest.raises(Rejected, match=r"65534.*share_uids"):
        LockProbe(home, path.name, OURS)
    with pytest.raises(ConfigError, match=r"65534.*share_uids"):
        ClientLock(home, CLIENT, OURS)
    path.unlink()

    os.chown(folder, 65_534, -1)
    for use in (make_folder, lambda home, ours: ClientLock(home, CLIENT, ours)):
        with pytest.raises(ConfigError, match=r"65534.*share_uids"):
            use(home, OURS)
    with pytest.raises(Rejected, match="65534"):
        LockProbe(home, path.name, OURS)


@pytest.mark.skipif(os.geteuid() != 0, reason="plays root, and a node of another user")
def test_the_lock_of_a_root_engine_is_readable_for_its_node(home: str) -> None:
    """Else the node could not compare the secret, and would refuse every write."""
    sharing = Sharing.of(share_uids=("65532",))
    make_folder(home, sharing)
    os.chown(folder_of(home), 65_532, 65_532)

    lock = ClientLock(home, CLIENT, sharing)

    found = (folder_of(home) / lock.name).stat()
    assert (found.st_uid, found.st_mode & 0o777) == (65_532, 0o600)
    lock.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another group")
def test_with_a_group_its_members_may_read_the_files(home: str) -> None:
    sharing = Sharing.of(share_group="65532")
    lock = ClientLock(home, CLIENT, sharing)

    for path, mode in ((folder_of(home), 0o770), (folder_of(home) / lock.name, 0o660)):
        assert (path.stat().st_gid, path.stat().st_mode & 0o777) == (65_532, mode), path
    lock.release()


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_file_without_a_whole_secret_has_none(home: str, size: int) -> None:
    """What its client has not written yet must not be equal to what another one shows."""
    lock = ClientLock(home, CLIENT, OURS)
    (folder_of(home) / lock.name).write_bytes(bytes(size))

    probe = LockProbe(home, lock.name, OURS)

    assert probe.secret() == b""
    probe.close(remove=False)
    lock.release()


@pytest.mark.parametrize("step", ["_open_folder", "ClientLock._locked_in"])
def test_a_folder_that_goes_meanwhile_is_made_again(
    home: str, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A node that stops removes it; the next one is about to start."""
    owner: object = client_lock if step == "_open_folder" else ClientLock
    name = step.rpartition(".")[2]
    real, gone = getattr(owner, name), [FileNotFoundError()]

    def missing_once(*arguments: object) -> object:
        if gone:
            raise gone.pop()
        return real(*arguments)

    monkeypatch.setattr(owner, name, missing_once)
    lock = ClientLock(home, CLIENT, OURS)

    assert (folder_of(home) / lock.name).exists()
    lock.release()


def test_a_lock_whose_folder_is_gone_is_released(home: str) -> None:
    """The node has removed everything: that is no reason to keep the lock, or to raise."""
    lock = ClientLock(home, CLIENT, OURS)
    shutil.rmtree(folder_of(home))

    lock.release()

    assert not open_within(folder_of(home))


def test_a_link_in_the_place_of_the_folder_is_not_followed(home: str, tmp_path: Path) -> None:
    """Another user could lead clients and nodes to files of other clients."""
    elsewhere = tmp_path / "elsewhere"
    lock = ClientLock(f"ipc://{elsewhere}", CLIENT, OURS)
    if folder_of(home).exists():
        folder_of(home).rmdir()
    folder_of(home).symlink_to(folder_of(f"ipc://{elsewhere}"))

    with pytest.raises(ConfigError):
        ClientLock(home, CLIENT + 1, OURS)
    with pytest.raises(Rejected):
        LockProbe(home, lock.name, OURS)
    lock.release()
