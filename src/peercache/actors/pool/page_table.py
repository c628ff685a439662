"""The page table: which page is in which slot, under which generation; how long pages are retained,
and when they expire.

Keeps a copy of the generation words as they have been stored, because everything that makes a read
safe is a rule about them: a record's word never moves (it is that of the slot's first granule,
whatever size class the granule belongs to), it is odd before a byte below it may change, and it
never again holds an even value it had. An even word is 2 × sequence, from one counter for all slots
that starts at random: it repeats neither here nor, but for a chance of about 2**-61, in the table
of another incarnation. Zero, which the table starts with, is no page's generation.

That counter numbers the changes of records too that no word stands for: of pages on disk only. So
each later change of a page's record has the greater number.

Times of retained pages are those of the loop's clock, which no step of the wall clock moves. A heap
has the ends, so neither an eviction nor a tick looks at pages that are still retained. A page that
is removed, or retained for longer, leaves a stale end behind; those are swept out once they are the
most.

Pages also expire that were not used for the time to live of their namespace. The queues of eviction
are in the order of use, so a look finds what has expired at their heads, and meets no other page.
What expires is evicted like any page: its word goes odd, its record is withdrawn, and it stays on
disk if it is there.
"""

from __future__ import annotations

import ctypes
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, Final, TypeAlias, final

import attrs
import numpy as np

from peercache.actors.effects import StoreWords
from peercache.actors.pool.size_classes import NEVER_TOUCHED, Slot
from peercache.actors.pool.slots import SlotAllocator
from peercache.actors.tenants import Tenant, Tenants
from peercache.installation.library import function
from peercache.model.ids import Incarnation
from peercache.model.keys import KEY, covers, space_of, split_keys
from peercache.model.records import (
    DROP,
    HAS_CHECKSUM,
    ON_DISK,
    RECORD,
    RECORD_BYTES,
    RESIDENT,
    Records,
)
from peercache.model.runs import U64
from peercache.model.seal import SEAL, SEAL_BYTES
from peercache.wire.messages.pool import (
    HERE,
    NOT_HERE,
    OVER_QUOTA,
    REFUSED_SIZE,
    REFUSED_TOO_LARGE,
    REPEATED,
    RESERVED,
    RETAIN_MAX_S,
    RETAINED,
)

_ONE: Final = np.uint64(1)

_BYTES_BEFORE = RECORD_BYTES, RECORD_BYTES + SEAL_BYTES, RECORD_BYTES + SEAL_BYTES + 8
_PUBLISHED_BYTES = _BYTES_BEFORE[2] + 8
"""Bytes a page of what `publish` makes: record, seal, index and word."""

# It takes microseconds: to get the GIL back may take five milliseconds.
_publish = function(
    "peercache_pool_publish", ctypes.c_int, *[ctypes.c_char_p] * 4, *[ctypes.c_uint64] * 5,
    ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, keeps_gil=True,
)  # fmt: skip


@final
@attrs.frozen(eq=False)
class PackedPages:
    """Pages of one namespace as clients send them, packed: n × 16 bytes of keys, n × u64 each."""

    namespace: int
    keys: bytes
    offsets: bytes
    lengths: bytes
    checksums: bytes


@final
@attrs.define(eq=False)
class Page:
    """One committed page.

    named_at: when it was named for spilling, in the actors' time; named_touched: when it had been
    touched last by then.
    """

    key: bytes
    slot: Slot
    length: int
    generation: int
    namespace: int
    checksum: int
    named_at: float = -math.inf
    named_touched: int = NEVER_TOUCHED


@final
class PageTable:
    """The committed pages of one node, and the words of all its granules."""

    def __init__(
        self, *, incarnation: Incarnation, granule: int, granules: int, sequence: int
    ) -> None:
        """Start empty; `sequence` (1 … 2**61 - 1, random) is the last number not to be used."""
        assert 0 < sequence < 2**61, sequence
        self._incarnation = incarnation
        self._granule = granule
        self._sequence = sequence
        self._words: U64 = np.zeros(granules, np.uint64)
        self._words_at = self._words.ctypes.data
        self._by_key: dict[bytes, Page] = {}
        self._by_slot: dict[int, Page] = {}
        self.find = self._by_key.get
        """The page of a key, or None."""
        self.stored_bytes = 0
        """Sum of the lengths of all pages."""

    def __len__(self) -> int:
        """Return the number of pages."""
        return len(self._by_key)

    @property
    def newest(self) -> int:
        """Return the last number that a record of this node was given."""
        return 2 * self._sequence

    def in_slots(self, slots: Iterable[Slot]) -> list[Page]:
        """Return the pages in these slots."""
        return [self._by_slot[slot.first] for slot in slots]

    def of_keys(self, keys: Iterable[bytes]) -> list[Page]:
        """Return those of these pages that are here, in the order of the keys."""
        found = [self._by_key.get(key) for key in keys]
        return [page for page in found if page is not None]

    def found(self, keys: bytes, namespace: int) -> list[Page]:
        """Return the pages of these packed keys that a get of this namespace finds, each once.

        The key identifies its geometry, and the seal its space.
        """
        named, space = self.of_keys(dict.fromkeys(split_keys(keys))), space_of(namespace)
        return [page for page in named if space_of(page.namespace) == space]

    def of_namespace(self, namespace: int) -> list[Page]:
        """Return the pages that a removal `covers`: a pass over all, for a call that is rare."""
        return [page for page in self._by_key.values() if covers(namespace, page.namespace)]

    def all(self) -> Iterable[Page]:
        """Return all pages: a pass over them is for events that are rare."""
        return self._by_key.values()

    def scan(
        self, first: int, namespace: int, *, pages_max: int, granules_max: int
    ) -> tuple[list[Page], int]:
        """Return the pages of a namespace's space in these granules, in the order of their slots,
        and the granule after the last one that was examined.

        A page never moves to another slot. pages_max: of any namespace, to examine.
        """
        words, space = self._words[first : first + granules_max], space_of(namespace)
        found = np.flatnonzero(((words & _ONE) == 0) & (words != 0))[:pages_max]
        end = min(first + granules_max, len(self._words))
        if len(found) == pages_max:
            end = first + int(found[-1]) + 1
        pages = [self._by_slot[index] for index in (found + first).tolist()]
        return [page for page in pages if space_of(page.namespace) == space], end

    @property
    def granules(self) -> int:
        """Return the number of granules: the end of a scan."""
        return len(self._words)

    def judge(
        self, keys: Sequence[bytes], lengths: Sequence[int], bytes_max: int
    ) -> tuple[bytearray, list[Page]]:
        """Return the state of each page of a Reserve, and the pages that are here already.

        RESERVED stands where a slot is wanted; whether there is one remains to be found out.
        """
        states = bytearray((RESERVED,)) * len(keys)
        if keys and self.are_new(keys) and min(lengths) > 0 and max(lengths) <= bytes_max:
            return states, []
        first: dict[bytes, int] = {}
        here: list[Page] = []
        for index, (key, length) in enumerate(zip(keys, lengths, strict=True)):
            earlier = first.setdefault(key, index)
            page = self.find(key)
            if earlier != index:
                states[index] = REPEATED if lengths[earlier] == length else REFUSED_SIZE
            elif page is not None:
                states[index] = HERE if page.length == length else REFUSED_SIZE
                if page.length == length:
                    here.append(page)
            elif length > bytes_max:
                states[index] = REFUSED_TOO_LARGE
            elif length == 0:
                states[index] = REFUSED_SIZE
        return states, here

    def are_new(self, keys: Sequence[bytes]) -> bool:
        """Return whether none of these keys is here, nor twice among them."""
        return len(set(keys)) == len(keys) and self._by_key.keys().isdisjoint(keys)

    def add(
        self,
        keys: Sequence[bytes],
        slots: Sequence[Slot],
        lengths: Sequence[int],
        namespace: int,
        checksums: Sequence[int],
    ) -> list[Page]:
        """Enter pages that are new under rising generations; `publish` then stores their words."""
        count = len(keys)
        assert count == len(slots) == len(lengths) == len(checksums), "a part of a page is missing"
        first = 2 * self._sequence + 2
        self._sequence += count
        generations = range(first, first + 2 * count, 2)
        added = list(map(Page, keys, slots, lengths, generations, repeat(namespace), checksums))
        before = len(self._by_key)
        self._by_key.update(zip(keys, added, strict=True))
        self._by_slot.update(zip([slot.first for slot in slots], added, strict=True))
        assert len(self._by_key) == before + count, "a page entered twice"
        self.stored_bytes += sum(lengths)
        return added

    def publish(self, batch: PackedPages) -> tuple[Records, StoreWords]:
        """Return the records of the pages added last, and the seals that make them readable.

        The first page of the batch is the one that was entered last.
        """
        count = len(batch.offsets) // 8
        # One range of memory: records, seals, indices, words.
        whole: Any = (ctypes.c_char * (count * _PUBLISHED_BYTES))()
        were_odd = _publish(
            batch.keys, batch.offsets, batch.lengths, batch.checksums, count, self.newest,
            self._incarnation, self._granule, space_of(batch.namespace),
            self._words_at, len(self._words), whole,
        )  # fmt: skip
        assert were_odd, "a slot was written to under an even word"
        ends = [count * bytes_before for bytes_before in _BYTES_BEFORE]
        seals = np.frombuffer(whole, SEAL, count, ends[0])
        indices = np.frombuffer(whole, np.int64, count, ends[1])
        words = np.frombuffer(whole, np.uint64, count, ends[2])
        return np.frombuffer(whole, RECORD, count), StoreWords(indices, words, seals)

    def protect(self, slots: Sequence[int]) -> StoreWords | None:
        """Make the words of slots (by first granule) odd, so that their bytes may change."""
        indices = np.array(slots, np.int64)
        words = self._words[indices]
        even = (words & _ONE) == 0
        if not even.any():
            return None
        indices, words = indices[even], words[even] | _ONE
        self._words[indices] = words
        return StoreWords(indices, words)

    def end(self, pages: Sequence[Page]) -> Records:
        """Take pages out of the table and return their drops; `protect` their slots with it."""
        for page in pages:
            del self._by_key[page.key], self._by_slot[page.slot.first]
            self.stored_bytes -= page.length
        drops = np.empty(len(pages), DROP)
        drops["key"] = np.frombuffer(b"".join([page.key for page in pages]), KEY)
        drops["generation"] = np.array([page.generation for page in pages], np.uint64)
        indices = np.array([page.slot.first for page in pages], np.int64)
        assert (self._words[indices] == drops["generation"]).all(), "a page's word had moved on"
        return drops

    def records(self, pages: Sequence[Page]) -> Records:
        """Return the records of pages, (n,) RECORD."""
        records = np.zeros(len(pages), RECORD)
        if not pages:
            return records
        records["key"] = np.frombuffer(b"".join([page.key for page in pages]), KEY)
        records["holder"] = self._incarnation
        firsts = np.array([page.slot.first for page in pages], np.uint64)
        records["offset"] = firsts * np.uint64(self._granule)
        records["generation"] = np.array([page.generation for page in pages], np.uint64)
        records["length"] = np.array([page.length for page in pages], np.uint32)
        checksums = np.array([page.checksum for page in pages], np.uint64)
        records["checksum"] = checksums
        records["flags"] = np.where(checksums != 0, RESIDENT | HAS_CHECKSUM, RESIDENT)
        return records

    def on_disk_records(self, keys: Sequence[bytes], lengths: Sequence[int]) -> Records:
        """Return new records of pages that are on disk and not here, under new generations."""
        records = np.zeros(len(keys), RECORD)
        if len(keys):
            records["key"] = np.frombuffer(b"".join(keys), KEY)
            records["holder"] = self._incarnation
            records["generation"] = self._numbers(len(keys))
            records["length"] = np.array(lengths, np.uint32)
            records["flags"] = ON_DISK
        return records

    def drops_of(self, keys: Sequence[bytes]) -> Records:
        """Return drops that end all earlier records of these pages, none of which is here."""
        drops = np.zeros(len(keys), DROP)
        if len(keys):
            drops["key"] = np.frombuffer(b"".join(keys), KEY)
            drops["generation"] = self._numbers(len(keys))
        return drops

    def records_in_state(
        self, keys: bytes, states: Sequence[int], wanted: tuple[int, ...]
    ) -> Records:
        """Return the records of those pages whose state is wanted and which are still here."""
        if not any(state in states for state in wanted):
            return self.records([])
        pairs = zip(split_keys(keys), states, strict=True)
        return self.records(self.of_keys(key for key, state in pairs if state in wanted))

    def _numbers(self, count: int) -> U64:
        """Take the next numbers, rising."""
        first = self._sequence + 1
        self._sequence += count
        numbers: U64 = np.uint64(2) * np.arange(first, first + count, dtype=np.uint64)
        return numbers

    def check(self) -> None:
        """Assert that the two indexes agree in size, in constant time."""
        by_key, by_slot = len(self._by_key), len(self._by_slot)
        assert by_key == by_slot, f"{by_key} pages, {by_slot} slots with one"
        assert self.stored_bytes >= by_key, f"{by_key} pages of {self.stored_bytes} bytes"


LAPSES_MAX: Final = 4096
"""Pages that lapse in one tick: some milliseconds."""

LAPSE_PAUSE_S: Final = 0.001
"""Pause after such a tick: the messages that wait come before the pages that are left."""

STALE_ENDS_MIN: Final = 1024
"""So many stale ends are not worth a sweep."""

End: TypeAlias = tuple[float, int, Slot]


@final
class Retention:
    """Which pages of one pool are retained, and until when."""

    def __init__(self, slots: SlotAllocator) -> None:
        """Retain nothing yet."""
        self._slots = slots
        self._ends: list[End] = []
        self._numbered = 0
        self._pauses_until = -math.inf

    def retain(self, pages: Sequence[Page | None], seconds: float, now: float) -> bytes:
        """Retain pages for so long, the first ones first; return the state of each, one byte.

        A page that is retained for longer stays so. 0 seconds, or what is no time, let pages go.
        None: a page that is not here.
        """
        until = now + min(seconds, RETAIN_MAX_S) if seconds > 0 else 0.0
        states = bytearray(len(pages))
        self._numbered += len(pages)
        for index, page in enumerate(pages):
            if page is None:
                states[index] = NOT_HERE
            elif not until:
                states[index] = RETAINED
                if page.slot.retained_until:
                    self._slots.let_go(page.slot)
            else:
                # Of equal ends the last page lapses first: a chain loses its tail first.
                states[index] = self._retain(page.slot, until, self._numbered - index)
        self.sweep()
        return bytes(states)

    def lapse(self, now: float) -> None:
        """Let pages go whose time is over, LAPSES_MAX at most; the next ones after a pause."""
        ends = self._ends
        for _ in range(LAPSES_MAX):
            if not ends or ends[0][0] > now:
                break
            until, _, slot = heapq.heappop(ends)
            if slot.retained_until == until:
                self._slots.let_go(slot)
        else:
            self._pauses_until = now + LAPSE_PAUSE_S
        self.sweep()

    def deadline(self) -> float:
        """Return when the next page may lapse."""
        return max(self._ends[0][0], self._pauses_until) if self._ends else math.inf

    def sweep(self) -> None:
        """Keep one end of each retained page, where most ends are stale: after any page went."""
        ends = self._ends
        if len(ends) > 2 * self._slots.retained_count + STALE_ENDS_MIN:
            live = {end[2].first: end for end in ends if end[2].retained_until == end[0]}
            self._ends = list(live.values())
            heapq.heapify(self._ends)

    def check(self) -> None:
        """Assert the bound, in constant time."""
        most = 2 * self._slots.retained_count + STALE_ENDS_MIN
        assert self._slots.retained_count <= len(self._ends) <= most, f"{len(self._ends)} ends"

    def _retain(self, slot: Slot, until: float, number: int) -> int:
        if slot.retained_until >= until:
            return RETAINED
        if not self._slots.retain(slot, until):
            return OVER_QUOTA
        heapq.heappush(self._ends, (until, number, slot))
        return RETAINED


LOOK_S: Final = 1.0
"""How often a pool looks for pages that have expired."""

EXPIRES_MAX: Final = 1024
"""Pages that expire in one tick: some milliseconds."""

EXPIRE_PAUSE_S: Final = 0.001
"""Pause after such a tick: the messages that wait come before the pages that are left."""


@final
class Expiry:
    """When a pool looks for pages that have expired."""

    def __init__(self, tenants: Tenants) -> None:
        """Look at once, if any namespace has a time to live."""
        self._due = 0.0 if tenants.may_expire else math.inf

    def expired(self, slots: SlotAllocator, now: float) -> list[Slot]:
        """Return slots of pages that have expired, EXPIRES_MAX at most; free all of them."""
        if self._due > now:
            return []
        expired = slots.expired(now, EXPIRES_MAX)
        self._due = now + (EXPIRE_PAUSE_S if len(expired) == EXPIRES_MAX else LOOK_S)
        return expired

    def deadline(self) -> float:
        """Return when the next look is due; inf if no page ever expires."""
        return self._due


def owners_of(slots: list[Slot]) -> Counter[Tenant]:
    """Return how many of these slots each tenant has."""
    return Counter(slot.extent.size_class.tenant for slot in slots)
