"""The lock of a client: held while its process lives, whatever else happens to it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peercache.errors import ConfigError, Rejected
from peercache.memory.client_lock import (
    ClientLock,
    LockProbe,
    folder_of,
    lock_name,
    remove_dead_locks,
)
from tests.pace import PATIENCE_S

CLIENT = 0xABCDEF

HOLDER = """
import os, sys
from peercache.memory.client_lock import ClientLock
lock = ClientLock(sys.argv[1], int(sys.argv[2]))
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


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        threading.Event().wait(0.005)


@pytest.fixture
def home(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/node.ipc"


@contextmanager
def holder(home: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds the lock; lines tell it what else to do."""
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


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


@contextmanager
def probing(home: str) -> Iterator[LockProbe]:
    probe = LockProbe(home, lock_name(CLIENT))
    yield probe
    probe.close(remove=False)


def test_a_lock_survives_a_stopped_process(home: str) -> None:
    """Stopped in the middle of a copy, it may go on an hour later."""
    with holder(home) as process, probing(home) as probe:
        process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

        assert probe.is_held()


def test_a_lock_is_gone_after_sigkill(home: str) -> None:
    """At once: the kernel drops it with the process."""
    with holder(home) as process, probing(home) as probe:
        assert probe.is_held()

        process.kill()
        process.wait()

        assert not probe.is_held()


def test_a_forked_child_neither_takes_nor_drops_the_lock(home: str) -> None:
    """Even one that closes the file: the lock is the parent's."""
    with holder(home) as process, probing(home) as probe:
        tell(process, "fork")

        assert probe.is_held()


def test_a_forked_child_that_lives_on_does_not_keep_the_lock(home: str) -> None:
    """Its parent has died, and no process is left that could write."""
    with holder(home) as process, probing(home) as probe:
        tell(process, "fork and stay")
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
        tell(process, "release")

        assert not probe.is_held()
        assert not folder_of(home).exists()


def test_a_starting_node_removes_the_locks_of_the_dead_only(home: str) -> None:
    """Live clients keep their files; files with other names are left alone."""
    with holder(home), probing(home) as probe:
        folder = folder_of(home)
        (folder / lock_name(5)).touch()
        (folder / "notes.lock").touch()

        remove_dead_locks(home)

        left = sorted(path.name for path in folder.iterdir())
        assert left == [lock_name(CLIENT), "notes.lock"]
        assert probe.is_held()


def test_a_home_without_clients_has_nothing_to_remove(home: str) -> None:
    """Its folder is not there yet."""
    remove_dead_locks(home)

    assert not folder_of(home).exists()


def test_a_client_waits_for_a_node_that_is_just_removing_its_file(home: str) -> None:
    """The node holds the lock for that moment; then the client makes the file anew."""
    folder = folder_of(home)
    folder.mkdir()
    path = folder / lock_name(CLIENT)
    script = (
        "import sys; from peercache.memory.client_lock import LockProbe\n"
        "probe = LockProbe(sys.argv[1], sys.argv[2])\n"
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
    lock = ClientLock(home, CLIENT)

    assert node.stdout.readline() == "removed\n"
    assert path.stat().st_ino == os.fstat(lock._fd).st_ino
    # What it holds is what a node would look at.
    assert _is_locked_for_others(path)
    lock.release()
    node.communicate("\n")


def test_a_file_removed_between_opening_and_locking_is_made_anew(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To hold the lock of a file without a name is to hold nothing that a node could find."""
    path = folder_of(home) / lock_name(CLIENT)
    real = fcntl.lockf
    interleaved = iter([path.unlink])

    def lockf(file: int, operation: int) -> None:
        # Once: a starting node has just found it unlocked.
        next(interleaved, lambda: None)()
        real(file, operation)

    monkeypatch.setattr(fcntl, "lockf", lockf)

    lock = ClientLock(home, CLIENT)

    assert path.stat().st_ino == os.fstat(lock._fd).st_ino
    lock.release()


def test_a_folder_that_cannot_be_used_is_a_clear_error(tmp_path: Path) -> None:
    """It names the setting and the path; no descriptor is left behind."""
    (tmp_path / "file").touch()
    before = len(list(Path("/proc/self/fd").iterdir()))

    with pytest.raises(ConfigError, match=r"home.*file"):
        ClientLock(f"ipc://{tmp_path}/file/node.ipc", CLIENT)

    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    "name", ["", "x", "../../etc/passwd", "0" * 16, "0" * 16 + ".lock/..", "G" * 16 + ".lock"]
)
def test_only_names_of_locks_are_opened(home: str, name: str) -> None:
    """The name comes from the connecting process."""
    with pytest.raises(Rejected, match="lock"):
        LockProbe(home, name)


def test_a_lock_that_is_not_there_or_a_link_is_refused(home: str, tmp_path: Path) -> None:
    """A link could lead anywhere."""
    folder_of(home).mkdir()
    secret = tmp_path / "secret"
    secret.touch()
    (folder_of(home) / lock_name(1)).symlink_to(secret)

    for client in (1, 2):
        with pytest.raises(Rejected, match="cannot open"):
            LockProbe(home, lock_name(client))


def test_the_files_are_for_their_owner_alone(home: str) -> None:
    """A process that could open one could hold it for a dead client."""
    lock = ClientLock(home, CLIENT)

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


def test_the_last_lock_takes_the_folder_along(tmp_path: Path) -> None:
    """Nothing is left behind, and the next client finds its way all the same."""
    home = f"ipc://{tmp_path}/home"
    first, second = ClientLock(home, 1), ClientLock(home, 2)
    first.release()
    assert folder_of(home).is_dir()

    second.release()
    assert not folder_of(home).exists()

    third = ClientLock(home, 3)
    assert folder_of(home).is_dir()
    third.release()
