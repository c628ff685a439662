"""The peer of a connection: what is known before its first message, TLS settings, and the gate.

TLS 1.3 only, and both ends present a certificate of the cluster's authority. Every certificate
contains one common name, because nng requires one; the owner is identified by the identity in the
certificate, which `Gate` checks on each new connection.
"""

from __future__ import annotations

import socket
import time
from enum import Enum
from math import inf
from typing import Any, TypeAlias, final

import attrs
import pynng
from pynng._nng import ffi, lib

from peercache.config.quantities import format_address
from peercache.errors import Rejected
from peercache.observability.reasons import EXPIRED
from peercache.trust.files import LiveTls, TlsFiles
from peercache.trust.identity import SHARED_NAME, CertificateRole, Identity, until_among
from peercache.trust.sharing import Sharing, plain_ip


@final
class ControlTls:
    """nng's settings for one process; `renew` follows new files."""

    def __init__(self, files: TlsFiles) -> None:
        """Use these certificates."""
        self.renew(files)

    def renew(self, files: TlsFiles) -> None:
        """Use these certificates for new connections."""
        self.server = self._settings(files, pynng.TLSConfig.MODE_SERVER)
        self.client = self._settings(files, pynng.TLSConfig.MODE_CLIENT)

    def _settings(self, files: TlsFiles, mode: int) -> Any:
        settings = pynng.TLSConfig(
            mode,
            server_name=SHARED_NAME if mode == pynng.TLSConfig.MODE_CLIENT else None,
            ca_string=files.ca_pem,
            own_cert_string=files.cert_pem,
            own_key_string=files.key_pem,
            auth_mode=pynng.TLSConfig.AUTH_MODE_REQUIRED,
        )
        pynng.check_err(
            lib.nng_tls_config_version(
                settings._tls_config,  # noqa: SLF001 - pynng has no name for this call
                lib.NNG_TLS_1_3,
                lib.NNG_TLS_1_3,
            )
        )
        return settings


def control_url(address: str, tls: ControlTls | None) -> str:
    """Return the URL to dial for the control port at HOST:PORT."""
    return f"tcp://{address}" if tls is None else f"tls+tcp://{address}"


Address: TypeAlias = tuple[str, int]

_UNKNOWN: Address = ("", 0)

UNDATED_S = 3600.0
"""How long a connection lasts if its certificate does not repeat its expiry in a name, such as one
of another tool: nng does not report the expiry, and the next handshake checks it."""


class Transport(Enum):
    """How a connection reaches this process."""

    TCP = "tcp"
    IPC = "ipc"
    INPROC = "inproc"


@attrs.frozen
class Peer:
    """The peer of a connection, as the kernel and TLS report it.

    uid:           that of the process at the other end of an ipc connection; None for others.
    local, remote: the numeric addresses of a tcp connection.
    common_name, alternative_names: names in its certificate, which TLS has verified; none without
                                    TLS.
    valid_until:   when the connection ends, in seconds since 1970: when its certificate expires, or
                   UNDATED_S after it was made if the certificate's names do not contain the expiry.
    """

    transport: Transport
    uid: int | None = None
    local: Address = _UNKNOWN
    remote: Address = _UNKNOWN
    common_name: str = ""
    alternative_names: tuple[str, ...] = ()
    valid_until: float = inf

    def place(self) -> str:
        """Return where it is, for a log: HOST:PORT, or the user at a home address."""
        if self.remote[0]:
            return format_address(*self.remote)
        return "this process" if self.uid is None else f"uid {self.uid}, at the home address"

    def has_expired(self) -> bool:
        """Return whether its certificate has expired."""
        return self.valid_until < inf and self.valid_until <= time.time()


@final
class Gate:
    """Checks the peer of a connection, whichever end dialled.

    With TLS the peer is the owner of a certificate. Without TLS, a process at this host's loopback
    must belong to a user that shares the host; only `insecure` admits processes of other hosts.
    """

    def __init__(self, sharing: Sharing, certificates: LiveTls | None) -> None:
        """Check users by `sharing`, and certificates with TLS."""
        self._sharing = sharing
        self._certificates = certificates

    def identity(self, peer: Peer) -> Identity | None:
        """Return the owner of a peer's certificate, None without one; raise Rejected."""
        if peer.transport is Transport.IPC:
            if peer.uid is None:
                raise Rejected("owner", "the kernel does not report whose process this is")
            self._sharing.check_uid("the process at the other end", peer.uid)
        elif peer.transport is Transport.TCP:
            if self._certificates is not None:
                if peer.has_expired():
                    raise Rejected(EXPIRED, "the certificate has expired")
                return self._certificates.admit(peer.common_name, peer.alternative_names)
            problem = self._sharing.tcp_peer_problem(peer.local, peer.remote)
            if problem:
                raise Rejected("owner", problem)
        return None

    def admits(self, peer: Peer) -> bool:
        """Return whether a peer is admitted now: its certificate may have been revoked since."""
        try:
            self.identity(peer)
        except Rejected:
            return False
        return True

    def check_node(self, peer: Peer, name: str | None) -> None:
        """Raise Rejected unless a process that we have dialled may be the node of this name.

        name: None for any node of the cluster, as at a discovery address.
        """
        identity = self.identity(peer)
        if identity is None:
            return
        if identity.role is not CertificateRole.NODE:
            raise Rejected("role", f"{identity.uri()} is no node")
        if name is not None and identity.name != name:
            raise Rejected("name", f"the node {identity.name!r} answers in place of {name!r}")


def peer_of(pipe: Any) -> Peer | None:
    """Return what nng knows of a pipe's peer; None for a pipe that has ended.

    The kind of connection is determined by the address, never by failed queries: the kernel has no
    address of a connection that was reset, but messages that it sent before are still read.
    """
    found = ffi.new("nng_sockaddr *")
    if lib.nng_pipe_get_addr(pipe.pipe, b"remote-address", found):
        return None
    if found.s_family == lib.NNG_AF_INPROC:
        return Peer(Transport.INPROC)
    remote = _host_and_port(found)
    if remote is None:
        return Peer(Transport.IPC, _number(pipe, b"ipc:peer-uid"))
    local = ffi.new("nng_sockaddr *")
    is_known = not lib.nng_pipe_get_addr(pipe.pipe, b"local-address", local)
    at = (_host_and_port(local) if is_known else None) or _UNKNOWN
    # nng returns the subject from its common name on.
    common_name = _text(pipe, b"tls-peer-cn").partition(",")[0]
    names = _texts(pipe, b"tls-peer-alt-names")
    return Peer(Transport.TCP, None, at, remote, common_name, names, _end_of(names))


def _end_of(names: tuple[str, ...]) -> float:
    """Return when a connection ends, given the names in the peer's certificate."""
    if not names:
        return inf  # Without TLS.
    until = until_among(names)
    return time.time() + UNDATED_S if until is None else until


def _host_and_port(found: Any) -> Address | None:
    """Return an address of a tcp connection; None for one of another kind."""
    # nng keeps ports and addresses in network byte order.
    if found.s_family == lib.NNG_AF_INET:
        raw = bytes(ffi.buffer(ffi.addressof(found.s_in, "sa_addr"), 4))
        return str(plain_ip(raw)), socket.ntohs(found.s_in.sa_port)
    if found.s_family == lib.NNG_AF_INET6:
        raw = bytes(ffi.buffer(found.s_in6.sa_addr, 16))
        return str(plain_ip(raw)), socket.ntohs(found.s_in6.sa_port)
    return None


def _number(pipe: Any, option: bytes) -> int | None:
    found = ffi.new("uint64_t *")
    return None if lib.nng_pipe_get_uint64(pipe.pipe, option, found) else int(found[0])


def _text(pipe: Any, option: bytes) -> str:
    found = ffi.new("char **")
    if lib.nng_pipe_get_string(pipe.pipe, option, found) or found[0] == ffi.NULL:
        return ""
    text = _decoded(found[0])
    lib.nng_strfree(found[0])
    return text


def _texts(pipe: Any, option: bytes) -> tuple[str, ...]:
    found = ffi.new("void **")
    if lib.nng_pipe_get_ptr(pipe.pipe, option, found) or found[0] == ffi.NULL:
        return ()
    names = ffi.cast("char **", found[0])
    texts: list[str] = []
    while names[len(texts)] != ffi.NULL:
        name = names[len(texts)]
        texts.append(_decoded(name))
        lib.nng_strfree(name)
    # nng allocates the list, and its texts, for each call.
    lib.nng_free(found[0], ffi.sizeof("char *") * (len(texts) + 1))
    return tuple(texts)


def _decoded(text: Any) -> str:
    raw: bytes = ffi.string(text)
    return raw.decode(errors="replace")
