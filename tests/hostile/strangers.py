"""What strangers can do to a node's sockets, and what of it shows in the node's process."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from peercache import Client
from peercache.net.sockets import PAIR1_GREETING, local_path
from peercache.wire.codec import decode
from peercache.wire.messages.declared import Message
from tests.hostile.garbage import enveloped
from tests.pace import TIMEOUT_S, wait_until
from tests.system.nodes import CALL_S, Closing, LocalCluster, NodeProcess, keys_of, pages_of, read

MIB = 2**20

Connect = Callable[[], socket.socket]


@attrs.frozen
class Vitals:
    """What a process takes of the machine. rss_bytes: anonymous memory, without the pool."""

    rss_bytes: int
    threads: int
    descriptors: int

    @classmethod
    def of(cls, node: NodeProcess) -> Vitals:
        """Look at a living node."""
        return cls.of_process(node.process.pid)

    @classmethod
    def of_process(cls, pid: int) -> Vitals:
        """Look at a living process."""
        process = Path(f"/proc/{pid}")
        facts = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        rss_bytes = int(facts["RssAnon"].split()[0]) * 1024
        descriptors = sum(1 for _ in (process / "fd").iterdir())
        return cls(rss_bytes, int(facts["Threads"]), descriptors)


def ports_of(node: NodeProcess) -> dict[str, Connect]:
    """Return how to connect to each port of a node."""

    def tcp(address: str) -> Connect:
        host, _, port = address.rpartition(":")
        return lambda: socket.create_connection((host, int(port)), TIMEOUT_S)

    def home() -> socket.socket:
        opened = socket.socket(socket.AF_UNIX)
        try:
            # Without a timeout the kernel waits for room among those not yet accepted.
            opened.connect(local_path(node.ready["home"]))
        except BaseException:
            opened.close()
            raise
        opened.settimeout(TIMEOUT_S)
        return opened

    served = {
        name: tcp(node.ready[name]) for name in ("control", "data", "http") if node.ready[name]
    }
    return {"home": home, **served}


@attrs.frozen
class Caller(Closing):
    """A connection that has greeted as nng does, and then sends what it likes."""

    connection: socket.socket
    is_local: bool
    cluster: str = ""

    @classmethod
    def at(cls, node: NodeProcess, port: str) -> Caller:
        """Connect to `control` or `home`, and exchange nng's greeting."""
        connection = ports_of(node)[port]()
        try:
            connection.sendall(PAIR1_GREETING)
            greeted = received(connection, len(PAIR1_GREETING))
            assert greeted == PAIR1_GREETING, greeted
        except BaseException:
            connection.close()
            raise
        return cls(connection, is_local=port == "home", cluster=node.cluster)

    def say(self, message: object, *, sender: int, target: int = 0) -> None:
        """Send a message in a sender's name."""
        raw = enveloped(message, cluster=self.cluster, sender=sender, target=target)  # type: ignore[arg-type]
        self.connection.sendall(self.framed(raw))

    def answer(self) -> Message:
        """Return the next message that comes."""
        return decode(self.hear(), cluster=self.cluster).message

    def ask(self, message: object, *, sender: int) -> Message:
        """Send a message; return the next one that comes."""
        self.say(message, sender=sender)
        return self.answer()

    def framed(self, body: bytes, *, hops: int = 1, claims: int = -1) -> bytes:
        """Return a message as nng frames it; `claims` is a length that is not its own."""
        length = 4 + len(body) if claims < 0 else claims
        kind = b"\x01" if self.is_local else b""
        return kind + struct.pack(">QI", length, hops) + body

    def hear(self) -> bytes:
        """Return the next message, without nng's header."""
        head = received(self.connection, 9 if self.is_local else 8)
        length = int.from_bytes(head[-8:], "big")
        return received(self.connection, length)[4:]

    def close(self) -> None:
        """Hang up."""
        self.connection.close()


def received(connection: socket.socket, count: int) -> bytes:
    """Receive exactly so many bytes, or what came before the other side closed."""
    got = b""
    while len(got) < count and (piece := connection.recv(count - len(got))):
        got += piece
    return got


def metric(node: NodeProcess, name: str) -> dict[str, float]:
    """Return a metric's values by label value, as a scrape shows them."""
    with ports_of(node)["http"]() as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        page = b""
        while piece := connection.recv(65536):
            page += piece
    found = {}
    for line in page.decode().splitlines():
        if line.startswith((f"{name}{{", f"{name}_total{{")):
            label = line.partition('="')[2].partition('"')[0]
            found[label] = float(line.rpartition(" ")[2])
    return found


@contextlib.contextmanager
def one_node(*flags: str, pool: str = "16MiB") -> Iterator[tuple[LocalCluster, NodeProcess]]:
    """Give a cluster of one node, with every port open."""
    with LocalCluster() as cluster:
        yield cluster, cluster.start(pool=pool, flags=("--metrics-port=-1", *flags))


HITS_SHARE_MIN = 0.95
"""Of a bystander's reads: a stale record now and then is a miss, as it should."""


class Bystander:
    """A client that stores and reads all the while, and must hardly notice anything.

    It asks the directory again for each read, over tcp and over shared memory in turn, so that the
    control port, the home address and the data port are all on its way.
    """

    def __init__(self, cluster: LocalCluster, node: NodeProcess, *, pages: int = 16) -> None:
        """Store pages; reading begins with the block."""
        self._keys = keys_of("bystander", pages)
        self._clients: list[Client] = [
            cluster.client(node, fabric=fabric, location_cache_entries=0)
            for fabric in ("tcp", "shm")
        ]
        assert all(self._clients[0].batch_set(self._keys, pages_of(self._keys)))
        wait_until(lambda: all(read(self._clients[0], self._keys)))
        self._thread = threading.Thread(target=self._read_on)
        self._stop = threading.Event()
        self.reads = self.hits = 0
        self.longest_s = 0.0
        self.error: BaseException | None = None

    def _read_on(self) -> None:
        try:
            while not self._stop.is_set():
                for client in self._clients:
                    started = time.monotonic()
                    found = read(client, self._keys)
                    self.longest_s = max(self.longest_s, time.monotonic() - started)
                    self.reads += len(found)
                    self.hits += sum(found)
        except BaseException as error:
            self.error = error

    def why(self) -> list[dict[str, object]]:
        """Return what its clients counted of misses."""
        return [
            {k: v for k, v in client.stats().items() if "missed" in k or "breaker" in k}
            for client in self._clients
        ]

    def __enter__(self) -> Bystander:
        """Begin to read."""
        self._thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Stop, and state that reads were hits, in time."""
        self._stop.set()
        self._thread.join()
        if error is None:
            if self.error is not None:
                raise self.error
            assert self.reads > 0
            assert self.hits >= HITS_SHARE_MIN * self.reads, (
                f"{self.reads - self.hits} of {self.reads} missed: {self.why()}"
            )
            assert self.longest_s < CALL_S / 2, f"a read took {self.longest_s:.2f} s"
