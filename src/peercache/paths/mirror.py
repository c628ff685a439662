"""Mirroring: keeps a copy of pages that were read from another host in the home node's pool.

A get requests slots from its home node before it reads the pages, and copies them from the caller's
memory after they are verified, before it returns. The home node publishes them like any page, so
that later readers find them on their own host, and readers elsewhere have one more holder.

The order matters. A page that was removed from every member must not come back: a removal that the
home node receives after it granted the slot, or shortly before, voids the slot
(`actors.pool.reservations`). Bytes that were read before the grant might be older than that.

A mirrored page has the key with which it was verified by the holder's seal. Its bytes are never
used for another key, even if the engine's next weights have another namespace.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from threading import Lock
from typing import Any, Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.keys import PageKeys
from peercache.model.records import HAS_CHECKSUM, Records
from peercache.model.runs import U64, PageRuns
from peercache.net.breaker import Breakers
from peercache.paths.cluster import Cluster
from peercache.paths.location_cache import LocationCache
from peercache.paths.steps import Ask, Place, Post, Step
from peercache.paths.write import ClientReservations
from peercache.wire.messages.declared import Message
from peercache.wire.messages.pool import (
    COMMITTED,
    HERE,
    RESERVED,
    Abort,
    Commit,
    Committed,
    Granted,
    ReserveMirror,
)

OFF, HOT, ALL, PREFETCH = "off", "hot", "all", "prefetch"

FAR: Final = 2
"""The distance of a holder on another host (`Cluster.distance`)."""

HOT_S: Final = 60.0
"""A page is hot when it was read within this time, and at most twice this time ago."""

MARKS: Final = 2**18
"""Marks of a filter of pages read, 256 KiB: with 10,000 pages a minute one in 600 is a false
positive, which costs one copy."""

TIMEOUT_S: Final = 0.01
"""How long a get waits for its home node, for slots and again for the commit: on one host an answer
takes 0.2 ms. A node that takes longer is busy with more important work."""

TIMEOUT_FRACTION: Final = 1 / 8
"""The fraction of the remaining time that such a wait may take."""

COPY_FRACTION: Final = 1 / 4
"""The fraction of the time of the reads that the copy may take, or COPY_S if that is more."""

COPY_S: Final = 0.002
"""A copy at 5 GB/s of 10 MiB."""

PREFETCH_TIMEOUT_S: Final = 0.5
"""How long a prefetch waits for its home node: to keep a copy is all that it is for."""

PAUSE_S: Final = 1.0
"""How long a client stops mirroring after its home node had no room, or did not answer."""

PAGES_MAX: Final = 1024
"""Pages of one get that are mirrored."""

Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.intp]


@attrs.frozen(eq=False)
class MirrorHome:
    """The target of mirroring: the home node's incarnation, and the client's reservations there."""

    incarnation: int
    reservations: ClientReservations


@final
class Recent:
    """Which pages were read recently: two Bloom filters (1970); new pages are added to the newer
    one.

    Its size is fixed. Old pages are forgotten: after HOT_S the older filter is dropped.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._newer: Mask = np.zeros(MARKS, np.bool_)
        self._older: Mask = np.zeros(MARKS, np.bool_)
        self._since = -np.inf

    def read(self, keys: PageKeys, now: float) -> Mask:
        """Return which pages, (n,) bool, were read recently; record all of them as read."""
        if now - self._since >= HOT_S:
            is_old = now - self._since >= 2 * HOT_S
            self._older, self._newer = self._newer, np.zeros(MARKS, np.bool_)
            if is_old:
                self._older = np.zeros(MARKS, np.bool_)
            self._since = now
        # A key is a hash: each of its halves can be used as a hash value.
        marks = np.ascontiguousarray(keys).view("<u8").reshape(-1, 2) % np.uint64(MARKS)
        one, other = marks[:, 0], marks[:, 1]
        known: Mask = (self._newer[one] & self._newer[other]) | (
            self._older[one] & self._older[other]
        )
        self._newer[marks] = True
        return known


@final
class Mirrorer:
    """Mirrors what the gets of one client read. Thread-safe."""

    def __init__(
        self,
        *,
        pulls: str,
        cache: LocationCache,
        breakers: Breakers,
        namespace_tag: int,
        clock: Callable[[], float],
    ) -> None:
        """Mirror pages that were read from other hosts.

        pulls: "hot" ones, "all", or those of a "prefetch", which takes its time.
        """
        assert pulls in (HOT, ALL, PREFETCH), pulls
        self.timeout_s = PREFETCH_TIMEOUT_S if pulls == PREFETCH else TIMEOUT_S
        self.copy_fraction = np.inf if pulls == PREFETCH else COPY_FRACTION
        self.cache = cache
        self.breakers = breakers
        self.namespace_tag = namespace_tag
        self.clock = clock
        self._recent = Recent() if pulls == HOT else None
        self._lock = Lock()
        self._paused_until = -np.inf

    def wants(self, keys: PageKeys) -> Mask:
        """Return which of these pages, which are being read from other hosts, to mirror."""
        with self._lock:
            now = self.clock()
            if self._recent is not None:
                wanted = self._recent.read(keys, now)
            else:
                wanted = np.ones(len(keys), np.bool_)
            return wanted & (now >= self._paused_until)

    @property
    def is_paused(self) -> bool:
        """Whether the home node had no room, or did not answer, a moment ago."""
        return self.clock() < self._paused_until

    def pause(self) -> None:
        """Stop mirroring for PAUSE_S."""
        with self._lock:
            self._paused_until = self.clock() + PAUSE_S


@final
class MirroredBatch:
    """The mirrored pages of one get, from the request for their slots to the commit."""

    def __init__(
        self, mirrorer: Mirrorer, home: MirrorHome, keys: PageKeys, runs: PageRuns
    ) -> None:
        """Start without slots."""
        self.kept = 0
        """Number of pages that are in the home pool because of this get."""
        self._mirrorer = mirrorer
        self._home = home
        self._keys = keys
        self._runs = runs
        self._started = mirrorer.clock()
        self._epoch = mirrorer.cache.epoch
        self._sequence = 0
        self._places: Places = np.empty(0, np.intp)
        self._states: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._offsets: U64 = np.empty(0, np.uint64)
        self._checksums: U64 = np.zeros(len(keys), np.uint64)

    def reserve(
        self, places: Places, records: Records, cluster: Cluster, until: float
    ) -> Generator[Step, Any, None]:
        """Request slots for those of these pages that should be mirrored, before they are read.

        Only once: pages that a later attempt reads are mirrored by the next get.
        """
        home = self._home
        if self._sequence or cluster.home != home.incarnation:
            return
        holders: list[int] = records["holder"].tolist()
        far = {h: cluster.distance(h) == FAR for h in dict.fromkeys(holders)}
        if not any(far.values()):
            return
        distant = places[[far[holder] for holder in holders]]
        wanted = distant[self._mirrorer.wants(self._keys[distant])][:PAGES_MAX]
        if not len(wanted) or self._mirrorer.breakers.is_open(home.incarnation):
            return
        if overlap(self._runs):
            # Destinations overlap: one would contain parts of two pages at the end.
            return
        self._sequence = home.reservations.begin()
        lengths = self._runs.lengths[wanted].tobytes()
        question = ReserveMirror(
            0, self._sequence, self._mirrorer.namespace_tag, self._keys[wanted].tobytes(), lengths
        )
        granted = yield from self._ask(question, until)
        if (
            not isinstance(granted, Granted)
            or len(granted.states) != len(wanted)
            or len(granted.offsets) != 8 * len(wanted)
        ):
            self._mirrorer.pause()
            return
        self._places = wanted
        self._states = np.frombuffer(granted.states, np.uint8)
        self._offsets = np.frombuffer(granted.offsets, np.uint64)
        here = self._states == HERE
        # Pages that another client has mirrored are read at the home node from now on.
        self._mirrorer.cache.forget(self._keys[wanted[here]])
        if not (here | (self._states == RESERVED)).any():
            self._mirrorer.pause()

    def note_checksums(self, places: Places, records: Records) -> None:
        """Record the checksums of hits, from the records by which they were read."""
        has = (records["flags"] & HAS_CHECKSUM) != 0
        self._checksums[places[has]] = records["checksum"][has]

    def keep(self, hits: Mask, until: float) -> Generator[Step, Any, None]:
        """Copy verified pages into their slots, and commit them; nothing is written afterwards.

        hits: (n,) bool, of all pages.
        """
        reserved = np.flatnonzero(self._states == RESERVED)
        if not self._sequence or not len(reserved):
            return
        self._states = np.empty(0, np.uint8)
        home, clock = self._home, self._mirrorer.clock
        chosen = reserved[hits[self._places[reserved]]]
        count = 0
        if len(chosen):
            now = clock()
            spent_s = max(COPY_S, (now - self._started) * self._mirrorer.copy_fraction)
            # The commit takes time, too, before the caller's deadline.
            copied_by = min(now + spent_s, until - max(until - now, 0.0) * TIMEOUT_FRACTION)
            count = yield Place(
                self._offsets[chosen], self._runs.take(self._places[chosen]), copied_by
            )
        if not count:
            yield Post(((home.incarnation, Abort(self._sequence)),))
            return
        written = np.zeros(len(self._places), np.uint8)
        written[chosen[:count]] = 1
        checksums = self._checksums[self._places] * written
        commit = Commit(0, self._sequence, written.tobytes(), checksums.tobytes(), 0.0)
        answer = yield from self._ask(commit, until)
        if isinstance(answer, Committed):
            self.kept = answer.states.count(COMMITTED)
            self._mirrorer.cache.store_packed(answer.records, clock(), epoch=self._epoch)

    def end(self) -> None:
        """End the reservation: nothing is written any more."""
        if self._sequence:
            self._home.reservations.end(self._sequence)

    def _ask(self, message: Message, until: float) -> Generator[Step, Any, Message | None]:
        now = self._mirrorer.clock()
        timeout_s = min(self._mirrorer.timeout_s, max(until - now, 0.0) * TIMEOUT_FRACTION)
        questions = ((self._home.incarnation, message),)
        answers: Sequence[Message | None] = yield Ask(questions, now + timeout_s)
        return answers[0]


def overlap(runs: PageRuns) -> bool:
    """Return whether two runs share a byte, so that a destination belongs to two pages."""
    filled = runs.sizes > 0
    addresses, sizes = runs.addresses[filled], runs.sizes[filled]
    order = np.argsort(addresses)
    ends = (addresses + sizes)[order]
    # A run that overlaps a later one also overlaps the next one.
    return bool((addresses[order][1:] < ends[:-1]).any())
