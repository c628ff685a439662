"""The kernel's neighbour tables: whether a peer's Ethernet address resolves before a connect.

To connect a queue pair the kernel resolves that address, which takes up to a second if the peer
does not answer, and pyverbs holds the GIL meanwhile: the node's loop, or the engine, would be
blocked. So a datagram to the discard port makes the kernel resolve the address first, without
blocking, and its tables show the result. A peer without an entry counts as reachable: it is behind
a router, on this host, or has a link-local address that contains the Ethernet address.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from peercache.rdma.device import Gid

DISCARD_PORT = 9
RESOLVE_S = 0.15
"""Longest wait for an answer; a working network needs far less than a millisecond."""

LOOK_S = 0.001
"""Interval between two reads of the table."""

_TABLE = Path("/proc/net/arp")
_COMPLETE = 2

_GET_NEIGHBOURS, _NEIGHBOUR, _DONE, _ERROR = 30, 28, 3, 2
_REQUEST_DUMP = 0x301
_DESTINATION = 1
_MESSAGE, _ENTRY, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BxxxiHBB"), "=HH"
_VALID = 0x02 | 0x04 | 0x08 | 0x10 | 0x40 | 0x80
"""Entries with an address: REACHABLE, STALE, DELAY, PROBE, NOARP and PERMANENT."""

_DUMP_BYTES = 2**16
_DUMP_S = 0.1


def ask(ours: Gid, theirs: bytes) -> None:
    """Make the kernel resolve a neighbour's address; never waits."""
    other = Gid(0, theirs, ours.kind)
    family = socket.AF_INET if other.is_ipv4 else socket.AF_INET6
    # A missing route, a missing local address or a full queue is detected when the pair connects.
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as datagram:
        datagram.settimeout(0)
        datagram.bind((_text(family, ours.raw), 0))
        datagram.sendto(b"", (_text(family, theirs), DISCARD_PORT))


def is_known(theirs: bytes, table: Path = _TABLE) -> bool:
    """Return whether the kernel knows the address, or needs none."""
    other = Gid(0, theirs, "")
    if not other.is_ipv4:
        states = list(states_of(theirs, _dump()))
        return not states or any(state & _VALID for state in states)
    wanted = _text(socket.AF_INET, theirs)
    try:
        rows = table.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return True
    flags = [int(row.split()[2], 16) for row in rows if row.split()[:1] == [wanted]]
    return not flags or any(flag & _COMPLETE for flag in flags)


def find(
    ours: Gid,
    theirs: bytes,
    until: float,
    *,
    look: Callable[[bytes], bool] = is_known,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Return whether the address is known, by `until` and within RESOLVE_S; for a thread.

    The GIL is released while it waits.
    """
    ask(ours, theirs)
    until = min(until, clock() + RESOLVE_S)
    while not look(theirs):
        if clock() >= until:
            return False
        sleep(LOOK_S)
    return True


def states_of(theirs: bytes, dump: bytes) -> Iterator[int]:
    """Yield the state of each entry for an IPv6 address in a dump of the kernel's table."""
    for kind, begin, end in _messages(dump):
        if kind != _NEIGHBOUR or not begin + _ENTRY.size <= end <= len(dump):
            continue
        _, _, state, _, _ = _ENTRY.unpack_from(dump, begin)
        at = begin + _ENTRY.size
        while at + 4 <= end:
            size, what = struct.unpack_from(_ATTRIBUTE, dump, at)
            if what == _DESTINATION and dump[at + 4 : at + size] == theirs:
                yield state
            at += max(4, -(-size // 4) * 4)


def _messages(dump: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the kind of each message, and the begin and the end of its content."""
    at = 0
    while at + _MESSAGE.size <= len(dump):
        length, kind, *_ = _MESSAGE.unpack_from(dump, at)
        if length < _MESSAGE.size:
            kind, length = _ERROR, len(dump)  # Too short for a message: the rest cannot be read.
        yield kind, at + _MESSAGE.size, at + length
        at += -(-length // 4) * 4


def _dump() -> bytes:
    """Return the kernel's table of IPv6 neighbours as netlink messages; b"" if it gives none."""
    reply = b""
    route = (socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    with contextlib.suppress(OSError), socket.socket(*route) as kernel:
        kernel.settimeout(_DUMP_S)
        entry = _ENTRY.pack(socket.AF_INET6, 0, 0, 0, 0)
        header = (_MESSAGE.size + len(entry), _GET_NEIGHBOURS, _REQUEST_DUMP, 1, 0)
        kernel.send(_MESSAGE.pack(*header) + entry)
        while not _is_last(part := kernel.recv(_DUMP_BYTES)):
            reply += part
        reply += part
    return reply


def _is_last(part: bytes) -> bool:
    """Return whether this part contains the message that ends a dump."""
    return not part or any(kind in (_DONE, _ERROR) for kind, *_ in _messages(part))


def _text(family: int, raw: bytes) -> str:
    return socket.inet_ntop(family, raw[12:] if family == socket.AF_INET else raw)
