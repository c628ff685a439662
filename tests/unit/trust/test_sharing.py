"""Which users of this host are believed: files, folders, unix sockets, loopback connections."""

from __future__ import annotations

import os
import pwd
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peercache.config.quantities import is_loopback
from peercache.errors import ConfigError, Rejected
from peercache.trust import sharing as module
from peercache.trust.sharing import Sharing, peer_uid, uid_of_tcp_peer
from tests.descriptors import no_descriptors, open_within

STRANGER = 65_534
OURS = os.geteuid()

needs_root = pytest.mark.skipif(OURS != 0, reason="makes files of another user")


@contextmanager
def opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def folder_of(path: Path) -> Iterator[int]:
    folder = os.open(path, os.O_PATH)
    try:
        yield folder
    finally:
        os.close(folder)


def test_only_this_user_and_root_share_the_host_unless_the_settings_say_more() -> None:
    assert Sharing.of().uids == {OURS, 0}
    more = Sharing.of(share_uids=("12", "daemon"))
    assert more.uids == {OURS, 0, 12, pwd.getpwnam("daemon").pw_uid}
    assert not more.allows_uid(13)
    with pytest.raises(ConfigError, match=r"share_uids.*no-such"):
        Sharing.of(share_uids=("no-such",))


def test_a_group_is_a_name_or_a_number() -> None:
    assert not Sharing.of().has_group
    assert Sharing.of(share_group="root").gid == 0
    assert Sharing.of(share_group="54321").gid == 54_321
    with pytest.raises(ConfigError, match=r"share_group.*no-such"):
        Sharing.of(share_group="no-such")


def test_the_uid_of_users_outside_a_user_namespace_is_never_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There it stands for every user that the namespace does not know."""
    monkeypatch.setattr(module, "_overflow_uid", lambda: STRANGER)

    assert not Sharing.of(share_uids=(str(STRANGER), "12")).allows_uid(STRANGER)
    assert Sharing.of(share_uids=(str(STRANGER), "12")).allows_uid(12)


@needs_root
@pytest.mark.parametrize(
    ("uid", "gid", "mode", "expected"),
    [
        (OURS, OURS, 0o600, False),
        (OURS, 54_321, 0o640, False),
        (OURS, 54_321, 0o660, True),
        (STRANGER, STRANGER, 0o600, True),
    ],
)
def test_a_file_that_another_user_may_write_may_change_under_us(
    tmp_path: Path, uid: int, gid: int, mode: int, *, expected: bool
) -> None:
    path = tmp_path / "file"
    path.touch()
    os.chown(path, uid, gid)
    path.chmod(mode)

    assert Sharing.of().may_change_under_us(path.stat()) is expected
    assert not Sharing(STRANGER, frozenset()).may_change_under_us(path.stat()) or mode == 0o660


@needs_root
def test_a_file_of_another_uid_is_refused_with_the_setting_to_change(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(0o600)
    os.chown(path, STRANGER, STRANGER)

    with folder_of(tmp_path) as folder:
        with pytest.raises(Rejected, match=r"65534.*share_uids") as caught:
            Sharing.of().open_file("file", os.O_RDONLY, folder=folder, what=str(path))
        assert caught.value.reason == "owner"
        os.close(
            Sharing.of(share_uids=(str(STRANGER),)).open_file(
                "file", os.O_RDONLY, folder=folder, what=str(path)
            )
        )


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o602)

    with folder_of(tmp_path) as folder, pytest.raises(Rejected, match="every user"):
        Sharing.of().open_file("file", os.O_RDONLY, folder=folder, what=str(path))


@needs_root
def test_a_file_that_a_group_may_write_wants_that_group(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.chown(path, -1, 54_321)
    path.chmod(0o660)

    with opened(path) as file:
        with pytest.raises(Rejected, match=r"54321.*share_group"):
            Sharing.of().check("the file", os.fstat(file))
        Sharing.of(share_group="54321").check("the file", os.fstat(file))


def test_links_pipes_and_folders_are_not_opened(tmp_path: Path) -> None:
    """And opening one never blocks."""
    (tmp_path / "secret").touch(0o600)
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(0o700)

    with folder_of(tmp_path) as folder:
        with pytest.raises(OSError, match="link"):
            Sharing.of().open_file("link", os.O_RDONLY, folder=folder, what="a link")
        for name in ("pipe", "folder"):
            with pytest.raises(Rejected, match="no regular file"):
                Sharing.of().open_file(name, os.O_RDONLY, folder=folder, what=f"a {name}")
    assert not open_within(tmp_path)


@needs_root
@pytest.mark.parametrize(
    ("owner", "mode", "problem"),
    [
        (OURS, 0o700, ""),
        (0, 0o755, ""),
        (0, 0o1777, ""),
        (STRANGER, 0o1777, "share_uids"),
        (OURS, 0o777, "every user"),
        (0, 0o777, "every user"),
        (STRANGER, 0o700, "share_uids"),
    ],
)
def test_a_folder_in_which_others_can_replace_our_files_is_refused(
    owner: int, mode: int, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    os.chown(path, owner, 0)
    path.chmod(mode)

    if not problem:
        os.close(Sharing.of().open_folder(path))
        return
    with pytest.raises(Rejected, match=problem):
        Sharing.of().open_folder(path)


def test_a_folder_that_is_a_link_is_followed_only_where_the_path_is_ours(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to("real")

    os.close(Sharing.of().open_folder(tmp_path / "link"))
    with pytest.raises(OSError, match=r"Not a directory|link"):
        Sharing.of().open_folder(tmp_path / "link", follow=False)


@needs_root
def test_files_are_opened_to_the_group_only_where_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(0o600)
    with opened(path) as file:
        Sharing.of().open_to_group(file)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

        Sharing.of(share_group="54321").open_to_group(file)
        assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) == (0o660, 54_321)


@needs_root
def test_a_group_that_this_user_is_not_in_is_a_clear_error() -> None:
    done = _as_stranger(
        "file = os.open('/dev/shm', os.O_TMPFILE | os.O_RDWR, 0o600)\n"
        "Sharing.of(share_group='54321').open_to_group(file)\n"
    )
    assert "share_group" in done.stderr
    assert "member of the group" in done.stderr


def test_the_uid_behind_a_unix_socket_is_the_kernel_s_word() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert peer_uid(one) == OURS


SERVE = """
import os, socket, sys
path, uid = sys.argv[1], int(sys.argv[2])
s = socket.socket(socket.AF_UNIX)
s.bind(path)
os.chmod(path, 0o666)
os.setgid(uid); os.setuid(uid)
s.listen()
print("listening", flush=True)
sys.stdin.readline()
"""


@needs_root
def test_a_listener_of_another_uid_at_our_own_socket_is_refused(tmp_path: Path) -> None:
    """Whose file it is shows nothing: the kernel knows which process listens."""
    path = str(tmp_path / "home.ipc")
    serving = subprocess.Popen(
        [sys.executable, "-c", SERVE, path, str(STRANGER)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert serving.stdout is not None
        assert serving.stdout.readline() == "listening\n"
        assert Path(path).stat().st_uid == OURS

        with pytest.raises(Rejected, match=r"listens at.*65534.*share_uids"):
            Sharing.of().check_listener(path)
        Sharing.of(share_uids=(str(STRANGER),)).check_listener(path)
        os.chown(path, STRANGER, -1)
        with pytest.raises(Rejected, match=r"the socket.*65534"):
            Sharing.of().check_listener(path)
    finally:
        serving.kill()
        serving.communicate()
    Sharing.of().check_listener(str(tmp_path / "not there"))


@needs_root
@pytest.mark.parametrize(("folder_mode", "socket_mode"), [(0o700, 0o666), (0o755, 0o600)])
def test_a_user_that_is_not_admitted_is_shown_which_setting_to_change(
    folder_mode: int, socket_mode: int
) -> None:
    with tempfile.TemporaryDirectory() as name, socket.socket(socket.AF_UNIX) as listener:
        path = Path(name) / "home.ipc"
        listener.bind(str(path))
        listener.listen()
        path.chmod(socket_mode)
        Path(name).chmod(folder_mode)

        done = _as_stranger(f"Sharing.of().check_listener({str(path)!r})")

        assert "not open to uid 65534" in done.stderr
        assert "share_uids = 65534" in done.stderr
        assert "share_group" in done.stderr
        Path(name).chmod(0o700)


# --- loopback connections -------------------------------------------------------------------------

CONNECT = """
import encodings.idna, os, socket, sys
host, port, uid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.setgid(uid); os.setuid(uid)
s = socket.create_connection((host, port))
print("connected", flush=True)
sys.stdin.readline()
s.close()
print("closed", flush=True)
sys.stdin.readline()
"""


@contextmanager
def dual_stack(listen: str) -> Iterator[socket.socket]:
    """Listen on an address; on an IPv6 one also for IPv4."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((listen, 0))
        listener.listen()
        yield listener


@contextmanager
def connection_of(
    uid: int, listen: str, connect: str
) -> Iterator[tuple[socket.socket, Connecting]]:
    with dual_stack(listen) as listener:
        port = listener.getsockname()[1]
        connecting = Connecting(connect, port, uid)
        accepted, _ = listener.accept()
        with accepted:
            try:
                yield accepted, connecting
            finally:
                connecting.end()


class Connecting:
    """A process of some uid that holds a connection."""

    def __init__(self, host: str, port: int, uid: int) -> None:
        """Connect."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONNECT, host, str(port), str(uid)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._said() == "connected"

    def close(self) -> None:
        """Close the connection, and live on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self._said() == "closed"

    def end(self) -> None:
        """Leave nothing behind."""
        self.process.kill()
        self.process.communicate()

    def _said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


WAYS = [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1"), ("::", "::1")]


def _ends(accepted: socket.socket) -> tuple[tuple[str, int], tuple[str, int]]:
    return accepted.getsockname()[:2], accepted.getpeername()[:2]


@needs_root
@pytest.mark.parametrize("look", ["_uid_by_netlink", "_uid_by_table"])
@pytest.mark.parametrize(("listen", "connect"), WAYS)
def test_a_loopback_connection_reports_the_uid_of_its_other_end(
    listen: str, connect: str, look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By either of the kernel's interfaces, and for IPv4 on a socket of IPv6."""
    if look == "_uid_by_table":
        monkeypatch.setattr(module, "_uid_by_netlink", _refuse)
    with connection_of(STRANGER, listen, connect) as (accepted, _):
        local, remote = _ends(accepted)

        assert uid_of_tcp_peer(local, remote) == STRANGER
        assert "share_uids" in Sharing.of().tcp_peer_problem(local, remote)
        assert Sharing.of(share_uids=(str(STRANGER),)).tcp_peer_problem(local, remote) == ""


@pytest.mark.parametrize(("listen", "connect"), WAYS)
def test_the_side_that_connects_finds_the_listener_s_uid_too(listen: str, connect: str) -> None:
    """A client examines the node: for IPv4, too, where its listener is a dual-stack one."""
    with dual_stack(listen) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection((connect, port)) as ours, listener.accept()[0]:
            assert uid_of_tcp_peer(*_ends(ours)) == OURS


@needs_root
@pytest.mark.parametrize("look", ["_uid_by_netlink", "_uid_by_table"])
def test_a_connection_that_its_process_has_closed_is_no_user_s(
    look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel shows such a socket as one of uid 0, and it must not pass for root's."""
    if look == "_uid_by_table":
        monkeypatch.setattr(module, "_uid_by_netlink", _refuse)
    with connection_of(STRANGER, "127.0.0.1", "127.0.0.1") as (accepted, connecting):
        local, remote = _ends(accepted)
        connecting.close()

        assert uid_of_tcp_peer(local, remote) is None
        assert "gone" in Sharing.of().tcp_peer_problem(local, remote)


def test_without_a_descriptor_a_connection_is_refused_for_that() -> None:
    """The lookup takes one: who connects is not known, so it is neither let in nor called gone."""
    with connection_of(OURS, "127.0.0.1", "127.0.0.1") as (accepted, _):
        local, remote = _ends(accepted)
        with no_descriptors():
            problem = Sharing.of().tcp_peer_problem(local, remote)
            with pytest.raises(OSError, match="Too many open files"):
                uid_of_tcp_peer(local, remote)

        assert problem == module.NO_DESCRIPTORS
        assert Sharing.of().tcp_peer_problem(local, remote) == ""


def test_no_connection_has_no_uid() -> None:
    """A listener at the asked address is not taken for it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        assert uid_of_tcp_peer(("127.0.0.1", 9), ("127.0.0.1", port)) is None


def test_a_connection_from_another_host_is_for_trials_only() -> None:
    """It has no uid to judge."""
    ends = ("10.0.0.1", 1), ("10.0.0.2", 2)

    assert "insecure = true" in Sharing.of().tcp_peer_problem(*ends)
    assert Sharing.of(insecure=True).tcp_peer_problem(*ends) == ""


@pytest.mark.parametrize("insecure", [False, True])
@pytest.mark.parametrize(
    "ends",
    [
        (("127.0.0.1", 1), ("10.0.0.2", 2)),
        (("10.0.0.1", 1), ("127.0.0.1", 2)),
        (("::1", 1), ("fd00::2", 2)),
        (("::ffff:127.0.0.1", 1), ("::ffff:10.0.0.2", 2)),
        (("", 0), ("10.0.0.2", 2)),
        (("10.0.0.1", 1), ("", 0)),
    ],
)
def test_one_end_on_loopback_is_enough_to_want_a_user(
    ends: tuple[tuple[str, int], tuple[str, int]], insecure: bool
) -> None:
    """No process of this host has such a connection, as one that route_localnet lets in."""
    assert "gone" in Sharing.of(insecure=insecure).tcp_peer_problem(*ends)


def test_loopback_is_known_in_every_spelling() -> None:
    for host in ("127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", "::ffff:7f08:901"):
        assert is_loopback(host), host
    for host in ("10.0.0.1", "::", "fe80::1%eth0", "0.0.0.0"):
        assert not is_loopback(host), host


def _refuse(*_: object) -> None:
    raise PermissionError(1, "a sandbox forbids it")


def _as_stranger(source: str) -> subprocess.CompletedProcess[str]:
    entering = f"import os; os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})\n"
    # The interpreter itself may be where this user cannot read.
    imports = "import encodings.ascii; from peercache.trust.sharing import Sharing\n"
    return subprocess.run(
        [sys.executable, "-c", imports + entering + source],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
