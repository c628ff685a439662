"""A transfer engine that writes into another process' memory over TCP.

Mooncake's own needs libibverbs and 140 MB. A prefill engine hands a request's pages to a decode
engine through it; they do not pass through the storage backend, which is what the tests are about.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
from collections.abc import Sequence

_HEADER = struct.Struct("<QQ")
_DONE = b"\x01"
_FAILED = -1


class TransferEngine:
    """Mooncake's class of the same name, as far as SGLang calls it: 0 is success, -1 a failure."""

    def __init__(self) -> None:
        self._regions: dict[int, int] = {}
        self._links: dict[str, socket.socket] = {}
        self._sending = threading.Lock()

    def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int:
        """Listen on a free port of the host."""
        self._listener = socket.create_server((hostname, 0))
        threading.Thread(target=self._accept, daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        """Return the port of this engine; with the host it is the session of its peers."""
        return int(self._listener.getsockname()[1])

    def batch_register_memory(self, addresses: Sequence[int], lengths: Sequence[int]) -> int:
        """Let peers write into some memory."""
        self._regions.update(zip(addresses, lengths, strict=True))
        return 0

    def batch_unregister_memory(self, addresses: Sequence[int]) -> int:
        """Let peers no longer write into some memory."""
        for address in addresses:
            self._regions.pop(address, None)
        return 0

    def batch_transfer_sync_write(
        self,
        session: str,
        sources: Sequence[int],
        destinations: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Write pieces of our memory into a peer's; return when all of them are there."""
        with self._sending:
            try:
                link = self._links.get(session) or self._dial(session)
                for source, destination, length in zip(sources, destinations, lengths, strict=True):
                    link.sendall(_HEADER.pack(destination, length))
                    link.sendall((ctypes.c_char * length).from_address(source))
                    if link.recv(1) != _DONE:
                        raise ConnectionError(session)
            except OSError:
                self._links.pop(session, None)
                return _FAILED
        return 0

    def send_probe(self, session: str) -> int:
        """Return whether a peer that failed can be reached again."""
        return self.batch_transfer_sync_write(session, (), (), ())

    def _dial(self, session: str) -> socket.socket:
        host, _, port = session.rpartition(":")
        self._links[session] = socket.create_connection((host, int(port)), timeout=60.0)
        return self._links[session]

    def _accept(self) -> None:
        while True:
            link, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link, link.makefile("rb") as pieces:
            while header := pieces.read(_HEADER.size):
                address, length = _HEADER.unpack(header)
                if not self._may_write(address, length):
                    return
                memory = (ctypes.c_char * length).from_address(address)
                if pieces.readinto(memory) != length:
                    return
                link.sendall(_DONE)

    def _may_write(self, address: int, length: int) -> bool:
        return any(
            begin <= address and address + length <= begin + size
            for begin, size in self._regions.items()
        )
