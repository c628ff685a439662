"""The index of a disk in memory: which page lies where, and which pages go for new ones.

An *entry* is a page on disk or on its way there, and is named by a number that stays its own as
long as the entry lives. It is WRITING, then HELD; what is removed while it is *pinned* (a write or
a load is under way) is ENDED: its key is gone, its place is not given out before the last unpin.

Room for new pages comes from empty slots, then from the least recently touched entries of the same
slot size, or, where those of another size are much colder, from a whole slab of that size.
Everything works on batches: numpy arrays, about 80 bytes an entry, no object a page. Pure: no I/O,
no clock of its own; age is counted in touches.

A batch's life: `begin` → Spill → `finish` (written) or `abandon` (not). A load: `pin` → Load →
`unpin`. A call that is late keeps its pin until it has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.disk.eviction import EvictionQueues
from peercache.actors.disk.index_rows import ENDED, HELD, WRITING, EntryRows
from peercache.actors.disk.key_table import NO_ROW, Halves, KeyTable, halves_of
from peercache.actors.disk.slabs import BLOCK_BYTES, SlabAllocator, slot_blocks
from peercache.actors.storage_port import DISK_ENTRY
from peercache.actors.tenants import Tenant, Tenants
from peercache.model.keys import COPIES, SPACE_BITS, space_of
from peercache.model.runs import I64, U64

PINS_MAX: Final = 255


@attrs.frozen(eq=False)
class Gone:
    """Entries that have ended.

    keys:       n packed keys; the pool is told of them.
    namespaces: (n,) uint64, of their pages.
    places:     whose index rows go: of pages that had been written. A pinned entry keeps its place.
    """

    keys: bytes
    namespaces: U64
    places: U64

    @property
    def count(self) -> int:
        """Return the number of entries."""
        return len(self.keys) // 16


@attrs.frozen(eq=False)
class Begun:
    """What `begin` found room for.

    entries: (n,) int64: the new entry of each page, -1 where there is none: it is there already,
             named twice, too large, or there is no room.
    places:  (n,) uint64, of the entries that are not -1.
    gone:    the entries that were evicted; Forget comes before the Spill of this batch.
    """

    entries: I64
    places: U64
    gone: Gone


@final
class DiskIndex:
    """The index and allocator of one store."""

    def __init__(self, *, capacity_bytes: int, slab_bytes: int) -> None:
        """Start empty. capacity_bytes: whole slabs of it are used; DiskOpened tells both."""
        self._slabs = SlabAllocator(slab_count=capacity_bytes // slab_bytes, slab_bytes=slab_bytes)
        self._keys = KeyTable()
        self._entries = EntryRows(slab_bytes)
        self.tenants = Tenants(whole=self._slabs.capacity_bytes)
        """Whose pages these are, in bytes of their slots."""
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
        """Divide the disk between tenants; a pass over all entries, as a tenant first appears."""
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
        """Return which pages could lie here at all, if there were nothing else."""
        fitting: npt.NDArray[np.bool_] = (lengths > 0) & self._slabs.fits(slot_blocks(lengths))
        return fitting

    # --- looking ---------------------------------------------------------------------------------

    def find(self, keys: bytes) -> I64:
        """Return the HELD entry of each packed key, -1 where there is none."""
        entries = self._keys.find(halves_of(keys))
        there = np.flatnonzero(entries >= 0)
        entries[there[self._state(entries[there]) != HELD]] = NO_ROW
        return entries

    def knows(self, keys: bytes) -> npt.NDArray[np.bool_]:
        """Return which packed keys are HELD or being written."""
        found: npt.NDArray[np.bool_] = self.live(keys) >= 0
        return found

    def live(self, keys: bytes) -> I64:
        """Return the entry of each packed key, HELD or being written, -1 where there is none."""
        return self._keys.find(halves_of(keys))

    def entries(self, entries: I64) -> npt.NDArray[np.void]:
        """Return entries as rows of DISK_ENTRY (`used` is 0: age is kept in touches)."""
        rows = self._entries.rows[entries]
        found = np.zeros(len(entries), DISK_ENTRY)
        for name in ("place", "sequence", "namespace", "length", "written"):
            found[name] = rows[name]
        found["key"] = np.frombuffer(self._keys.keys_of(entries), "V16")
        found["slot"] = slot_blocks(rows["length"])
        return found

    def rows(self, entries: I64) -> npt.NDArray[np.void]:
        """Return entries as they are kept (`entries.FIELDS`): a fifth of the time of `entries`."""
        return self._entries.rows[entries]

    def lengths(self, entries: I64) -> I64:
        """Return the length of the page of each entry."""
        lengths: I64 = self._entries.rows["length"][entries].astype(np.int64)
        return lengths

    def is_held(self, entries: I64) -> npt.NDArray[np.bool_]:
        """Return which of these entries (pinned by the caller, so that they live) are HELD."""
        held: npt.NDArray[np.bool_] = self._state(entries) == HELD
        return held

    def coldest(self, count: int) -> I64:
        """Return the least recently touched HELD entries, coldest first."""
        return self._entries.coldest(self._entries.held(), count)

    def hottest_first(self) -> I64:
        """Return every HELD entry, the most recently touched first."""
        return self._entries.coldest(self._entries.held(), len(self))[::-1]

    def touched_since(self, clock: int) -> I64:
        """Return the HELD entries that were touched after `clock` showed this, coldest first."""
        rows = self._entries.rows[: self._entries.end]
        recent = np.flatnonzero((rows["state"] == HELD) & (rows["touched"] > np.uint64(clock)))
        return recent[np.argsort(rows["touched"][recent], kind="stable")]

    def of_namespaces(self, namespaces: Sequence[int]) -> I64:
        """Return the entries of some namespaces, those being written included.

        As `model.keys.covers` says.
        """
        rows = self._entries.rows[: self._entries.end]
        live = (rows["state"] == HELD) | (rows["state"] == WRITING)
        wanted, tags = np.array(namespaces, np.uint64), rows["namespace"]
        spaces = tags & np.uint64(SPACE_BITS)
        is_theirs = np.isin(tags, wanted) | np.isin(spaces, wanted)
        named = np.isin(spaces, wanted & np.uint64(SPACE_BITS)) | np.any(wanted == COPIES)
        is_theirs |= (tags == spaces) & named
        return np.flatnonzero(live & is_theirs)

    def are_of_space(self, entries: I64, namespace: int) -> npt.NDArray[np.bool_]:
        """Return which entries are of the space of a namespace's tag: a get of it finds them."""
        spaces = self._entries.rows["namespace"][entries] & np.uint64(SPACE_BITS)
        are_theirs: npt.NDArray[np.bool_] = spaces == np.uint64(space_of(namespace))
        return are_theirs

    def written_before(self, unix_s: int) -> I64:
        """Return the HELD entries that were written before a moment: for a time to live."""
        rows = self._entries.rows[: self._entries.end]
        return np.flatnonzero((rows["state"] == HELD) & (rows["written"] < unix_s))

    # --- writing ----------------------------------------------------------------------------------

    def begin(
        self, keys: bytes, namespaces: U64, lengths: U64, sequences: U64, unix_s: int
    ) -> Begun:
        """Take a place for each page that is not known; the entries are WRITING and pinned."""
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
        rows["length"][new], rows["written"][new] = lengths[pages], unix_s
        rows["state"][new], rows["pins"][new], rows["touched"][new] = WRITING, 1, 0
        self._slabs.put(places, new)
        self._keys.add(new, halves[pages])
        return Begun(entries, places, _together(gone))

    def finish(self, entries: I64) -> tuple[npt.NDArray[np.bool_], U64]:
        """Unpin entries that were written: they are HELD, and the hottest, the last one most.

        Return which are; and the places of the others, which were removed meanwhile: the store has
        rows of them. Their keys may have entries anew.
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
        """Abandon entries whose slabs the file system has no room for: closed until `reopen`."""
        for number in np.unique(self._entries.slabs_of(entries)).tolist():
            self._slabs.close(self._slabs.slabs[number])
        self.abandon(entries)

    def reopen(self) -> None:
        """Give out places of closed slabs again: the file system may have room now."""
        self._slabs.reopen()

    # --- what lies there --------------------------------------------------------------------------

    def load(self, entries: npt.NDArray[np.void]) -> None:
        """Take what DiskOpened tells, coldest first; only an empty index does."""
        assert not self._entries.end, "an index is loaded once, and first"
        rows = self._new(entries["place"])
        for name in ("sequence", "namespace", "length", "written"):
            self._entries.rows[name][rows] = entries[name]
        self._entries.rows["state"][rows] = HELD
        blocks = slot_blocks(entries["length"])
        self._slabs.load(entries["place"], blocks, rows)
        self._keys.add(rows, halves_of(entries["key"].tobytes()))
        self._held_count = len(rows)
        self._stored_bytes = self._entries.page_bytes(rows)
        self._held_bytes = self._entries.slot_bytes(rows)
        self._charge(rows, 1)
        self.touch(rows)

    def touch(self, entries: I64) -> None:
        """Make HELD entries the hottest, the last one most."""
        count = len(entries)
        stamps = np.arange(self.clock + 1, self.clock + 1 + count, dtype=np.uint64)
        self._entries.rows["touched"][entries] = stamps
        self._eviction.note_touch(entries, stamps)
        self.clock += count

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
        """End entries, HELD or WRITING, each named once. Pinned ones keep their places for now."""
        state = self._state(entries)
        entries = entries[(state == HELD) | (state == WRITING)]
        keys, namespaces = self._keys.keys_of(entries), self._entries.rows["namespace"][entries]
        # Only what was written has a row; the row of a page that is being written goes later.
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
        """Assert the sums, in time that does not grow with the index."""
        taken = self._slabs.taken_bytes
        assert 0 <= self._held_bytes <= taken, f"{self._held_bytes} bytes held of {taken}"
        assert taken <= self._slabs.capacity_bytes, f"{taken} bytes taken"
        assert 0 <= self._stored_bytes <= self._held_bytes, f"{self._stored_bytes} bytes stored"
        charged = sum(tenant.taken for tenant in self.tenants.all())
        assert self._held_bytes <= charged <= taken, f"{charged} bytes of tenants in {taken}"
        assert 0 <= self._held_count <= len(self._keys), f"{self._held_count} entries held"

    # --- below -----------------------------------------------------------------------------------

    def _alike(
        self, wanted: npt.NDArray[np.bool_], blocks: I64, namespaces: U64
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
        """Note what these entries take, or take no longer."""
        if not self.tenants.are_several:
            self.tenants.others.taken += sign * self._entries.slot_bytes(entries)
            return
        tenants = self.tenants.all()
        numbers = self.tenants.numbers(self._entries.rows["namespace"][entries])
        for number in np.unique(numbers).tolist():
            taken = self._entries.slot_bytes(entries[numbers == number])
            tenants[number].taken += sign * taken

    def _room(self, blocks: int, count: int, gone: list[Gone], tenant: Tenant) -> U64:
        """Return up to `count` places, ascending, evicting what must go."""
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
    none = np.empty(0, np.uint64)
    return Gone(
        b"".join(part.keys for part in parts),
        np.concatenate([part.namespaces for part in parts] or [none]),
        np.concatenate([part.places for part in parts] or [none]),
    )
