"""Link use: which links of a node are closed because they are not used, or because others are.

A node dials what it needs when it needs it. In a cluster of thousands it greets every member once,
and afterwards speaks with the masters, with the owners of its records, and rarely with others.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import final

LINKS_MAX = 4096
"""Links of one node, where its process may have descriptors enough."""

LINK_DESCRIPTORS = 5
"""Descriptors of a link: its connection, and two pipes of nng."""

LINK_SHARE = 0.25
"""Part of a process's descriptors for links; the rest is for its listeners and files."""

LINKS_MIN = 32
"""Links of a process with few descriptors: masters, heads, and the owners of its newest records."""

IDLE_S = 15.0
"""How long a link stays that is not used: heartbeats and streams use theirs every few seconds, and
another connection costs milliseconds."""

SETTLE_S = 2.0
"""How long a new link is left alone, whatever the bound: it may not have been answered yet."""


def links_that_fit(descriptors: float) -> int:
    """Return how many links a process may have that may have so many descriptors."""
    fitting = descriptors * LINK_SHARE / LINK_DESCRIPTORS
    return int(min(LINKS_MAX, max(LINKS_MIN, fitting)))


@final
class LinkUse:
    """When each link was used last, by its address. Pure."""

    def __init__(self, *, links_max: int) -> None:
        """Keep no more than about `links_max` links: the ones used last."""
        self.links_max = links_max
        self._used: dict[str, float] = {}  # least recently used first

    def __len__(self) -> int:
        """Return how many links are in use."""
        return len(self._used)

    def used(self, address: str, now: float) -> None:
        """Note that a message goes to an address."""
        self._used.pop(address, None)
        self._used[address] = now

    def ended(self, address: str) -> None:
        """Note that the link has been closed."""
        self._used.pop(address, None)

    def surplus(self, now: float, *, kept: Collection[str]) -> list[str]:
        """Return the links to close: idle ones, and the least recently used of too many.

        kept: addresses whose links stay, such as those of discovery.
        """
        too_many = len(self._used) - self.links_max
        found: list[str] = []
        for address, at in self._used.items():
            if now - at < (SETTLE_S if len(found) < too_many else IDLE_S):
                # All that follow were used later.
                break
            if address not in kept:
                found.append(address)
        return found
