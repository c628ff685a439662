"""Admission: which connections a node accepts, and in which role.

A connection begins with a Hello. It is refused, with a log line and a reason, if wire version,
granule, certificate, user or proof do not fit; messages before a Hello are dropped. `trust.rights`
defines what an admitted session may send.
"""

from __future__ import annotations

import hmac
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import final

from peercache.errors import Rejected
from peercache.memory.client_lock import LockProbe, lock_name
from peercache.model.ids import FIRST_IDENTITY, incarnation_of, name_of
from peercache.model.keys import Namespace
from peercache.model.process import OF_ONE_CERTIFICATE
from peercache.net.peers import Gate, Peer, Transport
from peercache.observability.log import WarnOnce, get_logger
from peercache.trust.identity import CertificateRole, Identity
from peercache.trust.rights import Session, spaces_of
from peercache.wire.envelope import WIRE_VERSION, WIRE_VERSION_OLDEST, versions_spoken
from peercache.wire.messages.declared import Role
from peercache.wire.messages.session import OPERATOR, Hello

CLIENTS_MAX = 1024
"""Writing clients of one home node: each uses a descriptor and is probed every second."""


ADMITTED_FRACTION = 0.75
"""The fraction of all connections that may be admitted ones over tcp."""

BUSY = "busy"
"""The reason of a refusal for lack of room: a later attempt may succeed."""

STRANGER_S = 10.0
"""Timeout from connect to Hello, which honest peers send first. Until then a connection may hold an
incomplete message of the largest size in memory."""


@final
class Admission:
    """Admits connections, and remembers the lock of every writing client."""

    def __init__(
        self,
        *,
        cluster: str,
        granule: int,
        home: str,
        local_secret: bytes,
        gate: Gate,
        probe: Callable[[str, str], LockProbe],
        connections_max: float = math.inf,
    ) -> None:
        """Admit peers that fit; clients of this process present `local_secret` instead of a lock.

        gate:  checks the peer of each connection by its user or certificate.
        probe: opens a client's lock file, given home address and name; raises Rejected.
        connections_max: the limit of connections, those without a Hello included; the housekeeping
                         renews it.
        """
        self._cluster = cluster
        self._granule = granule
        self._home = home
        self._local_secret = local_secret
        self._gate = gate
        self._probe = probe
        self.connections_max = connections_max
        # By connection over tcp: the name in its certificate, "" without one.
        self._owners: dict[int, str] = {}
        self._of_owner: Counter[str] = Counter()
        self.sessions: dict[int, Session] = {}
        self._peers: dict[int, Peer] = {}
        self._locks: dict[int, LockProbe] = {}
        self._strangers: dict[int, float] = {}
        self._warn_once = WarnOnce(get_logger())

    def admit(self, pipe: int, peer: Peer, sender: int, hello: Hello) -> Session:
        """Open a session on a pipe, or raise Rejected with the reason."""
        if sender < FIRST_IDENTITY:
            raise Rejected("identity", f"{sender} is the identity of no node and of no client")
        if hello.wire_newest < WIRE_VERSION_OLDEST or hello.wire_oldest > WIRE_VERSION:
            raise Rejected(
                "wire_version",
                f"you speak {hello.wire_oldest} to {hello.wire_newest}, "
                f"this node {versions_spoken()}: upgrade the older side",
            )
        identity = self._gate.identity(peer)
        owner = "" if identity is None else identity.uri()
        if peer.transport is Transport.TCP:
            self._check_room(pipe, owner)
        # An operator does not name slots, and need not know the granule.
        if hello.granule != self._granule and (hello.is_node or hello.geometry != OPERATOR):
            raise Rejected(
                "granule", f"your granule is {hello.granule}, this cluster's {self._granule}"
            )
        if hello.is_node:
            session = self._node(peer, identity, sender, hello)
        else:
            session = self._client(peer, identity, sender, hello)
        self.sessions[pipe] = session
        self._peers[pipe] = peer
        if peer.transport is Transport.TCP and pipe not in self._owners:
            self._owners[pipe] = owner
            self._of_owner[owner] += 1
        return session

    def _check_room(self, pipe: int, owner: str) -> None:
        """Raise Rejected for too many connections, of one certificate or in total.

        A quarter of all is reserved for connections that have not sent Hello.
        """
        if pipe in self._owners:
            return
        most = self.connections_max
        if owner and self._of_owner[owner] >= most / OF_ONE_CERTIFICATE:
            raise Rejected(BUSY, f"{owner} has as many connections as one certificate may have")
        if len(self._owners) >= most * ADMITTED_FRACTION:
            raise Rejected(BUSY, "this node has as many connections as its open files allow")

    def end(self, pipe: int) -> None:
        """Forget a connection; the reservations of its client stay: it may come back."""
        self.sessions.pop(pipe, None)
        self._peers.pop(pipe, None)
        owner = self._owners.pop(pipe, None)
        if owner is not None:
            self._of_owner[owner] -= 1
            if not self._of_owner[owner]:
                del self._of_owner[owner]

    def of_peers(self, wanted: Callable[[Peer], bool]) -> list[int]:
        """Return the admitted connections with peers for which `wanted` is true."""
        return [pipe for pipe, peer in self._peers.items() if wanted(peer)]

    def overstaying(self, pipes: Sequence[int], now: float) -> list[int]:
        """Return which of these open connections (oldest first) to close.

        Of those that have not sent Hello: each that is STRANGER_S old, and the oldest of the rest,
        until there are at most `connections_max` connections.
        """
        strangers = [pipe for pipe in pipes if pipe not in self.sessions]
        self._strangers = {pipe: self._strangers.get(pipe, now) for pipe in strangers}
        too_many = len(pipes) - self.connections_max
        return [
            pipe
            for place, (pipe, since) in enumerate(self._strangers.items())
            if place < too_many or now - since >= STRANGER_S
        ]

    def attached(self) -> list[tuple[int, str, int]]:
        """Return each writing client: its identity, its namespace, and the pid of its process."""
        own = os.getpid()
        return [
            (session.identity, session.namespace, self._pid(session.identity, own))
            for session in self.sessions.values()
            if session.role is Role.WRITER
        ]

    def _pid(self, client: int, own: int) -> int:
        lock = self._locks.get(client)
        return own if lock is None else lock.holder()

    def exited(self) -> list[int]:
        """Return the clients that have exited since the last call, and forget them."""
        gone = [client for client, lock in self._locks.items() if not lock.is_held()]
        for client in gone:
            self._locks.pop(client).close(remove=True)
        return gone

    def close(self) -> None:
        """Close the lock files; their clients continue."""
        for lock in self._locks.values():
            lock.close(remove=False)
        self._locks.clear()

    def _node(self, peer: Peer, identity: Identity | None, sender: int, hello: Hello) -> Session:
        """Admit a node as the incarnation determined by its certificate."""
        if peer.transport is not Transport.TCP:
            raise Rejected("transport", "nodes connect over tcp; this is the clients' address")
        if identity is not None:
            if identity.role is not CertificateRole.NODE:
                raise Rejected("role", f"{identity.uri()} is no node")
            if hello.name != identity.name:
                problem = f"its Hello has {hello.name!r}, its certificate {identity.name!r}"
                raise Rejected("name", problem)
            if incarnation_of(self._cluster, hello.name, hello.nonce) != sender:
                problem = f"{name_of(sender)} is not the incarnation of {identity.name!r}"
                raise Rejected("incarnation", problem)
        changes = spaces_of(identity)
        return Session(sender, Role.NODE, changes=changes, name=hello.name)

    def _client(self, peer: Peer, identity: Identity | None, sender: int, hello: Hello) -> Session:
        """Admit a client: over tcp it reads, over ipc it proves what it may write."""
        role = Role.READER
        if peer.transport is Transport.TCP:
            if hello.lock or hello.secret:
                # Even with the secret: a process that can read it can also reach the home address.
                raise Rejected("transport", "a client writes over its node's home address only")
            wants = hello.geometry == OPERATOR
            if wants if identity is None else identity.role is CertificateRole.OPERATOR:
                role = Role.OPERATOR
        elif hello.geometry == OPERATOR and not hello.lock and not hello.secret:
            # A sharing user that is neither this node's user nor root must not do this.
            role = Role.OPERATOR if peer.uid in (0, os.getuid()) else Role.READER
        elif self._is_writer(peer, sender, hello):
            role = Role.WRITER
        # The name itself: two names may have the same space tag.
        if identity is not None and not identity.allows(hello.namespace):
            problem = f"{identity.uri()} does not allow namespace {hello.namespace!r}"
            raise Rejected("namespace", problem)
        space = Namespace(hello.namespace).space_tag()
        reads = spaces_of(identity)
        if role is Role.WRITER:
            self._compare_geometry(hello)
        changes = {Role.WRITER: frozenset({space}), Role.OPERATOR: None}.get(role, frozenset())
        return Session(sender, role, hello.namespace, hello.geometry, reads, changes)

    def _compare_geometry(self, hello: Hello) -> None:
        """Warn if another writer has a different geometry for this namespace: they share no page.

        The geometry is part of every page key, so both work. If they should share pages, this line
        explains why they do not.
        """
        for session in self.sessions.values():
            if (
                session.role is Role.WRITER
                and session.namespace == hello.namespace
                and session.geometry != hello.geometry
            ):
                self._warn_once(
                    "node.geometry_differs",
                    (hello.namespace, frozenset((session.geometry, hello.geometry))),
                    namespace=hello.namespace,
                    geometry=hello.geometry,
                    other=session.geometry,
                )

    def _is_writer(self, peer: Peer, client: int, hello: Hello) -> bool:
        """Return whether a client of this host proves that it may write under this identity."""
        if not hello.lock:
            if not hello.secret:
                return False
            is_ours = hmac.compare_digest(hello.secret, self._local_secret)
            if peer.transport is not Transport.INPROC or not is_ours:
                raise Rejected("secret", "this is not the secret of this node's own process")
            return True
        if hello.lock != lock_name(client):
            # Otherwise any process that knows a client's id could write under its identity.
            raise Rejected("lock", f"{hello.lock!r} is not the lock of client {name_of(client)}")
        if client not in self._locks:
            if len(self._locks) >= CLIENTS_MAX:
                raise Rejected("clients", f"this node has {CLIENTS_MAX} clients already")
            probe = self._probe(self._home, hello.lock)
            try:
                if not probe.is_held():
                    raise Rejected("lock", f"the lock {hello.lock} is not held")
                _check_secret(probe, hello)
            except BaseException:
                probe.close(remove=False)
                raise
            self._locks[client] = probe
        _check_secret(self._locks[client], hello)
        return True


def _check_secret(probe: LockProbe, hello: Hello) -> None:
    secret = probe.secret()
    if not secret or not hmac.compare_digest(hello.secret, secret):
        raise Rejected("secret", f"the secret is not that in the lock file {hello.lock}")
