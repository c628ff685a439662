"""Addresses: where a node listens, which address it announces, and why others cannot reach it.

A node cannot know its own address: it may have several, and names of others may not resolve yet. A
connection is proof: its peer reaches this node at our address of the connection (`Reach`). Until
there is a connection, the node uses its routes, and announces no loopback address to other hosts if
it has any other. `Advertising` keeps the announced address equal to the one at which others reach
this node.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from fcntl import ioctl
from ipaddress import IPv4Address, IPv6Address
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, final

import attrs
import trio

from peercache.actors.effects import Effect
from peercache.actors.membership.actor import Membership
from peercache.config.entries import heads_of
from peercache.config.home import default_home
from peercache.config.quantities import DEFAULT_DATA_PORT, format_address, parse_address
from peercache.config.settings import Config
from peercache.errors import AddressTaken, ConfigError
from peercache.fabric.tcp.sockets import open_listeners
from peercache.memory.client_lock import make_folder, make_home_folder
from peercache.net.sockets import Listener, remove_dead_socket
from peercache.trust.contexts import client_context, shake_hands
from peercache.trust.files import LiveTls
from peercache.trust.sharing import (
    GROUP_FILE_MODE,
    PRIVATE_FILE_MODE,
    Sharing,
    plain_ip,
)

RESOLVE_S = 1.0
"""How long a start waits for names: if they do not resolve, the node starts alone."""

ALONE_S = 10.0
"""How long a node may be alone although peers answer, before it reports that it is not reached."""

FRESH_S = 15.0
"""How long an answer of a peer counts: the peer may have died in the meantime."""

FOUND_MAX = 8
"""Addresses of sources that are asked for the reason why the node is alone."""

HOSTS_MAX = 8
"""Remembered own addresses: a host has one in each of its networks."""

TOWARDS_THE_INTERNET = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation: only a route is looked up, and no packet is sent."""

_SIOCGIFADDR = 0x8915
_INTERFACE_ADDRESS = struct.Struct("16s2xH4s8x")
_IPV6_TABLE = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE = "00"

_Host: TypeAlias = IPv4Address | IPv6Address


def numeric_hosts(address: str) -> set[str]:
    """Return the numeric host of a HOST:PORT as a set; an empty set for a name."""
    host, _ = parse_address(address)
    return {host} if _numeric(host) is not None else set()


async def resolved(addresses: Iterable[str], within_s: float) -> dict[str, set[str]]:
    """Return the numeric hosts of each HOST:PORT; empty for a name that does not resolve in time.

    The system's resolver may take half a minute for each name. It runs in threads, which are
    abandoned when the time is up.
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
    """Return the numeric hosts of a HOST:PORT, empty if there are none; may take half a minute."""
    host, port = parse_address(address)
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {str(row[4][0]) for row in rows}


def routed_host(towards: Iterable[str]) -> str:
    """Return the address that this host uses towards others; loopback if it has no network.

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
    """Return the address from which this host would send to another, "" if it has no route."""
    # Connecting a UDP socket sends nothing.
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
            # An interface without an IPv4 address.
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
        return plain_ip(host)
    except ValueError:
        return None


def _is_for_others(host: str) -> bool:
    """Return whether other hosts can use an address for this host."""
    number = _numeric(host)
    return number is not None and not (
        number.is_loopback or number.is_link_local or number.is_unspecified
    )


@final
class Reach:
    """What connections have shown about this node's own address, and which peers have answered."""

    def __init__(self, heads: Iterable[str], *, clock: Callable[[], float]) -> None:
        """Record the answers of the nodes at `heads`, the addresses of discovery."""
        self._heads = tuple(heads)
        self._found: tuple[str, ...] = ()
        self._clock = clock
        self._hosts: dict[str, None] = {}
        # By address: the first time that it admitted this node since it is alone, and the last
        # time.
        self._welcomed: dict[str, tuple[float, float]] = {}
        self._refused: dict[str, tuple[str, float]] = {}
        self.own_head: str | None = None
        """The discovery address at which this node itself has answered."""

    @property
    def asked(self) -> tuple[str, ...]:
        """The addresses for which answers are recorded."""
        return self._heads + self._found

    def follow(self, found: Iterable[str]) -> None:
        """Also record the answers at some addresses that sources return now."""
        self._found = tuple(islice((each for each in found if each not in self._heads), FOUND_MAX))
        for noted in (self._welcomed, self._refused):
            # A refusal may arrive meanwhile, on a thread of nng: it is forgotten when it is old.
            for address in [each for each in list(noted) if each not in self.asked]:
                noted.pop(address, None)

    def connected(self, own_host: str) -> None:
        """Record our own address of a connection with another node."""
        number = _numeric(own_host)
        if number is None or not _is_for_others(own_host):
            return
        self._hosts.pop(str(number), None)
        self._hosts[str(number)] = None
        if len(self._hosts) > HOSTS_MAX:
            del self._hosts[next(iter(self._hosts))]

    def answered_itself(self, address: str) -> None:
        """Record that a dialled address is this node's own."""
        if address in self._heads:
            self.own_head = address
            self._welcomed.pop(address, None)

    def welcomed(self, address: str) -> None:
        """Record that the node at an address has admitted this one."""
        if address in self.asked:
            now = self._clock()
            self._refused.pop(address, None)
            self._welcomed[address] = (self._welcomed.get(address, (now, now))[0], now)

    def refused(self, address: str, problem: str) -> None:
        """Record that the process at an address refuses this node, and why; from any thread."""
        if address in self.asked:
            self._welcomed.pop(address, None)
            self._refused[address] = (problem, self._clock())

    def joined(self) -> None:
        """Record that another node has this node as a live member in its view."""
        self._welcomed.clear()
        self._refused.clear()

    def silent_heads(self) -> tuple[str, ...]:
        """Return the addresses of `asked` that have not admitted this node recently."""
        now = self._clock()
        answered = {a for a, (_, last) in list(self._welcomed.items()) if now - last < FRESH_S}
        return tuple(a for a in self.asked if a not in answered and a != self.own_head)

    def better_than(self, host: str) -> str:
        """Return an address at which others reach this node; `host` if it is one."""
        if host in self._hosts or not self._hosts:
            return host
        return next(reversed(self._hosts))

    def problem(self, control: str) -> str:
        """Return why no other node has this node in its view; "" if there is no problem.

        If its peers do not answer, a node is correctly alone: it is the first, or the last.
        """
        now = self._clock()
        # Copies: threads of nng add refusals.
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


NO_HEAD = 255
"""Head rank of a node that is not at a discovery address."""

_WILDCARDS = ("", "0.0.0.0", "::", "*")  # noqa: S104 - compared, not bound


def listen_control(listener: Listener, config: Config) -> tuple[str, int]:
    """Bind the control port; return (host, port), host "" for every interface."""
    host, port = config.listen_address()
    host = "" if host in _WILDCARDS else host
    try:
        return host, _listen(listener, host, port)
    except AddressTaken:
        if config.listen:
            raise
    # A default port is optional: two engines on one host need not agree on ports.
    return host, _listen(listener, host, 0)


def _listen(listener: Listener, host: str, port: int) -> int:
    if host:
        return listener.listen_tcp("listen", host, port)
    everywhere = "0.0.0.0"  # noqa: S104 - every interface is asked for
    try:
        # First, because on most systems it includes IPv4, and could not be bound in addition to it.
        bound = listener.listen_tcp("listen", "::", port)
    except ConfigError:
        # IPv6 is switched off.
        return listener.listen_tcp("listen", everywhere, port)
    # A host without an IPv4 address is not an error either.
    with suppress(AddressTaken, ConfigError):
        listener.listen_tcp("listen", everywhere, bound)
    return bound


async def listen_data(host: str, config: Config, log: Any) -> list[trio.SocketListener]:
    """Bind the data port on the host of the control port; raise as `open_listeners` does.

    The default port is optional, as that of the control port: several nodes on one host need not
    name ports. It is logged, because a firewall between hosts may admit only the default one.
    """
    congestion = config.tcp_congestion
    if config.data_port >= 0:
        return await open_listeners(host, config.data_port, congestion)
    if config.listen_address()[1]:
        try:
            return await open_listeners(host, DEFAULT_DATA_PORT, congestion)
        except AddressTaken:
            log.warning("node.data_port_taken", taken=DEFAULT_DATA_PORT)
    return await open_listeners(host, 0, congestion)


def listen_home(listener: Listener, config: Config, sharing: Sharing) -> str:
    """Listen for the clients of this host; return the ipc:// address.

    Raises ConfigError if a folder, file or socket of another uid is in the way: no path is used
    that a stranger could replace or listen at.
    """
    home = config.home or default_home()
    path = Path(home.removeprefix("ipc://"))
    try:
        # The default may be in /tmp, where every user may create a link.
        make_home_folder(path.parent, sharing, follow=bool(config.home))
        remove_dead_socket(home, sharing)
        listener.listen_local(home)
        # In a folder that only sharing uids may modify.
        path.chmod(GROUP_FILE_MODE if sharing.has_group else PRIVATE_FILE_MODE)
        if sharing.has_group:
            os.chown(path, -1, sharing.gid)
        make_folder(home, sharing)
    except OSError as error:
        raise ConfigError("home", f"cannot use {path}: {error.strerror}: choose another") from error
    return home


def advertised_host(config: Config, bound_host: str, known: Mapping[str, set[str]]) -> str:
    """Return the host that others should dial.

    known: the numeric hosts of each discovery address, as far as names resolve.
    """
    if config.advertise:
        return config.advertise
    if bound_host:
        return bound_host
    heads = heads_of(config.discovery_addr)
    return routed_host(host for address in heads for host in sorted(known[address]))


def names_to_resolve(config: Config, control_port: int) -> tuple[str, ...]:
    """Return each HOST:PORT that a node must resolve: those of its heads, and its own."""
    own = (format_address(config.advertise, control_port),) if config.advertise else ()
    return (*heads_of(config.discovery_addr), *own)


def is_host_fixed(config: Config, bound_host: str) -> bool:
    """Return whether the configuration determines the host that others dial."""
    return bool(config.advertise or bound_host)


def head_rank(config: Config, control: str, known: Mapping[str, set[str]]) -> int:
    """Return the rank among the discovery addresses: a cluster's founder is its head.

    A name with several hosts, such as a headless service, does not identify a node.
    """
    if not config.discovery_addr:
        return 0
    host, port = parse_address(control)
    own = {host, *known.get(control, ())}
    for rank, address in enumerate(heads_of(config.discovery_addr)):
        hosts = known[address]
        is_own = bool(own & hosts) and parse_address(address)[1] == port
        if address == control or (is_own and all(each in own or is_ours(each) for each in hosts)):
            return min(rank, NO_HEAD)
    return NO_HEAD


LOOK_S = 0.5
"""How soon a new address is announced; a check compares a few words."""

GREET_S = 5.0
"""How often a node that is alone asks its discovery addresses whether they admit it."""

RESOLVE_AGAIN_S = 1.0
RESOLVE_LONGEST_S = 30.0
"""Back-off between two attempts to resolve the names of discovery, and how long one may take."""


@final
@attrs.define(eq=False)
class Advertising:
    """Watches names that resolve late and connections that show this node's address.

    is_fixed: whether the configuration determines the address, so that only the head rank may
              change.
    greet:    sends Hello to discovery addresses again.
    tls:      the certificates; nng does not report to a dialer why its handshake fails.
    """

    config: Config
    membership: Membership
    reach: Reach
    is_fixed: bool
    perform: Callable[[Effect], None]
    greet: Callable[[Iterable[str]], None]
    log: Any
    known: dict[str, set[str]]
    tls: LiveTls | None = None
    _logged_problem: str = attrs.field(default="", init=False)

    async def run(self) -> None:
        """Work until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._resolve)
            nursery.start_soon(self._watch)
            while True:
                await trio.sleep(LOOK_S)
                self.look()

    async def _watch(self) -> None:
        """Find out whether a lonely node should have peers, and log that."""
        while True:
            if self.membership.is_joined:
                self.reach.joined()
            else:
                self.greet(self.reach.asked)
                await self._shake_hands()
            self._log_problem()
            await trio.sleep(GREET_S)

    async def _shake_hands(self) -> None:
        """Try a handshake with heads that have not admitted this node, to find out why it fails."""
        if self.tls is None:
            return
        context = client_context(self.tls)
        for address in self.reach.silent_heads():
            noted = await trio.to_thread.run_sync(
                shake_hands, address, context, self.tls, abandon_on_cancel=True
            )
            if noted.problem and not noted.is_silent and not self.membership.is_joined:
                self.reach.refused(address, noted.problem)

    def _log_problem(self) -> None:
        me = self.membership.me
        problem = "" if self.membership.is_joined else self.reach.problem(me.control)
        if problem and not self._logged_problem:
            self.log.warning("node.not_reached", problem=problem)
        elif self._logged_problem and not problem:
            self.log.info("node.reached_again")
        self._logged_problem = problem

    async def _resolve(self) -> None:
        """Resolve the names that did not resolve at the start, until all have."""
        pause_s = RESOLVE_AGAIN_S
        while missing := [address for address, hosts in self.known.items() if not hosts]:
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESOLVE_LONGEST_S)
            found = await resolved(missing, RESOLVE_LONGEST_S)
            self.known.update(found)
            if any(found.values()):
                self.look(is_news=True)

    def look(self, *, is_news: bool = False) -> None:
        """Notify the others of this node's address, if it has changed.

        is_news: whether more names have been resolved.
        """
        me = self.membership.me
        host, port = parse_address(me.control)
        if not self.is_fixed:
            if is_news:
                host = routed_host(_hosts(self.known, heads_of(self.config.discovery_addr)))
            host = self.reach.better_than(host)
        control = format_address(host, port)
        data = format_address(host, parse_address(me.data)[1])
        rank = self._rank(control)
        if (control, data, rank) == (me.control, me.data, me.head_rank):
            return
        self.log.info("node.address_changed", control=control, data=data, before=me.control)
        effects = self.membership.move(
            trio.current_time(), control=control, data=data, head_rank=rank
        )
        for effect in effects:
            self.perform(effect)

    def _rank(self, control: str) -> int:
        own = self.reach.own_head
        if own is not None:
            return min(heads_of(self.config.discovery_addr).index(own), NO_HEAD)
        return head_rank(self.config, control, self.known)


def _hosts(known: dict[str, set[str]], wanted: Iterable[str]) -> list[str]:
    return [host for address in wanted for host in sorted(known.get(address, ()))]
