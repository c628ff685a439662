"""Cables of the guest: pulled, plugged in again, impaired. Only works inside the guest.

The end of a cable is a network interface, rd1 for rxe1 and so on. Its own ways to its peer are in
the table 100 + its number (rig/guest_init.sh); the kernel drops them when the interface goes down.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FAMILIES = ("-4", "-6")


def received_bytes(interface: str) -> int:
    """Return what an interface has counted."""
    return int(Path("/sys/class/net", interface, "statistics/rx_bytes").read_text())


def pull(end: str) -> list[tuple[str, str]]:
    """Take an interface down; its device's port goes down. The answer is for `plug`."""
    kept = [
        (family, way)
        for family in FAMILIES
        for way in _ip(family, "route", "show", "table", _table(end)).splitlines()
    ]
    _ip("link", "set", end, "down")
    return kept


def plug(end: str, kept: list[tuple[str, str]]) -> None:
    """Bring an interface up again, with the ways it had."""
    _ip("link", "set", end, "up")
    for family, way in kept:
        # What `show` prints about a dead interface is no argument.
        words = [word for word in way.split() if word not in {"dead", "linkdown", "pref", "medium"}]
        _ip(family, "route", "replace", *words, "table", _table(end))


@contextmanager
def pulled(end: str) -> Iterator[None]:
    """The cable is out for the length of the block."""
    kept = pull(end)
    try:
        yield
    finally:
        plug(end, kept)


@contextmanager
def impaired(end: str, *, loss_percent: float = 0.0, delay_ms: float = 0.0) -> Iterator[None]:
    """What this end sends is lost or late for the length of the block; its port stays up.

    All of it lost is a silent cut: a switch that died, a firewall.
    """
    facts = ["loss", f"{loss_percent}%"] if loss_percent else []
    facts += ["delay", f"{delay_ms}ms"] if delay_ms else []
    _run("tc", "qdisc", "replace", "dev", end, "root", "netem", *facts)
    try:
        yield
    finally:
        _run("tc", "qdisc", "del", "dev", end, "root")


@contextmanager
def known_to(end: str, address: str, *, of: str) -> Iterator[None]:
    """An interface knows the Ethernet address of another one, and need not ask."""
    hardware = Path("/sys/class/net", of, "address").read_text().strip()
    _ip("neigh", "replace", address, "lladdr", hardware, "dev", end, "nud", "permanent")
    try:
        yield
    finally:
        _ip("neigh", "del", address, "dev", end)


def forget_neighbours(end: str) -> None:
    """Make an interface resolve its peers again."""
    for family in FAMILIES:
        _ip(family, "neigh", "flush", "dev", end)


def _table(end: str) -> str:
    return str(100 + int(end.removeprefix("rd")))


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    ended = subprocess.run(command, check=False, text=True, capture_output=True)
    assert ended.returncode == 0, f"{' '.join(command)}: {ended.stderr}"
    return ended.stdout
