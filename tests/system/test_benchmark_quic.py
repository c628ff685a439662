"""The benchmark of QUIC: its tcp candidate, its links, and what it prints; no library is needed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import quic
from benchmarks.secured import Secured
from tests import needs_openssl  # noqa: F401 - skips
from tests.system.nodes import PATIENT, free_port
from tests.system.test_benchmarks import benchmark

COUNT = """
import socket, sys, time
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.bind((sys.argv[1], 9))
end.settimeout(60)  # The sender is a process that has yet to start.
print("ready", flush=True)
late_ns = []
try:
    while True:
        late_ns.append(-int(end.recv(100)) + time.monotonic_ns())
        end.settimeout(3)
except TimeoutError:
    print(len(late_ns), min(late_ns) / 1e6)
"""
SEND = """
import socket, sys, time
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(400):
    end.sendto(b"%d" % time.monotonic_ns(), (sys.argv[1], 9))
    time.sleep(0.0005)
"""


@pytest.fixture(scope="module")
def link_program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the compiled link; skip where there can be none."""
    if os.geteuid() or not os.access("/dev/net/tun", os.W_OK):
        pytest.skip("needs root and /dev/net/tun, for a link between two network namespaces")
    if missing := [name for name in ("ip", "cc") if shutil.which(name) is None]:
        pytest.skip(f"needs {missing[0]}: apt-get install iproute2 gcc libc6-dev")
    name = f"quic-{os.getpid()}-try"
    if subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode:
        pytest.skip("may not make a network namespace here")
    subprocess.run(["ip", "netns", "delete", name], check=True)
    program = quic.compile_c("quic_link", tmp_path_factory.mktemp("link"))
    assert program, "benchmarks/quic_link.c does not compile"
    return program


CANDIDATE = """
import runpy
runpy.run_module("benchmarks.quic", run_name="__main__", alter_sys=True)
"""


def test_the_tcp_candidate_reads_every_page_over_tls(tmp_path: Path) -> None:
    """With the arguments of every candidate; on loopback, so that it runs without root."""
    secured = Secured(tmp_path / "authority", quic.CLUSTER)
    # One's names are those of flags, the other's those of settings.
    server, client = ([*given.values()] for given in (secured.node("server"), secured.client("r")))
    at = "127.0.0.1", free_port()
    words = [sys.executable, "-c", PATIENT + CANDIDATE, "tcp"]
    root = Path(quic.__file__).parents[1]
    with subprocess.Popen(
        [*words, "server", *at, *server, "cubic"], stdout=subprocess.PIPE, text=True, cwd=root
    ) as serving:
        try:
            assert serving.stdout is not None
            assert serving.stdout.readline() == "ready\n"
            for flight in ("1", "2"):
                done = subprocess.run(
                    [*words, "client", *at, *client, "cubic", "6", flight, "30"],
                    stdout=subprocess.PIPE, text=True, timeout=120, check=True, cwd=root,
                )  # fmt: skip
                found = json.loads(done.stdout)
                assert len(found["took"]) == 6
                assert min(found["took"]) > 0
                assert found["handshake_s"] > 0
        finally:
            serving.terminate()


def test_a_link_delays_and_loses_what_it_is_set_to(link_program: str) -> None:
    """Half of 400 datagrams, each after 20 ms: a run with other numbers is one in a million."""
    with quic.two_hosts("50/40", link_program) as hosts:
        inside = [f"ip netns exec {host} {shlex.quote(sys.executable)} -c" for host in hosts]
        counting = quic.start(f"{inside[1]} {shlex.quote(COUNT)} {quic.ADDRESSES[1]}")
        assert counting.stdout is not None
        assert counting.stdout.readline() == "ready\n"
        assert quic.finish(f"{inside[0]} {shlex.quote(SEND)} {quic.ADDRESSES[1]}") == 0
        count, late_ms = counting.communicate(timeout=60)[0].split()
    assert 150 <= int(count) <= 250
    assert float(late_ms) >= 20


@pytest.mark.slow  # 3 runs of 64 MiB for each link
@pytest.mark.usefixtures("link_program")
def test_quic_prints_a_line_for_each_candidate_of_each_link() -> None:
    """The link has a rate, and a candidate that cannot start is named so."""
    done = benchmark(
        "quic", "--links", "direct,0/20", "--only", "tcp cubic, one batch; none",
        "--run", "none=false",
    )  # fmt: skip

    lines = done.stdout.splitlines()
    assert [line[:22].strip() for line in lines] == [
        "direct", "tcp cubic, one batch", "none", "0/20", "tcp cubic, one batch", "none",
    ]  # fmt: skip
    assert [lines[at][22:].strip() for at in (2, 5)] == ["does not start"] * 2
    direct, limited = ([float(word) for word in lines[at][22:].split()[:4]] for at in (1, 4))
    assert min(direct + limited) > 0
    rate_mb_s, _, shaken_ms, _ = limited
    assert rate_mb_s <= quic.RATE / 1e6
    # TLS takes several round trips.
    assert shaken_ms > 40
