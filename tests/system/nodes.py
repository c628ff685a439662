"""Real nodes as real processes, and pages whose bytes show whose they are."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from peercache import Client
from peercache.memory.layout import HEADER_BYTES, Layout, parse_header
from tests.pace import TIMEOUT_S, wait_until

PAGE_BYTES = 128 * 1024
EVICTED_IS_GONE = ("--spill", "off")
"""Else a page that is evicted seconds after it was stored may have a place at another node."""
CALL_S = 20.0
"""The deadline of a call: some of them fit into TIMEOUT_S."""
Page = npt.NDArray[np.uint8]


class Closing:
    """What is closed at the end of a `with` block."""

    def close(self) -> object:
        """Leave nothing behind."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


class NodeDied(AssertionError):
    """A node ended by itself, and not in good order."""


class NodeProcess:
    """One `python -m peercache.node`."""

    def __init__(
        self, flags: Sequence[str], *, before: Sequence[str] = (), python: str = sys.executable
    ) -> None:
        """Start it and wait for its ready line; what it prints goes to `log`.

        before: what stands before the command, such as a change of the namespace or the user.
        python: the interpreter, with another build installed than this one.
        """
        self.flags = list(flags)
        self._is_killed = False
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        self.process = subprocess.Popen(
            [*before, python, "-m", "peercache.node", *flags],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            said = self.said()
            self.end()
            raise AssertionError(f"the node did not start: {said}")
        self.ready: dict[str, str] = json.loads(line)

    @property
    def cluster(self) -> str:
        """The name of its cluster, by its flags."""
        return self.flags[self.flags.index("--cluster") + 1]

    def kill(self) -> None:
        """SIGKILL it, and wait until it is gone."""
        self._is_killed = self._is_killed or self.process.poll() is None
        self.process.kill()
        self.process.wait()

    def assert_not_died(self) -> None:
        """Fail where the node has ended other than by `kill` or in good order."""
        status = self.process.poll()
        if status and not self._is_killed:
            raise NodeDied(f"the node at {self.ready['control']} ended with {status}")

    def pause(self) -> None:
        """SIGSTOP it, and wait until every thread of it has stopped."""
        pause(self.process)

    def resume(self) -> None:
        """SIGCONT it."""
        self.process.send_signal(signal.SIGCONT)

    def terminate(self) -> int:
        """SIGTERM it; return its exit status."""
        self.process.terminate()
        return self.process.wait(TIMEOUT_S)

    def said(self) -> str:
        """Return its log."""
        self.log.flush()
        self.log.seek(0)
        return self.log.read()

    def page(self, path: str) -> str:
        """Return a page that it serves over HTTP."""
        with urllib.request.urlopen(f"http://{self.ready['http']}{path}", timeout=TIMEOUT_S) as got:
            return str(got.read().decode())

    def flip(self, where: slice | bytes) -> None:
        """Flip a bit of pages in its memory: at these places, or once in the page with this."""
        segment = Path("/dev/shm", f"peercache-{self.ready['node']}")
        with segment.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            header = parse_header(memory[:HEADER_BYTES])
            begin = Layout.of(header.page_bytes, header.granule).pages_offset
            pages = np.frombuffer(memory, np.uint8)[begin:]
            if isinstance(where, bytes):
                at = memory.find(where, begin) - begin + len(where) // 2
                where = slice(at, at + 1)
            pages[where] ^= 1
            del pages

    def end(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(ProcessLookupError):
            self.resume()
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()


class LocalCluster:
    """Nodes of one cluster on loopback, and clients attached to them."""

    def __init__(self) -> None:
        """Start with no node."""
        # Not pytest's folder: the path of a unix socket is at most 108 bytes long.
        self.folder = tempfile.TemporaryDirectory(prefix="peercache-")
        self.name = f"test-{os.getpid()}-{time.monotonic_ns()}"
        self.nodes: list[NodeProcess] = []
        self.clients: list[Client] = []

    def start(
        self,
        home: str = "",
        *,
        pool: str = "16MiB",
        flags: Sequence[str] = (),
        before: Sequence[str] = (),
        python: str = sys.executable,
    ) -> NodeProcess:
        """Start a node that joins the first one, if there is one; before: as in NodeProcess."""
        name = home or f"n{len(self.nodes)}"
        all_flags = [
            "--cluster", self.name, "--home", f"ipc://{self.folder.name}/{name}.ipc",
            "--pool-size", pool, "--metrics-port", "0", "--log-format", "json", *flags,
        ]  # fmt: skip
        if "--listen" not in flags:
            all_flags += ["--listen", "127.0.0.1:0"]
        if self.nodes and "--discovery-addr" not in flags:
            all_flags += ["--discovery-addr", self.nodes[0].ready["control"]]
        node = NodeProcess(all_flags, before=before, python=python)
        self.nodes.append(node)
        return node

    def start_many(
        self, count: int, *, pool: str = "16MiB", flags: Sequence[str] = ()
    ) -> list[NodeProcess]:
        """Start nodes and wait until all know all."""
        nodes = [self.start(pool=pool, flags=flags) for _ in range(count)]
        for node in nodes:
            self.wait_for_members(node, count)
        return nodes

    def wait_for_members(self, node: NodeProcess, count: int, within_s: float = TIMEOUT_S) -> None:
        """Wait until a node counts so many live members."""
        with self.client(node) as client:
            wait_until(
                lambda: client.stats().get("home_members_alive") == count, "members", within_s
            )
        self.clients.remove(client)

    def client(self, node: NodeProcess, **settings: Any) -> Client:
        """Return a client at a node, with deadlines that no test should come to."""
        patient = {"op_timeout_s": CALL_S, "exists_timeout_s": CALL_S, **settings}
        client = Client.open(cluster=self.name, home=node.ready["home"], **patient)
        self.clients.append(client)
        return client

    def __enter__(self) -> LocalCluster:
        """Return the cluster itself."""
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """End clients and processes, and show the logs of a failed test.

        A node that has died fails its test, whatever else the test saw.
        """
        for client in self.clients:
            client.close()
        # A fixture does not know whether its test failed: pytest shows this only if it did.
        if error is not None or "(teardown)" in os.environ.get("PYTEST_CURRENT_TEST", ""):
            for node in self.nodes:
                sys.stderr.write(f"--- {node.flags}\n{node.said()}\n")
        try:
            for node in self.nodes:
                node.assert_not_died()
        finally:
            for node in self.nodes:
                node.end()
            self.folder.cleanup()


def pause(process: subprocess.Popen[Any]) -> None:
    """SIGSTOP a process, and wait until every thread of it has stopped."""
    process.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{process.pid}/task")
    wait_until(lambda: all(state_of(thread) == "T" for thread in threads.iterdir()))


def state_of(process: Path) -> str:
    """Return the letter by which the kernel shows what a process or a thread does."""
    return (process / "stat").read_text().rpartition(")")[2].split()[0]


def keys_of(name: str, count: int) -> list[str]:
    """Return page keys as SGLang makes them."""
    return [hashlib.sha256(f"{name}/{i}".encode()).hexdigest() for i in range(count)]


def page_of(key: str, size: int = PAGE_BYTES) -> Page:
    """Return the only right bytes of a key: all words of a page differ, and so do pages."""
    seed = int(key[:16], 16)
    words = np.arange(size // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(seed)
    return words.view(np.uint8)


def pages_of(keys: Sequence[str], size: int = PAGE_BYTES) -> list[Page]:
    """Return the pages of a batch."""
    return [page_of(key, size) for key in keys]


def empty(count: int, size: int = PAGE_BYTES) -> list[Page]:
    """Return poisoned destinations: a hit that wrote nothing is noticed."""
    return [np.full(size, 0xA5, np.uint8) for _ in range(count)]


def read(client: Client, keys: Sequence[str], size: int = PAGE_BYTES) -> list[bool]:
    """Read a batch, and assert that every hit has exactly its key's bytes."""
    buffers = empty(len(keys), size)
    hits = client.batch_get(keys, buffers)
    assert len(hits) == len(keys)
    for key, buffer, hit in zip(keys, buffers, hits, strict=True):
        if hit:
            assert np.array_equal(buffer, page_of(key, size)), f"wrong bytes under {key}"
    return hits


def timed(call: Callable[[], list[bool]]) -> tuple[list[bool], float]:
    """Return an answer and the seconds it took."""
    started = time.monotonic()
    return call(), time.monotonic() - started


PATIENT = """
import pytest
from tests.pace import no_peer_is_taken_for_hung
no_peer_is_taken_for_hung(pytest.MonkeyPatch())
"""


@contextlib.contextmanager
def script(source: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run Python source in a process of its own, as patient as ours, that ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", PATIENT + source, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


DIES_WRITING = """
import os, signal, sys
from peercache import Client
from peercache.client import bridge
from tests.system.nodes import keys_of, pages_of
def die(step, segment):
    os.kill(os.getpid(), signal.SIGKILL)
bridge._place = die
client = Client.open(cluster=sys.argv[1], home=sys.argv[2], op_timeout_s=60)
keys = keys_of(sys.argv[3], 8)
client.batch_set(keys, pages_of(keys))
"""
"""A `script` that is killed after it has reserved slots for its keys, and before it writes."""


def command(*words: str, limit_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run `peercache` with these words to its end, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "peercache", *words],
        capture_output=True, text=True, check=False, timeout=limit_s,
    )  # fmt: skip


def flags_of(settings: Mapping[str, str]) -> list[str]:
    """Return settings as flags of the command line."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def free_port() -> str:
    """Return a port that was free just now, of those that no connection is given by itself."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return str(port)


@contextlib.contextmanager
def capture_logs() -> Iterator[list[str]]:
    """Collect what PeerCache logs in this process."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("peercache")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
