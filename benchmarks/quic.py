"""`python -m benchmarks.quic`: QUIC libraries and the tcp fabric, on links that lose packets.

Two network namespaces (it needs root, and a C compiler) with a link between them of 1 Gb/s in each
direction, on which 1 MiB can wait. A client reads 64 pages of 1 MiB, four at a time, or begins none
after 10 s; all encrypt with AES-128-GCM. Candidates alternate; each line has the medians of three
runs, and the 99th percentile of all their pages. `direct` is a plain veth pair; only its processor
times are comparable, because on the other links the link's process works for the kernel of both.

A candidate is a program that takes `server|client ADDRESS PORT CA CERT KEY CONGESTION`; a client
also `PAGES FLIGHT LIMIT_S`. A server prints a line when it is ready; a client prints one object of
JSON, as `quic_python.py` does. The handshake of tcp includes the greeting, and a page of 4 KiB.

    --run 'openssl=/tmp/quic_openssl'      the program of a candidate, or one more candidate
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import attrs
import numpy as np
import trio

from benchmarks.secured import Secured, Settings
from peercache.config.settings import Config
from peercache.fabric.tcp.admission import DataAdmission
from peercache.fabric.tcp.client import TcpFabric
from peercache.fabric.tcp.server import serve_pages
from peercache.fabric.tcp.sockets import open_listeners
from peercache.memory.published import PublishedSegment
from peercache.model.ids import Incarnation, incarnation_of
from peercache.model.member import ALIVE, Member
from peercache.model.reads import PeerRead
from peercache.model.runs import PageRuns
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics
from peercache.trust.files import LiveTls

HERE = Path(__file__).parent
CLUSTER, NODE, NONCE = "quic", "server", bytes(16)
INCARNATION = incarnation_of(CLUSTER, NODE, NONCE)
GENERATION, GRANULE, PAGE_BYTES = 2, 4096, 2**20
PAGES, FLIGHT, LIMIT_S, RUNS = 64, 4, 10.0, 3
RATE, QUEUE_BYTES = 125e6, 2**20
ADDRESSES, PORT = ("10.96.0.1", "10.96.0.2"), 31999
LINKS = ("direct", "0/0", "0.1/0", "1/0", "0/10", "0.1/10", "1/10")
"""Loss in percent, and round trip in milliseconds."""

TCP = f"{sys.executable} -m benchmarks.quic tcp"
PYTHON = f"{sys.executable} {HERE / 'quic_python.py'}"
Candidate: TypeAlias = tuple[str, str, int]
"""Program, congestion control, pages in flight. tcp with one in flight reads one batch."""
CANDIDATES: dict[str, Candidate] = {
    "tcp cubic": (TCP, "cubic", FLIGHT),
    "tcp bbr": (TCP, "bbr", FLIGHT),
    "tcp cubic, one batch": (TCP, "cubic", 1),
    "tcp bbr, one batch": (TCP, "bbr", 1),
    "openssl": ("", "newreno", FLIGHT),
    "aioquic": (f"{PYTHON} aioquic", "cubic", FLIGHT),
    "qh3": (f"{PYTHON} qh3", "-", FLIGHT),
    "aiopquic": (f"{PYTHON} aiopquic", "bbr", FLIGHT),
}


def live_tls(ca: str, cert: str, key: str, *, is_node: bool) -> LiveTls:
    """Return the certificates of one end."""
    config = Config.load({"cluster": CLUSTER, "tls_ca": ca, "tls_cert": cert, "tls_key": key})
    live = LiveTls.open(config, is_node=is_node, log=get_logger())
    assert live is not None
    return live


async def serve_tcp(host: str, port: int, tls: LiveTls, congestion: str) -> None:
    """Serve one page over the tcp fabric."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        segment = PublishedSegment.create(
            Path(folder), incarnation=Incarnation(INCARNATION), page_bytes=PAGE_BYTES,
            granule=GRANULE,
        )  # fmt: skip
        segment.populate(PAGE_BYTES)
        segment.seals[0] = (GENERATION, b"", 0, PAGE_BYTES)
        admission = DataAdmission(
            cluster=CLUSTER, granule=GRANULE, incarnation=INCARNATION, tls=tls, sharing=None
        )
        listeners = await open_listeners(host, port, congestion)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_serve, listeners, segment, admission)
            print("ready", flush=True)


async def _serve(
    listeners: list[trio.SocketListener], segment: PublishedSegment, admission: DataAdmission
) -> None:
    await serve_pages(listeners, segment, admission=admission, metrics=Metrics())


def read_tcp(at: str, tls: LiveTls, pages: int, flight: int, limit_s: float) -> dict[str, Any]:
    """Read pages over the tcp fabric; return the figures. flight: 1 reads one batch."""
    fabric = TcpFabric(cluster=CLUSTER, granule=GRANULE, tls=tls, max_channels_per_peer=16)
    member = attrs.evolve(
        Member(INCARNATION, 1, ALIVE, 255, "host", "", data=at, boot_id="", segment=""),
        name=NODE, nonce=NONCE,
    )  # fmt: skip
    memory = np.zeros((max(flight, pages if flight == 1 else 0), PAGE_BYTES), np.uint8)
    left, took = iter(range(pages)), list[float]()

    def read(first: int, count: int, size: int = PAGE_BYTES) -> None:
        begin = np.uint64(memory[first].ctypes.data)
        sizes = np.full(count, size, np.uint64)
        starts = np.arange(count, dtype=np.uint64)
        runs = PageRuns(
            begin + starts * np.uint64(PAGE_BYTES), sizes, np.arange(count + 1, dtype=np.int64)
        )
        generations = np.full(count, GENERATION, np.uint64)
        what = PeerRead(member, np.zeros(count, np.uint64), sizes, runs, generations)
        since = time.monotonic()
        # As a client does, whose calls have deadlines: what arrived in time counts.
        fetched = fabric.read(what, since + limit_s)
        done = int((fetched.seals["word"] == GENERATION).sum())
        took.extend([time.monotonic() - since] * done)

    def stream(place: int) -> None:
        while time.monotonic() < began + limit_s and next(left, None) is not None:
            read(place, 1)

    before = time.monotonic()
    read(0, 1, GRANULE)
    took.clear()
    began, busy = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    threads = [threading.Thread(target=stream, args=(place,)) for place in range(flight)]
    if flight == 1:
        threads = [threading.Thread(target=read, args=(0, pages))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - busy.ru_utime - busy.ru_stime
    fabric.close()
    return {"handshake_s": began - before, "seconds": seconds, "cpu_s": cpu_s, "took": took}


def start(line: str, stderr: int | None = None) -> subprocess.Popen[str]:
    """Start a command."""
    return subprocess.Popen(  # noqa: S603 - ours, or one that the caller named
        shlex.split(line), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
    )


def finish(line: str, stderr: int | None = None) -> int:
    """Run a command; return its exit status."""
    with start(line, stderr) as process:
        process.communicate()
    return process.returncode


def ip(line: str) -> None:
    """Run `ip`."""
    assert finish(f"ip {line}") == 0, line


@contextlib.contextmanager
def two_hosts(link: str, program: str) -> Iterator[tuple[str, str]]:
    """Make two network namespaces with a link; return their names."""
    hosts, switch = (f"quic-{os.getpid()}-0", f"quic-{os.getpid()}-1"), f"quic-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        for each in (*hosts, switch):
            ip(f"netns add {each}")
            stack.callback(ip, f"netns delete {each}")
        if link == "direct":
            ip(f"link add eth0 netns {hosts[0]} type veth peer name eth0 netns {hosts[1]}")
        else:
            loss, round_trip = (float(each) for each in link.split("/"))
            words = f"{program} {loss / 100} {round_trip * 500} {RATE} {QUEUE_BYTES}"
            wire = start(f"ip netns exec {switch} {words}")
            stack.callback(wire.communicate)
            assert wire.stdout is not None
            wire.stdout.readline()
            for number, host in enumerate(hosts):
                ip(f"-n {switch} link set tap{number} netns {host} name eth0")
        for number, host in enumerate(hosts):
            ip(f"-n {host} link set eth0 address 02:00:00:00:00:0{number}")
            ip(f"-n {host} addr add {ADDRESSES[number]}/24 dev eth0")
            ip(f"-n {host} link set eth0 up")
            # Without a question that the link may lose.
            other = f"{ADDRESSES[1 - number]} lladdr 02:00:00:00:00:0{1 - number}"
            ip(f"-n {host} neigh replace {other} dev eth0 nud permanent")
        yield hosts


def cpu_s(process: int) -> float:
    """Return the processor time of a process."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return sum(int((each / "schedstat").read_text().split()[0]) for each in tasks) / 1e9


@attrs.define
class Row:
    """The figures of a candidate on a link, one for each run, and of all pages."""

    rates: list[float] = attrs.field(factory=list)
    shaken: list[float] = attrs.field(factory=list)
    costs: list[float] = attrs.field(factory=list)
    took: list[float] = attrs.field(factory=list)
    failure: str = "no run"

    def __str__(self) -> str:
        """Return the columns."""
        if not self.took:
            return self.failure
        p99 = 1e3 * float(np.percentile(self.took, 99))
        medians = f"{median(self.rates):8.1f} {p99:9.0f} {median(self.shaken):9.1f}"
        spread = f"{min(self.rates):.1f} to {max(self.rates):.1f}"
        return f"{medians} {median(self.costs):8.2f}   {spread}"

    def add(self, found: dict[str, Any], server_s: float) -> None:
        """Add a run."""
        count = len(found["took"])
        self.rates.append(count * PAGE_BYTES / 1e6 / found["seconds"])
        self.shaken.append(1e3 * found["handshake_s"])
        self.costs.append((server_s + found["cpu_s"]) * 1e9 / PAGE_BYTES / max(count, 1))
        self.took += found["took"]


def run(hosts: tuple[str, str], candidate: Candidate, files: Sequence[Settings], row: Row) -> None:
    """Run a candidate once on a link."""
    program, congestion, flight = candidate
    commands = [
        f"ip netns exec {host} {program} {role} {ADDRESSES[0]} {PORT} {given['tls_ca']}"
        f" {given['tls_cert']} {given['tls_key']} {congestion}"
        for host, role, given in zip(hosts, ("server", "client"), files, strict=True)
    ]
    server = start(commands[0])
    try:
        assert server.stdout is not None
        if not server.stdout.readline():
            row.failure = "does not start"
            return
        before = cpu_s(server.pid)
        with start(f"{commands[1]} {PAGES} {flight} {LIMIT_S}") as client:
            stop = threading.Timer(12 * LIMIT_S, client.kill)
            stop.start()
            found, _ = client.communicate()
            stop.cancel()
        row.add(json.loads(found), cpu_s(server.pid) - before)
    except json.JSONDecodeError:
        row.failure = "the client failed"
    finally:
        server.terminate()
        server.communicate()


def compile_c(name: str, folder: Path, more: str = "") -> str:
    """Return a compiled program of this folder, "" if it does not compile here."""
    made = folder / name
    line = f"cc -D_GNU_SOURCE -O2 -o {made} {HERE / name}.c {more}"
    return str(made) if finish(line, subprocess.DEVNULL) == 0 else ""


def main(given: Sequence[str]) -> None:
    """Measure every candidate on every link."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quic")
    parser.add_argument("--links", default=",".join(LINKS), help="PERCENT/MILLISECONDS, or direct")
    parser.add_argument("--only", default="", help="as in 'tcp bbr; openssl'; default: all")
    parser.add_argument("--run", action="append", default=[], metavar="NAME=PROGRAM")
    parser.add_argument("--folder", help="for certificates; default: a temporary one")
    options = parser.parse_args(given)
    candidates = dict(CANDIDATES)
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder = Path(made)
        link_program = compile_c("quic_link", folder)
        openssl = compile_c("quic_openssl", folder, "-lssl -lcrypto")
        candidates["openssl"] = (openssl or "false", "newreno", FLIGHT)
        for each in options.run:
            name, _, program = each.partition("=")
            known = candidates.get(name, ("", name.partition(" ")[2] or "bbr", FLIGHT))
            candidates[name] = (program, *known[1:])
        secured = Secured(folder / "authority", CLUSTER)
        issued = [secured.node(NODE), secured.client("reader")]
        files = [{key.replace("-", "_"): file for key, file in each.items()} for each in issued]
        wanted = options.only.split("; ") if options.only else list(candidates)
        for link in options.links.split(","):
            rows = {name: Row() for name in wanted}
            with two_hosts(link, link_program) as hosts:
                for name in wanted * RUNS:
                    run(hosts, candidates[name], files, rows[name])
            print(f"{link:22} {'MB/s':>8} {'p99 ms':>9} {'shaken ms':>9} {'CPU s/GB':>8}")
            for name, row in rows.items():
                print(f"{name:22} {row}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["tcp"]:
        role, host, port, *names = sys.argv[2:9]
        ends = live_tls(*names[:3], is_node=role == "server")
        if role == "server":
            trio.run(serve_tcp, host, int(port), ends, names[3])
        else:
            pages, flight, limit_s = sys.argv[9:12]
            at = f"{host}:{port}"
            figures = read_tcp(at, ends, int(pages), int(flight), float(limit_s))
            print(json.dumps(figures), flush=True)
    else:
        main(sys.argv[1:])
