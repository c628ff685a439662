"""The circuit breaker: which peers are not worth waiting for just now.

A reader's own evidence opens it at once, before any heartbeat notices: a refused or broken
connection, or `STALL_S` of waiting without a single answer. That a big batch met its caller's
deadline is no evidence. An open breaker lets one probe through when its back-off is over.
A peer has two: it may answer questions and yet serve no pages, as behind a firewall.
"""

from __future__ import annotations

from threading import Lock
from typing import final

import attrs

STALL_S = 0.25
"""Waiting without progress after which a peer is taken for hung: far above a garbage collection or
a scheduler hiccup, far below what an engine would rather recompute in."""

BACKOFF_MIN_S = 0.5
BACKOFF_MAX_S = 4.0
"""A hung peer costs one stalled probe per back-off, so at most 6 % of the time of one caller."""


def data_port(peer: int) -> int:
    """Return what the breaker of a peer's data port is called; the peer's own is of its control."""
    return ~peer


@attrs.define
class _Peer:
    waited_s: float = 0.0
    waited_until: float = float("-inf")
    backoff_s: float = 0.0
    open_until: float = 0.0
    is_probed: bool = False


@final
class Breakers:
    """One breaker a peer; thread-safe."""

    def __init__(self) -> None:
        """Start with every breaker closed."""
        self._peers: dict[int, _Peer] = {}
        self._lock = Lock()
        self.opened_count = 0

    def available(self, peer: int, now: float) -> bool:
        """Return whether to ask this peer; True for one caller when a probe is due."""
        with self._lock:
            state = self._peers.get(peer)
            if state is None or not state.backoff_s:
                return True
            if now < state.open_until:
                return False
            # This caller probes; the others wait for what it finds.
            state.open_until = now + state.backoff_s
            state.is_probed = True
            return True

    def may_be_available(self, peer: int, now: float) -> bool:
        """Return whether `available` would be True, without taking the probe."""
        with self._lock:
            state = self._peers.get(peer)
            return state is None or not state.backoff_s or now >= state.open_until

    def is_open(self, peer: int) -> bool:
        """Return whether the breaker is open, without taking the probe."""
        with self._lock:
            state = self._peers.get(peer)
            return state is not None and state.backoff_s > 0

    def answered(self, peer: int) -> None:
        """Note any sign of life: closes the breaker."""
        if peer in self._peers:
            with self._lock:
                self._peers.pop(peer, None)

    def waited(self, peer: int, waited_s: float, now: float) -> None:
        """Note that the last `waited_s` brought nothing."""
        with self._lock:
            state = self._peers.setdefault(peer, _Peer())
            # Threads that wait at the same time wait the same time: it counts once.
            state.waited_s += max(0.0, min(waited_s, now - state.waited_until))
            state.waited_until = max(state.waited_until, now)
            # A hair under the limit counts: callers wait STALL_S by the same clock.
            if state.waited_s >= STALL_S * 0.98:
                self._open(state, now)

    def failed(self, peer: int, now: float) -> None:
        """Note a refused or broken connection: opens at once."""
        with self._lock:
            self._open(self._peers.setdefault(peer, _Peer()), now)

    def forget(self, alive: set[int]) -> None:
        """Forget peers that the view no longer names."""
        with self._lock:
            for peer in [p for p in self._peers if (p if p >= 0 else ~p) not in alive]:
                del self._peers[peer]

    def _open(self, state: _Peer, now: float) -> None:
        state.waited_s = 0.0
        if not state.backoff_s:
            self.opened_count += 1
        elif not state.is_probed:
            # Whoever asked before it opened tells nothing new: only probes lengthen the back-off.
            return
        state.backoff_s = min(max(2 * state.backoff_s, BACKOFF_MIN_S), BACKOFF_MAX_S)
        state.open_until = now + state.backoff_s
        state.is_probed = False
