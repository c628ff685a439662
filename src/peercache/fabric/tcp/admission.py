"""Decides which clients the data port admits, and which pages each may read."""

from __future__ import annotations

from typing import final

import attrs

from peercache.errors import Rejected
from peercache.fabric.tcp import wire
from peercache.fabric.tcp.tls import Contexts, TlsPeer
from peercache.trust import rights
from peercache.trust.files import LiveTls
from peercache.trust.identity import Identity
from peercache.trust.sharing import Address, Sharing


@final
@attrs.frozen(kw_only=True)
class DataAdmission:
    """Decides which clients the data port admits: the only place that does.

    tls:     our certificates; None: serve in clear text.
    sharing: whose processes may read in clear text; None: any process's.
    """

    cluster: str
    granule: int
    incarnation: int
    tls: LiveTls | None = None
    sharing: Sharing | None = None

    def contexts(self) -> Contexts | None:
        """Return the factory of TLS sessions, None in clear text; raises as `TlsContext` does."""
        return None if self.tls is None else Contexts(self.tls, is_server=True)

    def check_address(self, local: Address, remote: Address) -> None:
        """Raise Rejected for a process that may not read in clear text.

        With TLS the certificate is enough.
        """
        if self.sharing is None or self.tls is not None:
            return
        problem = self.sharing.tcp_peer_problem(local, remote)
        if problem:
            raise Rejected(wire.OWNER, problem)

    def spaces(self, identity: Identity) -> tuple[int, ...]:
        """Return the spaces that the owner of a certificate may read, () for all of them.

        Raises Rejected for an owner that may read no page.
        """
        if not rights.reads_pages(identity):
            problem = f"{identity.uri()} reads no pages: use a client's or a node's certificate"
            raise Rejected(wire.ROLE, problem)
        return tuple(sorted(rights.spaces_of(identity) or ()))

    def stays(self, peer: TlsPeer) -> bool:
        """Return whether this certificate, with which a client was admitted, is still accepted."""
        try:
            return self.tls is None or bool(self.tls.admit(peer.serial, peer.names))
        except Rejected:
            return False

    def admit(self, greeting: wire.Greeting) -> str | None:
        """Return why a client with this greeting is refused, one of wire.REASONS, or None."""
        expected = wire.greet(
            cluster=self.cluster, granule=greeting.granule, incarnation=greeting.incarnation
        )
        if greeting.cluster != expected.cluster:
            return wire.CLUSTER
        if greeting.granule != self.granule:
            return wire.GRANULE
        if greeting.incarnation != self.incarnation:
            return wire.INCARNATION
        return None
