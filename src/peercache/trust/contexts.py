"""TLS contexts for two purposes: requests to etcd, and finding out the identity of a node.

`EtcdFiles` are the files for mutual authentication with etcd over etcds://. `shake_hands` finds
out, with a TLS handshake, the identity of a node, or why it refuses; nng does not report that.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any, final

import attrs

from peercache.config.quantities import parse_address
from peercache.config.settings import Config
from peercache.errors import ConfigError, Rejected
from peercache.trust.files import LiveTls, load_own_certificate, read_secret
from peercache.trust.identity import SHARED_NAME


@final
@attrs.frozen
class EtcdFiles:
    """The settings that name the files."""

    config: Config

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of a connection, from the current files; raise ConfigError."""
        authorities, certificate, key = (
            self.config.etcd_ca, self.config.etcd_cert, self.config.etcd_key
        )  # fmt: skip
        try:
            context = ssl.create_default_context(cafile=authorities or None)
        except OSError as error:
            raise _unusable("etcd_ca", authorities, error) from error
        if certificate:
            read_secret("etcd_key", key, self.config)
            try:
                context.load_cert_chain(certificate, key)
            except OSError as error:
                raise _unusable("etcd_cert", f"{certificate} with {key}", error) from error
        return context


def _unusable(name: str, path: str, error: OSError) -> ConfigError:
    """Return the error about a file that TLS cannot use; ssl.SSLError is an OSError."""
    why = "it is no PEM, or no pair" if isinstance(error, ssl.SSLError) else error.strerror
    return ConfigError(name, f"{path} cannot be used ({why}): give PEM files that this user reads")


CONNECT_S = 2.0
"""How long to wait for one node."""

ALERT_S = 0.5
"""Wait for a refusal: with TLS 1.3 it comes after the client's handshake has ended."""


@attrs.frozen
class HandshakeAnswer:
    """identity: that of the node; problem: why it or this process refuses; is_silent: no answer."""

    identity: str = ""
    problem: str = ""
    is_silent: bool = False


def client_context(tls: LiveTls) -> ssl.SSLContext:
    """Return the TLS context of a client of the cluster."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=tls.files.ca_pem)
    load_own_certificate(context, tls.files)
    return context


def shake_hands(address: str, context: ssl.SSLContext, tls: LiveTls) -> HandshakeAnswer:
    """Connect to the control port of a node; blocks for CONNECT_S and the resolver."""
    try:
        with (
            socket.create_connection(parse_address(address), timeout=CONNECT_S) as plain,
            context.wrap_socket(plain, server_hostname=SHARED_NAME) as encrypted,
        ):
            peer: Any = encrypted.getpeercert()
            names = [name for kind, name in peer["subjectAltName"] if kind == "URI"]
            identity = tls.admit(peer["serialNumber"], names)
            encrypted.settimeout(ALERT_S)
            try:
                is_closed = not encrypted.recv(1)
            except TimeoutError:
                is_closed = False
            problem = "it does not accept this host's certificate" if is_closed else ""
            return HandshakeAnswer(identity.uri(), problem)
    except Rejected as error:
        return HandshakeAnswer(problem=error.detail)
    except ssl.SSLError as error:
        problem = getattr(error, "verify_message", "") or error.reason or ""
        return HandshakeAnswer(problem=problem)
    except OSError as error:
        return HandshakeAnswer(problem=error.strerror or "no answer in time", is_silent=True)
