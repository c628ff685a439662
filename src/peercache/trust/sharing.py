"""Sharing: with which processes a node and its clients share files, sockets and memory, if no
certificate identifies them.

On this host two settings define it, `share_uids` and `share_group`; without them it is this
process's own uid and root, which cannot be excluded. Processes of other hosts are admitted only
with `insecure`. Every check of a file, a folder, a socket or a connection in clear text uses a
`Sharing`, and each check examines open descriptors (fstat, SO_PEERCRED, the kernel's socket
tables), never a path.
"""

from __future__ import annotations

import errno
import grp
import ipaddress
import os
import pwd
import socket
import stat
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeAlias

import attrs

from peercache.config.quantities import is_loopback
from peercache.config.settings import WAYS_OUT, Config
from peercache.errors import ConfigError, Rejected

Address: TypeAlias = tuple[str, int]
"""A numeric host and a port."""

PRIVATE_FILE_MODE = 0o600
GROUP_FILE_MODE = 0o660
PRIVATE_FOLDER_MODE = 0o700
GROUP_FOLDER_MODE = 0o770

REASON = "owner"
"""The reason of every `Rejected` about a uid that does not share the host."""

PROBE_S = 0.5
"""How long to wait for a full queue of a listener."""

NO_DESCRIPTORS = (
    "this node cannot identify who connects, because it has no free file descriptor (Too many "
    "open files): raise its limit (ulimit -n, LimitNOFILE)"
)
"""Why a node without free descriptors refuses a connection on this host."""

NOT_LOOPBACK = (
    "this connection is not over loopback, so nothing proves whose process is at its other end; "
    f"{WAYS_OUT}"
)
"""Why a node with neither certificates nor `insecure` refuses a connection."""

_GROUP_UNSET = -1

ROOT_UID = 0
"""The user that permissions do not restrict."""


@attrs.frozen
class Sharing:
    """Decides which uids share this host with this process, and whether other hosts do.

    uid: that of this process.
    uids: every uid that shares the host, this one included.
    gid:  the group that may open files, -1 for none.
    insecure: processes of other hosts are admitted, although nothing identifies them.
    """

    uid: int
    uids: frozenset[int]
    gid: int = _GROUP_UNSET
    insecure: bool = False

    @classmethod
    def of_config(cls, config: Config) -> Sharing:
        """Read the settings of a node or client; raise ConfigError for an unknown name."""
        return cls.of(
            share_group=config.share_group,
            share_uids=config.share_uids,
            insecure=config.insecure,
        )

    @classmethod
    def of(
        cls, *, share_group: str = "", share_uids: Iterable[str] = (), insecure: bool = False
    ) -> Sharing:
        """Read the three settings; raise ConfigError for an unknown name.

        share_group: a name or a number. Its members in the user database share the host, too; a
                     container has no such database, so it lists its uids in share_uids.
        share_uids: names or numbers.
        """
        uid = os.geteuid()
        gid, members = _group(share_group) if share_group else (_GROUP_UNSET, ())
        named = {_uid(user) for user in share_uids}
        shared = frozenset({*named, *members} - {_overflow_uid()})
        return cls(uid, shared | {uid, ROOT_UID}, gid, insecure)

    @property
    def has_group(self) -> bool:
        """Whether a group may open files."""
        return self.gid != _GROUP_UNSET

    def allows_uid(self, uid: int) -> bool:
        """Return whether a uid shares this host."""
        return uid in self.uids

    def sentence(self, what: str, uid: int) -> str:
        """Return why a file or process of this uid is refused, and what to set."""
        return (
            f"{what} belongs to uid {uid}, which does not share this host with uid {self.uid}: "
            f"set share_uids = {uid} for the process of uid {self.uid}, or run both as one user"
        )

    def check_uid(self, what: str, uid: int) -> None:
        """Raise Rejected unless this uid shares the host."""
        if not self.allows_uid(uid):
            raise Rejected(REASON, self.sentence(what, uid))

    def check(self, what: str, found: os.stat_result) -> None:
        """Raise Rejected unless an opened file or folder is of a sharing uid, and closed to others.

        found: from fstat, so that the path cannot be changed between the check and the use.
        """
        self.check_uid(what, found.st_uid)
        mode = stat.S_IMODE(found.st_mode)
        if mode & stat.S_IWOTH:
            raise Rejected(REASON, f"{what} may be written by every user: chmod o-w")
        if mode & stat.S_IWGRP and found.st_gid != self.gid and not _is_private(found):
            raise Rejected(
                REASON,
                f"{what} may be written by group {found.st_gid}: chmod g-w, or set share_group",
            )

    def may_change_under_us(self, found: os.stat_result) -> bool:
        """Return whether a user other than this one and root may write to a file, or truncate it.

        found: from fstat.
        """
        is_open_to_group = bool(stat.S_IMODE(found.st_mode) & stat.S_IWGRP)
        is_foreign = found.st_uid not in (self.uid, ROOT_UID)
        return is_foreign or (is_open_to_group and not _is_private(found))

    def check_folder(self, what: str, found: os.stat_result) -> None:
        """Raise Rejected unless other users can neither replace nor remove our files in a folder.

        A sticky one, such as /dev/shm, may be open to every user.
        """
        if found.st_mode & stat.S_ISVTX:
            self.check_uid(what, found.st_uid)
        else:
            self.check(what, found)

    def open_folder(self, path: str | os.PathLike[str], *, follow: bool = True) -> int:
        """Return a descriptor of a folder, to open files in it; raise Rejected or OSError.

        follow: whether the folder itself may be a symbolic link.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        folder = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
        try:
            self.check_folder(os.fspath(path), os.fstat(folder))
        except BaseException:
            os.close(folder)
            raise
        return folder

    def open_file(self, name: str, flags: int, *, folder: int, what: str) -> int:
        """Return a descriptor of a regular file of a sharing uid; raise Rejected or OSError.

        folder: a descriptor. Links are not followed, and pipes do not block. With O_CREAT a new
                file is private to this user.
        """
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(name, flags, PRIVATE_FILE_MODE, dir_fd=folder)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise Rejected("file", f"{what} is no regular file")
            self.check(what, found)
        except BaseException:
            os.close(file)
            raise
        return file

    def open_to_group(self, file: int, mode: int = GROUP_FILE_MODE) -> None:
        """Open a file or folder of ours to the group, if there is one; raise ConfigError.

        Without a group its mode does not change.
        """
        if not self.has_group:
            return
        try:
            if os.fstat(file).st_gid != self.gid:
                os.fchown(file, -1, self.gid)
            os.fchmod(file, mode)
        except OSError as error:
            raise ConfigError(
                "share_group",
                f"uid {self.uid} cannot give files to group {self.gid} ({error.strerror}): "
                "make it a member of the group",
            ) from error

    def check_listener(self, path: str) -> None:
        """Raise Rejected if another uid's process listens on a unix socket, or does not admit us.

        A missing socket, or one with a dead listener, is accepted.
        """
        try:
            owner = Path(path).stat().st_uid
        except PermissionError as error:
            raise Rejected(REASON, self._not_admitted(path, _owner_above(path))) from error
        except OSError:
            return
        self.check_uid(f"the socket {path}", owner)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(PROBE_S)
            try:
                probe.connect(path)
                listening = peer_uid(probe)
            except PermissionError as error:
                raise Rejected(REASON, self._not_admitted(path, owner)) from error
            except OSError:
                return
        self.check_uid(f"the process that listens at {path}", listening)

    def _not_admitted(self, path: str, owner: int) -> str:
        return (
            f"{path} belongs to uid {owner} and is not open to uid {self.uid}, which does not "
            f"share this host's node: set share_uids = {self.uid}, and share_group to a group of "
            "both users, for the node and its clients"
        )

    def tcp_peer_problem(self, local: Address, remote: Address) -> str:
        """Return why the process at the other end of a connection in clear text is refused, or "".

        local, remote: the two ends as this process sees them, whichever of them dialled. The
                       kernel does not know the ends of a connection that was reset: their hosts
                       are "".
        """
        is_known = bool(local[0] and remote[0])
        if is_known and not is_on_loopback(local, remote):
            return "" if self.insecure else NOT_LOOPBACK
        try:
            uid = uid_of_tcp_peer(local, remote) if is_known else None
        except OSError:
            return NO_DESCRIPTORS
        if uid is None:
            return f"{_OTHER_END} has gone, or cannot be identified"
        return "" if self.allows_uid(uid) else self.sentence(_OTHER_END, uid)


_OTHER_END = "the process at the other end of this connection"


def is_on_loopback(local: Address, remote: Address) -> bool:
    """Return whether a connection is one of this host's loopback: whether either end is.

    A process may connect to 127.0.0.1 from any address of its host, so one end is enough. With
    route_localnet, or behind a rule that translates addresses, even another host may reach
    127.0.0.1: then no process of this host has the other end, and no uid is found.
    """
    return is_loopback(local[0]) or is_loopback(remote[0])


def _owner_above(path: str) -> int:
    """Return the owner of the deepest folder above a path that this process can examine."""
    for folder in Path(path).parents:
        with suppress(OSError):
            return folder.stat().st_uid
    return ROOT_UID


def peer_uid(connection: socket.socket) -> int:
    """Return the uid of the process at the other end of a connected unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def uid_of_tcp_peer(local: Address, remote: Address) -> int | None:
    """Return the uid of the process on this host that made a connection; None if it cannot be
    determined.

    local, remote: numeric addresses of the accepted connection. One lookup in the kernel's hash
                   table: 30 µs, for any number of sockets. Without that interface (inet_diag) the
                   kernel's tables are read as text: 3 ms, and 10 ms with 1,000 connections. A
                   socket that its process has closed belongs to no uid.
    Raises OSError if no descriptor is free, because a lookup needs one.
    """
    ends = (plain_ip(remote[0]), remote[1]), (plain_ip(local[0]), local[1])
    exhausted: OSError | None = None
    for look in (_uid_by_netlink, _uid_by_table):
        try:
            return look(*ends)
        except OSError as error:  # noqa: PERF203 - two turns at most
            # This interface is missing (a sandbox, a kernel without the module): try the next one.
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                exhausted = error
    if exhausted is not None:
        raise exhausted
    return None


# --- the group, and the uids of a user namespace --------------------------------------------------


def _uid(named: str) -> int:
    """Return the uid of a user."""
    if named.isdigit():
        return int(named)
    try:
        return pwd.getpwnam(named).pw_uid
    except KeyError as error:
        raise ConfigError("share_uids", f"{named!r} is no user of this host") from error


def _group(named: str) -> tuple[int, tuple[int, ...]]:
    """Return the id of a group, and the uids of the members that the user database names."""
    try:
        found = grp.getgrgid(int(named)) if named.isdigit() else grp.getgrnam(named)
    except KeyError as error:
        if named.isdigit():
            return int(named), ()
        raise ConfigError("share_group", f"{named!r} is no group of this host") from error
    members = []
    for name in found.gr_mem:
        with suppress(KeyError):
            members.append(pwd.getpwnam(name).pw_uid)
    return found.gr_gid, tuple(members)


@cache
def _overflow_uid() -> int:
    """Return the uid that represents users outside this user namespace, -1 if there is none."""
    try:
        mapped = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
        if mapped == ["0", "0", "4294967295"]:
            return -1
        return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1


def _is_private(found: os.stat_result) -> bool:
    """Return whether the group of a file is its owner's private group, as on most systems."""
    try:
        owner = pwd.getpwuid(found.st_uid)
        group = grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    return owner.pw_gid == found.st_gid and not set(group.gr_mem) - {owner.pw_name}


# --- the kernel's socket tables -------------------------------------------------------------------

_CREDENTIALS = struct.Struct("=iII")
"""struct ucred: pid, uid, gid."""

_Host: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"
_End: TypeAlias = tuple[_Host, int]

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_NLMSG_ERROR = 2
_EVERY_STATE = 0xFFFF_FFFF
_NO_COOKIE = 0xFFFF_FFFF
_ENOENT = 2

_ENVELOPE = struct.Struct("=IHHII")
"""struct nlmsghdr: length, type, flags, sequence, port."""

_QUESTION = struct.Struct("=BBBxI")
"""struct inet_diag_req_v2 before its socket id: family, protocol, extensions, states."""

_PORTS = struct.Struct("!HH16s16s")
"""struct inet_diag_sockid, its part in network order: ports and addresses."""

_IPV4_BYTES = 4

_INTERFACE = struct.Struct("=III")
"""The rest of it: interface, cookie."""

_ANSWER = struct.Struct("=BBBB48sIIIII")
"""struct inet_diag_msg: family, state, timer, retransmits, socket id, …, uid, inode."""

_OPEN_STATES = frozenset({1, 2, 4, 5, 8, 9, 11})
"""States of a connection with a process that may still send: not TIME_WAIT, CLOSE, LISTEN or a
request without a socket."""


def plain_ip(written: str | bytes) -> _Host:
    """Return an IP address without its zone, or raise ValueError. IPv6 sockets show IPv4 addresses
    as mapped ones: those are returned as IPv4.
    """
    found = ipaddress.ip_address(written.partition("%")[0] if isinstance(written, str) else written)
    return getattr(found, "ipv4_mapped", None) or found


def _uid_by_netlink(sought: _End, other: _End) -> int | None:
    """Query the socket with the local address `sought` and the remote address `other`."""
    ports = _PORTS.pack(
        sought[1], other[1], sought[0].packed.ljust(16, b"\0"), other[0].packed.ljust(16, b"\0")
    )
    family = socket.AF_INET if sought[0].version == 4 else socket.AF_INET6
    question = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, _EVERY_STATE) + ports
    question += _INTERFACE.pack(0, _NO_COOKIE, _NO_COOKIE)
    envelope = _ENVELOPE.pack(
        _ENVELOPE.size + len(question), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        # The kernel answers during the send, so there is nothing to wait for.
        kernel.settimeout(0)
        kernel.sendto(envelope + question, (0, 0))
        raw = kernel.recv(4096)
    _, kind, *_ = _ENVELOPE.unpack_from(raw)
    if kind == _NLMSG_ERROR:
        number = -int(struct.unpack_from("=i", raw, _ENVELOPE.size)[0])
        if number == _ENOENT:
            return None
        raise OSError(number, os.strerror(number))
    family, state, _, _, found, *_, uid, inode = _ANSWER.unpack_from(raw, _ENVELOPE.size)
    # If no connection matches, the kernel returns a listener.
    is_it = _ends_of(family, found) == (sought, other) and state in _OPEN_STATES and inode
    return int(uid) if is_it else None


def _ends_of(family: int, found: bytes) -> tuple[_End, _End]:
    """Return both ends of a socket that the kernel has found.

    A dual-stack listener's connections are IPv6 sockets, also those that are asked for by their
    IPv4 addresses: the kernel then returns mapped IPv6 addresses.
    """
    own_port, far_port, own, far = _PORTS.unpack_from(found)
    if family == socket.AF_INET:
        own, far = own[:_IPV4_BYTES], far[:_IPV4_BYTES]
    return (plain_ip(own), own_port), (plain_ip(far), far_port)


def _uid_by_table(sought: _End, other: _End) -> int | None:
    """Search the socket in the kernel's text tables."""
    wanted = {
        (own, far)
        for spell in (_as_ipv4, _as_ipv6)
        if (own := spell(sought)) and (far := spell(other))
    }
    for name in ("tcp", "tcp6"):
        table = Path("/proc/net") / name
        if name == "tcp6" and not table.exists():
            continue  # IPv6 is switched off.
        with table.open(encoding="ascii") as lines:
            next(lines, None)
            for line in lines:
                _, own, far, state, _, _, _, uid, _, inode, *_ = line.split()
                if (own, far) in wanted and int(state, 16) in _OPEN_STATES and int(inode):
                    return int(uid)
    return None


def _hexadecimal(raw: bytes, port: int) -> str:
    words: Callable[[bytes], tuple[int, ...]] = struct.Struct(f"={len(raw) // 4}I").unpack
    return "".join(f"{word:08X}" for word in words(raw)) + f":{port:04X}"


def _as_ipv4(end: _End) -> str:
    return _hexadecimal(end[0].packed, end[1]) if end[0].version == 4 else ""


def _as_ipv6(end: _End) -> str:
    prefix = bytes(10) + b"\xff\xff" if end[0].version == 4 else b""
    return _hexadecimal(prefix + end[0].packed, end[1])
