"""Candidates: addresses at which gossip says that members are, until they answer themselves. Pure.

What others say of a node that this one does not know is an address to try, and never a member: a
peer may name thousands that do not exist. A few are dialled at a time, taking turns among those
that named them, so that no peer's inventions keep out what another one names.
"""

from __future__ import annotations

import random

import attrs

AT_ONCE_MAX = 8
"""Candidates dialled at one time: each is a link of some descriptors. An honest one answers within
milliseconds and makes room."""

ANSWER_S = 1.0
"""How long a candidate may take to answer."""

AGAIN_MIN_S = 1.0
AGAIN_MAX_S = 30.0
"""Back-off of an address that did not answer, should it be named again."""

OF_ONE_MAX = 16_384
"""Candidates that one peer names: the members of the largest cluster."""

WAITING_MAX = 32_768
"""Candidates that all peers name; further ones are dropped, and named again by honest peers."""

FAILED_MAX = 16_384
"""Addresses remembered that did not answer."""


@attrs.define
class _Failed:
    until: float
    delay_s: float


class Candidates:
    """The addresses to try, by the peer that named them, and those that are being dialled."""

    def __init__(self, *, rng: random.Random) -> None:
        """Start with none."""
        self._rng = rng
        self._waiting: dict[int, dict[str, None]] = {}  # the next peer's turn first
        self._count = 0
        self._dialled: dict[str, float] = {}
        self._failed: dict[str, _Failed] = {}  # oldest first

    def __len__(self) -> int:
        """Return how many addresses wait to be dialled."""
        return self._count

    @property
    def dialled(self) -> frozenset[str]:
        """The addresses that are being dialled."""
        return frozenset(self._dialled)

    def name(self, address: str, source: int, now: float) -> None:
        """Try this address, which a peer has named; not again while it is known not to answer."""
        failed = self._failed.get(address)
        if address in self._dialled or (failed is not None and now < failed.until):
            return
        named = self._waiting.setdefault(source, {})
        if address not in named and len(named) < OF_ONE_MAX and self._count < WAITING_MAX:
            named[address] = None
            self._count += 1
        if not named:
            del self._waiting[source]

    def answered(self, address: str) -> None:
        """Note that a process has answered there."""
        self._dialled.pop(address, None)
        self._failed.pop(address, None)

    def due(self, now: float) -> list[str]:
        """Return the addresses to dial now; give up those that did not answer in time."""
        for address in [one for one, until in self._dialled.items() if until <= now]:
            del self._dialled[address]
            self._fail(address, now)
        found: list[str] = []
        while self._waiting and len(self._dialled) < AT_ONCE_MAX:
            source, named = next(iter(self._waiting.items()))
            address = next(iter(named))
            # The next peer's turn.
            del self._waiting[source], named[address]
            self._count -= 1
            if named:
                self._waiting[source] = named
            if address not in self._dialled:
                self._dialled[address] = now + ANSWER_S
                found.append(address)
        return found

    def _fail(self, address: str, now: float) -> None:
        before = self._failed.pop(address, None)
        delay_s = AGAIN_MIN_S if before is None else min(2 * before.delay_s, AGAIN_MAX_S)
        # Nodes that heard the same gossip do not dial in step.
        self._failed[address] = _Failed(now + delay_s * self._rng.uniform(0.5, 1.0), delay_s)
        if len(self._failed) > FAILED_MAX:
            del self._failed[next(iter(self._failed))]
