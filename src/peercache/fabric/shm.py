"""The shared-memory fabric: peers on this host, one copy out of their mapped segment.

Owns    the mappings of peers' segments, one for each incarnation.
Takes   reads, from any thread; `forget` when a member is dead.
Sends   seals, loaded after the last byte of every page of the read. It does not verify them:
        whether a seal makes a hit is decided in one place, for all fabrics.
Keeps   a page is copied only if its word was the record's generation before. No byte outside a
        peer's page memory is read, and no byte outside the destination is written. No seal is
        returned for an incomplete page.
Limits  SEGMENTS_MAX mappings; FAILURES_MAX remembered failures, for RETRY_S, and addresses with a
        failure in the log.

The order "word, bytes, seal" is kept by fences in `memory/_seals.c`, on every processor.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from peercache.errors import PeerCacheError, PeerUnreachable, Rejected
from peercache.memory.attached import AttachedSegment
from peercache.model.ids import Incarnation, name_of
from peercache.model.member import Member
from peercache.model.reads import Fetched, PeerRead
from peercache.model.seal import still_committed, unread_seals
from peercache.observability.log import get_logger
from peercache.observability.reasons import DEADLINE, INTERNAL, PEER_UNREACHABLE, REFUSED
from peercache.trust.sharing import Sharing

SEGMENTS_MAX = 64
"""A host runs a few nodes; each mapping may need 2 MiB of page tables per GiB of pool."""

RETRY_S = 1.0
"""How long a failure to open is cached: a read must not try again for every batch, and a node that
has just started is found within a heartbeat."""

FAILURES_MAX = 1024
"""Members that can fail at a time: the view's own size, in the largest cluster on one host."""

CLOSE_TIMEOUT_S = 5.0
"""How long `close` waits for reads in flight, which end by their own deadlines of 2 s."""


class ShmFabric:
    """Reads published memory of nodes on this host. Implements `Fabric`."""

    name = "shm"

    def __init__(
        self,
        *,
        boot_id: str,
        sharing: Sharing | None = None,
        folders: Container[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        between: Callable[[], None] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Start with no mapping.

        boot_id: that of this host, `segment.layout.boot_id()`.
        sharing: the users whose segments are mapped; None: this process's user and root.
        folders: the allowed folders of segments: a peer could name a folder on a file system that
                 hangs. None: any folder, only for tests.
        clock:   the clock of the deadlines, in seconds.
        between: called between the bytes and the seals of a read; only for tests.
        before:  called between the first check and the bytes; only for tests.
        """
        self._boot_id = boot_id
        self._sharing = sharing if sharing is not None else Sharing.of()
        self._folders = folders
        self._clock = clock
        self._between = between
        self._before = before
        self._lock = threading.Lock()
        self._closed = False
        self._segments: OrderedDict[int, AttachedSegment] = OrderedDict()
        self._retry_at: OrderedDict[int, float] = OrderedDict()
        # The addresses whose failure is in the log: a container with another /dev/shm fails for
        # ever, under each incarnation of its node.
        self._logged: OrderedDict[str, None] = OrderedDict()

    def reaches(self, member: Member) -> bool:
        """Return whether the member's segment is mapped here, or can be."""
        return self._segment(member) is not None

    def read(self, read: PeerRead, deadline: float) -> Fetched:
        """Compare the words, copy the pages, then load their seals.

        Pages outside the peer's page memory are refused; pages that are not copied by `deadline`
        are ODD, and come after all copied ones.
        """
        segment = self._segment(read.member)
        if segment is not None:
            with suppress(PeerUnreachable), segment.in_use():
                return self._read(segment, read, deadline)
        return Fetched(unread_seals(len(read.offsets)), PEER_UNREACHABLE)

    def forget(self, incarnation: int) -> None:
        """Unmap the segment of a dead member, after the last read that uses it."""
        with self._lock:
            segment = self._segments.pop(incarnation, None)
        if segment is not None:
            segment.close(0.0)

    def close(self) -> None:
        """Unmap everything, after the reads in flight; afterwards no peer is reached."""
        with self._lock:
            self._closed = True
            segments = list(self._segments.values())
            self._segments.clear()
        until = self._clock() + CLOSE_TIMEOUT_S
        for segment in segments:
            segment.close(max(0.0, until - self._clock()))

    def _read(self, segment: AttachedSegment, read: PeerRead, deadline: float) -> Fetched:
        inside = _inside(segment, read)
        index = inside.nonzero()[0]
        runs, offsets = read.runs, read.offsets
        if len(index) < len(inside):
            offsets = offsets[index]
        # Before the first byte: otherwise a record of a later commit could validate older bytes.
        words = segment.words(offsets)
        is_there = still_committed(words, read.generations[index])
        others, words = index[~is_there], words[~is_there]
        if len(others):
            index, offsets = index[is_there], offsets[is_there]
        if len(index) < len(inside):
            runs = runs.take(index)
        if self._before is not None:
            self._before()
        count = segment.copy(runs, offsets, to_slots=False, deadline=deadline, clock=self._clock)
        if self._between is not None:
            self._between()
        # Always after the bytes of all these pages.
        loaded = segment.seals(offsets[:count])
        if count == len(inside):
            return Fetched(loaded, "")
        seals = unread_seals(len(inside))
        seals["word"][others] = words
        seals[index[:count]] = loaded
        if count < len(index):
            if self._clock() >= deadline:
                return Fetched(seals, DEADLINE)
            # In time but not copied: an address is not mapped, ours or one of a truncated file.
            name, at = name_of(read.member.incarnation), read.member.control
            get_logger().warning("shm.copy_faulted", node=name, at=at)
            return Fetched(seals, INTERNAL)
        return Fetched(seals, "" if inside.all() else REFUSED)

    def _segment(self, member: Member) -> AttachedSegment | None:
        if member.boot_id != self._boot_id or not member.segment:
            return None
        incarnation = member.incarnation
        with self._lock:
            if self._closed:
                return None
            found = self._segments.get(incarnation)
            if found is not None:
                self._segments.move_to_end(incarnation)
                return found
            if self._retry_at.get(incarnation, 0.0) > self._clock():
                return None
            # Opened under the lock, so that no two threads map the same segment: 0.1 ms.
            found = self._open(member)
            if found is None:
                return None
            self._segments[incarnation] = found
            surplus = len(self._segments) > SEGMENTS_MAX
            oldest = self._segments.popitem(last=False)[1] if surplus else None
        if oldest is not None:
            oldest.close(0.0)
        return found

    def _open(self, member: Member) -> AttachedSegment | None:
        incarnation = Incarnation(member.incarnation)
        try:
            folder = os.path.dirname(member.segment)  # noqa: PTH120 - it is compared as text
            if self._folders is not None and folder not in self._folders:
                raise Rejected("segment", f"{folder} is no folder where this host has segments")
            found = AttachedSegment.open(
                member.segment, incarnation=incarnation, writable=False, sharing=self._sharing
            )
        except PeerCacheError as error:
            self._retry_at[incarnation] = self._clock() + RETRY_S
            self._retry_at.move_to_end(incarnation)
            if len(self._retry_at) > FAILURES_MAX:
                self._retry_at.popitem(last=False)
            if member.control not in self._logged:
                self._logged[member.control] = None
                if len(self._logged) > FAILURES_MAX:
                    self._logged.popitem(last=False)
                get_logger().info(
                    "shm.attach_failed",
                    node=name_of(incarnation), at=member.control, reason=str(error),
                )  # fmt: skip
            return None
        self._logged.pop(member.control, None)
        get_logger().info(
            "shm.attached",
            node=name_of(incarnation), at=member.control, bytes=found.page_bytes,
        )  # fmt: skip
        return found


def _inside(segment: AttachedSegment, read: PeerRead) -> npt.NDArray[np.bool_]:
    """Return which pages are completely in the page memory, at places where slots may begin."""
    page_bytes, granule = np.uint64(segment.page_bytes), np.uint64(segment.granule)
    lengths, offsets = read.lengths, read.offsets
    # A sum could wrap around, a difference of checked numbers cannot.
    inside: npt.NDArray[np.bool_] = (lengths > 0) & (lengths <= page_bytes)
    inside &= offsets <= page_bytes - np.minimum(lengths, page_bytes)
    # The seal of an offset within a granule belongs to another slot.
    inside &= offsets % granule == 0
    # The copy uses the destination's size.
    inside &= lengths == read.runs.lengths
    return inside
