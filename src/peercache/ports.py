"""The seams: what actors and paths ask of the world, as protocols and plain values.

State actors return *effects*, values that say what to do, in the order in which it must be done.
Whoever performs them (the node in production, the simulated world in `sims/`) keeps that order.
The read and write paths (`transfer/`) yield *steps* and are driven by the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import attrs
import numpy as np
import numpy.typing as npt

from peercache.channel_exchange import ChannelOpened, OpenChannel
from peercache.disk_state.ports import DiskEffect
from peercache.messages import Clear, Member, Message, Refused, Remove, Reserve
from peercache.runs import U64, PageRuns

ODD = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
"""What a word buffer is filled with before a read: odd, so never equal to a generation."""


@attrs.frozen
class Origin:
    """Who sent a message, and the way back.

    identity: incarnation of a node, or id of a client.
    pipe:     the connection that the answer goes back on; 0 for a member, which is answered over
              our own link to it.
    """

    identity: int
    pipe: int = 0


# --- effects of state actors --------------------------------------------------------------------


@attrs.frozen
class Send:
    """Send to a member (an incarnation), or back along an Origin. May be lost."""

    to: int | Origin
    message: Message


@attrs.frozen
class SendTo:
    """Send to whoever listens at an address (HOST:PORT), as target 0. May be lost."""

    address: str
    message: Message


@attrs.frozen(eq=False)
class StoreWords:
    """Store generation words: `values[i]` at word `indices[i]`, each one aligned 8-byte store."""

    indices: npt.NDArray[np.int64]
    values: U64


@attrs.frozen
class Tell:
    """Hand a fact to another actor of this node; never lost, never encoded."""

    actor: str
    fact: object


Effect: TypeAlias = Send | SendTo | StoreWords | Tell | DiskEffect


class StateActor(Protocol):
    """A state machine that never awaits. `now` is monotonic seconds, handed in."""

    def on_message(self, sender: Origin, message: object, now: float) -> list[Effect]:
        """Take one message and return what must be done."""

    def on_tick(self, now: float) -> list[Effect]:
        """Do what has come due at `now`; afterwards `deadline()` is later than `now`."""

    def deadline(self) -> float:
        """Return when the next tick is due; inf for never."""

    def check(self) -> None:
        """Assert the invariants, in time that does not grow with the state."""


# --- facts between the actors of one node (Tell) --------------------------------------------------


@attrs.frozen
class ViewChanged:
    """membership → ring, directory, publisher: the view as it is now (dead and left included)."""

    members: tuple[Member, ...]


@attrs.frozen(eq=False)
class RingChanged:
    """ring → publisher: the ring as it is now (a `hash_ring.HashRing`)."""

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


# --- disk ---------------------------------------------------------------------------------------
# What the disk actor asks of the page store, and what it hears: `disk_state.ports`.

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


# --- rdma ---------------------------------------------------------------------------------------


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


# --- fabrics --------------------------------------------------------------------------------------


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


class Fabric(Protocol):
    """Moves bytes out of a peer's published memory. Called from any thread."""

    name: str

    def reaches(self, member: Member) -> bool:
        """Return whether this fabric can read from that peer; may try, never raises."""

    def read(self, read: PeerRead, deadline: float) -> Fetched:
        """Fill the destinations in page order by `deadline` (time.monotonic seconds).

        Never raises for what the world does. After it returns nothing writes to a destination.
        """

    def close(self) -> None:
        """Release connections and mappings, after the reads in flight."""


@runtime_checkable
class RegistersMemory(Protocol):
    """A fabric that reads faster into memory that it was told of before."""

    def register(self, name: str, address: int, length: int, owner: object) -> Callable[[], None]:
        """Begin to make memory ready, in the background; return what ends that.

        name:  what the memory is, for people.
        owner: kept alive until then: the memory must not be freed before.
        """


# --- steps of the sans-IO paths -------------------------------------------------------------------


@attrs.frozen(eq=False)
class Ask:
    """Ask several peers at once; the answer is one message or None (unreachable, no answer) each.

    until:  when to stop waiting.
    enough: given one answer, whether it makes the others unnecessary.
    """

    questions: tuple[tuple[int, Message], ...]
    until: float
    enough: Callable[[Message], bool] | None = None


@attrs.frozen
class Post:
    """Send a message to each peer and expect nothing; may be lost."""

    messages: tuple[tuple[int, Message], ...]


@attrs.frozen
class Greet:
    """Say Hello at an address, whoever listens there; the answer is Welcome, Refused or None."""

    url: str
    until: float


@attrs.frozen
class Hear:
    """Take what has come from a peer and answers nothing that anybody waits for."""

    peer: int


@attrs.frozen(eq=False)
class Fetch:
    """Read from several holders at once; the answer is one Fetched each."""

    reads: tuple[PeerRead, ...]
    until: float


@attrs.frozen(eq=False)
class Place:
    """Copy pages from the caller's runs into reserved slots of the home segment.

    The answer is the number of leading pages whose every byte is in place.
    """

    offsets: U64
    runs: PageRuns
    until: float


@attrs.frozen(eq=False)
class Checksum:
    """Compute the xxh3_64 of pages in the caller's memory; the answer is (n,) uint64."""

    runs: PageRuns


Step: TypeAlias = Ask | Post | Greet | Hear | Fetch | Place | Checksum
Answers: TypeAlias = Sequence[Message | None]
