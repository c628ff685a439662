"""Hosts that are network namespaces of their own, on one bridge; each has its own /etc/hosts."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

SETTINGS = Path("/etc/netns")
"""Where `ip netns exec` finds what a namespace has in place of files in /etc."""

DEAD_RESOLVER = "nameserver 10.77.0.99\noptions timeout:5 attempts:2\n"
"""A server that never answers: each name costs the resolver of the system ten seconds."""


@attrs.frozen
class Host:
    """One host. name: of its namespace; ipv4, ipv6: its addresses on the bridge."""

    name: str
    ipv4: str
    ipv6: str

    def command(self) -> tuple[str, ...]:
        """Return what stands before a command that runs on this host."""
        return ("ip", "netns", "exec", self.name)

    def knows(self, names: dict[str, str]) -> None:
        """Let these names resolve here, and no others."""
        # In place: the file is bound over /etc/hosts.
        lines = [f"{address} {name}\n" for name, address in names.items()]
        (SETTINGS / self.name / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))

    def unplug(self, address: str) -> None:
        """Take an address from this host."""
        _run("ip", "-n", self.name, "address", "del", f"{address}/24", "dev", "net0")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Make hosts without a default route; skip the test where that is not allowed."""
    tag = f"pc{os.getpid() % 100_000}"
    bridge = f"{tag}s"
    made: list[Host] = []
    try:
        try:
            _run("ip", "netns", "add", bridge)
        except (subprocess.CalledProcessError, FileNotFoundError):
            pytest.skip("may not make network namespaces")
        _run("ip", "-n", bridge, "link", "add", "name", "bridge0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "bridge0", "up")
        for number in range(1, count + 1):
            made.append(Host(f"{tag}h{number}", f"10.77.0.{number}", f"fd77::{number}"))
            _plug_in(made[-1], bridge, f"port{number}")
        yield made
    finally:
        for name in (*(host.name for host in made), bridge):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            shutil.rmtree(SETTINGS / name, ignore_errors=True)


def _plug_in(host: Host, bridge: str, port: str) -> None:
    folder = SETTINGS / host.name
    folder.mkdir(parents=True)
    (folder / "resolv.conf").write_text(DEAD_RESOLVER)
    host.knows({})
    _run("ip", "netns", "add", host.name)
    inside = ("ip", "-n", host.name)
    _run(*inside, "link", "set", "lo", "up")
    _run(
        *inside, "link", "add", "name", "net0", "type", "veth",
        "peer", "name", port, "netns", bridge,
    )  # fmt: skip
    _run("ip", "-n", bridge, "link", "set", port, "master", "bridge0", "up")
    _run(*inside, "address", "add", f"{host.ipv4}/24", "dev", "net0")
    # Without the second in which the kernel looks for another host of this address.
    _run(*inside, "address", "add", f"{host.ipv6}/64", "dev", "net0", "nodad")
    _run(*inside, "link", "set", "net0", "up")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
