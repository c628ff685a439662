"""TLS 1.3 records that no library would send, made from the secret of a real session."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import tempfile

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

HANDSHAKE, DATA = 22, 23
"""Types of records."""
KEY_UPDATE = b"\x18\x00\x00\x01\x00"
"""The message with which a peer replaces its key; it requests none."""
TICKET = b"\x04\x00\x00\x0e" + struct.pack(">IIBHBH", 60, 1, 0, 1, 0, 0)
"""The shortest NewSessionTicket: its lifetime, a number, and a ticket of one byte."""


class Forger:
    """Makes the records of one side of a session, whose secret it knows.

    The side itself must send nothing after its handshake.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._hash: hashes.HashAlgorithm = (
            hashes.SHA256() if len(secret) == hashes.SHA256.digest_size else hashes.SHA384()
        )
        self._use()

    def record(self, said: bytes, kind: int = DATA) -> bytes:
        """Return the next record."""
        head = struct.pack(">BHH", DATA, 0x0303, len(said) + 1 + 16)
        nonce = (self._iv ^ self._count).to_bytes(12, "big")
        self._count += 1
        return head + self._cipher.encrypt(nonce, said + bytes([kind]), head)

    def key_update(self) -> bytes:
        """Return a record with which this side replaces its key, and replace it."""
        made = self.record(KEY_UPDATE, HANDSHAKE)
        self._secret = self._expand(b"traffic upd", self._hash.digest_size)
        self._use()
        return made

    def _use(self) -> None:
        key_bytes = 16 if self._hash.digest_size == 32 else 32
        self._cipher = AESGCM(self._expand(b"key", key_bytes))
        self._iv = int.from_bytes(self._expand(b"iv", 12), "big")
        self._count = 0

    def _expand(self, label: bytes, size: int) -> bytes:
        info = struct.pack(">HB", size, 6 + len(label)) + b"tls13 " + label + b"\x00"
        return HKDFExpand(self._hash, size, info).derive(self._secret)


class Side:
    """One side of a session in Python's ssl, after its handshake over a connection.

    forger: makes its records.
    """

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, *, is_server: bool = False
    ) -> None:
        self.connection = connection
        self._into, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        with tempfile.NamedTemporaryFile("r") as log:
            context.keylog_filename = log.name
            self.session = context.wrap_bio(self._into, self._out, server_side=is_server)
            self._shake_hands()
            context.keylog_filename = None
            lines = [line.split() for line in log.read().splitlines()]
        name = "SERVER_TRAFFIC_SECRET_0" if is_server else "CLIENT_TRAFFIC_SECRET_0"
        self.forger = Forger(next(bytes.fromhex(line[2]) for line in lines if line[0] == name))

    def send(self, said: bytes) -> None:
        """Send it in a record of its own."""
        self.connection.sendall(self.forger.record(said))

    def flush(self) -> None:
        """Send what the session, in place of the forger, has made."""
        self.connection.sendall(self._out.read())

    def receive(self, count: int) -> bytes:
        """Return so many bytes of the other side's; fewer if it hangs up."""
        got = b""
        while len(got) < count:
            with contextlib.suppress(ssl.SSLWantReadError):
                got += self.session.read(count - len(got))
                continue
            try:
                received = self.connection.recv(65536)
            except ConnectionResetError:
                break
            if not received:
                break
            self._into.write(received)
        return got

    def _shake_hands(self) -> None:
        while not self._has_shaken_hands():
            self.flush()
            self._into.write(self.connection.recv(65536))
        self.flush()

    def _has_shaken_hands(self) -> bool:
        with contextlib.suppress(ssl.SSLWantReadError):
            self.session.do_handshake()
            return True
        return False
