"""Hosts of their own on one machine: network namespaces on one switch, each with its own files.

    with separate_hosts("host-a", "host-b") as ((a, b), _):
        a.run("ping -c 1 host-b")

Each host has a boot id of its own, resolves the others' names, and sees folders of its own below
the paths that FOLDERS names. Nothing of the machine itself changes. Making them needs root:
`skip_reason` explains why not.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from tests.pace import TIMEOUT_S, wait_until

PYTHON = f"env -C {Path(__file__).parents[2]} {sys.executable}"
"""The interpreter of these tests, in the checkout."""

FOLDERS = ("/etc/peercache", "/run/peercache", "/dev/shm")
"""Folders that each host has of its own: those that the how-to pages name, and its memory."""


def skip_reason() -> str:
    """Return why this machine cannot make hosts, "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not all(map(shutil.which, ("ip", "unshare", "mount"))):
        return "network namespaces need the commands ip, unshare and mount"
    name = f"pc{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode != 0:
        return f"no network namespace: {made.stderr.decode().strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return ""


@attrs.define(eq=False)
class Host:
    """One host. namespace: its name for `ip netns`. root: where its folders really are.

    clock_s: by how many whole seconds its monotonic clock is ahead of the machine's.
    """

    name: str
    address: str
    ipv6: str
    namespace: str
    root: Path
    clock_s: int = 0
    started: list[subprocess.Popen[str]] = attrs.field(factory=list)

    def path(self, inside: str) -> Path:
        """Return where a file of this host is for the test."""
        return self.root / inside.removeprefix("/")

    def knows(self, names: dict[str, str]) -> None:
        """Let these names resolve here, and no others."""
        # In place: the file is bound over /etc/hosts.
        lines = [f"{address} {name}\n" for name, address in names.items()]
        self.path("/etc/hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))

    def wrapped(self, command: list[str]) -> list[str]:
        """Return a command that runs the given one on this host."""
        steps = [f"hostname {self.name}"]
        # The machine may lack the folders, and must not get them: their parents are overlays.
        steps += [_overlay(parent, self.root) for parent in ("/etc", "/run")]
        steps += [f"mount --bind {self.root}/etc/hosts /etc/hosts"]
        if self.path("/etc/resolv.conf").exists():
            steps += [f"mount --bind {self.root}/etc/resolv.conf /etc/resolv.conf"]
        # PeerCache distinguishes hosts by it.
        steps += [f"mount --bind {self.root}/boot_id /proc/sys/kernel/random/boot_id"]
        # /dev/shm last: the files of all hosts are below it.
        steps += [f"mkdir -p {each} && mount --bind {self.root}{each} {each}" for each in FOLDERS]
        script = f'{" && ".join(steps)} && exec "$@"'
        clock = ["--time", "--monotonic", str(self.clock_s)] if self.clock_s else []
        return ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--uts", *clock,
                "sh", "-c", script, "sh", *command]  # fmt: skip

    def run(self, command: str, **more: object) -> subprocess.CompletedProcess[str]:
        """Run a shell command to its end."""
        return subprocess.run(
            self.wrapped(["sh", "-c", command]),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            **more,  # type: ignore[call-overload]
        )

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start a shell command; it ends with the host at the latest."""
        with (self.root / f"{len(self.started)}.log").open("w") as log:
            process = subprocess.Popen(
                self.wrapped(["sh", "-c", f"exec {command}"]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.started.append(process)
        return process

    def said(self) -> str:
        """Return the logs of what was started here."""
        return "".join(file.read_text() for file in sorted(self.root.glob("*.log")))


@attrs.define(eq=False)
class Talker:
    """A client in a process of its own."""

    process: subprocess.Popen[str]
    first: dict[str, Any] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        """Wait until it is ready, or refused."""
        self.first = self._answer()

    def ask(self, what: str, name: str = "", count: int = 0) -> Any:
        """Ask, and return what it answers."""
        assert self.process.stdin is not None
        print(json.dumps({"ask": what, "name": name, "count": count}), file=self.process.stdin,
              flush=True)  # fmt: skip
        return self._answer()["done"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the client ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


def open_client(host: Host, **settings: Any) -> Talker:
    """Open a client on a host."""
    said = shlex.quote(json.dumps({"fabric": "tcp", **settings}))
    return Talker(host.start(f"{PYTHON} -m tests.system.host_client {said}"))


def members_at(client: Talker, count: int) -> None:
    """Wait until a client's home node sees so many members."""
    wait_until(lambda: client.ask("stats").get("home_members_alive") == count)


def _overlay(parent: str, root: Path) -> str:
    """Return the command that makes additions to a folder of the machine invisible to it."""
    upper, work = (f"{root}/over{parent}/{part}" for part in ("upper", "work"))
    options = f"lowerdir={parent},upperdir={upper},workdir={work}"
    return f"mkdir -p {upper} {work} && mount -t overlay overlay -o {options} {parent}"


def ip(line: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *shlex.split(line)], check=True, capture_output=True)


def plug_in(switch: str, host: Host, number: int) -> None:
    """Connect eth0 of a host with the switch's bridge."""
    end = f"{host.namespace}x"
    ip(f"link add {end} netns {switch} type veth peer name eth0 netns {host.namespace}")
    ip(f"-n {switch} link set {end} master br0 up")


@contextlib.contextmanager
def separate_hosts(
    *names: str, network: str = "10.97.0", plug: Callable[[str, Host, int], None] = plug_in
) -> Iterator[tuple[list[Host], str]]:
    """Make hosts on one switch, in namespaces that nothing else is in; end what they started.

    plug: makes eth0 of a host, and its connection with the switch.
    Returns the hosts, and the name of the switch's namespace, where all their traffic passes.
    """
    tag = f"pc{secrets.token_hex(3)}"
    switch = f"{tag}-s"
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:

        def make(namespace: str) -> None:
            ip(f"netns add {namespace}")
            stack.callback(ip, f"netns delete {namespace}")
            ip(f"-n {namespace} link set lo up")

        make(switch)
        ip(f"-n {switch} link add br0 type bridge")
        ip(f"-n {switch} link set br0 up")
        hosts = []
        for number, name in enumerate(names):
            host = Host(
                name, f"{network}.{number + 1}", f"fd97::{number + 1}", f"{tag}-{number}",
                Path(folder) / name,
            )  # fmt: skip
            make(host.namespace)
            plug(switch, host, number)
            ip(f"-n {host.namespace} addr add {host.address}/24 dev eth0")
            # Without the second in which the kernel looks for another host of this address.
            ip(f"-n {host.namespace} addr add {host.ipv6}/64 dev eth0 nodad")
            ip(f"-n {host.namespace} link set eth0 up")
            for each in (*FOLDERS, "/etc"):
                host.path(each).mkdir(parents=True, exist_ok=True)
            host.path("boot_id").write_text(f"{uuid.uuid4()}\n")
            hosts.append(host)
        for host in hosts:
            host.knows({each.name: each.address for each in hosts})
        try:
            yield hosts, switch
        finally:
            for process in [each for host in hosts for each in host.started]:
                process.terminate()
            for process in [each for host in hosts for each in host.started]:
                _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
