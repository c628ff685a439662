"""A relay in front of a port: a link whose rate can be set."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time

import attrs

from tests.pace import LOOK_S
from tests.system.nodes import Closing

NODE_HOST, LINK_HOST = "127.0.0.2", "127.0.0.3"
"""Addresses of loopback, of the node itself and of the relays."""

PIECE = 8192
BEHIND_S = 0.02
"""How much a busy machine may catch up at once."""


class Relay(Closing):
    """Passes bytes between those who connect and a target, in one thread.

    byte_s: seconds for each byte that the target sends, over all connections; 0 is no limit, inf
            lets none pass. A change holds at once.
    """

    def __init__(self, at: tuple[str, int], target: tuple[str, int], byte_s: float = 0.0) -> None:
        """Listen at an address."""
        self.byte_s = byte_s
        self._target = target
        self._free_at = 0.0
        self._is_ended = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(at)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every connection."""
        self._is_ended.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._is_ended.is_set():
            for key, _ in self._selector.select(0.05):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._pass(key.fileobj, *key.data)

    def _accept(self) -> None:
        caller, _ = self._listener.accept()
        target = socket.create_connection(self._target)
        for one, other, is_slow in ((caller, target, False), (target, caller, True)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(one, selectors.EVENT_READ, (other, is_slow))

    def _pass(self, source: socket.socket, other: socket.socket, is_slow: bool) -> None:
        raw = b""
        with contextlib.suppress(OSError):
            raw = source.recv(PIECE if self.byte_s else 1 << 18)
            if raw:
                if is_slow and self.byte_s:
                    self._wait(len(raw))
                other.sendall(raw)
                return
        for end in (source, other):
            # The other end may have been closed first.
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(end)
            end.close()

    def _wait(self, size: int) -> None:
        begins = max(self._free_at, time.monotonic() - BEHIND_S)
        while not self._is_ended.is_set():
            self._free_at = begins + size * self.byte_s
            left_s = self._free_at - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(left_s, LOOK_S))


@attrs.frozen
class SlowLink(Closing):
    """A node's addresses that others reach through relays: control at full speed, data at a rate.

    flags: of the node. data: its link, whose rate can be set.
    """

    flags: tuple[str, ...]
    control: Relay
    data: Relay

    @classmethod
    def open(cls, byte_s: float = 0.0) -> SlowLink:
        """Choose free ports, and open the link."""
        ports = []
        for _ in range(2):
            with socket.create_server((NODE_HOST, 0)) as chosen:
                ports.append(chosen.getsockname()[1])
        control, data = ports
        return cls(
            ("--listen", f"{NODE_HOST}:{control}", "--data-port", str(data),
             "--advertise", LINK_HOST, "--insecure", "true"),
            Relay((LINK_HOST, control), (NODE_HOST, control)),
            Relay((LINK_HOST, data), (NODE_HOST, data), byte_s),
        )  # fmt: skip

    def close(self) -> None:
        """Close both."""
        self.control.close()
        self.data.close()
