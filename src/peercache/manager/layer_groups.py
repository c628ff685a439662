"""What a prefix needs of each group of layers of an engine.

Engines with several kinds of layers (hybrid models) keep the blocks of each kind as a group of its
own, and evict them apart. A prefix is usable if every group has what the next token reads: of full
attention all blocks, of a sliding window the last ones, of a recurrent state the last one. The
rules are those of vLLM 0.32 (`find_longest_cache_hit` of its `HybridKVCacheCoordinator`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, unique

import attrs
import numpy as np
import numpy.typing as npt


@unique
class Needs(Enum):
    """What of a group's blocks a prefix needs."""

    ALL = "all of them"
    WINDOW = "those of its window"
    STATE = "the last one"


_NEEDS = {
    "": Needs.ALL,
    "full_attention": Needs.ALL,
    "mla_attention": Needs.ALL,
    "sink_full_attention": Needs.ALL,
    "sliding_window": Needs.WINDOW,
    "sliding_window_mla": Needs.WINDOW,
    "mamba": Needs.STATE,
}
"""By the kind that an event names; events of engines with one group name none."""


def needs_of(kind: str, window: int) -> Needs | None:
    """Return what a prefix needs of a group; None: no rule is known for this kind.

    window: in tokens, of a sliding window.
    """
    needs = _NEEDS.get(kind)
    return None if needs is Needs.WINDOW and window < 1 else needs


@attrs.frozen
class HeldBlocks:
    """Which blocks of a prompt a group has.

    held:         (blocks,) bool, from the first block of the prompt on; those behind are absent.
    block_tokens: tokens of each. window: in tokens; 0 unless a window is needed.
    """

    needs: Needs
    block_tokens: int
    window: int
    held: npt.NDArray[np.bool_]

    def usable(self) -> npt.NDArray[np.bool_]:
        """Return for 0, 1, … blocks whether this group can go on behind so many: (blocks + 1,)."""
        count = np.arange(len(self.held) + 1)
        enough = np.ones(len(count), np.bool_)
        if self.needs is Needs.STATE:
            enough[1:] = self.held
            return enough
        # Of each number of blocks, how many at its end are held without a gap.
        absent = np.where(self.held, 0, count[1:])
        trailing = count[1:] - np.maximum.accumulate(absent)
        wanted = count[1:]
        if self.needs is Needs.WINDOW:
            # The next token reads the window - 1 tokens before it.
            wanted = np.minimum(wanted, -(-(self.window - 1) // self.block_tokens))
        enough[1:] = trailing >= wanted
        return enough


def usable_tokens(groups: Sequence[HeldBlocks]) -> int:
    """Return the longest prefix, in tokens, that all groups can go on behind.

    It ends where a block of every group ends.
    """
    step = math.lcm(*(group.block_tokens for group in groups))
    count = min(len(group.held) * group.block_tokens for group in groups) // step
    enough = np.ones(count + 1, np.bool_)
    for group in groups:
        enough &= group.usable()[:: step // group.block_tokens][: count + 1]
    return int(np.flatnonzero(enough)[-1]) * step
