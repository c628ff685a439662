"""Reconnect: which addresses to redial, and when. Pure.

A node redials two kinds of addresses as long as no live member is known there. Those of
`discovery_addr` it redials without end, because a partition has no longest time. Those of members
that were lost without a goodbye it redials for LOST_S: later another cluster may have the address.
"""

from __future__ import annotations

import math
import random
from collections.abc import Container, Mapping

import attrs

LOST_MAX = 256
"""Lost addresses remembered. One that answers is enough to heal: it knows the other members."""

LOST_S = 600.0
"""How long a lost address is redialled. Two sides of a longer partition find each other by
`discovery_addr`."""

REDIALS_PER_TURN = 2
"""Lost addresses redialled at one time: a thousand nodes that lost a thousand do not flood."""

ALIAS_S = 60.0
"""Longest back-off for a discovery address whose head is known under another address (a host name
and its number). It is redialled now and then all the same, for lists that differ between hosts."""


@attrs.define
class _Redial:
    at: float
    delay_s: float
    until: float = math.inf


class Reconnect:
    """The addresses to redial, each with the time of its next dial and its back-off."""

    def __init__(
        self,
        discovery: Mapping[str, int],
        *,
        first_s: float,
        longest_s: float,
        rng: random.Random,
    ) -> None:
        """Dial `discovery` (address → head rank) at once and lost addresses soon; then back off."""
        self._discovery = dict(discovery)
        self._first_s = first_s
        self._longest_s = longest_s
        self._rng = rng
        self._heads = {address: _Redial(-math.inf, first_s) for address in discovery}
        self._lost: dict[str, _Redial] = {}

    def __len__(self) -> int:
        """Return the number of lost addresses."""
        return len(self._lost)

    def heads(self) -> tuple[str, ...]:
        """Return the discovery addresses that are not this node's own."""
        return tuple(self._heads)

    def is_own(self, control: str, head_rank: int) -> None:
        """Dial this address no longer, nor the head of this rank: they are this node's."""
        for address, rank in self._discovery.items():
            if address == control or rank == head_rank:
                self._heads.pop(address, None)
        self._lost.pop(control, None)

    def lost(self, address: str, now: float) -> None:
        """Redial this address until `found`, for LOST_S; the one lost longest makes room."""
        if address in self._heads or address in self._lost:
            return
        if len(self._lost) >= LOST_MAX:
            del self._lost[next(iter(self._lost))]
        # All nodes notice the same loss at about the same time.
        at = now + self._rng.uniform(0.0, self._first_s)
        self._lost[address] = _Redial(at, self._first_s, now + LOST_S)

    def found(self, address: str) -> None:
        """Redial this address no longer: a live member is there, or the member said goodbye."""
        self._lost.pop(address, None)

    def due(self, now: float, *, reached: Container[str], ranks: Container[int]) -> list[str]:
        """Return the addresses to dial now, and plan the next dial of each.

        reached: control addresses of members that are alive; ranks: head ranks that they hold.
        """
        dialled = []
        for address, redial in self._heads.items():
            if address in reached:
                redial.at, redial.delay_s = now, self._first_s
                continue
            if self._discovery[address] in ranks:
                longest_s = ALIAS_S
            else:
                # Its head may have been there under another address until just now.
                longest_s = self._longest_s
                redial.at = min(redial.at, now + longest_s)
            if redial.at <= now:
                self._plan(redial, now, longest_s)
                dialled.append(address)
        for address in [one for one, redial in self._lost.items() if redial.until <= now]:
            del self._lost[address]
        pending = sorted((redial.at, address) for address, redial in self._lost.items())
        for at, address in pending[:REDIALS_PER_TURN]:
            if at <= now:
                self._plan(self._lost[address], now, self._longest_s)
                dialled.append(address)
        return dialled

    def _plan(self, redial: _Redial, now: float, longest_s: float) -> None:
        delay_s = min(redial.delay_s, longest_s)
        redial.at = now + delay_s * self._rng.uniform(0.5, 1.0)
        redial.delay_s = 2 * delay_s
