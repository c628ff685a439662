"""The RDMA ports of this host, and the choice of the ports to use.

The facts come from sysfs, which needs no library and no permission: tests use recorded trees, and
one small file shows whether a link is up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from peercache.memory.kernel import text_of

SYSFS = Path("/sys/class/infiniband")

ETHERNET = "Ethernet"
INFINIBAND = "InfiniBand"
ROCE_V2 = "RoCE v2"
IWARP_NODE = "RNIC"
"""An iWARP device; it needs a connection manager, which PeerCache does not use."""

ANY_GID = -1
EMPTY_MAX = 32
"""A GID table ends after this many empty entries in a row. The kernel always fills the lowest free
entry, and a table may have a thousand entries, one file each."""

_IPV4_MAPPED = bytes(10) + b"\xff\xff"
_LINK_LOCAL = b"\xfe\x80"


@attrs.frozen
class Gid:
    """One entry of a port's GID table. raw: 16 bytes; kind: the kernel's word, "" if unknown."""

    index: int
    raw: bytes
    kind: str

    @property
    def is_ipv4(self) -> bool:
        """Return whether the entry is an IPv4 address."""
        return self.raw.startswith(_IPV4_MAPPED)

    @property
    def is_link_local(self) -> bool:
        """Return whether the address is valid on its own link only."""
        return self.raw.startswith(_LINK_LOCAL)

    def text(self) -> str:
        """Return the GID as verbs write it: eight groups of four digits."""
        return self.raw.hex(":", 2)


@attrs.frozen
class Port:
    """One port of one device, as sysfs shows it.

    name:       device, and ":port" if it is not the first.
    state:      "ACTIVE", "DOWN", "INIT", …
    link_layer: ETHERNET or INFINIBAND.
    node:       "CA", or IWARP_NODE.
    lid:        the port's address on InfiniBand, 0 on Ethernet.
    rate_gbps:  the signal rate of the link.
    gids:       the entries that are not empty.
    """

    device: str
    number: int
    state: str
    link_layer: str
    node: str
    lid: int
    rate_gbps: float
    gids: tuple[Gid, ...]

    @property
    def name(self) -> str:
        """Return the name of the port in the configuration."""
        return self.device if self.number == 1 else f"{self.device}:{self.number}"


@attrs.frozen
class Chosen:
    """A port to use, and its GID."""

    port: Port
    gid: Gid


@attrs.frozen
class Choice:
    """The ports to use, in order. problems: why other ports are not used, one sentence each."""

    ports: tuple[Chosen, ...]
    problems: tuple[str, ...]


def read_ports(root: Path = SYSFS) -> tuple[Port, ...]:
    """Return every port of every device, by name; none on a host without RDMA."""
    if not root.is_dir():
        return ()
    folders = sorted(root.iterdir(), key=lambda folder: folder.name)
    return tuple(
        _read_port(device, folder)
        for device in folders
        for folder in sorted((device / "ports").iterdir(), key=lambda port: int(port.name))
    )


def is_up(device: str, number: int, root: Path = SYSFS) -> bool:
    """Return whether a port's link is up now; takes 20 µs."""
    return _state(root / device / "ports" / str(number)) == "ACTIVE"


def choose(ports: Sequence[Port], names: Sequence[str] = (), gid_index: int = ANY_GID) -> Choice:
    """Choose the ports to read over.

    names:     exactly these ports, as rails, in this order: "mlx5_0" or "mlx5_0:2" each. Empty: the
               fastest port that is up, the first by name if several are equal.
    gid_index: the GID of every chosen port; ANY_GID: use the best entry.
    """
    if names:
        return _choose_named(ports, names, gid_index)
    usable, problems = [], []
    for port in ports:
        problem, gid = _judge(port, gid_index)
        if gid is None:
            problems.append(problem)
        else:
            usable.append(Chosen(port, gid))
    best = sorted(usable, key=lambda each: -each.port.rate_gbps)[:1]
    if not ports:
        problems.append("this host has no RDMA device")
    return Choice(tuple(best), tuple(problems))


def best_gid(port: Port) -> Gid | None:
    """Return the GID that peers can most likely reach, or None.

    InfiniBand: the first entry. Ethernet: an entry of RoCE v2, which is routed; IPv4 before global
    IPv6 before link-local, the order in which networks are usually configured.
    """
    if port.link_layer == INFINIBAND:
        return port.gids[0] if port.gids else None
    routed = [gid for gid in port.gids if gid.kind == ROCE_V2]
    order = sorted(routed, key=lambda gid: (not gid.is_ipv4, gid.is_link_local, gid.index))
    return order[0] if order else None


def _choose_named(ports: Sequence[Port], names: Sequence[str], gid_index: int) -> Choice:
    known = {port.name: port for port in ports}
    # "mlx5_0:1" is another name of the first port.
    known.update({f"{port.device}:{port.number}": port for port in ports})
    chosen, problems = [], []
    for name in dict.fromkeys(names):
        port = known.get(name)
        if port is None:
            there = ", ".join(each.name for each in ports) or "none"
            problems.append(f"there is no RDMA device {name}; there is {there}")
            continue
        # A rail with a link that is down is skipped until it comes up.
        problem, gid = _judge(port, gid_index, must_be_up=False)
        if gid is None:
            problems.append(problem)
        else:
            chosen.append(Chosen(port, gid))
    return Choice(tuple(chosen), tuple(problems))


def _judge(port: Port, gid_index: int, *, must_be_up: bool = True) -> tuple[str, Gid | None]:
    """Return why the port cannot be used, or the GID to use."""
    if port.node == IWARP_NODE:
        return f"{port.name} is an iWARP device, which cannot be connected without rdma_cm", None
    if must_be_up and port.state != "ACTIVE":
        return f"the link of {port.name} is {port.state or 'in no known state'}", None
    if gid_index == ANY_GID:
        gid = best_gid(port)
        if gid is None:
            return f"{port.name} has no RoCE v2 GID: does its interface have an IP address?", None
        return "", gid
    for gid in port.gids:
        if gid.index == gid_index:
            return "", gid
    return f"{port.name} has no GID at index {gid_index}", None


def _read_port(device: Path, folder: Path) -> Port:
    return Port(
        device=device.name,
        number=int(folder.name),
        state=_state(folder),
        link_layer=text_of(folder / "link_layer"),
        node=text_of(device / "node_type").partition(": ")[2],
        lid=int(text_of(folder / "lid") or "0", 16),
        rate_gbps=float(text_of(folder / "rate").partition(" ")[0] or 0),
        gids=tuple(_gids(folder)),
    )


def _state(folder: Path) -> str:
    return text_of(folder / "state").partition(": ")[2]


def _gids(folder: Path) -> Iterator[Gid]:
    empty = 0
    for entry in sorted((folder / "gids").iterdir(), key=lambda gid: int(gid.name)):
        # Entries come and go, and the kernel refuses to read some empty ones.
        raw = bytes.fromhex(text_of(entry).replace(":", "") or "00" * 16)
        # An entry with only a subnet prefix is empty.
        if any(raw[8:]):
            empty = 0
            yield Gid(int(entry.name), raw, text_of(folder / "gid_attrs" / "types" / entry.name))
        elif (empty := empty + 1) == EMPTY_MAX:
            return
