"""Reach: at which address other nodes reach this one, and what keeps them from it.

A node cannot know its own address: it may have several, and names of others may not resolve yet.
What a connection shows is certain: the peer at its other end reaches this node at our end of it.
Until there is one, the node goes by its routes, and says no address of loopback to other hosts
while it has any other.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from fcntl import ioctl
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import islice
from pathlib import Path
from typing import TypeAlias, final

import trio

from peercache.config.quantities import parse_address

RESOLVE_S = 1.0
"""How long a start waits for names: a node whose names do not resolve starts alone."""

ALONE_S = 10.0
"""How long a node whose peers answer may be alone before it says that it is not reached."""

FRESH_S = 15.0
"""How long an answer of a peer is believed: one that has died meanwhile is no witness."""

FOUND_MAX = 8
"""Addresses of sources that are asked for the reason while the node is alone."""

HOSTS_MAX = 8
"""Own addresses remembered: a host has one to each of its networks."""

TOWARDS_THE_INTERNET = ("192.0.2.1", "2001:db8::1")
"""Addresses of documentation: only a route is asked for, and no packet is sent."""

_SIOCGIFADDR = 0x8915
_INTERFACE_ADDRESS = struct.Struct("16s2xH4s8x")
_IPV6_TABLE = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE = "00"

_Host: TypeAlias = IPv4Address | IPv6Address


def numeric_hosts(address: str) -> set[str]:
    """Return the host of a HOST:PORT that is a number, in a set; empty for a name."""
    host, _ = parse_address(address)
    return {host} if _numeric(host) is not None else set()


async def resolved(addresses: Iterable[str], within_s: float) -> dict[str, set[str]]:
    """Return the numeric hosts of each HOST:PORT; empty for a name that does not resolve in time.

    The resolver of the system may take half a minute for each name. It runs in threads, which are
    left behind when the time is up.
    """
    found = {address: numeric_hosts(address) for address in addresses}

    async def look(address: str) -> None:
        found[address] = await trio.to_thread.run_sync(look_up, address, abandon_on_cancel=True)

    with trio.move_on_after(within_s):
        async with trio.open_nursery() as nursery:
            for address in [address for address, hosts in found.items() if not hosts]:
                nursery.start_soon(look, address)
    return found


def look_up(address: str) -> set[str]:
    """Return the numeric hosts of a HOST:PORT, empty for none; may take half a minute."""
    host, port = parse_address(address)
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {str(row[4][0]) for row in rows}


def routed_host(towards: Iterable[str]) -> str:
    """Return the address that this host uses towards others; loopback where it has no network.

    towards: numeric hosts, the ones that matter most first.
    """
    hosts = [*towards, *TOWARDS_THE_INTERNET]
    ours = [host for host in map(_source_address, hosts) if host]
    for host in [*ours, *_interface_hosts()]:
        if _is_for_others(host):
            return host
    return ours[0] if ours else "127.0.0.1"


def is_ours(host: str) -> bool:
    """Return whether a numeric address is one of this host's."""
    number = _numeric(host)
    if number is None:
        return False
    family = socket.AF_INET if number.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def _source_address(towards: str) -> str:
    """Return the address from which this host would send to another, "" where it has no route."""
    # A UDP socket sends nothing by connecting.
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(
            towards, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        ):
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


def _interface_hosts() -> list[str]:
    """Return the addresses of this host's interfaces, IPv4 first."""
    hosts = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            asked = _INTERFACE_ADDRESS.pack(name.encode(), socket.AF_INET, bytes(4))
            # An interface without an address of IPv4.
            with suppress(OSError):
                raw = ioctl(probe, _SIOCGIFADDR, asked.ljust(40, b"\0"))
                hosts.append(socket.inet_ntoa(raw[20:24]))
    with suppress(OSError):
        for line in _IPV6_TABLE.read_text(encoding="ascii").splitlines():
            number, _, _, scope, *_ = line.split()
            if scope == _GLOBAL_SCOPE:
                hosts.append(str(IPv6Address(bytes.fromhex(number))))
    return hosts


def _numeric(host: str) -> _Host | None:
    try:
        found = ip_address(host)
    except ValueError:
        return None
    mapped = getattr(found, "ipv4_mapped", None)
    return found if mapped is None else mapped


def _is_for_others(host: str) -> bool:
    """Return whether an address means this host to other hosts too."""
    number = _numeric(host)
    return number is not None and not (
        number.is_loopback or number.is_link_local or number.is_unspecified
    )


@final
class Reach:
    """What connections have shown about this node's own address, and about its peers' answers."""

    def __init__(self, heads: Iterable[str], *, clock: Callable[[], float]) -> None:
        """Follow the answers of the nodes at `heads`, the addresses of discovery."""
        self._heads = tuple(heads)
        self._found: tuple[str, ...] = ()
        self._clock = clock
        self._hosts: dict[str, None] = {}
        # By address: when it first admitted this node since it is alone, and when last.
        self._welcomed: dict[str, tuple[float, float]] = {}
        self._refused: dict[str, tuple[str, float]] = {}
        self.own_head: str | None = None
        """The discovery address at which this very node has answered."""

    @property
    def asked(self) -> tuple[str, ...]:
        """The addresses whose answers are followed."""
        return self._heads + self._found

    def follow(self, found: Iterable[str]) -> None:
        """Follow the answers at some addresses that sources give now, too."""
        self._found = tuple(islice((each for each in found if each not in self._heads), FOUND_MAX))
        for told in (self._welcomed, self._refused):
            # A refusal may come meanwhile, from a thread of nng: it is forgotten when it is old.
            for address in [each for each in list(told) if each not in self.asked]:
                told.pop(address, None)

    def connected(self, own_host: str) -> None:
        """Note our end of a connection with another node."""
        number = _numeric(own_host)
        if number is None or not _is_for_others(own_host):
            return
        self._hosts.pop(str(number), None)
        self._hosts[str(number)] = None
        if len(self._hosts) > HOSTS_MAX:
            del self._hosts[next(iter(self._hosts))]

    def answered_itself(self, address: str) -> None:
        """Note that a dialled address is this node's own."""
        if address in self._heads:
            self.own_head = address
            self._welcomed.pop(address, None)

    def welcomed(self, address: str) -> None:
        """Note that the node at an address has admitted this one."""
        if address in self.asked:
            now = self._clock()
            self._refused.pop(address, None)
            self._welcomed[address] = (self._welcomed.get(address, (now, now))[0], now)

    def refused(self, address: str, problem: str) -> None:
        """Note that what answers at an address refuses this node, and why; from any thread."""
        if address in self.asked:
            self._welcomed.pop(address, None)
            self._refused[address] = (problem, self._clock())

    def joined(self) -> None:
        """Note that this node is a member for another one."""
        self._welcomed.clear()
        self._refused.clear()

    def silent_heads(self) -> tuple[str, ...]:
        """Return the addresses of `asked` that have not admitted this node lately."""
        now = self._clock()
        heard = {a for a, (_, last) in list(self._welcomed.items()) if now - last < FRESH_S}
        return tuple(a for a in self.asked if a not in heard and a != self.own_head)

    def better_than(self, host: str) -> str:
        """Return the address at which others reach this node, `host` if that is one."""
        if host in self._hosts or not self._hosts:
            return host
        return next(reversed(self._hosts))

    def problem(self, control: str) -> str:
        """Return what keeps this node, a member for no other, out of its cluster; "" for nothing.

        A node is alone rightly where its peers do not answer: it is the first, or the last.
        """
        now = self._clock()
        # Copies: refusals come from threads of nng.
        welcomed = {
            address: first
            for address, (first, last) in list(self._welcomed.items())
            if now - last < FRESH_S
        }
        if welcomed:
            if now - min(welcomed.values()) < ALONE_S:
                return ""
            return (
                f"no node reaches this one at {control}, though {', '.join(welcomed)} answers: set "
                "advertise to an address that other hosts reach, and open its ports"
            )
        for address, (problem, at) in list(self._refused.items()):
            if now - at < FRESH_S:
                return f"every node that answers refuses this one: {address}: {problem}"
        return ""
