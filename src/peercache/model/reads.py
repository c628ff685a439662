"""Read requests to a fabric and their results, and the result of a lookup in a directory table."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.member import Member
from peercache.model.runs import U64, PageRuns
from peercache.model.seal import Seals

TICK_AGE_MAX_S = 0.08
"""How long ago the owner of a directory table may have been active, for a missing key to count as
absent: less than a set waits for an owner, so that the table of a paused owner is no longer trusted
when a set stops waiting for it."""


@attrs.frozen(eq=False)
class PeerRead:
    """Read these slots of one holder into these runs.

    member:      the holder.
    offsets:     (n,) uint64, in the holder's page memory.
    lengths:     (n,) uint64, equal to the lengths of `runs`.
    runs:        n pages' destinations.
    generations: (n,) uint64, the word that each slot's seal must have before its first byte is
                 read. If the word differs, the page was evicted, or its record is forged.
    """

    member: Member
    offsets: U64
    lengths: U64
    runs: PageRuns
    generations: U64


@attrs.frozen(eq=False)
class Fetched:
    """The result of a fabric's read.

    seals:   (n,) SEAL, the seal of each slot, read after all of that page's bytes; the word is ODD
             if the page did not arrive completely. If the word differed from the generation before
             the first byte, the word of the seal is not the generation.
    failure: "" or the miss reason of the pages that did not arrive.
    fabric:  the name of the fabric, for metrics.
    took_s:  how long the read took, if several holders were read at the same time.
    """

    seals: Seals
    failure: str
    fabric: str = ""
    took_s: float = 0.0


@attrs.frozen(eq=False)
class Looked:
    """The result of a lookup of keys in a directory table.

    records:    packed records of all holders that answers may name, at most a few per key.
    places:     (records,) uint32, the index of each record's key in the batch.
    is_final:   whether a key without a record is absent, if the table's node owns it on the given
                ring: the table was complete when the batch began.
    is_at_work: whether the owner was active recently.
    """

    records: bytes
    places: npt.NDArray[np.uint32]
    is_final: bool
    is_at_work: bool
