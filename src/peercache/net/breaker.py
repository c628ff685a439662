"""The circuit breakers of a client: the peers that it does not use at the moment.

A failure that the client itself sees opens a breaker at once, before any heartbeat is missed: a
refused or broken connection, or `stall_s` of waiting without a single answer. A big batch that
reaches its caller's deadline is no such failure. An open breaker lets one probe through after its
back-off. A peer has two
breakers, one for requests and one for its data port: behind a firewall it may answer requests but
serve no pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import final

import attrs

from peercache.observability.reasons import PEER_UNREACHABLE

STALL_S = 0.25
"""The minimum wait without progress after which a peer counts as hung: far above a garbage
collection or a scheduling delay."""

STALL_FRACTION = 1 / 8
"""The same as a fraction of a call's deadline, which is how long the engine prefers to wait instead
of computing the page again: with a deadline of 2 s it is `STALL_S`. An overloaded host answers
slowly, but is not hung: there the deadline should be longer."""

BACKOFF_MIN_S = 0.5
BACKOFF_MAX_S = 4.0
"""A hung peer costs one stalled probe per back-off, so at most 6 % of the time of one caller."""


def data_port(peer: int) -> int:
    """Return the name of the breaker of a peer's data port; that of its requests is `peer`."""
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
    """The circuit breakers of the peers, one each; thread-safe."""

    def __init__(self, *, op_timeout_s: float = 0.0) -> None:
        """Start with every breaker closed. op_timeout_s: the deadline of the client's calls."""
        self._op_timeout_s = op_timeout_s
        self._peers: dict[int, _Peer] = {}
        self._lock = Lock()
        self.opened_count = 0

    @property
    def stall_s(self) -> float:
        """Return how long a wait without progress is until a peer counts as hung."""
        return max(STALL_S, self._op_timeout_s * STALL_FRACTION)

    def available(self, peer: int, now: float) -> bool:
        """Return whether to use this peer; True for only one caller when a probe is due."""
        with self._lock:
            state = self._peers.get(peer)
            if state is None or not state.backoff_s:
                return True
            if now < state.open_until:
                return False
            # This caller probes; the others wait for its result.
            state.open_until = now + state.backoff_s
            state.is_probed = True
            return True

    def may_read(self, holders: Iterable[int], now: float) -> bool:
        """Return whether `begin_read` would be True for all of them, without taking a probe."""
        if not self._peers:
            return True
        with self._lock:
            states = [self._peers.get(data_port(holder)) for holder in holders]
            return all(
                state is None or not state.backoff_s or now >= state.open_until for state in states
            )

    def begin_read(self, holder: int, now: float) -> bool:
        """Return whether to read from this holder; True for only one caller if a probe is due."""
        return self.available(data_port(holder), now)

    def end_read(self, holder: int, failure: str, now: float) -> None:
        """Record the result of a read: a failure of the holder opens its breaker."""
        if failure == PEER_UNREACHABLE:
            self.failed(data_port(holder), now)
        elif not failure:
            self.answered(data_port(holder))

    def is_open(self, peer: int) -> bool:
        """Return whether the breaker is open, without taking the probe."""
        with self._lock:
            state = self._peers.get(peer)
            return state is not None and state.backoff_s > 0

    def answered(self, peer: int) -> None:
        """Record an answer of the peer: closes the breaker."""
        if peer in self._peers:
            with self._lock:
                self._peers.pop(peer, None)

    def waited(self, peer: int, waited_s: float, now: float) -> None:
        """Record that the last `waited_s` brought no progress."""
        with self._lock:
            state = self._peers.setdefault(peer, _Peer())
            # Several threads may wait for the peer at the same time; the time counts once.
            state.waited_s += max(0.0, min(waited_s, now - state.waited_until))
            state.waited_until = max(state.waited_until, now)
            # A wait slightly below the limit counts: callers wait for stall_s by the same clock.
            if state.waited_s >= self.stall_s * 0.98:
                self._open(state, now)

    def failed(self, peer: int, now: float) -> None:
        """Record a refused or broken connection: opens the breaker at once."""
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
            # An older request is no new evidence: only probes increase the back-off.
            return
        state.backoff_s = min(max(2 * state.backoff_s, BACKOFF_MIN_S), BACKOFF_MAX_S)
        state.open_until = now + state.backoff_s
        state.is_probed = False
