"""Candidates: addresses at which members may be, by gossip or discovery, until they answer. Pure.

What others say of a node that this one does not know is an address to try, and never a member: a
peer may name thousands that do not exist. A few are dialled at a time, taking turns among those
that named them, so that no peer's inventions keep out what another one names.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable

import attrs

from peercache.actors.membership.found import FoundAddresses

AT_ONCE_MAX = 8
"""Candidates dialled at one time: each is a link of some descriptors. An honest one answers within
milliseconds and makes room."""

ANSWER_S = 1.0
"""How long a candidate may take to answer."""

AGAIN_MIN_S = 1.0
AGAIN_MAX_S = 4.0
"""Back-off of an address that did not answer, should it be named again. No more: a member that was
cut off from this node alone is back within ten seconds, and AT_ONCE_MAX bounds what dials cost."""

OF_ONE_MAX = 16_384
"""Candidates that one peer names: the members of the largest cluster."""

WAITING_MAX = 32_768
"""Candidates that all peers name; further ones are dropped, and named again by honest peers."""

FAILED_MAX = 16_384
"""Addresses remembered that did not answer."""


@attrs.define
class _Failed:
    at: float
    until: float
    delay_s: float


@attrs.define
class _Named:
    """The addresses that one peer has named."""

    order: list[str] = attrs.field(factory=list)
    known: set[str] = attrs.field(factory=set)

    def draw(self, rng: random.Random) -> str:
        """Take any of them: a thousand nodes that hear one list dial none of it in step."""
        at = rng.randrange(len(self.order))
        self.order[at], self.order[-1] = self.order[-1], self.order[at]
        address = self.order.pop()
        self.known.remove(address)
        return address


class Candidates:
    """The addresses to try, by the peer that named them, and those that are being dialled."""

    def __init__(self, *, rng: random.Random) -> None:
        """Start with none."""
        self._rng = rng
        self._waiting: dict[int, _Named] = {}  # the next peer's turn first
        self._count = 0
        self._dialled: dict[str, float] = {}
        self._failed: dict[str, _Failed] = {}  # oldest first
        self._found = FoundAddresses(rng=rng)

    def __len__(self) -> int:
        """Return how many addresses that peers have named wait to be dialled."""
        return self._count

    @property
    def dialled(self) -> frozenset[str]:
        """The addresses that are being dialled."""
        return frozenset(self._dialled).union(self._found.tried)

    def name(self, address: str, source: int, now: float, *, is_own: bool = False) -> None:
        """Try this address, which a peer has named; not again while it is known not to answer.

        is_own: the peer says that it is there itself. Another may have been there, and failed.
        """
        failed = self._failed.get(address)
        if address in self._dialled:
            return
        if failed is not None:
            until = failed.at + AGAIN_MIN_S if is_own else failed.until
            if now < until:
                return
        named = self._waiting.get(source)
        if self._count >= WAITING_MAX or (named is not None and len(named.order) >= OF_ONE_MAX):
            return
        if named is None:
            named = self._waiting[source] = _Named()
        if address not in named.known:
            named.known.add(address)
            named.order.append(address)
            self._count += 1

    def found(self, addresses: Iterable[str], now: float) -> None:
        """Try the addresses that discovery gives, and no longer those that it gave before."""
        self._found.replace(addresses, now)

    def answered(self, address: str, now: float) -> None:
        """Note that a process has answered there."""
        self._found.answered(address, now)
        self._dialled.pop(address, None)
        self._failed.pop(address, None)

    def due(self, now: float, *, reached: Container[str] = (), own: str = "") -> list[str]:
        """Return the addresses to dial now; give up those that did not answer in time.

        reached, own: addresses of live members and of this node, which discovery may give too.
        """
        for address in [one for one, until in self._dialled.items() if until <= now]:
            del self._dialled[address]
            self._fail(address, now)
        found: list[str] = []
        while self._waiting and len(self._dialled) < AT_ONCE_MAX:
            source, named = next(iter(self._waiting.items()))
            address = named.draw(self._rng)
            # The next peer's turn.
            del self._waiting[source]
            self._count -= 1
            if named.order:
                self._waiting[source] = named
            if address not in self._dialled:
                self._dialled[address] = now + ANSWER_S
                found.append(address)
        more = self._found.due(now, reached=reached, own=own)
        return found + [address for address in more if address not in self._dialled]

    def _fail(self, address: str, now: float) -> None:
        before = self._failed.pop(address, None)
        delay_s = AGAIN_MIN_S if before is None else min(2 * before.delay_s, AGAIN_MAX_S)
        # Nodes that heard the same gossip do not dial in step.
        self._failed[address] = _Failed(now, now + delay_s * self._rng.uniform(0.5, 1.0), delay_s)
        if len(self._failed) > FAILED_MAX:
            del self._failed[next(iter(self._failed))]
