"""The circuit breakers of a client: which peers it neither asks nor reads for now.

The client's own evidence opens a breaker at once, before any heartbeat notices: a refused or broken
connection, or `stall_s` of waiting without a single answer. A big batch that meets its caller's
deadline is no evidence. An open breaker lets one probe through when its back-off is over.
A peer has two, one for questions and one for its data port: behind a firewall it may answer
questions and yet serve no pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import final

import attrs

from peercache.observability.reasons import PEER_UNREACHABLE

STALL_S = 0.25
"""The least waiting without progress after which a peer counts as hung: far above a garbage
collection or a scheduler hiccup."""

STALL_FRACTION = 1 / 8
"""The same as a part of a call's deadline, which says how long the engine would rather wait than
compute the page again: with a deadline of 2 s it is `STALL_S`. A host with more work than cores
answers late, and is not hung: there the deadline is longer."""

BACKOFF_MIN_S = 0.5
BACKOFF_MAX_S = 4.0
"""A hung peer costs one stalled probe per back-off, so at most 6 % of the time of one caller."""


def data_port(peer: int) -> int:
    """Return the name of the breaker of a peer's data port; that of its questions is `peer`."""
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

    def __init__(self, *, op_timeout_s: float = 0.0) -> None:
        """Start with every breaker closed. op_timeout_s: the deadline of the client's calls."""
        self._op_timeout_s = op_timeout_s
        self._peers: dict[int, _Peer] = {}
        self._lock = Lock()
        self.opened_count = 0

    @property
    def stall_s(self) -> float:
        """Return the waiting without progress after which a peer counts as hung."""
        return max(STALL_S, self._op_timeout_s * STALL_FRACTION)

    def available(self, peer: int, now: float) -> bool:
        """Return whether to ask this peer; True for one caller when a probe is due."""
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
        """Return whether to read from this holder; True for one caller when a probe is due."""
        return self.available(data_port(holder), now)

    def end_read(self, holder: int, failure: str, now: float) -> None:
        """Note how a read ended: one that the holder did not serve opens its breaker."""
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
        """Note any sign of life: closes the breaker."""
        if peer in self._peers:
            with self._lock:
                self._peers.pop(peer, None)

    def waited(self, peer: int, waited_s: float, now: float) -> None:
        """Note that the last `waited_s` brought nothing."""
        with self._lock:
            state = self._peers.setdefault(peer, _Peer())
            # Several threads may wait for the peer during the same time, which counts once.
            state.waited_s += max(0.0, min(waited_s, now - state.waited_until))
            state.waited_until = max(state.waited_until, now)
            # A wait slightly under the limit counts: callers wait stall_s by the same clock.
            if state.waited_s >= self.stall_s * 0.98:
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
            # An older question is no new evidence: only probes lengthen the back-off.
            return
        state.backoff_s = min(max(2 * state.backoff_s, BACKOFF_MIN_S), BACKOFF_MAX_S)
        state.open_until = now + state.backoff_s
        state.is_probed = False
