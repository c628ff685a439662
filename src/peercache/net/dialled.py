"""A connection that a client has dialled, and whether it may be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from peercache.net.peers import Peer, Transport
from peercache.net.sockets import Dialer, reached
from peercache.net.tls import ControlTls


@final
class Dialled:
    """One nng socket to one incarnation. Implements `Connection`."""

    def __init__(
        self, url: str, *, tls: ControlTls | None, accepts: Callable[[Peer], bool]
    ) -> None:
        self.url = url
        self._accepts = accepts
        self.is_connected = False
        self._is_broken = False
        self._peer = Peer(Transport.TCP)
        self.is_fresh = True
        self.is_probed = False
        self._dialer = Dialer(
            url,
            on_connected=self._connected,
            on_removed=self._removed,
            tls=tls,
            accepts=self._judged,
            waits_to_send=False,
        )
        self.fd = self._dialer.receive_fd
        self.send = self._dialer.send
        self.receive = self._dialer.receive
        self.close = self._dialer.close

    @property
    def is_broken(self) -> bool:
        """Whether it has ended, or must not be used again."""
        return self._is_broken or self._peer.has_expired()

    @is_broken.setter
    def is_broken(self, is_broken: bool) -> None:
        self._is_broken = is_broken

    def _judged(self, peer: Peer) -> bool:
        self._peer = peer
        is_accepted = self._accepts(peer)
        # Another process listens there: a question fails now, not at its deadline.
        self.is_broken = self.is_broken or not is_accepted
        return is_accepted

    def _connected(self) -> None:
        self.is_connected = True

    def _removed(self) -> None:
        self.is_broken = True

    def is_refused(self, timeout_s: float) -> bool:
        """Probe whether the address refuses: once a lease, and only until it is connected."""
        if self.is_connected or self.is_probed:
            return False
        self.is_probed = True
        return reached(self.url, timeout_s) is False
