"""A peer of the tcp fabric that does what a script prescribes, and reads of peers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import attrs
import numpy as np

from peercache.fabric.tcp import wire
from peercache.fabric.tcp.client import TcpFabric
from peercache.model.member import Member
from peercache.model.reads import Fetched, PeerRead
from tests.contracts.fabric_suite import GRANULE, INCARNATION, Destination, member_of
from tests.pace import TIMEOUT_S
from tests.unit.fabric.serving import PageServer

PORTION = wire.PORTION_BYTES_MAX


def at(server: PageServer, incarnation: int = INCARNATION) -> Member:
    """Return a member that serves at the server's address."""
    return member_of(incarnation, data=server.address)


def read(
    fabric: TcpFabric,
    member: Member,
    into: Destination,
    *,
    step: int = GRANULE,
    timeout_s: float = TIMEOUT_S,
    changed: int = 0,
) -> Fetched:
    """Read slots that begin `step` bytes apart; changed: by how much their words have changed."""
    offsets = np.arange(len(into.lengths), dtype=np.uint64) * np.uint64(step)
    # What `memory` gives each granule.
    generations = np.uint64(2) * offsets // np.uint64(GRANULE) + np.uint64(2 + changed)
    peer_read = PeerRead(member, offsets, into.lengths, into.runs, generations)
    return fabric.read(peer_read, time.monotonic() + timeout_s)


@attrs.define
class ScriptedPeer:
    """A listener that runs a script for each connection it accepts, in a thread."""

    script: Callable[[socket.socket], None]
    listener: socket.socket = attrs.field(
        factory=lambda: socket.create_server(("127.0.0.1", 0)), init=False
    )
    accepted: int = attrs.field(default=0, init=False)

    @property
    def member(self) -> Member:
        """The member that this peer pretends to be."""
        return member_of(INCARNATION, data=f"127.0.0.1:{self.listener.getsockname()[1]}")

    def run(self) -> None:
        """Accept until the listener is shut down."""
        with self.listener:
            while True:
                try:
                    connection, _ = self.listener.accept()
                except OSError:
                    return
                self.accepted += 1
                with connection, contextlib.suppress(OSError):
                    self.script(connection)


@contextlib.contextmanager
def peer_that(script: Callable[[socket.socket], None]) -> Iterator[ScriptedPeer]:
    """Run a scripted peer; whatever it waits for must end before the block does."""
    peer = ScriptedPeer(script)
    thread = threading.Thread(target=peer.run)
    thread.start()
    try:
        yield peer
    finally:
        peer.listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def accept(connection: socket.socket) -> None:
    """Take a greeting and a request of one page as a good server does."""
    connection.recv(wire.OPENING_BYTES + wire.GREETING_REST_BYTES, socket.MSG_WAITALL)
    connection.sendall(wire.encode_answer(""))
    connection.recv(wire.REQUEST_BYTES + wire.ENTRY_BYTES, socket.MSG_WAITALL)
