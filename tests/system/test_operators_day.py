"""An operator's day: install, certificates, five nodes, load, look, kill, drain, upgrade, alert.

Everything is done as an operator does it: with the installed wheel's own command, over TLS, with
certificates that `peercache certs` has made.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

import tests.needs_openssl  # noqa: F401 - skips this module
from peercache import Client
from tests.pace import TIMEOUT_S, wait_until
from tests.system.installed import install_wheel
from tests.system.load import Load
from tests.system.monitoring import ALERTMANAGER, PROMETHEUS, Monitoring
from tests.system.nodes import (
    LocalCluster,
    NodeProcess,
    empty,
    flags_of,
    free_port,
    keys_of,
    page_of,
    pages_of,
)
from tests.system.test_dashboard import CHROMIUM, Ignored, browsing, expect

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PROMETHEUS and ALERTMANAGER and CHROMIUM.exists()),
        reason="there is no Prometheus, Alertmanager or Chromium (apt-get install prometheus "
        "prometheus-alertmanager chromium)",
    ),
]

NODES = 5
PAGES = 24
POOL = "16MiB"
"""Of a node: room for five times its own pages."""

HIT_RATE = 0.9
TIMEOUT_MS = TIMEOUT_S * 1000


@attrs.define(eq=False)
class Site:
    """One cluster of the installed build, and the operator's folder of certificates."""

    bin: Path
    folder: Path
    cluster: LocalCluster
    ports: list[str] = attrs.field(factory=lambda: [free_port() for _ in range(NODES)])
    nodes: list[NodeProcess] = attrs.field(factory=list)

    def command(self, *arguments: str, expected: int = 0) -> str:
        """Run `peercache`; return what it prints."""
        done = subprocess.run(
            [str(self.bin / "peercache"), *arguments],
            capture_output=True, text=True, check=False, timeout=2 * TIMEOUT_S, cwd=self.folder,
        )  # fmt: skip
        assert done.returncode == expected, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def operate(self, *arguments: str, at: int = 0) -> subprocess.CompletedProcess[str]:
        """Ask a node as an operator; any exit status."""
        return subprocess.run(
            [str(self.bin / "peercache"), *arguments, *self.flags("operator-ann"),
             "--at", self.nodes[at].ready["control"]],
            capture_output=True, text=True, check=False, timeout=2 * TIMEOUT_S,
        )  # fmt: skip

    def files(self, name: str) -> dict[str, str]:
        """Return the files of a certificate, as settings."""
        pki = self.folder / "pki"
        return {"tls_ca": str(pki / "ca.crt"), "tls_cert": str(pki / f"{name}.crt"),
                "tls_key": str(pki / f"{name}.key")}  # fmt: skip

    def flags(self, name: str) -> list[str]:
        """Return the files of a certificate, as flags."""
        return flags_of(self.files(name))

    def make_certificates(self) -> None:
        """Do what the how-to prescribes."""
        self.command("certs", "init", "pki", "--cluster", self.cluster.name)
        for place in range(NODES):
            self.command("certs", "issue", "pki", "--node", f"n{place}", "--host", "127.0.0.1")
        self.command("certs", "issue", "pki", "--client", "engine")
        self.command("certs", "issue", "pki", "--operator", "ann")

    def start(self, place: int) -> None:
        """Start a node, or start it again on its disk and at its home address."""
        flags = [*self.flags(f"node-n{place}"), "--metrics-port", self.ports[place]]
        # tcp: as between hosts; what is handed over goes over TLS.
        flags += ["--fabric", "tcp", "--log-level", "debug", "--disk-size", POOL]
        flags += ["--disk-enabled", "true", "--disk-path", str(self.folder / f"disk-{place}")]
        if self.nodes:
            flags += [
                "--discovery-addr",
                self.nodes[(place + 1) % len(self.nodes)].ready["control"],
            ]
        node = self.cluster.start(
            f"n{place}", pool=POOL, flags=flags, python=str(self.bin / "python")
        )
        self.nodes[place : place + 1] = [node]

    def client(self, place: int) -> Client:
        """Attach an engine to a node."""
        return self.cluster.client(self.nodes[place], **self.files("client-engine"))

    def wait_for_all(self, client: Client) -> None:
        """Wait until a client's node counts all members."""
        wait_until(lambda: client.stats().get("home_members_alive") == NODES)


def reader(client: Client) -> Any:
    """Return what reads a batch, and compares every byte of a hit."""

    def read(keys: Sequence[str]) -> list[object]:
        buffers = empty(len(keys))
        hits = client.batch_get(keys, buffers)
        return [
            "wrong" if hit and bytes(buffer) != bytes(page_of(key)) else hit
            for key, buffer, hit in zip(keys, buffers, hits, strict=True)
        ]

    return read


def test_an_operators_day(tmp_path: Path) -> None:
    """From the wheel to the upgrade: every command answers, no page is lost, no byte is wrong."""
    installed = install_wheel(tmp_path / "installed")
    with LocalCluster() as cluster:
        site = Site(installed, tmp_path, cluster)
        site.make_certificates()
        for place in range(NODES):
            site.start(place)
        clients = [site.client(place) for place in range(NODES)]
        for client in clients:
            site.wait_for_all(client)
        keys: list[str] = []
        for place, client in enumerate(clients):
            own = keys_of(f"of {place}", PAGES)
            assert client.batch_set(own, pages_of(own)) == [True] * PAGES
            keys += own

        watched = [f"127.0.0.1:{port}" for port in site.ports]
        (tmp_path / "monitoring").mkdir()
        with (
            Load([reader(client) for client in clients], keys) as load,
            Monitoring(tmp_path / "monitoring", watched, tls=site.files("operator-ann")) as alerts,
            browsing() as browser,
            browser.at(f"https://{watched[0]}/") as page,
        ):
            look(site, page)
            one_dies_and_comes_back(site, page, alerts)
            browser.complaints = Ignored()  # The node that the page is of is restarted.
            upgrade_all(site, clients)
            expect(page.locator("td .state.ok")).to_have_count(NODES, timeout=TIMEOUT_MS)
            page.screenshot(path=tmp_path / "upgraded.png", full_page=True)

        assert load.failed is None
        assert load.wrong == 0
        assert load.asked > 1000
        assert load.hit_rate >= HIT_RATE, f"{load.hits} of {load.asked}"
        print(f"hit rate {load.hit_rate:.4f} of {load.asked} reads")


def look(site: Site, page: Any) -> None:
    """See that all is well: on the command line, on a terminal, and in a browser."""
    wait_until(lambda: site.operate("status", at=1).returncode == 0)
    reported = json.loads(site.operate("members", "--json", at=2).stdout)
    assert [member["state"] for member in reported["members"]] == ["ok"] * NODES
    ca, cert, key = site.files("operator-ann").values()
    urls = [f"https://127.0.0.1:{port}" for port in site.ports]
    judged = subprocess.run(
        [str(site.bin / "peercache"), "slo", "--json", "--ca", ca, "--cert", cert, "--key", key,
         *urls],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    objectives = json.loads(judged.stdout)["objectives"]
    assert any(objective["calls"] for objective in objectives), judged.stdout
    assert judged.returncode in (0, 1), judged.stderr
    drawn, status = top(site)
    assert status == 0
    assert site.nodes[0].ready["control"].encode() in drawn
    expect(page.locator("td .state.ok")).to_have_count(NODES, timeout=TIMEOUT_MS)
    assert page.locator(".attention").count() == 0


def top(site: Site) -> tuple[bytes, int]:
    """Return what `peercache top` draws on a terminal until q, and its exit status."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
    command = [str(site.bin / "peercache"), "top", *site.flags("operator-ann"),
               "--at", site.nodes[0].ready["control"]]  # fmt: skip
    with subprocess.Popen(command, stdin=theirs, stdout=theirs) as process:
        drawn = b""
        while b"q ends it" not in drawn:
            assert select.select([ours], [], [], TIMEOUT_S)[0], "it draws nothing"
            drawn += os.read(ours, 65_536)
        os.write(ours, b"q")
        # A terminal that is not read fills up.
        while process.poll() is None:
            if select.select([ours], [], [], 0.1)[0]:
                os.read(ours, 65_536)
    os.close(ours)
    os.close(theirs)
    assert b"hit/s" in drawn
    return drawn, process.returncode


def one_dies_and_comes_back(site: Site, page: Any, alerts: Monitoring) -> None:
    """A killed node is seen by status, dashboard and alert; started again, it is well."""
    dead = site.nodes[-1]
    dead.kill()
    name = dead.ready["control"]
    wait_until(lambda: site.operate("status").returncode == 1)
    trouble = page.locator(".attention li.bad", has_text=name)
    expect(trouble).to_have_count(1, timeout=TIMEOUT_MS)
    wait_until(lambda: alerts.receiver.received("PeerCacheDown", "firing"))
    site.start(NODES - 1)
    wait_until(lambda: alerts.receiver.received("PeerCacheDown", "resolved"))


def upgrade_all(site: Site, clients: Sequence[Client]) -> None:
    """Drain each node over TLS, and start it again on its disk."""
    handed_over = 0
    for place in range(NODES):
        leaving = site.nodes[place]
        drained = site.operate("drain", "--within", "30", "--json", at=place)
        assert drained.returncode == 0, drained.stderr
        lines = [json.loads(line) for line in drained.stdout.splitlines()]
        assert lines[-1]["state"] == "left"
        handed_over += lines[-1]["given"]
        assert leaving.process.wait(TIMEOUT_S) == 0
        site.start(place)
        site.wait_for_all(clients[place])
    assert handed_over >= PAGES
    pulled = [json.loads(line) for node in site.cluster.nodes for line in node.said().splitlines()
              if '"placement.pulled"' in line]  # fmt: skip
    assert {line["fabric"] for line in pulled} == {"tcp"}
    wait_until(lambda: site.operate("status").returncode == 0)
