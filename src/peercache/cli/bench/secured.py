"""What TLS costs: a cluster with certificates, and a bare pair of OpenSSL, for `bench local`."""

from __future__ import annotations

import ctypes
import datetime as dt
import os
import socket
from pathlib import Path
from typing import final

from peercache.cli.bench.limits import Memory
from peercache.config.settings import Config
from peercache.errors import PeerCacheError
from peercache.fabric.tcp.tls import TlsContext
from peercache.installation.library import tls_function
from peercache.trust.authority import CA_CERTIFICATE, Authority
from peercache.trust.files import TlsFiles
from peercache.trust.identity import CertificateRole, Identity

LIFETIME = dt.timedelta(days=30)
"""Shorter ones are warned about in the log."""

Settings = dict[str, str]


@final
class Secured:
    """The certificates of one cluster, for as long as a benchmark runs."""

    def __init__(self, folder: Path, cluster: str) -> None:
        """Make them in a new folder."""
        self.cluster = cluster
        self._folder = folder
        self._authority = Authority.create(folder, cluster, LIFETIME)

    def node(self, name: str) -> Settings:
        """Return the settings of a node, as flags have them."""
        settings = self._issue(CertificateRole.NODE, name)
        return {key.replace("_", "-"): value for key, value in settings.items()}

    def client(self, name: str) -> Settings:
        """Return the settings of a client."""
        return self._issue(CertificateRole.CLIENT, name)

    def pair(self) -> tuple[Settings, Settings]:
        """Return the settings of both ends of a bare pair, the sender first."""
        return self._issue(CertificateRole.NODE, "sender"), self.client("receiver")

    def _issue(self, role: CertificateRole, name: str) -> Settings:
        identity = Identity(self.cluster, role, name, ())
        path = self._authority.issue(identity, hosts=["127.0.0.1"], lifetime=LIFETIME)
        ca, key = self._folder / CA_CERTIFICATE, path.with_suffix(".key")
        files = {"tls_ca": ca, "tls_cert": path, "tls_key": key}
        return {name: os.fspath(file) for name, file in files.items()}


def send_stream(port: int, source: Memory, page_bytes: int, settings: Settings) -> None:
    """Send the whole working set over one encrypted connection, page by page, once."""
    send = tls_function(
        "peercache_tls_pair_send",
        ctypes.c_int,
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint64] * 2),
    )
    context = _context(settings, is_server=True)
    with socket.create_connection(("127.0.0.1", port)) as stream:
        if not send(context.handle, stream.fileno(), source.ctypes.data, len(source), page_bytes):
            raise PeerCacheError("the encrypted stream broke off")


def receive_stream(
    listener: socket.socket, target: Memory, page_bytes: int, settings: Settings
) -> float:
    """Receive one working set; return GB/s from the request on, after the handshake."""
    receive = tls_function(
        "peercache_tls_pair_receive",
        ctypes.c_double,
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint64] * 2),
    )
    context = _context(settings, is_server=False)
    stream, _ = listener.accept()
    with stream:
        seconds: float = receive(
            context.handle, stream.fileno(), target.ctypes.data, len(target), page_bytes
        )
    if seconds <= 0:
        raise PeerCacheError("the encrypted stream broke off")
    return len(target) / seconds / 1e9


def _context(settings: Settings, *, is_server: bool) -> TlsContext:
    files = TlsFiles.load(Config.load(dict(settings)), is_node=is_server)
    assert files is not None, "certificates were made above"
    return TlsContext(files, is_server=is_server)
