"""The cost of TLS: a cluster with certificates, and a bare stream of Python's `ssl`."""

from __future__ import annotations

import datetime as dt
import os
import socket
import ssl
import time
from pathlib import Path
from typing import final

from peercache.cli.bench.limits import Memory
from peercache.trust.authority import CA_CERTIFICATE, Authority
from peercache.trust.identity import CertificateRole, Identity

LIFETIME = dt.timedelta(days=30)
"""Shorter ones cause warnings in the log."""

SEND_BYTES = 512 * 2**10
RECEIVE_BYTES = 256 * 2**10
"""The sizes of the fabric's own sends and receives (`fabric/tcp/_tls.c`)."""

Settings = dict[str, str]


@final
class Secured:
    """The certificates of one cluster, for the time of a benchmark."""

    def __init__(self, folder: Path, cluster: str) -> None:
        """Create them in a new folder."""
        self.cluster = cluster
        self._folder = folder
        self._authority = Authority.create(folder, cluster, LIFETIME)

    def node(self, name: str) -> Settings:
        """Return the settings of a node, in the form of flags."""
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


class _Bare:
    """One end of a stream of Python's `ssl`, with sends and receives of the fabric's sizes."""

    def __init__(self, stream: socket.socket, settings: Settings, *, is_server: bool) -> None:
        """Shake hands."""
        self._stream = stream
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(settings["tls_ca"])
        context.load_cert_chain(settings["tls_cert"], settings["tls_key"])
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        while not self._is_ready():
            self._receive()

    def send(self, some: memoryview) -> None:
        self._tls.write(some)
        self._stream.sendall(self._outgoing.read())

    def receive(self, into: memoryview) -> int:
        """Return how many bytes arrived: at most those of one record."""
        while not (count := self._decrypt(into)):
            self._receive()
        return count

    def _decrypt(self, into: memoryview) -> int:
        try:
            return int(self._tls.read(len(into), into))
        except ssl.SSLWantReadError:
            return 0

    def _is_ready(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            self._stream.sendall(self._outgoing.read())
        return True

    def _receive(self) -> None:
        count = self._stream.recv_into(self._buffer)
        if not count:
            raise ConnectionError("the encrypted stream ended early")
        self._incoming.write(self._buffer[:count])


def send_stream(port: int, source: Memory, settings: Settings) -> None:
    """Send the whole working set over one encrypted connection, once."""
    with socket.create_connection(("127.0.0.1", port)) as stream:
        end = _Bare(stream, settings, is_server=True)
        end.receive(memoryview(bytearray(1)))
        for begin in range(0, len(source), SEND_BYTES):
            end.send(source.data[begin : begin + SEND_BYTES])


def receive_stream(listener: socket.socket, target: Memory, settings: Settings) -> float:
    """Receive one working set; return GB/s from the request on, after the handshake."""
    stream, _ = listener.accept()
    with stream:
        end = _Bare(stream, settings, is_server=False)
        started = time.perf_counter()
        end.send(memoryview(b"g"))
        done = 0
        while done < len(target):
            done += end.receive(target.data[done:])
        return len(target) / (time.perf_counter() - started) / 1e9
