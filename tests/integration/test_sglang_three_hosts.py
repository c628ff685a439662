"""Prefill and decode on three hosts, as docs/tutorials/three-hosts.md shows it, with SGLang.

tests/system/test_three_hosts.py runs the other blocks of the page, and explains its marks. Here its
nodes start as on the page, with certificates; then the blocks of its step 7 run as they stand:
SGLang's servers in both roles, its router, and the prompt. What a CPU demands is added at the end
of the servers' commands (`sglang_hosts`), with a transfer backend that it can have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import attrs
import pytest

import tests.needs_openssl  # noqa: F401 - skips this module
from tests.integration import older_sglang, sglang_hosts
from tests.integration.processes import environment
from tests.pace import TIMEOUT_S, paced, wait_until
from tests.system import test_three_hosts as three_hosts
from tests.system.nodes import free_port
from tests.system.separate_hosts import separate_hosts
from tests.system.test_three_hosts import NAMES, PAGE, steps

ROUTER = older_sglang.place(older_sglang.ROUTER)

pytestmark = [
    # Three servers are nine processes that import SGLang.
    pytest.mark.slow,
    three_hosts.CAN_MAKE_HOSTS,
    pytest.mark.skipif(not ROUTER.exists(), reason=f"{ROUTER} is not there: older_sglang.py"),
]

READY = "curl -sf -o /dev/null http://127.0.0.1:8000/health_generate"
TRANSFER = "--disaggregation-transfer-backend mooncake_tcp"
"""Over a stand-in of Mooncake's engine (cpu_engine/mooncake)."""


@attrs.define
class Walk(three_hosts.Site):
    """The page's hosts, and what SGLang's environment lacks: our commands, and the router."""

    installed: sglang_hosts.Site

    def __attrs_post_init__(self) -> None:
        """Let all commands of the page be found, on the hosts and on the user's own machine."""
        super().__attrs_post_init__()
        found = self.installed.variables
        found["PATH"] = f"{self.bin}:{found['PATH']}"
        found["PYTHONPATH"] += f"{os.pathsep}{ROUTER}"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of all commands."""
        return {**self.installed.variables, "PEERCACHE_POOL_SIZE": three_hosts.POOL}

    def end(self) -> None:
        """End the nodes, the servers and the router."""
        super().end()
        self.installed.end()


@pytest.fixture
def walk(tmp_path: Path) -> Iterator[Walk]:
    """Yield the page's hosts with their nodes, after its fourth step."""
    for each in ("admin", "installed"):
        (tmp_path / each).mkdir()
    installed = sglang_hosts.Site(tmp_path / "installed")
    with separate_hosts(*NAMES, network="10.0.0") as (hosts, _):
        walk = Walk(tmp_path / "admin", {host.name: host for host in hosts}, installed)
        try:
            for step in steps(PAGE.partition("\n## 5. ")[0]):
                walk.do(step)
            yield walk
        finally:
            walk.end()


def test_both_roles_serve_behind_the_router_and_read_from_storage(walk: Walk) -> None:
    """The page's commands start all of it, and its prompt comes from storage the second time."""
    site, first = walk.installed, walk.hosts[NAMES[0]]
    section = PAGE.partition("\n## 7. ")[2].partition("\n## ")[0]
    settings, prefill, decode, router, asks = steps(f"\n{section}")
    walk.do(settings)
    for step in (prefill, decode):
        for name in step.hosts:
            command = f"{step.text.rstrip()} {site.for_a_server} {TRANSFER}"
            site.starts(walk.hosts[name], command)
    for host in walk.hosts.values():
        site.serves(host)
    site.starts(first, router.text)
    wait_until(lambda: first.run(READY).returncode == 0, "the router serves", TIMEOUT_S)

    found = paced(
        lambda _: site.types(first, asks.text).splitlines(),
        # A machine that is paused makes misses; what is asked again comes from storage both times.
        lambda found: set(found) == {str(asks.output).strip()},
    )

    assert set(found) == {str(asks.output).strip()}, site.logs()


def test_the_router_repeats_a_request_that_decode_gave_up(tmp_path: Path) -> None:
    """As often as the page states. Both servers are stand-ins, and decode's answers 500."""
    attempts: list[str] = []
    port = free_port()
    with stand_in(200) as prefill, stand_in(500, attempts) as decode:
        command = [
            sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation",
            "--port", port, "--prometheus-port", free_port(), "--prefill", prefill, "8998",
            "--decode", decode,
        ]  # fmt: skip
        with (tmp_path / "router.out").open("wb") as log:
            router = subprocess.Popen(
                command, stdout=log, stderr=log,
                env=environment(PYTHONPATH_FIRST=str(ROUTER), PEERCACHE_TEST_CPU_ENGINE="1"),
            )  # fmt: skip
        try:
            at = f"http://127.0.0.1:{port}"
            wait_until(lambda: status_of(f"{at}/readiness") == 200, "the router has its servers")
            prompt = json.dumps({"model": "tiny", "prompt": "1 2 3", "max_tokens": 1}).encode()
            assert status_of(f"{at}/v1/completions", prompt) == 500
        finally:
            router.kill()
            router.wait()

    assert "makes 5 attempts by default" in PAGE
    assert attempts == ["/v1/completions"] * 5


def status_of(url: str, body: bytes | None = None) -> int:
    """Return the status of an answer, 0 if nothing listens."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@contextmanager
def stand_in(status: int, prompts: list[str] | None = None) -> Iterator[str]:
    """Yield the address of a server that answers each prompt so, and keeps its path."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            if prompts is not None:
                prompts.append(self.path)
            self.answer(status)

        def answer(self, code: int) -> None:
            body = b'{"model_path": "tiny", "is_generation": true}'
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Keep stderr clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
