"""Clusters over a real network between hosts: a trial, and one that is secured by the how-to page.

The commands are those of `docs/how-to/secure-a-cluster.md`, read from the page.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tests.needs_openssl  # noqa: F401 - skips this module
from peercache.actors.pool.reservations import NEWCOMER_S
from peercache.model.keys import Namespace, page_keys
from tests.pace import TIMEOUT_S, wait_until
from tests.system.nodes import PAGE_BYTES, keys_of, pages_of
from tests.system.separate_hosts import (
    PYTHON,
    Host,
    members_at,
    open_client,
    separate_hosts,
    skip_reason,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/secure-a-cluster.md").read_text()
POOL = ["--pool-size", "64MiB", "--metrics-port", "0"]
PAGES = 64

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "hosts can be made"),
]


def block(name: str) -> str:
    """Return the block of the page after its mark."""
    mark = rf"^( *)<!-- acceptance: {re.escape(name)} -->\n *```\w+\n(.*?)```"
    found = re.search(mark, PAGE, re.DOTALL | re.MULTILINE)
    assert found, f"the page has no block {name}"
    return re.sub(rf"^{found[1]}", "", found[2], flags=re.MULTILINE)


def lines(name: str) -> list[str]:
    """Return the commands of a block."""
    return [line for line in block(name).replace("\\\n", " ").splitlines() if line.strip()]


def type_in(name: str, folder: Path, *hosts: Host) -> None:
    """Type a block on the machine with the authority: what is copied, to each of these hosts."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for line in lines(name):
        program, source, target = shlex.split(line)[:3]
        if program == "ssh":
            continue
        if program != "scp":
            subprocess.run(line, shell=True, cwd=folder, check=True, capture_output=True,
                           env={**os.environ, "PATH": path})  # fmt: skip
            continue
        for host in hosts:
            place = host.path(target.partition(":")[2])
            subprocess.run(["cp", "-p", folder / source.replace("host-a", host.name), place],
                           check=True)  # fmt: skip


def start_node(host: Host, command: str, *flags: str) -> dict[str, str]:
    """Start a node by a command of the page, with a small pool; return its ready line."""
    ours = command.replace("python -m", f"{PYTHON} -m").replace(" --pool-size 64GiB", "")
    process = host.start(f"{ours} {shlex.join([*POOL, *flags])}")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, host.said()
    ready: dict[str, str] = json.loads(line)
    return ready


@contextlib.contextmanager
def captured(switch: str, file: Path) -> Iterator[None]:
    """Write all traffic between the hosts to a file."""
    command = ["ip", "netns", "exec", switch, sys.executable, "-m", "tests.system.capture"]
    process = subprocess.Popen([*command, str(file)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "capturing\n"
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT_S)
        process.stdout.close()


def leaked(file: Path, name: str) -> dict[str, int]:
    """Return how many pieces of pages, and how many keys of a batch, a capture holds."""
    raw = file.read_bytes()
    keys = keys_of(name, PAGES)
    pieces = [
        page.tobytes()[begin : begin + 24]
        for page in pages_of(keys[:8])
        for begin in range(64, 128 * 1024, 16 * 1024)
    ]
    packed = [key.tobytes() for key in page_keys(keys, Namespace().digest())]
    hexes = [key.encode() for key in keys]
    return {
        "bytes": len(raw),
        "pieces": sum(piece in raw for piece in pieces),
        "keys": sum(key in raw for key in packed + hexes),
    }


def test_a_trial_on_two_hosts_wants_one_flag(tmp_path: Path) -> None:
    """No certificate; and what passes the network is readable, which the capture must show."""
    with separate_hosts("host-a", "host-b") as ((a, b), switch):
        (command,) = lines("trial")
        start_node(a, command)
        start_node(b, command, "--discovery", "host-a:31998")
        home = {"home": "ipc:///run/peercache/home.ipc", "insecure": True}
        with captured(switch, tmp_path / "frames"):
            one, other = open_client(a, **home), open_client(b, **home)
            members_at(one, 2)
            members_at(other, 2)
            assert one.ask("set", "trial", PAGES) == PAGES
            wait_until(lambda: other.ask("get", "trial", PAGES) == PAGES)

    found = leaked(tmp_path / "frames", "trial")
    assert found["pieces"] > 32
    assert found["keys"] > 0


def _hits_in_shm(reader: Any) -> int:
    """Read the prompt once; return how many of its pages came from the own host's memory."""
    before = reader.ask("stats").get("pages_hit_shm", 0)
    assert reader.ask("get", "prompt", PAGES) == PAGES
    after: int = reader.ask("stats").get("pages_hit_shm", 0)
    return after - before


def test_copies_of_a_prompt_outlive_the_host_that_produced_it() -> None:
    """Two hosts have read it and kept copies, which a third one reads when the producer is gone."""
    with separate_hosts("host-a", "host-b", "host-c", "host-d") as ((a, b, c, d), _):
        (command,) = lines("trial")
        start_node(a, command)
        for host in (b, c, d):
            start_node(host, command, "--discovery", "host-a:31998")
        home = {"home": "ipc:///run/peercache/home.ipc", "insecure": True, "fabric": "auto"}
        producer, late = (open_client(host, **home) for host in (a, d))
        readers = [open_client(host, **home, mirror_pulls="all") for host in (b, c)]
        for client in (producer, late, *readers):
            members_at(client, 4)
        assert producer.ask("set", "prompt", PAGES) == PAGES
        for reader in readers:
            # What there is no time for is copied when it is read again.
            wait_until(lambda reader=reader: (  # type: ignore[misc]
                reader.ask("get", "prompt", PAGES) == PAGES
                and reader.ask("stats")["home_pool_bytes_mirrored"] == PAGES * 128 * 1024
            ))  # fmt: skip
            # The copies are published like any page: a moment later, on a busy machine.
            wait_until(lambda reader=reader: _hits_in_shm(reader) == PAGES)  # type: ignore[misc]

        for process in a.started:
            process.kill()

        wait_until(lambda: late.ask("get", "prompt", PAGES) == PAGES)
        members_at(late, 3)
        assert late.ask("get", "prompt", PAGES) == PAGES
        assert late.ask("stats")["pages_hit_tcp"] >= PAGES
        assert "pages_mirrored" not in late.ask("stats")


def test_a_prefetched_prompt_is_read_from_the_own_host() -> None:
    """Within the share of mirrored pages; what is here already is not copied again."""
    with separate_hosts("host-a", "host-b") as ((a, b), _):
        (command,) = lines("trial")
        start_node(a, command)
        # A share of half the pages: the others stay where they are.
        start_node(b, command, "--discovery", "host-a:31998", "--mirror-share", "0.0625")
        home = {"home": "ipc:///run/peercache/home.ipc", "insecure": True, "fabric": "auto"}
        producer, reader = (open_client(host, **home) for host in (a, b))
        for client in (producer, reader):
            members_at(client, 2)
        assert producer.ask("set", "prompt", PAGES) == PAGES

        time.sleep(NEWCOMER_S)  # Until then a new node mirrors nothing.
        assert reader.ask("prefetch", "prompt", PAGES // 4) == PAGES // 4
        first = reader.ask("stats")
        assert first["hint_pages_prefetch_done"] == first["pages_mirrored"] == PAGES // 4
        assert reader.ask("prefetch", "prompt", PAGES) == PAGES // 2
        assert reader.ask("prefetch", "nowhere", 3) == 0

        second = reader.ask("stats")
        assert second["hint_pages_prefetch_refused"] == PAGES // 2
        assert second["hint_pages_prefetch_already"] == PAGES // 4
        assert second["hint_pages_prefetch_missing"] == 3
        assert second["home_pool_bytes_mirrored"] == PAGES // 2 * 128 * 1024
        assert reader.ask("get", "prompt", PAGES) == PAGES
        third = reader.ask("stats")
        assert third["pages_hit_shm"] == PAGES // 2
        assert third["pages_hit_tcp"] == PAGES // 2


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[list[Host], str, Path]]:
    """Three hosts, secured and started by the commands of the page; the folder has `pki`."""
    with separate_hosts("host-a", "host-b", "host-c") as (hosts, switch):
        type_in("authority", tmp_path)
        type_in("copy", tmp_path, *hosts)
        for host in hosts:
            host.path("/etc/peercache/node.toml").write_text(block("node.toml"))
            start_node(host, lines("start")[0])
        yield hosts, switch, tmp_path


def engine() -> dict[str, Any]:
    """Return PeerCache's part of the page's line for SGLang."""
    names = ("cluster", "home", "tls_ca", "tls_cert", "tls_key")
    said = json.loads(block("engine"))
    return {name: said[name] for name in names}


def test_three_secured_hosts_by_the_commands_of_the_page(
    secured: tuple[list[Host], str, Path],
) -> None:
    """Pages pass encrypted, a clear reaches every host, and strangers are refused."""
    (a, b, c), switch, folder = secured
    with captured(switch, folder / "frames"):
        clients = [open_client(host, **engine()) for host in (a, b, c)]
        assert [client.first for client in clients] == [{"ready": True}] * 3
        for client in clients:
            members_at(client, 3)
        for host, client in zip("abc", clients, strict=True):
            assert client.ask("set", f"from-{host}", PAGES) == PAGES
        for client in clients:
            for host in "abc":
                wait_until(
                    lambda client=client, host=host: (
                        client.ask("get", f"from-{host}", PAGES) == PAGES
                    )
                )
    for host in "abc":
        found = leaked(folder / "frames", f"from-{host}")
        assert found["bytes"] > 6 * PAGES * 128 * 1024
        assert (found["pieces"], found["keys"]) == (0, 0)

    clients[2].ask("clear")
    for client in clients:
        for host in "abc":
            wait_until(
                lambda client=client, host=host: client.ask("get", f"from-{host}", PAGES) == 0
            )


def test_strangers_are_refused_on_control_and_data(
    secured: tuple[list[Host], str, Path],
) -> None:
    """`openssl s_client` without a certificate gets no answer but the refusal."""
    (a, b, c), _, _ = secured
    ready = open_client(a, **engine())
    members_at(ready, 3)
    ports = {
        line.split()[3].rpartition(":")[2]
        for line in a.run("ss -ltnH").stdout.splitlines()
        if not line.split()[3].startswith("127.")
    }
    assert len(ports) >= 2, "control and data"
    (command,) = lines("closed")
    shown = "-cert /etc/peercache/engine.crt -key /etc/peercache/engine.key"
    for port in sorted(ports):
        stranger = c.run(command.replace("31998", port))
        admitted = c.run(f"{command.replace('31998', port)} {shown}")
        assert "SSL routines" in stranger.stderr, (port, stranger)
        assert "SSL routines" not in admitted.stderr, (port, admitted)

    plain = open_client(b, cluster="prod", insecure=True, discovery_addr="host-a:31998",
                        listen="0.0.0.0:0", embedded=True, pool_size="16MiB",
                        metrics_port=0)  # fmt: skip
    assert plain.first == {"ready": True}, "a node that finds no peer starts alone"
    assert plain.ask("stats").get("home_members_alive") == 1
    assert ready.ask("stats").get("home_members_alive") == 3


def took(host: Host, event: str, before: int) -> bool:
    """Return whether a host's node has logged an event once more."""
    return host.said().count(event) > before


def test_certificates_are_renewed_revoked_and_replaced_by_the_commands_of_the_page(
    secured: tuple[list[Host], str, Path],
) -> None:
    """Nothing restarts, no page is lost, and what is refused stays refused."""
    (a, b, c), _, folder = secured
    near, far, lost = (open_client(host, **engine()) for host in (a, b, c))
    for client in (near, far, lost):
        members_at(client, 3)
    assert far.ask("set", "kept", PAGES) == PAGES
    assert lost.ask("set", "lost", PAGES) == PAGES
    for client in (far, lost):
        for name in ("kept", "lost"):
            wait_until(lambda client=client, name=name: (  # type: ignore[misc]
                client.ask("get", name, PAGES) == PAGES
            ))  # fmt: skip
    old_ca = (folder / "pki/ca.crt").read_text()

    type_in("renew", folder)
    before = a.said().count("tls.files_changed")
    subprocess.run(["cp", folder / "pki/node-host-a.crt", a.path("/etc/peercache/node.crt")],
                   check=True)  # fmt: skip
    wait_until(lambda: took(a, "tls.files_changed", before))

    type_in("revoke", folder, a)
    for client in (near, far):
        members_at(client, 2)
    # Neither end of a revoked host's traffic is left: its node's pages, and its engines' reads.
    wait_until(lambda: far.ask("get", "lost", PAGES) == 0)
    wait_until(lambda: lost.ask("get", "kept", PAGES) == 0)

    type_in("another authority", folder)
    for step in ("both", "new certificates", "new authority only"):
        counts = {host.name: host.said().count("tls.files_changed") for host in (a, b)}
        type_in(step, folder, a, b)
        for host in (a, b):
            wait_until(lambda host=host, counts=counts: (  # type: ignore[misc]
                took(host, "tls.files_changed", counts[host.name])
            ))  # fmt: skip
        wait_until(lambda: near.ask("get", "kept", PAGES) == PAGES)
    # The list of the old authority is there still, and stops no new process.
    assert a.path("/etc/peercache/revoked.crl").exists()
    fresh = open_client(a, **engine())
    assert fresh.first == {"ready": True}
    wait_until(lambda: fresh.ask("get", "kept", PAGES) == PAGES)
    for client in (near, far, fresh):
        assert client.ask("stats")["home_members_alive"] == 2
    # Host c has the files of the old authority, which none of the others has.
    assert c.path("/etc/peercache/ca.crt").read_text() == old_ca
    (command,) = lines("closed")
    shown = "-cert /etc/peercache/engine.crt -key /etc/peercache/engine.key"
    assert "SSL routines" in c.run(f"{command} {shown}").stderr
    assert "SSL routines" not in b.run(f"{command} {shown}").stderr


def test_a_prefetch_reads_no_page_that_is_larger_than_the_own_pool() -> None:
    """A copy of it could not be kept. So a record with an absurd length takes no memory either."""
    with separate_hosts("host-a", "host-b") as ((a, b), _):
        (command,) = lines("trial")
        start_node(a, command, "--metrics-port", "31997")
        start_node(b, command, "--discovery", "host-a:31998", "--pool-size", "64KiB")
        home = {"home": "ipc:///run/peercache/home.ipc", "insecure": True, "fabric": "auto"}
        producer, reader = (open_client(host, **home) for host in (a, b))
        for client in (producer, reader):
            members_at(client, 2)
        assert producer.ask("set", "prompt", 2) == 2

        assert reader.ask("prefetch", "prompt", 2) == 0

        assert reader.ask("stats")["hint_pages_prefetch_refused"] == 2
        assert reader.ask("get", "prompt", 2) == 2
        code = (
            "from urllib.request import urlopen; "
            "print(urlopen('http://127.0.0.1:31997/metrics').read().decode())"
        )

        def served() -> float:
            found = re.search(
                r"^peercache_tcp_bytes_served_total (\S+)$",
                a.run(f"{PYTHON} -c {shlex.quote(code)}").stdout,
                re.MULTILINE,
            )
            return float(found[1]) if found else 0.0

        wait_until(lambda: served() > 0)
        assert served() < 4 * PAGE_BYTES, "only the get has read them"
