"""A flood of half handshakes: a node whose process may open few files keeps some of them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from itertools import chain
from pathlib import Path

import tests.needs_openssl  # noqa: F401 - skips this module
from peercache import Client
from tests.certificates import Certificates
from tests.hostile.strangers import Vitals
from tests.pace import wait_until
from tests.system.nodes import NodeProcess, flags_of, keys_of, pages_of, read

LIMIT = 512
HALF = b"\x16\x03\x01\x40\x00\x01"
"""The head of a record that is never whole: 16 KiB."""
DRIP_S = 1.0
"""How often each connection gets another byte: a silent one would be closed for its silence."""


class Strangers:
    """Threads that open connections and begin a handshake, until `rest`; they keep all of them.

    Each of the addresses has a thread, which keeps the last LIMIT connections that it has opened.
    """

    def __init__(self, addresses: list[str]) -> None:
        self.opened: list[deque[socket.socket]] = [deque() for _ in addresses]
        self._rest = threading.Event()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._open, args=each, daemon=True)
            for each in zip(addresses, self.opened, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def has_flooded(self) -> bool:
        """Return whether every thread has opened as many as the node may have files."""
        return all(len(opened) >= LIMIT for opened in self.opened)

    def _open(self, address: str, opened: deque[socket.socket]) -> None:
        host, _, port = address.rpartition(":")
        while not self._rest.is_set():
            with contextlib.suppress(OSError):
                connection = socket.create_connection((host, int(port)), 1.0)
                opened.append(connection)
                connection.send(HALF)
            if len(opened) > LIMIT:
                opened.popleft().close()

    def rest(self) -> None:
        """Open no more; send another byte on each connection now and then."""
        self._rest.set()
        for thread in self._threads:
            thread.join()
        self._threads = [threading.Thread(target=self._drip, daemon=True)]
        self._threads[0].start()

    def _drip(self) -> None:
        while not self._stop.wait(DRIP_S):
            for connection in chain(*self.opened):
                with contextlib.suppress(OSError):
                    connection.send(b"\x00", socket.MSG_DONTWAIT)

    def end(self) -> None:
        """Close everything."""
        self._rest.set()
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for connection in chain(*self.opened):
            connection.close()


def test_strangers_leave_a_node_with_few_open_files_a_quarter_of_them(tmp_path: Path) -> None:
    """At every port at once, and the node's own client stores and reads all the while."""
    ca = Certificates(tmp_path / "ca")
    files = ca.node("one")
    # Not pytest's folder: the path of a unix socket is at most 108 bytes long.
    home = f"ipc:///tmp/{tmp_path.parent.name}-{tmp_path.name}"[:100]
    node = NodeProcess(
        ["--home", home, "--pool-size", "256MiB", "--listen", "127.0.0.1:0", *flags_of(files)],
        before=("prlimit", f"--nofile={LIMIT}:{LIMIT}"),
    )
    seen: list[int] = []
    failed: list[str] = []
    strangers = None
    try:
        with Client.open(home=home, **files) as client:
            strangers = Strangers(
                [node.ready["control"], node.ready["control"], node.ready["data"]]
                + [node.ready["http"]] * bool(node.ready["http"])
            )

            def has_stood_the_flood() -> bool:
                keys = keys_of(f"round-{len(seen) % 500}", 2)
                if not all(client.batch_set(keys, pages_of(keys))) or not all(read(client, keys)):
                    failed.append(keys[0])
                seen.append(Vitals.of(node).descriptors)
                return len(seen) >= 20 and strangers.has_flooded()

            wait_until(has_stood_the_flood)
            # nng accepts by itself between two checks of the node, and a busy machine makes those
            # late: a burst may take every descriptor until the next check.
            usual = sorted(seen)[len(seen) // 2]
            print(f"open files in the flood: usually {usual}, at most {max(seen)} of {LIMIT}")
            strangers.rest()
            wait_until(lambda: Vitals.of(node).descriptors <= LIMIT * 3 // 4)
        assert node.process.poll() is None, node.said()
    finally:
        if strangers is not None:
            strangers.end()
        node.end()
    assert not failed
