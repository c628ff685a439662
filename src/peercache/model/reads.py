"""Read requests to a fabric, and their results."""

from __future__ import annotations

import attrs
import numpy as np

from peercache.model.member import Member
from peercache.model.runs import U64, PageRuns

ODD = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
"""The value in a word buffer before a read: odd, so never equal to a generation."""


@attrs.frozen(eq=False)
class PeerRead:
    """Read these slots of one holder into these runs.

    member:      the holder.
    offsets:     (n,) uint64, in the holder's page memory.
    lengths:     (n,) uint64, equal to the lengths of `runs`.
    runs:        n pages' destinations.
    """

    member: Member
    offsets: U64
    lengths: U64
    runs: PageRuns


@attrs.frozen(eq=False)
class Fetched:
    """What a fabric read.

    words:   (n,) uint64, the generation word of each slot, read after all of that page's bytes;
             ODD where the page did not arrive in full.
    failure: "" or the miss reason of the pages that did not arrive.
    fabric:  the name of the fabric that read, for metrics.
    """

    words: U64
    failure: str
    fabric: str = ""
