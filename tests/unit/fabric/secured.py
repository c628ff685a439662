"""Certificates for tests of the data port, and peers that have them."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np

import tests.needs_openssl  # noqa: F401 - skips this module
from peercache.config.settings import Config
from peercache.fabric.tcp import wire
from peercache.model.ids import incarnation_of
from peercache.model.member import Member
from peercache.model.reads import PeerRead
from peercache.observability.log import get_logger
from peercache.trust.files import LiveTls
from tests.certificates import Certificates
from tests.contracts.fabric_suite import GRANULE, Destination, member_of
from tests.contracts.fakes import Memory
from tests.pace import TIMEOUT_S
from tests.unit.fabric.serving import CLUSTER, PageServer, fabric_for

NONCE = bytes(range(16))


@attrs.define
class Cluster:
    """The certificates of one cluster."""

    certificates: Certificates
    _known: dict[tuple[str, str], dict[str, str]] = attrs.field(factory=dict, init=False)

    @classmethod
    def of(cls, folder: Path, name: str = CLUSTER) -> Cluster:
        """Make its authority."""
        return cls(Certificates(folder / f"authority-of-{name}", name))

    def live(self, settings: dict[str, str], *, is_node: bool = False) -> LiveTls:
        """Return what a process with these settings knows."""
        config = Config.load({"cluster": self.certificates.authority.cluster, **settings})
        live = LiveTls.open(config, is_node=is_node, log=get_logger())
        assert live is not None
        return live

    def node(self, name: str = "one", **more: Any) -> LiveTls:
        """Return what a node with a certificate knows."""
        return self.live(self.node_files(name, **more), is_node=True)

    def node_files(self, name: str = "one", **more: Any) -> dict[str, str]:
        """Return the settings of a node with a certificate."""
        return self._issued(name, self.certificates.node, **more)

    def client(self, name: str = "reader", *namespaces: str, **more: Any) -> LiveTls:
        """Return what a client with a certificate knows."""
        return self.live(self.client_files(name, *namespaces, **more))

    def client_files(self, name: str = "reader", *namespaces: str, **more: Any) -> dict[str, str]:
        """Return the settings of a client with a certificate."""
        return self._issued(name, self.certificates.client, *namespaces, **more)

    def operator_files(self, name: str = "boss") -> dict[str, str]:
        """Return the files of an operator's certificate as settings."""
        return self._issued(name, self.certificates.operator)

    def _issued(
        self, name: str, issue: Callable[..., dict[str, str]], *more: Any, **options: Any
    ) -> dict[str, str]:
        key = (issue.__name__, name)
        if key not in self._known:
            self._known[key] = issue(name, *more, **options)
        return self._known[key]


def incarnation(name: str = "one") -> int:
    """Return the incarnation of the node with this certificate."""
    return incarnation_of(CLUSTER, name, NONCE)


def serve(memory: Memory, tls: LiveTls, name: str = "one", **options: Any) -> PageServer:
    """Serve memory over TLS."""
    return PageServer(
        memory,  # type: ignore[arg-type]
        incarnation=incarnation(name),
        granule=GRANULE,
        tls=tls,
        **options,
    )


def member_at(server: PageServer, name: str = "one") -> Member:
    """Return the member that the server's node claims to be."""
    member = member_of(incarnation(name), data=server.address)
    return attrs.evolve(member, name=name, nonce=NONCE)


def fabric_with(tls: LiveTls | None, **options: Any) -> Any:
    """Return a client side with a certificate, or without one."""
    return fabric_for(GRANULE, tls=tls, **options)


def greeting_of(name: str = "one") -> bytes:
    """Return what a reader sends to the node with this certificate."""
    return wire.encode_greeting(
        wire.greet(cluster=CLUSTER, granule=GRANULE, incarnation=incarnation(name))
    )


def one_page(
    server: PageServer, name: str = "one", *, size: int = 4, generation: int = 2
) -> tuple[PeerRead, Destination]:
    """Return what reads the server's first page, and where to."""
    into = Destination.of([[size]])
    asked = np.array([[0], [generation]], np.uint64)
    member = member_at(server, name)
    return PeerRead(member, asked[0], into.lengths, into.runs, asked[1]), into


def connect(server: PageServer) -> socket.socket:
    """Connect as a stranger."""
    return socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S)


def openssl_client(settings: dict[str, str] | None) -> ssl.SSLContext:
    """Return a client that believes every server, with a certificate or without."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if settings is not None:
        context.load_cert_chain(settings["tls_cert"], settings["tls_key"])
    return context
