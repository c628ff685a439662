"""Messages about how much of a prompt lies where: which members hold which of its pages."""

from __future__ import annotations

from typing import ClassVar

import attrs
import numpy as np

from peercache.model.overlap import HOLDERS_MAX, Overlap
from peercache.wire.messages.declared import EVERYONE, NO_ROLE, Declared, Receiver

OVERLAP_KEYS_MAX = 2048
"""Keys of one OverlapAsked: 128k tokens in pages of 64. A longer one is refused."""


@attrs.frozen
class OverlapAsked:
    """Ask a node which members hold these pages, and on which tier.

    shard_only: as far as its own shard knows: one node asks another one so.
    """

    # As a Lookup, and for other nodes too: where pages are, never what is in them.
    declared: ClassVar = Declared(55, Receiver.NODE, EVERYONE)

    request: int
    keys: bytes
    shard_only: bool


@attrs.frozen
class OverlapTold:
    """Answer an OverlapAsked.

    holders: the incarnations that hold any of the pages.
    flags: RESIDENT and ON_DISK of each page, a byte each: those of the first holder, then the next.
    whole: that a page without a flag is absent. Otherwise it may be known to a node not heard.
    """

    declared: ClassVar = Declared(56, Receiver.ASKER, NO_ROLE)

    request: int
    holders: tuple[int, ...]
    flags: bytes
    whole: bool


def overlap_of(answer: object, pages: int) -> Overlap:
    """Return what was told about so many pages; of anything else than that: nothing is known."""
    if (
        not isinstance(answer, OverlapTold)
        or len(answer.holders) > HOLDERS_MAX
        or len(answer.flags) != len(answer.holders) * pages
    ):
        return Overlap.unknown(pages)
    flags = np.frombuffer(answer.flags, np.uint8).reshape(len(answer.holders), pages)
    return Overlap(answer.holders, flags, answer.whole)
