"""Addresses: those of the members of the view, and those where other nodes may be. Pure.

Candidates: a report about a node that this one does not know is an address to try, never a member:
a peer may name thousands that do not exist. A few are dialled at a time, taking turns among the
peers that named them, so that forged addresses of one peer do not displace those of another.
Discovery may return thousands that are long dead, or none for hours. So a few of those are tried,
too, in turn, the newest first, as long as no live member is known there: neither kind displaces the
other.

Reconnect: addresses of `discovery_addr` are redialled forever, because a partition may last for any
time. Those of members that were lost without a goodbye are redialled for LOST_S: later another
cluster may have the address.

Places are updated entry by entry: a view of thousands changes thousands of times while its nodes
start.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Container, Iterable, Mapping
from typing import TypeVar, final

import attrs

from peercache.model.member import ALIVE, Member
from peercache.model.view import is_live

TRIED_AT_ONCE_MAX = 8
"""Addresses tried at one time: each is a link of some descriptors."""

ANSWER_S = 1.0
"""How long one may take to answer."""

AGAIN_S = 5.0
"""How soon one that did not answer is tried again: partitions heal in ten seconds."""

ALIAS_S = 60.0
"""How soon an address that has answered is tried again: its member has another address of its own,
or has been lost since, and is redialled as such. Also the longest back-off for an address of
`discovery_addr` if its member is known under another address."""

LOOKS_MAX = 256
"""Addresses examined in one turn: some tens of microseconds."""


class FoundAddresses:
    """The addresses that discovery returned, and when each is tried next."""

    def __init__(self, *, rng: random.Random) -> None:
        """Start with no address."""
        self._rng = rng
        self._next_at: dict[str, float] = {}
        self._order: deque[str] = deque()
        self._tried: dict[str, float] = {}

    def __len__(self) -> int:
        """Return how many addresses discovery returned."""
        return len(self._next_at)

    @property
    def tried(self) -> Iterable[str]:
        """The addresses that are being tried."""
        return self._tried

    def replace(self, addresses: Iterable[str], now: float) -> None:
        """Try these addresses, and no others; those that are new come first."""
        given = dict.fromkeys(addresses)
        new = [address for address in given if address not in self._next_at]
        # A thousand nodes that receive one answer do not dial it in step.
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


AT_ONCE_MAX = 8
"""Candidates dialled at one time: each is a link of some descriptors. An honest one answers within
milliseconds and makes room."""


AGAIN_MIN_S = 1.0
AGAIN_MAX_S = 4.0
"""Back-off of an address that did not answer, if it is named again. No more: a member that was cut
off from this node alone is back within ten seconds, and AT_ONCE_MAX bounds what dials cost."""

OF_ONE_MAX = 16_384
"""Candidates that one peer names: the members of the largest cluster."""

WAITING_MAX = 32_768
"""Candidates that all peers name; further ones are dropped, and named again by honest peers."""

FAILED_MAX = 16_384
"""Remembered addresses that did not answer."""


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
        """Remove a random one: a thousand nodes that receive one list do not dial it in step."""
        at = rng.randrange(len(self.order))
        self.order[at], self.order[-1] = self.order[-1], self.order[at]
        address = self.order.pop()
        self.known.remove(address)
        return address


class Candidates:
    """The addresses to try, by the peer that named them, and those that are being dialled."""

    def __init__(self, *, rng: random.Random) -> None:
        """Start with no candidate."""
        self._rng = rng
        self._waiting: dict[int, _Named] = {}  # the peer that is next in turn first
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
        """Try this address, which a peer has named, unless it is known not to answer.

        is_own: the peer names its own address. Another process may have failed there before.
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
        """Try the addresses that discovery returned, and no longer the earlier ones."""
        self._found.replace(addresses, now)

    def answered(self, address: str, now: float) -> None:
        """Note that a process has answered there."""
        self._found.answered(address, now)
        self._dialled.pop(address, None)
        self._failed.pop(address, None)

    def due(self, now: float, *, reached: Container[str] = (), own: str = "") -> list[str]:
        """Return the addresses to dial now; give up those that did not answer in time.

        reached, own: addresses of live members and of this node, which discovery may return too.
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
        # Nodes that received the same gossip do not dial in step.
        self._failed[address] = _Failed(now, now + delay_s * self._rng.uniform(0.5, 1.0), delay_s)
        if len(self._failed) > FAILED_MAX:
            del self._failed[next(iter(self._failed))]


LOST_MAX = 256
"""Remembered lost addresses. One that answers is enough to heal: it knows the other members."""

LOST_S = 600.0
"""How long a lost address is redialled. Two sides of a longer partition find each other by
`discovery_addr`."""

REDIALS_PER_TURN = 2
"""Lost addresses redialled at a time, so that a thousand nodes cause no flood."""


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
        """Stop to dial this address and the head of this rank: they are this node's own."""
        for address, rank in self._discovery.items():
            if address == control or rank == head_rank:
                self._heads.pop(address, None)
        self._lost.pop(control, None)

    def lost(self, address: str, now: float) -> None:
        """Redial this address until `found`, for LOST_S; the one that was lost first makes room."""
        if address in self._heads or address in self._lost:
            return
        if len(self._lost) >= LOST_MAX:
            del self._lost[next(iter(self._lost))]
        # All nodes notice a loss at about the same time.
        at = now + self._rng.uniform(0.0, self._first_s)
        self._lost[address] = _Redial(at, self._first_s, now + LOST_S)

    def found(self, address: str) -> None:
        """Stop to redial this address: a live member is there, or the member sent goodbye."""
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
                # Its head may have been at another address until just now.
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


_Key = TypeVar("_Key", str, int)


@final
class Places:
    """The addresses and head ranks of the other members. Callers must only read the three fields.

    live_at: the incarnations that are alive or suspect at each control address.
    reached: the control addresses of those that are alive; ranks: their head ranks. Each with its
             number of members.
    """

    def __init__(self) -> None:
        """Start with no other member."""
        self.live_at: dict[str, set[int]] = {}
        self.reached: dict[str, int] = {}
        self.ranks: dict[int, int] = {}

    def change(self, before: Member | None, after: Member | None) -> None:
        """Follow one entry: None before it comes, and after it is forgotten."""
        if before is not None and is_live(before):
            incarnations = self.live_at[before.control]
            incarnations.remove(before.incarnation)
            if not incarnations:
                del self.live_at[before.control]
            if before.state == ALIVE:
                _count(self.reached, before.control, -1)
                _count(self.ranks, before.head_rank, -1)
        if after is not None and is_live(after):
            self.live_at.setdefault(after.control, set()).add(after.incarnation)
            if after.state == ALIVE:
                _count(self.reached, after.control, 1)
                _count(self.ranks, after.head_rank, 1)


def _count(counts: dict[_Key, int], key: _Key, change: int) -> None:
    counts[key] = counts.get(key, 0) + change
    if not counts[key]:
        del counts[key]
