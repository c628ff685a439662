"""The index of a disk, in memory: where each page is, and which pages are evicted for new ones.

An *entry* is a page on disk or on its way there, and has a number that does not change during its
life. It is WRITING, then HELD; what is removed while it is *pinned* (a write or a load is under
way) is ENDED: its key is removed, and its place is not reused before the last unpin.

Room for new pages comes from empty slots, then from the least recently touched entries of the same
slot size, or, if entries of another size are much colder, from a whole slab of that size.
Everything works on batches: numpy arrays, about 90 bytes an entry, no Python object per page. Pure:
no I/O, no clock of its own; age is counted in touches.

A batch's life: `begin` → Write → `finish` (written) or `abandon` (not). A load: `pin` → Load →
`unpin`. A call past its deadline keeps its pin until it has ended.

Eviction: to find the coldest entry costs time that grows with the entries, so one search finds many
and keeps them in a queue, coldest first. An entry that was touched meanwhile is skipped: all
entries outside the queue are younger than all in it, so the order is exact. A tenant
(`actors.tenants`) evicts its own pages. If it is within its quota, or has a higher priority, it
first evicts pages of tenants that are over their quotas, the lowest priority first. Pages of a
tenant within its quota are evicted only for its own pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.disk.key_table import NO_ROW, Halves, KeyTable, halves_of
from peercache.actors.disk.slabs import BLOCK_BYTES, UNBOUND, Slab, SlabAllocator, slot_blocks
from peercache.actors.ports import DISK_ENTRY
from peercache.actors.tenants import Tenant, Tenants
from peercache.model.keys import COPIES, TAG, Tag, Tags, parts_of, space_of
from peercache.model.room import COLDER_FACTOR, DONOR_CHECK_EVERY
from peercache.model.runs import I64, U64

FREE, WRITING, HELD, ENDED = 0, 1, 2, 3

ROWS_STEP_MIN: Final = 1024
ROWS_STEP_DIVISOR: Final = 8
"""The array grows by an eighth, so at most that part of it is empty."""

FIELDS: Final = np.dtype(
    [
        ("place", "<u8"),
        ("sequence", "<u8"),
        ("touched", "<u8"),
        ("checksum", "<u8"),
        ("namespace", TAG),
        ("length", "<u4"),
        ("used", "<u4"),
        ("state", "u1"),
        ("pins", "u1"),
    ]
)


@final
class EntryRows:
    """Rows by number. `new` may replace the array `rows`: keep no view of it."""

    def __init__(self, slab_bytes: int) -> None:
        """Start with no rows."""
        self.rows: npt.NDArray[np.void] = np.zeros(0, FIELDS)
        self.end = 0
        """Numbers below were given out at least once."""
        self._spare = np.empty(0, np.int32)
        """Numbers of entries that ended: a stack."""
        self._spare_count = 0
        self._slab_bytes = np.uint64(slab_bytes)

    def new(self, count: int) -> I64:
        """Return the numbers of `count` new rows; their fields are stale."""
        reused = min(count, self._spare_count)
        self._spare_count -= reused
        old = self._spare[self._spare_count : self._spare_count + reused].astype(np.int64)
        begin, self.end = self.end, self.end + count - reused
        if self.end > len(self.rows):
            grown = np.zeros(self.end + max(ROWS_STEP_MIN, self.end // ROWS_STEP_DIVISOR), FIELDS)
            grown[:begin] = self.rows[:begin]
            self.rows = grown
        return np.concatenate((old, np.arange(begin, self.end)))

    def free(self, entries: I64) -> None:
        """Make these numbers available for new rows."""
        self.rows["state"][entries] = FREE
        count = self._spare_count + len(entries)
        if count > len(self._spare):
            grown = np.empty(max(count, min(2 * count, len(self.rows))), np.int32)
            grown[: self._spare_count] = self._spare[: self._spare_count]
            self._spare = grown
        self._spare[self._spare_count : count] = entries
        self._spare_count = count

    def held(self) -> I64:
        """Return every HELD entry, in arbitrary order."""
        return np.flatnonzero(self.rows["state"][: self.end] == HELD)

    def can_go(self, entries: I64) -> npt.NDArray[np.bool_]:
        """Return which of them can be evicted: HELD and not pinned."""
        # Field by field: a copy of whole rows would take 50 bytes each, for two fields.
        states, pins = self.rows["state"][entries], self.rows["pins"][entries]
        free: npt.NDArray[np.bool_] = (states == HELD) & (pins == 0)
        return free

    def coldest(self, entries: I64, count: int) -> I64:
        """Return the least recently touched of these, coldest first."""
        touched = self.rows["touched"][entries]
        if count < len(entries):
            chosen = np.argpartition(touched, count)[:count]
            entries, touched = entries[chosen], touched[chosen]
        coldest: I64 = entries[touched.argsort()]
        return coldest

    def slabs_of(self, entries: I64) -> I64:
        """Return the number of the slab that each is in."""
        slabs: I64 = (self.rows["place"][entries] // self._slab_bytes).astype(np.int64)
        return slabs

    def slot_bytes(self, entries: I64) -> int:
        """Return what their slots take together."""
        return int(slot_blocks(self.rows["length"][entries]).sum()) * BLOCK_BYTES

    def page_bytes(self, entries: I64) -> int:
        """Return the total length of their pages."""
        return int(self.rows["length"][entries].sum(dtype=np.int64))


QUEUE_DIVISOR: Final = 16
QUEUE_MIN: Final = 256
"""A queue has a sixteenth of a slot size's entries: each eviction then costs the same few steps."""

DONORS_MAX: Final = 64
"""Slabs that are examined closely for one eviction."""


@attrs.define(eq=False)
class _Queue:
    """The coldest entries of a slot size when the queue was filled, coldest first."""

    entries: I64 = attrs.field(factory=lambda: np.empty(0, np.int64))
    touched: U64 = attrs.field(factory=lambda: np.empty(0, np.uint64))
    at: int = 0
    batches: int = 0


@final
class EvictionQueues:
    """Chooses the entries to evict; changes neither entries nor slabs."""

    def __init__(self, entries: EntryRows, slabs: SlabAllocator) -> None:
        """Choose among these entries and slabs."""
        self._entries = entries
        self._slabs = slabs
        self._slab_touched = np.zeros(len(slabs.slabs), np.uint64)
        """The newest touch of each slab."""
        self._tenants = Tenants(whole=slabs.capacity_bytes)
        self._queues: dict[tuple[Tenant, int], _Queue] = {}

    def note_touch(self, entries: I64, stamps: U64) -> None:
        """Record touches; their stamps ascend."""
        # Of equal indices numpy keeps the last value, which is the newest.
        self._slab_touched[self._entries.slabs_of(entries)] = stamps

    def share_between(self, tenants: Tenants) -> None:
        """Take the quotas and priorities of these tenants into account from now on."""
        self._tenants = tenants
        self._queues.clear()

    def choose(self, blocks: int, count: int, clock: int, tenant: Tenant) -> I64:
        """Return the entries to evict for `count` slots of a size; empty if none can be evicted.

        They are up to `count` entries of that size, or all of one slab of another. tenant: the
        owner of the new pages.
        """
        self._forget_sizes_without_slabs(blocks)
        for debtor in self._debtors(tenant, blocks):
            owed = -(-(debtor.taken - debtor.quota) // (blocks * BLOCK_BYTES))
            found = self._coldest_of(blocks, min(count, owed), debtor)
            if len(found):
                return found
        own = self._coldest_of(blocks, count, tenant)
        if not len(own):
            # Nothing of this size can be evicted: without a donor it could fail forever.
            donors = self._donors(blocks, tenant)
            return donors[0].live_rows() if donors else own
        queue = self._queues[tenant, blocks]
        queue.batches += 1
        if queue.batches % DONOR_CHECK_EVERY == 1:
            oldest = int(self._entries.rows["touched"][own[0]])
            limit = clock - COLDER_FACTOR * (clock - oldest)
            slab = self._giving_slab(blocks, limit, tenant)
            if slab is not None:
                queue.at = 0  # those just found stay queued
                return slab.live_rows()
        return own

    def _coldest_of(self, blocks: int, count: int, tenant: Tenant) -> I64:
        queue = self._queues.setdefault((tenant, blocks), _Queue())
        for _ in range(2):
            while queue.at < len(queue.entries):
                upto = queue.at + count
                entries, touched = queue.entries[queue.at : upto], queue.touched[queue.at : upto]
                queue.at = upto
                # A later touch, or another page in this entry, has changed the stamp.
                same = self._entries.rows["touched"][entries] == touched
                can_go = same & self._entries.can_go(entries) & self._frees_room(entries)
                if can_go.any():
                    found: I64 = entries[can_go]
                    return found
            self._refill(blocks, queue, tenant)
            if not len(queue.entries):
                break
        return np.empty(0, np.int64)

    def _refill(self, blocks: int, queue: _Queue, tenant: Tenant) -> None:
        size = self._slabs.sizes.get(blocks)
        slabs = size.slabs.values() if size is not None else ()
        rows = [slab.live_rows() for slab in slabs if not slab.closed]
        every = np.concatenate(rows) if rows else np.empty(0, np.int64)
        every = every[self._entries.can_go(every)]
        if self._tenants.are_several:
            numbers = self._tenants.numbers(self._entries.rows["namespace"][every])
            every = every[numbers == self._tenants.all().index(tenant)]
        length = max(QUEUE_MIN, len(every) // QUEUE_DIVISOR)
        queue.entries = self._entries.coldest(every, length)
        queue.touched = self._entries.rows["touched"][queue.entries]
        queue.at = 0

    def _frees_room(self, entries: I64) -> npt.NDArray[np.bool_]:
        """Return which entries are in slabs that accept new pages."""
        slabs = self._slabs.slabs
        numbers = self._entries.slabs_of(entries).tolist()
        return np.array([not slabs[number].closed for number in numbers], np.bool_)

    def _debtors(self, tenant: Tenant, blocks: int) -> list[Tenant]:
        """Return the tenants that must give room to this one, the lowest priority first."""
        if not self._tenants.are_several:
            return []
        is_due = tenant.may_have(blocks * BLOCK_BYTES)
        over = [
            other
            for other in self._tenants.all()
            if other is not tenant
            and other.is_over
            and (is_due or other.priority < tenant.priority)
        ]
        return sorted(over, key=lambda other: other.priority)

    def _donors(self, blocks: int, tenant: Tenant) -> list[Slab]:
        """Return slabs of other slot sizes that could be evicted whole, the coldest first."""
        others = [
            slab
            for slab in self._slabs.slabs
            if slab.blocks not in (UNBOUND, blocks) and not slab.closed
        ]
        if self._tenants.are_several:
            # Otherwise the coldest slabs, of a tenant within its quota, hide those that can be
            # evicted.
            others = self._without_kept(others, tenant)
        others.sort(key=lambda slab: int(self._slab_touched[slab.number]))
        return [slab for slab in others[:DONORS_MAX] if self._can_go(slab, tenant)]

    def _without_kept(self, slabs: list[Slab], tenant: Tenant) -> list[Slab]:
        """Leave out slabs that cannot be evicted, judging by one page of each."""
        rows = np.array([slab.rows.max() for slab in slabs], np.int64)
        numbers = np.full(len(slabs), len(self._tenants.all()))
        named = rows >= 0
        numbers[named] = self._tenants.numbers(self._entries.rows["namespace"][rows[named]])
        owners = [*self._tenants.all(), None]
        return [
            slab
            for slab, number in zip(slabs, numbers.tolist(), strict=True)
            if (owner := owners[number]) is not None and _spares(owner, slab, 1, tenant)
        ]

    def _can_go(self, slab: Slab, tenant: Tenant) -> bool:
        rows = slab.live_rows()
        # A slot that was promised earlier in this batch has no row yet.
        is_free = len(rows) == slab.taken and bool(self._entries.can_go(rows).all())
        return is_free and (not self._tenants.are_several or self._may_lose(slab, rows, tenant))

    def _may_lose(self, slab: Slab, rows: I64, tenant: Tenant) -> bool:
        """Return whether each tenant with pages in a slab is this one, or can spare them."""
        tenants = self._tenants.all()
        numbers = self._tenants.numbers(self._entries.rows["namespace"][rows])
        pages = zip(*np.unique(numbers, return_counts=True), strict=True)
        return all(_spares(tenants[number], slab, int(count), tenant) for number, count in pages)

    def _giving_slab(self, blocks: int, limit: int, tenant: Tenant) -> Slab | None:
        """Return the slab of another size to evict instead of pages of this size, if any.

        The coldest slab of tenants that must give room to this one, of any age; otherwise a slab
        with entries that were touched before `limit`, on average.
        """
        debtors = self._debtors(tenant, blocks)
        if limit <= 0 and not debtors:
            return None
        donors = self._donors(blocks, tenant)
        owed = [slab for slab in donors if debtors and self._priority_in(slab, debtors) is not None]
        if owed:
            return min(owed, key=lambda slab: self._priority_in(slab, debtors) or 0)
        for slab in donors:
            if self._entries.rows["touched"][slab.live_rows()].mean() < limit:
                return slab
        return None

    def _priority_in(self, slab: Slab, debtors: list[Tenant]) -> int | None:
        """Return the highest priority in a slab; None unless all its pages are of these tenants."""
        tenants = self._tenants.all()
        rows = self._entries.rows["namespace"][slab.live_rows()]
        owners = [tenants[number] for number in np.unique(self._tenants.numbers(rows)).tolist()]
        is_owed = all(owner in debtors for owner in owners)
        return max(owner.priority for owner in owners) if is_owed else None

    def _forget_sizes_without_slabs(self, wanted: int) -> None:
        for key in [key for key in self._queues if key[1] not in self._slabs.sizes]:
            if key[1] != wanted:
                del self._queues[key]


def _spares(owner: Tenant, slab: Slab, pages: int, tenant: Tenant) -> bool:
    """Return whether a tenant can give this many pages of a slab to another one, or to itself."""
    if owner is tenant:
        return True
    slot_bytes = slab.blocks * BLOCK_BYTES
    is_safe = owner.priority > tenant.priority and not tenant.may_have(slot_bytes)
    return not is_safe and owner.taken - pages * slot_bytes >= owner.quota


PINS_MAX: Final = 255


@attrs.frozen(eq=False)
class Gone:
    """Entries that have ended.

    keys:       n packed keys; the pool is notified of them.
    namespaces: (n,) TAG, of their pages.
    places:     index rows to delete, of pages that had been written. A pinned entry keeps its
                place.
    """

    keys: bytes
    namespaces: Tags
    places: U64

    @property
    def count(self) -> int:
        """Return the number of entries."""
        return len(self.keys) // 16


@attrs.frozen(eq=False)
class Begun:
    """What `begin` found room for.

    entries: (n,) int64: the new entry of each page, or -1: the page is on disk already, named
             twice, too large, or there is no room.
    places:  (n,) uint64, of the entries that are not -1.
    gone:    the entries that were evicted; their Forget must precede the Write of this batch.
    """

    entries: I64
    places: U64
    gone: Gone


@final
class DiskIndex:
    """The index and allocator of one store."""

    def __init__(self, *, capacity_bytes: int, slab_bytes: int) -> None:
        """Start empty. capacity_bytes: whole slabs of it are used; DiskOpened has both values."""
        self._slabs = SlabAllocator(slab_count=capacity_bytes // slab_bytes, slab_bytes=slab_bytes)
        self._keys = KeyTable()
        self._entries = EntryRows(slab_bytes)
        self.tenants = Tenants(whole=self._slabs.capacity_bytes)
        """The owners of the pages, counted in bytes of their slots."""
        self._eviction = EvictionQueues(self._entries, self._slabs)
        self._held_bytes = 0
        self._held_count = 0
        self._stored_bytes = 0
        self.clock = 0
        """Touches so far."""

    def __len__(self) -> int:
        """Return the number of HELD entries."""
        return self._held_count

    @property
    def capacity_bytes(self) -> int:
        """Return the bytes of all slabs."""
        return self._slabs.capacity_bytes

    def share_between(self, tenants: Tenants) -> None:
        """Divide the disk between tenants; scans all entries, when a tenant first appears."""
        self.tenants = tenants
        self._eviction.share_between(tenants)
        for tenant in tenants.all():
            tenant.taken = 0
        rows = self._entries.rows[: self._entries.end]
        self._charge(np.flatnonzero((rows["state"] == HELD) | (rows["state"] == WRITING)), 1)

    @property
    def page_bytes_max(self) -> int:
        """Return the longest page that fits into a slab."""
        blocks = self._slabs.slab_bytes // BLOCK_BYTES - 2
        return max(0, blocks * BLOCK_BYTES) if self._slabs.slabs else 0

    def fits(self, lengths: U64) -> npt.NDArray[np.bool_]:
        """Return which pages would fit into an empty store."""
        fitting: npt.NDArray[np.bool_] = (lengths > 0) & self._slabs.fits(slot_blocks(lengths))
        return fitting

    # --- looking ---------------------------------------------------------------------------------

    def find(self, keys: bytes) -> I64:
        """Return the HELD entry of each packed key, or -1."""
        entries = self._keys.find(halves_of(keys))
        there = np.flatnonzero(entries >= 0)
        entries[there[self._state(entries[there]) != HELD]] = NO_ROW
        return entries

    def knows(self, keys: bytes) -> npt.NDArray[np.bool_]:
        """Return which packed keys are HELD or being written."""
        found: npt.NDArray[np.bool_] = self.live(keys) >= 0
        return found

    def live(self, keys: bytes) -> I64:
        """Return the entry of each packed key, HELD or being written, or -1."""
        return self._keys.find(halves_of(keys))

    def entries(self, entries: I64) -> npt.NDArray[np.void]:
        """Return entries as rows of DISK_ENTRY (`used` is 0: age is counted in touches)."""
        rows = self._entries.rows[entries]
        found = np.zeros(len(entries), DISK_ENTRY)
        for name in ("place", "sequence", "namespace", "length", "used"):
            found[name] = rows[name]
        found["key"] = np.frombuffer(self._keys.keys_of(entries), "V16")
        found["slot"] = slot_blocks(rows["length"])
        return found

    def rows(self, entries: I64) -> npt.NDArray[np.void]:
        """Return entries as stored (`entries.FIELDS`), in a fifth of the time of `entries`."""
        return self._entries.rows[entries]

    def used(self, entries: I64) -> tuple[Tags, npt.NDArray[np.uint32]]:
        """Return the namespaces of entries, and when each was last used, in Unix seconds."""
        rows = self._entries.rows
        return rows["namespace"][entries], rows["used"][entries]

    def lengths(self, entries: I64) -> I64:
        """Return the length of the page of each entry."""
        lengths: I64 = self._entries.rows["length"][entries].astype(np.int64)
        return lengths

    def is_held(self, entries: I64) -> npt.NDArray[np.bool_]:
        """Return which of these entries are HELD. The caller has pinned them, so they exist."""
        held: npt.NDArray[np.bool_] = self._state(entries) == HELD
        return held

    def coldest(self, count: int) -> I64:
        """Return the least recently touched HELD entries, coldest first."""
        return self._entries.coldest(self._entries.held(), count)

    def hottest_first(self) -> I64:
        """Return every HELD entry, the most recently touched first."""
        return self._entries.coldest(self._entries.held(), len(self))[::-1]

    def touched_since(self, clock: int) -> I64:
        """Return the HELD entries that were touched after this value of `clock`, coldest first."""
        rows = self._entries.rows[: self._entries.end]
        recent = np.flatnonzero((rows["state"] == HELD) & (rows["touched"] > np.uint64(clock)))
        return recent[np.argsort(rows["touched"][recent], kind="stable")]

    def of_namespaces(self, namespaces: Sequence[Tag]) -> I64:
        """Return the entries of some namespaces, those being written included.

        As `model.keys.covers` defines it.
        """
        rows = self._entries.rows[: self._entries.end]
        live = (rows["state"] == HELD) | (rows["state"] == WRITING)
        spaces, variants = rows["namespace"]["space"], rows["namespace"]["variant"]
        are_copies = variants == 0
        is_theirs = are_copies & (COPIES in namespaces)
        wanted: dict[int, set[int]] = {}
        for space, variant in map(parts_of, namespaces):
            wanted.setdefault(space, set()).add(variant)
        for space, some in wanted.items():
            named = are_copies | np.isin(variants, list(some)) | (0 in some)
            is_theirs |= named & (spaces == np.uint64(space))
        return np.flatnonzero(live & is_theirs)

    def scan(self, first: int, namespace: Tag, *, count: int) -> tuple[I64, int]:
        """Return the HELD entries of a namespace's space among these, and the number after them.

        An entry keeps its number.
        """
        first = min(first, self._entries.end)
        end = min(first + count, self._entries.end)
        entries: I64 = np.arange(first, end)
        held = entries[self._state(entries) == HELD]
        return held[self.are_of_space(held, namespace)], end

    @property
    def end(self) -> int:
        """Return the number after that of every entry: the end of a scan."""
        return self._entries.end

    def keys(self, entries: I64) -> bytes:
        """Return the packed keys of entries."""
        return self._keys.keys_of(entries)

    def are_of_space(self, entries: I64, namespace: Tag) -> npt.NDArray[np.bool_]:
        """Return which entries belong to a namespace, so that a get in it finds them."""
        spaces = self._entries.rows["namespace"]["space"][entries]
        are_theirs: npt.NDArray[np.bool_] = spaces == np.uint64(space_of(namespace))
        return are_theirs

    def used_before(self, unix_s: int, first: int, count: int) -> I64:
        """Return the HELD entries among these that were last used before a moment."""
        rows = self._entries.rows[first : min(first + count, self._entries.end)]
        return np.flatnonzero((rows["state"] == HELD) & (rows["used"] < unix_s)) + first

    # --- writing ----------------------------------------------------------------------------------

    def begin(
        self, keys: bytes, namespaces: Tags, lengths: U64, sequences: U64, used: I64 | int
    ) -> Begun:
        """Take a place for each page that is not known; the entries are WRITING and pinned.

        used: when each page was last used, in Unix seconds.
        """
        halves = halves_of(keys)
        entries = np.full(len(halves), NO_ROW, np.int64)
        blocks = slot_blocks(lengths)
        wanted = (self._keys.find(halves) < 0) & self.fits(lengths) & _first_of_each(halves)
        gone: list[Gone] = []
        places: U64 = np.zeros(len(halves), np.uint64)
        got_room = np.zeros(len(halves), np.bool_)
        for tenant, size, pages in self._alike(wanted, blocks, namespaces):
            room = self._room(size, len(pages), gone, tenant)
            places[pages[: len(room)]] = room
            got_room[pages[: len(room)]] = True
            tenant.taken += size * BLOCK_BYTES * len(room)
        pages = np.flatnonzero(got_room)
        places = places[pages]
        new = entries[pages] = self._new(places)
        rows = self._entries.rows
        rows["sequence"][new], rows["namespace"][new] = sequences[pages], namespaces[pages]
        rows["length"][new] = lengths[pages]
        rows["used"][new] = np.broadcast_to(np.maximum(used, 0), len(lengths))[pages]
        rows["state"][new], rows["pins"][new], rows["touched"][new] = WRITING, 1, 0
        rows["checksum"][new] = 0
        self._slabs.put(places, new)
        self._keys.add(new, halves[pages])
        return Begun(entries, places, _together(gone))

    def finish(self, entries: I64) -> tuple[npt.NDArray[np.bool_], U64]:
        """Unpin entries that were written: they become HELD and the hottest entries, the last one
        the hottest.

        Return which of them are HELD, and the places of the others, which were removed in the
        meantime: the store has rows of them, and their keys may have new entries.
        """
        live = self._state(entries) == WRITING
        held, ended = entries[live], entries[~live]
        self._entries.rows["state"][held] = HELD
        self._held_count += len(held)
        self._stored_bytes += self._entries.page_bytes(held)
        self._held_bytes += self._entries.slot_bytes(held)
        self.touch(held)
        places: U64 = self._entries.rows["place"][ended]
        self.unpin(entries)
        return live, places

    def abandon(self, entries: I64) -> None:
        """End entries that were not written, and unpin them."""
        self._end(entries[self._state(entries) == WRITING])
        self.unpin(entries)

    def refuse(self, entries: I64) -> None:
        """Abandon entries in slabs without room in the file system; close those until `reopen`."""
        for number in np.unique(self._entries.slabs_of(entries)).tolist():
            self._slabs.close(self._slabs.slabs[number])
        self.abandon(entries)

    def reopen(self) -> None:
        """Allocate places of closed slabs again: the file system may have room now."""
        self._slabs.reopen()

    # --- entries ---------------------------------------------------------------------------------

    def load(self, entries: npt.NDArray[np.void]) -> None:
        """Load the entries of DiskOpened, coldest first, into an empty index."""
        assert not self._entries.end, "an index is loaded once, and first"
        rows = self._new(entries["place"])
        for name in ("sequence", "namespace", "length", "used"):
            self._entries.rows[name][rows] = entries[name]
        self._entries.rows["checksum"][rows] = 0
        self._entries.rows["state"][rows] = HELD
        blocks = slot_blocks(entries["length"])
        self._slabs.load(entries["place"], blocks, rows)
        self._keys.add(rows, halves_of(entries["key"].tobytes()))
        self._held_count = len(rows)
        self._stored_bytes = self._entries.page_bytes(rows)
        self._held_bytes = self._entries.slot_bytes(rows)
        self._charge(rows, 1)
        self.touch(rows)

    def touch(self, entries: I64, unix_s: int | I64 = 0) -> None:
        """Make HELD entries the hottest, the last one the hottest. unix_s: when they were used."""
        count = len(entries)
        self._entries.rows["used"][entries] = np.maximum(
            self._entries.rows["used"][entries], unix_s
        )
        stamps = np.arange(self.clock + 1, self.clock + 1 + count, dtype=np.uint64)
        self._entries.rows["touched"][entries] = stamps
        self._eviction.note_touch(entries, stamps)
        self.clock += count

    def note_checksums(self, entries: I64, checksums: U64) -> None:
        """Note what pinned entries have on disk: it is not read from their headers any more."""
        self._entries.rows["checksum"][entries] = checksums

    def pin(self, entries: I64) -> None:
        """Keep the places of these entries, each named once, until they are unpinned."""
        pins = self._entries.rows["pins"]
        assert (pins[entries] < PINS_MAX).all(), "an entry is pinned too often"
        pins[entries] += 1

    def unpin(self, entries: I64) -> None:
        """Undo one `pin`; free the places of those that have ended."""
        pins = self._entries.rows["pins"]
        assert (pins[entries] > 0).all(), "an entry was unpinned too often"
        pins[entries] -= 1
        ended = entries[(pins[entries] == 0) & (self._state(entries) == ENDED)]
        self._free(ended)

    def remove(self, entries: I64) -> Gone:
        """End entries, HELD or WRITING, each named once. Pinned ones keep their places."""
        state = self._state(entries)
        entries = entries[(state == HELD) | (state == WRITING)]
        keys, namespaces = self._keys.keys_of(entries), self._entries.rows["namespace"][entries]
        # Only a written page has a row; the row of a page that is being written is deleted later.
        places = self._entries.rows["place"][entries[self._state(entries) == HELD]]
        self._end(entries)
        self._free(entries[self._entries.rows["pins"][entries] == 0])
        return Gone(keys, namespaces, places)

    # --- figures ----------------------------------------------------------------------------------

    def figures(self) -> dict[str, int]:
        """Return the figures; used + in flight + free is the capacity, to the byte.

        `disk_bytes_closed` is that part of the free bytes for which the file system has no room.
        """
        capacity, taken = self._slabs.capacity_bytes, self._slabs.taken_bytes
        closed = [slab for slab in self._slabs.slabs if slab.closed]
        used_in_closed = sum(slab.taken * slab.blocks * BLOCK_BYTES for slab in closed)
        return {
            "disk_bytes": capacity,
            "disk_bytes_used": self._held_bytes,
            "disk_bytes_in_flight": taken - self._held_bytes,
            "disk_bytes_free": capacity - taken,
            "disk_bytes_closed": len(closed) * self._slabs.slab_bytes - used_in_closed,
            "disk_bytes_stored": self._stored_bytes,
            "disk_pages": self._held_count,
            "disk_slot_sizes": len(self._slabs.sizes),
        }

    def check(self) -> None:
        """Assert the totals, in time that does not grow with the index."""
        taken = self._slabs.taken_bytes
        assert 0 <= self._held_bytes <= taken, f"{self._held_bytes} bytes held of {taken}"
        assert taken <= self._slabs.capacity_bytes, f"{taken} bytes taken"
        assert 0 <= self._stored_bytes <= self._held_bytes, f"{self._stored_bytes} bytes stored"
        charged = sum(tenant.taken for tenant in self.tenants.all())
        assert self._held_bytes <= charged <= taken, f"{charged} bytes of tenants in {taken}"
        assert 0 <= self._held_count <= len(self._keys), f"{self._held_count} entries held"

    # --- helpers ---------------------------------------------------------------------------------

    def _alike(
        self, wanted: npt.NDArray[np.bool_], blocks: I64, namespaces: Tags
    ) -> Iterator[tuple[Tenant, int, I64]]:
        """Yield the wanted pages of each tenant and slot size."""
        tenants = self.tenants.all()
        numbers: I64 = np.full(len(wanted), len(tenants) - 1)
        if self.tenants.are_several:
            numbers = self.tenants.numbers(namespaces)
        for number in np.unique(numbers[wanted]).tolist():
            theirs = wanted & (numbers == number)
            for size in np.unique(blocks[theirs]).tolist():
                yield tenants[number], size, np.flatnonzero(theirs & (blocks == size))

    def _charge(self, entries: I64, sign: int) -> None:
        """Charge the tenants for these entries, or credit them."""
        if not self.tenants.are_several:
            self.tenants.others.taken += sign * self._entries.slot_bytes(entries)
            return
        tenants = self.tenants.all()
        numbers = self.tenants.numbers(self._entries.rows["namespace"][entries])
        for number in np.unique(numbers).tolist():
            taken = self._entries.slot_bytes(entries[numbers == number])
            tenants[number].taken += sign * taken

    def _room(self, blocks: int, count: int, gone: list[Gone], tenant: Tenant) -> U64:
        """Return up to `count` places, ascending, evicting as much as needed."""
        found = [self._slabs.take(blocks, count)]
        missing = count - len(found[0])
        while missing:
            if not self._slabs.bind(blocks):
                victims = self._eviction.choose(blocks, missing, self.clock, tenant)
                if not len(victims):
                    break
                gone.append(self.remove(victims))
            found.append(self._slabs.take(blocks, missing))
            missing -= len(found[-1])
        return np.sort(np.concatenate(found))

    def _new(self, places: U64) -> I64:
        entries = self._entries.new(len(places))
        self._keys.reserve(len(self._entries.rows))
        self._entries.rows["place"][entries] = places
        self._entries.rows["pins"][entries] = 0
        return entries

    def _end(self, entries: I64) -> None:
        """End HELD and WRITING entries; their places are freed separately."""
        held = entries[self._state(entries) == HELD]
        self._held_count -= len(held)
        self._stored_bytes -= self._entries.page_bytes(held)
        self._held_bytes -= self._entries.slot_bytes(held)
        self._charge(entries, -1)
        self._keys.remove(entries)
        self._entries.rows["state"][entries] = ENDED

    def _free(self, entries: I64) -> None:
        if len(entries):
            self._slabs.release(self._entries.rows["place"][entries])
            self._entries.free(entries)

    def _state(self, entries: I64) -> npt.NDArray[np.uint8]:
        state: npt.NDArray[np.uint8] = self._entries.rows["state"][entries]
        return state


def _first_of_each(keys: Halves) -> npt.NDArray[np.bool_]:
    """Return True for the first of equal keys."""
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    first = np.ones(len(keys), np.bool_)
    ordered = keys[order]
    first[order[1:]] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return first


def _together(parts: list[Gone]) -> Gone:
    return Gone(
        b"".join(part.keys for part in parts),
        np.concatenate([part.namespaces for part in parts] or [np.empty(0, TAG)]),
        np.concatenate([part.places for part in parts] or [np.empty(0, np.uint64)]),
    )
