"""Facts that one actor of a node tells another: never encoded, never lost."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.effects import Origin
from peercache.model.member import Member
from peercache.wire.messages.pool import Clear, Remove, Reserve
from peercache.wire.messages.rdma import ChannelOpened, OpenChannel
from peercache.wire.messages.session import Refused


@attrs.frozen
class ViewChanged:
    """membership → ring, directory, publisher: the view as it is now (dead and left included)."""

    members: tuple[Member, ...]


@attrs.frozen(eq=False)
class RingChanged:
    """ring → publisher: the ring as it is now (a `model.hash_ring.HashRing`)."""

    ring: object


@attrs.frozen
class Republish:
    """membership → publisher: others may have dropped our records (we were found dead)."""


@attrs.frozen(eq=False)
class PagesCommitted:
    """pool → publisher: new records, and who waits to hear that they are published.

    Publisher answers `origin` with Committed(request, sequence, states, records, published) as soon
    as each record has one owner's acknowledgement, or after patience_s.
    """

    origin: Origin
    request: int
    sequence: int
    states: bytes
    records: npt.NDArray[np.void]
    """The records that this commit made, dtype RECORD; may be empty."""
    here: npt.NDArray[np.void]
    """Records of pages that were there already, for the client's cache."""
    patience_s: float
    ahead: int = 0
    offsets: bytes = b""
    """A reservation made ahead, which the answer tells of."""
    then: tuple[ReserveAhead, ...] = ()
    """What the pool hears as soon as the Commit is answered: nobody waits for it."""


@attrs.frozen(eq=False)
class RecordsChanged:
    """pool → directory (own shard) and publisher: records in force, and drops that end records."""

    records: npt.NDArray[np.void]
    drops: npt.NDArray[np.void]


@attrs.frozen
class ReserveAhead:
    """publisher → pool: what a Commit asked for beside, now that the Commit is answered."""

    origin: Origin
    reserve: Reserve


@attrs.frozen
class ClientGone:
    """node → pool: the client's process has exited; its reservations end."""

    client: int


@attrs.frozen
class PoolGrew:
    """node → pool: the first `usable_bytes` of the page memory are populated."""

    usable_bytes: int


# What the disk actor asks of the page store, and what it hears: `actors.storage_port`.

DISK_TIER = Origin(0)
"""The disk tier as a client of its own pool: what an actor of this node says comes from 0, and from
the network nobody does. Its reservations end when the store is done with their slots."""


@attrs.frozen(eq=False)
class PagesStored:
    """pool → disk: pages that a client has committed, all of one namespace."""

    records: npt.NDArray[np.void]
    namespace: int


@attrs.frozen
class PagesRemoved:
    """pool → disk: what is to go from disk too. keys: what went from memory. The tier answers."""

    origin: Origin
    message: Remove | Clear
    keys: bytes


@attrs.frozen
class RdmaServes:
    """node → rdma: the devices are open, and some of the memory is registered."""


@attrs.frozen
class RdmaAbsent:
    """node → rdma: there will be no channels. reason: a sentence, for whoever asks for one."""

    reason: str


@attrs.frozen
class WantPair:
    """rdma → verbs: make the other end of a channel, or say again what it opens."""

    origin: Origin
    wanted: OpenChannel


@attrs.frozen
class DropPair:
    """rdma → verbs: destroy a channel of a client."""

    client: int
    channel: int


@attrs.frozen
class PairOpened:
    """verbs → rdma: what came of a WantPair. answer: for the client; is_open: it has a channel."""

    origin: Origin
    channel: int
    is_open: bool
    answer: ChannelOpened | Refused
