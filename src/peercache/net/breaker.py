"""The circuit breakers of a client: the peers that it does not use at the moment.

A failure that the client itself sees opens a breaker at once, before any heartbeat is missed: a
refused or broken connection, or `stall_s` of waiting without a single answer. A big batch that
reaches its caller's deadline is no such failure. An open breaker lets one probe through after its
back-off. A peer has two
breakers, one for requests and one for its data port: behind a firewall it may answer requests but
serve no pages.

Long before that, an owner without an answer may be slow. `AnswerTimes` has the usual answer time of
each peer, and decides after how long another owner is asked for the same keys, and how often
(ADR 0040).
"""

from __future__ import annotations

import math
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


HEDGE_MIN_S = 0.005
"""The shortest wait for an answer before another owner is asked: what a busy thread of the engine
may take by holding the interpreter's lock once, and ten times what an idle owner needs."""

HEDGE_FIRST_S = 0.01
"""The same for a peer that has not answered yet: a first answer may follow a TLS handshake."""

HEDGE_MAX_S = 0.1
"""The longest one: beyond that, the stall of a breaker is near."""

DEVIATIONS = 4
"""How many mean deviations above the mean an answer is still usual, as in RFC 6298."""

MULTIPLE = 2
"""How many times its usual longest time an answer may take."""

MEAN_GAIN, DEVIATION_GAIN = 1 / 8, 1 / 4
"""The weights of a new answer in the mean and in the deviation, as in RFC 6298."""

HEDGES_PER_REQUEST = 0.1
"""If all owners are slow at the same time, because the machine is busy, the load must not double:
at most one request in ten is followed by another one."""

HEDGES_AT_ONCE = 10.0
"""Unused requests of that kind that a client may save: a failed node is noticed by several calls at
the same time."""

LAG_MIN_S = 0.5
LAG_MAX_S = 4.0
"""How long a peer that has not answered in time is asked last, unless a message arrives from it.
Then it is asked like any owner, which costs one such wait."""


@attrs.define
class _Times:
    mean_s: float
    deviation_s: float
    lags_until: float = float("-inf")
    lag_s: float = 0.0


@final
class AnswerTimes:
    """The answer times of each peer, which peers lag, and how often to ask others. Thread-safe."""

    def __init__(self) -> None:
        """Start without answers."""
        self._lock = Lock()
        self._times: dict[int, _Times] = {}
        self._lagging: dict[int, _Times] = {}
        self._saved = HEDGES_AT_ONCE

    def answered(self, peer: int, took_s: float) -> None:
        """Record how long an answer has taken."""
        with self._lock:
            times = self._times.get(peer)
            if times is None:
                self._times[peer] = _Times(took_s, took_s / 2)
                return
            error_s = took_s - times.mean_s
            times.deviation_s += DEVIATION_GAIN * (abs(error_s) - times.deviation_s)
            times.mean_s += MEAN_GAIN * error_s

    def hedge_s(self, peer: int) -> float:
        """Return after how long without an answer of this peer another owner is asked."""
        times = self._times.get(peer)
        if times is None:
            return HEDGE_FIRST_S
        usual_s = times.mean_s + DEVIATIONS * times.deviation_s
        return min(max(HEDGE_MIN_S, MULTIPLE * usual_s), HEDGE_MAX_S)

    def may_hedge(self) -> bool:
        """Return whether requests may be followed by others now."""
        return self._saved >= 1

    def hedged(self) -> None:
        """Record that requests are followed by others."""
        with self._lock:
            self._saved -= 1

    def asked(self) -> None:
        """Record requests of one call that may be followed by others."""
        with self._lock:
            self._saved = min(HEDGES_AT_ONCE, self._saved + HEDGES_PER_REQUEST)

    def lags(self, peer: int, now: float) -> None:
        """Record that a peer has not answered in time: it is asked last for a while."""
        with self._lock:
            times = self._times.setdefault(peer, _Times(HEDGE_FIRST_S / MULTIPLE, 0.0))
            if now >= times.lags_until:
                times.lag_s = min(max(2 * times.lag_s, LAG_MIN_S), LAG_MAX_S)
                times.lags_until = now + times.lag_s
                self._lagging[peer] = times

    def is_alive(self, peer: int) -> None:
        """Record that a message has arrived from a peer: it does not lag."""
        if peer in self._lagging:
            with self._lock:
                times = self._lagging.pop(peer, None)
                if times is not None:
                    times.lags_until, times.lag_s = float("-inf"), 0.0

    def lagging(self, now: float) -> set[int]:
        """Return the peers that lag."""
        if not self._lagging:
            return set()
        with self._lock:
            return {peer for peer, times in self._lagging.items() if now < times.lags_until}

    def forget(self, alive: set[int]) -> None:
        """Forget peers that the view no longer names."""
        with self._lock:
            for peer in self._times.keys() - alive:
                del self._times[peer]
                self._lagging.pop(peer, None)


@attrs.define
class _Peer:
    waited_s: float = 0.0
    silent_s: float = 0.0
    has_failed: bool = False
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
        self.times = AnswerTimes()

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

    def silent_s(self, peer: int) -> float:
        """Return how long callers have waited for a peer since its last message.

        Infinite if a connection to it has failed since: it does not run, and waiting is useless.
        """
        with self._lock:
            state = self._peers.get(peer)
            if state is None:
                return 0.0
            return math.inf if state.has_failed else state.silent_s

    def answered(self, peer: int) -> None:
        """Record an answer of the peer: closes the breaker."""
        self.times.is_alive(peer)
        if peer in self._peers:
            with self._lock:
                self._peers.pop(peer, None)

    def waited(self, peer: int, waited_s: float, now: float) -> None:
        """Record that the last `waited_s` brought no progress."""
        with self._lock:
            state = self._peers.setdefault(peer, _Peer())
            # Several threads may wait for the peer at the same time; the time counts once.
            more_s = max(0.0, min(waited_s, now - state.waited_until))
            state.waited_s += more_s
            state.silent_s += more_s
            state.waited_until = max(state.waited_until, now)
            # A wait slightly below the limit counts: callers wait for stall_s by the same clock.
            if state.waited_s >= self.stall_s * 0.98:
                self._open(state, now)

    def failed(self, peer: int, now: float) -> None:
        """Record a refused or broken connection: opens the breaker at once."""
        with self._lock:
            state = self._peers.setdefault(peer, _Peer())
            state.has_failed = True
            self._open(state, now)

    def forget(self, alive: set[int]) -> None:
        """Forget peers that the view no longer names."""
        self.times.forget(alive)
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
