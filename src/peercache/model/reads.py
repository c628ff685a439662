"""Read requests to a fabric, and their results; what a look into a directory table brings."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.member import Member
from peercache.model.runs import U64, PageRuns
from peercache.model.seal import Seals

TICK_AGE_MAX_S = 0.08
"""How long ago the owner of a directory table may have been at work, for an absent key to count as
absent: less than a set waits for an owner, so that a stopped owner's table counts no longer when a
set has given it up."""


@attrs.frozen(eq=False)
class PeerRead:
    """Read these slots of one holder into these runs.

    member:      the holder.
    offsets:     (n,) uint64, in the holder's page memory.
    lengths:     (n,) uint64, equal to the lengths of `runs`.
    runs:        n pages' destinations.
    generations: (n,) uint64, the word that each slot's seal must have before its first byte is
                 read. A page whose word is another one has been evicted, or its record is forged.
    """

    member: Member
    offsets: U64
    lengths: U64
    runs: PageRuns
    generations: U64


@attrs.frozen(eq=False)
class Fetched:
    """What a fabric read.

    seals:   (n,) SEAL, the seal of each slot, read after all of that page's bytes; the word is ODD
             where the page did not arrive in full. Where the word differed from the generation
             before the first byte, the seal has a word that is not the generation.
    failure: "" or the miss reason of the pages that did not arrive.
    fabric:  the name of the fabric that read, for metrics.
    """

    seals: Seals
    failure: str
    fabric: str = ""


@attrs.frozen(eq=False)
class Looked:
    """What a directory table says of a batch of keys.

    records:    packed records, all holders that answers may name, at most a few a key.
    places:     (records,) uint32, the place of each record's key in the batch.
    is_final:   whether a key without a record is absent, if the table's node owns it on the ring
                that was asked for: the table lacked nothing when the batch began.
    is_at_work: whether the owner was at work lately.
    """

    records: bytes
    places: npt.NDArray[np.uint32]
    is_final: bool
    is_at_work: bool
