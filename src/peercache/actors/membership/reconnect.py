"""Redial: whom to call who does not call us, and when. Pure.

Two kinds of addresses are called for as long as nobody known to be alive answers there: those of
`discovery_addr`, and those of members lost without a goodbye. Both for ever, because a partition
has no longest time, and with backoff, because most of the lost never come back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Container, Mapping

import attrs

LOST_MAX = 256
"""Lost addresses remembered. To heal, one of them must answer: that one knows the others."""

CALLS_PER_TURN = 2
"""Lost addresses called at one time; a thousand members that lost a thousand do not flood."""

ALIAS_S = 60.0
"""Longest backoff for a discovery address whose head is there under another address: a host name
and its number. It is called now and then all the same, for lists that differ between hosts."""


@attrs.define
class _Call:
    at: float
    delay_s: float


class Redial:
    """The addresses to call, each with the time of its next call and its backoff."""

    def __init__(
        self,
        discovery: Mapping[str, int],
        *,
        first_s: float,
        longest_s: float,
        rng: random.Random,
    ) -> None:
        """Call `discovery` (address → head rank) at once, the lost soon; then back off."""
        self._discovery = dict(discovery)
        self._first_s = first_s
        self._longest_s = longest_s
        self._rng = rng
        self._heads = {address: _Call(-math.inf, first_s) for address in discovery}
        self._lost: dict[str, _Call] = {}

    def __len__(self) -> int:
        """Return the number of lost addresses."""
        return len(self._lost)

    def lost(self, address: str, now: float) -> None:
        """Call this address until `found`; the one lost longest makes room."""
        if address in self._heads or address in self._lost:
            return
        if len(self._lost) >= LOST_MAX:
            del self._lost[next(iter(self._lost))]
        # Everybody notices the same loss at about the same time.
        at = now + self._rng.uniform(0.0, self._first_s)
        self._lost[address] = _Call(at, self._first_s)

    def found(self, address: str) -> None:
        """Call this address no longer: somebody alive is there, or said goodbye."""
        self._lost.pop(address, None)

    def due(self, now: float, *, reached: Container[str], ranks: Container[int]) -> list[str]:
        """Return the addresses to call now, and plan the next call of each.

        reached: control addresses of members that are alive; ranks: head ranks that they hold.
        """
        calls = []
        for address, call in self._heads.items():
            if address in reached:
                call.at, call.delay_s = now, self._first_s
                continue
            if self._discovery[address] in ranks:
                longest_s = ALIAS_S
            else:
                # Its head may have been there under another address until just now.
                longest_s = self._longest_s
                call.at = min(call.at, now + longest_s)
            if call.at <= now:
                self._plan(call, now, longest_s)
                calls.append(address)
        waiting = sorted((call.at, address) for address, call in self._lost.items())
        for at, address in waiting[:CALLS_PER_TURN]:
            if at <= now:
                self._plan(self._lost[address], now, self._longest_s)
                calls.append(address)
        return calls

    def _plan(self, call: _Call, now: float, longest_s: float) -> None:
        delay_s = min(call.delay_s, longest_s)
        call.at = now + delay_s * self._rng.uniform(0.5, 1.0)
        call.delay_s = 2 * delay_s
