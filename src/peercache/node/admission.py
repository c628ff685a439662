"""Admission: which connections a node accepts, and which messages each may send.

A connection begins with a Hello. It is refused, loudly and with a reason, when wire version,
granule, credentials or a namespace's geometry do not fit; what comes before a Hello is dropped.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from enum import Enum
from typing import final

import attrs

from peercache.errors import Rejected
from peercache.memory.client_lock import LockProbe, lock_name
from peercache.model.ids import name_of
from peercache.wire.envelope import WIRE_VERSION, WIRE_VERSION_OLDEST, Message
from peercache.wire.messages.directory import (
    Acknowledged,
    Delete,
    Disputed,
    Lookup,
    Put,
    Repair,
    StreamSummary,
    SummaryDiffers,
    SummaryMatches,
)
from peercache.wire.messages.membership import Heartbeat, HeartbeatSeen, Join, ViewAsked, ViewShared
from peercache.wire.messages.pool import (
    Abort,
    Clear,
    Commit,
    LiveReservations,
    Remove,
    Reserve,
    Touched,
)
from peercache.wire.messages.promote import Promote
from peercache.wire.messages.rdma import ChannelsHeld, OpenChannel
from peercache.wire.messages.session import Counted, Hello, StatsAsked

CLIENTS_MAX = 1024
"""Writing clients of one home node: each has a descriptor open and is probed every second."""


STRANGER_S = 10.0
"""From connect to Hello, which honest peers say first of all. Until then a connection may hold the
largest message in memory without ever ending it."""


class Role(Enum):
    """What a connection was admitted as."""

    NODE = "node"
    READER = "reader"
    WRITER = "writer"


_ANY = (Role.NODE, Role.READER, Role.WRITER)
_CLIENTS = (Role.READER, Role.WRITER)

SENDERS: dict[type[Message], tuple[Role, ...]] = {
    Join: (Role.NODE,),
    Heartbeat: (Role.NODE,),
    HeartbeatSeen: (Role.NODE,),
    ViewShared: (Role.NODE,),
    ViewAsked: _ANY,
    Lookup: _CLIENTS,
    Disputed: _CLIENTS,
    Put: (Role.NODE,),
    Delete: (Role.NODE,),
    StreamSummary: (Role.NODE,),
    Repair: (Role.NODE,),
    Acknowledged: (Role.NODE,),
    SummaryDiffers: (Role.NODE,),
    SummaryMatches: (Role.NODE,),
    Touched: _CLIENTS,
    Remove: _CLIENTS,
    Clear: _CLIENTS,
    Reserve: (Role.WRITER,),
    Commit: (Role.WRITER,),
    Abort: (Role.WRITER,),
    LiveReservations: (Role.WRITER,),
    Promote: _CLIENTS,
    OpenChannel: _CLIENTS,
    ChannelsHeld: _CLIENTS,
    StatsAsked: _CLIENTS,
    Counted: (Role.WRITER,),
}
"""Which roles may send a message to a node. A message that is missing here is refused."""


@attrs.frozen
class Session:
    """An admitted connection."""

    identity: int
    role: Role
    namespace: str
    geometry: str


@final
class Admission:
    """Admits connections, and remembers the lock of every writing client."""

    def __init__(
        self,
        *,
        granule: int,
        credentials: str,
        home: str,
        local_token: str,
        probe: Callable[[str, str], LockProbe] = LockProbe,
    ) -> None:
        """Admit peers that fit; clients of this very process show `local_token` instead of a lock.

        probe: opens a client's lock file, given home address and name; raises Rejected.
        """
        self._granule = granule
        self._credentials = credentials
        self._home = home
        self._local_token = local_token
        self._probe = probe
        self.sessions: dict[int, Session] = {}
        self._locks: dict[int, LockProbe] = {}
        self._strangers: dict[int, float] = {}

    def admit(self, pipe: int, sender: int, hello: Hello) -> Session:
        """Open a session on a pipe, or raise Rejected with what does not fit."""
        if sender == 0:
            raise Rejected("identity", "0 names no node and no client")
        if hello.wire_newest < WIRE_VERSION_OLDEST or hello.wire_oldest > WIRE_VERSION:
            raise Rejected(
                "wire_version",
                f"you speak {hello.wire_oldest} to {hello.wire_newest}, "
                f"this node {WIRE_VERSION_OLDEST} to {WIRE_VERSION}: upgrade the older side",
            )
        if hello.granule != self._granule:
            raise Rejected(
                "granule", f"your granule is {hello.granule}, this cluster's {self._granule}"
            )
        if not hmac.compare_digest(hello.credentials.encode(), self._credentials.encode()):
            raise Rejected("credentials", "the credentials are not this cluster's")
        self._check_geometry(hello)
        role = Role.NODE if hello.is_node else self._client_role(sender, hello)
        session = Session(sender, role, hello.namespace, hello.geometry)
        self.sessions[pipe] = session
        return session

    def end(self, pipe: int) -> None:
        """Forget a connection; what its client has reserved stays: it may come back."""
        self.sessions.pop(pipe, None)

    def overstaying(self, pipes: Sequence[int], now: float, *, connections_max: int) -> list[int]:
        """Return which of these open connections (oldest first) to close.

        Of those that have not said Hello: each that is STRANGER_S old, and the oldest of
        the rest as long as there are more connections than `connections_max`.
        """
        strangers = [pipe for pipe in pipes if pipe not in self.sessions]
        self._strangers = {pipe: self._strangers.get(pipe, now) for pipe in strangers}
        too_many = len(pipes) - connections_max
        return [
            pipe
            for place, (pipe, since) in enumerate(self._strangers.items())
            if place < too_many or now - since >= STRANGER_S
        ]

    def may_send(self, session: Session, message: Message) -> bool:
        """Tell whether this peer may send a message of this kind."""
        return session.role in SENDERS.get(type(message), ())

    def exited(self) -> list[int]:
        """Return the clients whose processes have exited since the last look, and forget them."""
        gone = [client for client, lock in self._locks.items() if not lock.is_held()]
        for client in gone:
            self._locks.pop(client).close(remove=True)
        return gone

    def close(self) -> None:
        """Let go of the lock files; their clients go on."""
        for lock in self._locks.values():
            lock.close(remove=False)
        self._locks.clear()

    def _check_geometry(self, hello: Hello) -> None:
        for session in self.sessions.values():
            if (
                hello.namespace
                and session.namespace == hello.namespace
                and session.geometry != hello.geometry
            ):
                raise Rejected(
                    "geometry",
                    f"namespace {hello.namespace!r} is in use with another geometry: "
                    f"{session.geometry!r}, yours is {hello.geometry!r}",
                )

    def _client_role(self, client: int, hello: Hello) -> Role:
        if not hello.lock:
            return Role.READER
        if hmac.compare_digest(hello.lock.encode(), self._local_token.encode()):
            return Role.WRITER
        if hello.lock != lock_name(client):
            # Else any process that knows a client's id could write in its name.
            raise Rejected("lock", f"{hello.lock!r} is not the lock of client {name_of(client)}")
        if client not in self._locks:
            if len(self._locks) >= CLIENTS_MAX:
                raise Rejected("clients", f"this node has {CLIENTS_MAX} clients already")
            probe = self._probe(self._home, hello.lock)
            if not probe.is_held():
                probe.close(remove=False)
                raise Rejected("lock", f"the lock {hello.lock} is not held")
            self._locks[client] = probe
        return Role.WRITER
