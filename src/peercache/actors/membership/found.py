"""Found: addresses that discovery gave, tried as long as no live member is known there. Pure.

A source may give thousands that are long dead, or none for hours. So a few are tried at a time, in
turn, the newest first, beside the candidates that members name: neither keeps the other out.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Container, Iterable

TRIED_AT_ONCE_MAX = 8
"""Addresses tried at one time: each is a link of some descriptors."""

ANSWER_S = 1.0
"""How long one may take to answer."""

AGAIN_S = 5.0
"""How soon one that did not answer is tried again: partitions heal in ten seconds."""

ALIAS_S = 60.0
"""How soon one is tried again that has answered: its member has another address of its own, or has
been lost since, and is redialled as such."""

LOOKS_MAX = 256
"""Addresses looked at in one turn: some tens of microseconds."""


class FoundAddresses:
    """The addresses of discovery, and when each is tried next."""

    def __init__(self, *, rng: random.Random) -> None:
        """Start with none."""
        self._rng = rng
        self._next_at: dict[str, float] = {}
        self._order: deque[str] = deque()
        self._tried: dict[str, float] = {}

    def __len__(self) -> int:
        """Return how many addresses discovery gives."""
        return len(self._next_at)

    @property
    def tried(self) -> Iterable[str]:
        """The addresses that are being tried."""
        return self._tried

    def replace(self, addresses: Iterable[str], now: float) -> None:
        """Try these addresses, and no others; those that are new come first."""
        given = dict.fromkeys(addresses)
        new = [address for address in given if address not in self._next_at]
        # A thousand nodes that hear one answer try none of it in step.
        self._rng.shuffle(new)
        kept = [address for address in self._order if address in given]
        self._order = deque([*new, *kept])
        self._next_at = {address: self._next_at.get(address, now) for address in self._order}

    def answered(self, address: str, now: float) -> None:
        """Note that a process has answered there."""
        if self._tried.pop(address, None) is not None and address in self._next_at:
            self._next_at[address] = now + ALIAS_S

    def due(self, now: float, *, reached: Container[str], own: str) -> list[str]:
        """Return the addresses to try now: those at which no member is reached."""
        for address in [one for one, until in self._tried.items() if until <= now]:
            del self._tried[address]
        addresses: list[str] = []
        for _ in range(min(LOOKS_MAX, len(self._order))):
            if len(self._tried) >= TRIED_AT_ONCE_MAX:
                break
            address = self._order[0]
            self._order.rotate(-1)
            if address == own or address in reached or self._next_at[address] > now:
                continue
            self._tried[address] = now + ANSWER_S
            self._next_at[address] = now + AGAIN_S * self._rng.uniform(0.5, 1.0)
            addresses.append(address)
        return addresses
