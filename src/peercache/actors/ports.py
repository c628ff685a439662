"""The ports of the disk actor and the rdma actor: effects, and the results that answer them.

Effects are values. The adapter of a port performs them: the page store and `rdma.serving` on real
devices, fakes in tests. Results are messages to the actors.

The disk actor decides where each page is stored; the store moves bytes on threads of its own and
answers each job exactly once. Places are byte offsets in the store, as if its slabs were one long
file.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.origin import Origin
from peercache.model.keys import TAG, Tags
from peercache.model.runs import U64
from peercache.wire.messages.session import ChannelOpened, OpenChannel, Refused

DISK_DONE = 0
"""Outcome for one page of a job: written or read in full."""
DISK_CHANGED = 1
"""The pool rewrote or evicted the page while it was being written: the place holds nothing."""
DISK_DAMAGED = 2
"""The place holds another page, or its checksum is wrong: the place counts as empty."""
DISK_FAILED = 3
"""An I/O error: the content of the place must not be trusted."""
DISK_FULL = 4
"""No space on the file system, or less than its floor: the place cannot be written for now."""
DISK_LATE = 5
"""The call was running at the deadline, *and may still write*: into the pool (Load) or into the
place (Write). Slot and place stay allocated until `LateEnded` names the page."""
DISK_UNTRIED = 6
"""The deadline passed, or the tier ended, before the page's turn: nothing was touched."""
DISK_REPLACED = 7
"""Another complete page is at the place: the node was killed between writing the page and its row,
so the row of the earlier page is left. The place counts as empty."""

DISK_ENTRY = np.dtype(
    [
        ("key", "V16"),
        ("namespace", TAG),
        ("place", "<u8"),
        ("sequence", "<u8"),
        ("length", "<u4"),
        ("written", "<u4"),  # unix seconds
        ("used", "<u4"),  # unix seconds, coarse; so a time to live continues after a restart
        ("slot", "<u4"),  # blocks of 4 KiB that the slot takes, its header included
    ]
)
"""One page on disk, as DiskOpened reports it at start. 60 bytes."""


# --- effects of the disk actor --------------------------------------------------------------------


@attrs.frozen(eq=False)
class Write:
    """disk → store: write pages of the pool to places. Answered by one WriteDone.

    The store compares each page's generation word with its record's generation before and after; a
    page that changed in between is DISK_CHANGED. Consecutive places are written by one call. A
    place is not given to a second job before the first one has answered for it.

    job:        a number that no other job of this store has had.
    records:    RESIDENT records: key, offset, length, generation (and checksum, with its flag).
    namespaces: (n,) TAG.
    places:     (n,) uint64, byte offsets in the store, of the slots' headers.
    sequences:  (n,) uint64, write sequences: the highest wins if two slots have the same key.
    until:      deadline, in the actor's time.
    """

    job: int
    records: npt.NDArray[np.void]
    namespaces: Tags
    places: U64
    sequences: U64
    until: float


@attrs.frozen(eq=False)
class Load:
    """disk → store: read pages into reserved slots of the pool. Answered by one LoadDone.

    The slots' generation words are odd during the load. A page's slot takes its length rounded up
    to 4 KiB, which a granule always has. Loads are done before writes.

    keys:    n packed keys, 16 bytes each.
    lengths: (n,) uint64. The page found must have this key, namespace and length.
    places:  (n,) uint64, as given to Write or reported by DiskOpened.
    offsets: (n,) uint64, of the slots in page memory.
    until:   deadline, in the actor's time.
    known:   (n,) uint64, the xxh3_64 of each page, as the store has reported it for this key and
             place; 0: not known. Bytes with this checksum are the page, so its header is not read,
             unless they have another one.
    """

    job: int
    keys: bytes
    namespaces: Tags
    lengths: U64
    places: U64
    offsets: U64
    until: float
    known: U64 | None = None


@attrs.frozen(eq=False)
class Forget:
    """disk → store: these places are empty now; delete their index rows, in order with Write.

    A Write to a forgotten place may follow at once: the row is deleted first.

    places: (n,) uint64. Their slots stay as they are until they are written again: an index that
            is rebuilt from slots finds those pages.
    job:    0, or a number for ForgetDone, which reports that the rows are deleted permanently.
    """

    places: U64
    job: int = 0


@attrs.frozen(eq=False)
class NoteUse:
    """disk → store: these places were used, coldest first. Coarse; lost in a crash.

    unix_s: (n,) int64, when.
    """

    places: U64
    unix_s: npt.NDArray[np.int64]


DiskEffect: TypeAlias = Write | Load | Forget | NoteUse


# --- results from the page store (to the disk actor) ----------------------------------------------


@attrs.frozen(eq=False)
class DiskOpened:
    """store → disk: the folder is open and locked. The first result; before it the store takes no
    jobs.

    usable_bytes: whole slabs below the cap; a multiple of slab_bytes.
    slab_bytes:   bytes of a slab; slab i holds the places from i x slab_bytes on.
    entries:      dtype DISK_ENTRY, coldest first; places fit their slabs and do not overlap, and a
                  key occurs once. No page has been verified: a Load does that.
    unix_s:       the wall clock now, to compare with `used`.
    """

    usable_bytes: int
    slab_bytes: int
    entries: npt.NDArray[np.void]
    unix_s: int


@attrs.frozen(eq=False)
class WriteDone:
    """store → disk: the outcome of each page of a Write, one byte each.

    checksums: (n,) xxh3_64 of DONE pages, if the store reports them.
    """

    job: int
    outcomes: bytes
    checksums: U64 | None = None


@attrs.frozen(eq=False)
class LoadDone:
    """store → disk: the outcome of each page of a Load; checksums: (n,) xxh3_64 of DONE pages."""

    job: int
    outcomes: bytes
    checksums: U64


@attrs.frozen
class LateEnded:
    """store → disk: a call that was DISK_LATE has returned; slot and place of its pages are free.

    indices: the pages of the job. What was read or written must not be trusted.
    """

    job: int
    indices: tuple[int, ...]


@attrs.frozen
class ForgetDone:
    """store → disk: the places of this Forget stay forgotten across restarts."""

    job: int


@attrs.frozen
class DiskEnded:
    """store → disk: the tier is off from now on (stuck, removed, read-only); the node continues.

    Open jobs are answered first; LateEnded may still follow.
    """

    reason: str


@attrs.frozen
class DiskRoom:
    """store → disk: how many bytes the file system lets the store use now, above its floor.

    Less than DiskOpened.usable_bytes where the file system is small, or others fill it. Sent after
    DiskOpened if it is less, and at each change.
    """

    usable_bytes: int


DiskFact: TypeAlias = (
    DiskOpened | WriteDone | LoadDone | LateEnded | ForgetDone | DiskEnded | DiskRoom
)


# --- effects: rdma → queue pairs ------------------------------------------------------------------


@attrs.frozen
class OpenPair:
    """Connect a queue pair to the client's end, or describe the existing one of the channel.

    A repeated request keeps the queue pair. A request with another end of the client replaces it.
    """

    origin: Origin
    wanted: OpenChannel


@attrs.frozen
class DropPair:
    """Destroy the queue pair of a channel, if there is one. Has no answer."""

    client: int
    channel: int


@attrs.frozen
class ServeMemory:
    """Register the first `usable_bytes` of the page memory, in the background. Has no answer."""

    usable_bytes: int


RdmaEffect: TypeAlias = OpenPair | DropPair | ServeMemory


# --- results: queue pairs → rdma ------------------------------------------------------------------


@attrs.frozen
class RdmaServes:
    """The devices are open, and the seals are registered."""


@attrs.frozen
class RdmaAbsent:
    """There are no queue pairs from now on. reason: a sentence for clients and operators."""

    reason: str


@attrs.frozen
class PairOpened:
    """The answer to OpenPair. is_open: the channel has a queue pair. answer: for the client."""

    origin: Origin
    channel: int
    is_open: bool
    answer: ChannelOpened | Refused


RdmaFact: TypeAlias = RdmaServes | RdmaAbsent | PairOpened


class QueuePairs(Protocol):
    """The queue pairs of a node, as the rdma actor sees them.

    Creating a queue pair may take long, so the port is asynchronous. The first result is RdmaServes
    or RdmaAbsent. After RdmaServes each OpenPair has exactly one PairOpened, in the order of the
    effects; after RdmaAbsent there are no results, and effects do nothing.
    """

    def perform(self, effect: RdmaEffect) -> None:
        """Start an effect and return at once, before its result."""
