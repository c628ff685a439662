"""Taking over: how a node reads the pages that another one hands over, and what of them has come.

The bytes go straight into reserved slots of the own pool, whose words are odd meanwhile, so no
reader sees them before they are verified and committed.
"""

from __future__ import annotations

import numpy as np

from peercache.model.keys import Tag, space_of
from peercache.model.member import Member
from peercache.model.reads import Fetched, PeerRead
from peercache.model.records import Records
from peercache.model.runs import U64, PageRuns
from peercache.paths.verify import verified


def reading_of(member: Member, records: Records, addresses: U64) -> PeerRead:
    """Return what to read: pages of a member into one place each.

    addresses: (n,) uint64, where the slot of each page begins.
    """
    lengths = records["length"].astype(np.uint64)
    return PeerRead(
        member=member,
        offsets=records["offset"].astype(np.uint64),
        lengths=lengths,
        runs=PageRuns.regular(addresses, lengths, len(records)),
        generations=records["generation"].astype(np.uint64),
    )


def arrived(records: Records, namespace: Tag, fetched: Fetched) -> bytes:
    """Return one byte a page: 1 where the bytes are the page that was offered."""
    return verified(records, space_of(namespace), fetched.seals).astype(np.uint8).tobytes()
