"""Taking over: how a node reads pages that another one hands over, and checks which have arrived.

The bytes are read directly into reserved slots of the own pool. The words of these slots are odd
meanwhile, so no reader uses them before they are verified and committed.
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
    """Return the read of a member's pages into one slot each.

    addresses: (n,) uint64, the address of each page's slot.
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
    """Return one byte per page: 1 if the bytes are the offered page."""
    return verified(records, space_of(namespace), fetched.seals).astype(np.uint8).tobytes()
