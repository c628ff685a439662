"""Finds pages: in the cache, then in directory tables of this host, then by requests in parallel.

`LocationCache` has the last records that a client has seen. It is always safe, because a stale
record fails verification. It never caches an absence: a page may appear anywhere at any moment.
Every operation is one compiled call per batch: an `exists` of known pages, which an engine calls
for each prompt, does little else.

`Search` is the state of one search: what was found, which owners are next, and what is absent. Of
several records of a page it keeps that of the nearest holder, and prefers any copy in memory to one
that is only on a disk. It performs no steps and has no clock: `Locator` sends the requests, and
adds the answers.

The tables of this host's nodes are read in shared memory, without a request. A page that is missing
in such a table is absent only if the table has authority for the key; otherwise another owner is
asked.

A search sends one request per peer and batch. An owner that does not answer is replaced by its
replica at once; so is one without a record, for `handover_s` after a view change, or if it reports
that it is behind: then ANSWERS_MAX owners must agree. In a settled cluster an absent page costs one
request.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cached_property
from itertools import repeat
from threading import Lock
from typing import Any, Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.installation.library import Begin, function
from peercache.model.keys import PageKeys
from peercache.model.reads import Looked
from peercache.model.records import ON_DISK, RECORD, RECORD_BYTES, RESIDENT, ROW, Records
from peercache.net.breaker import Breakers
from peercache.observability import reasons
from peercache.paths.cluster import Cluster
from peercache.paths.steps import Ask, ReadTable, Step
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import Located, Lookup

WAYS: Final = 16
"""Places in one set of keys: the least recently used record of a set is evicted."""

HEADER_BYTES: Final = 64
SET_BYTES: Final = 64 + WAYS * 72
LINE_BYTES: Final = 64

HOLDERS_MAX: Final = 64
"""Holders of one batch; with more, `holders` returns None."""


@final
class LocationCache:
    """A bounded map from page key to the last seen record. Thread-safe."""

    def __init__(self, *, entries_max: int) -> None:
        """Hold at most `entries_max` records (76 bytes each); with 0 it stays empty.

        The memory is allocated as records are stored. A nearly full cache may lack a few more of
        the least recently used records than its size suggests: each key has WAYS places.
        """
        self._ways = min(WAYS, entries_max)
        self._sets = entries_max // WAYS if entries_max >= WAYS else min(1, entries_max)
        self._lock = Lock()
        self._compiled = _compiled()
        self._holders = np.zeros(HOLDERS_MAX, np.uint64)
        self._holders_at = ctypes.addressof(Begin.from_buffer(self._holders))
        self.epoch = 0
        """Changes with each `end`: what a call has found before is not stored afterwards."""
        self.clear()

    def __len__(self) -> int:
        """Return the number of cached records."""
        return int(self._header[2])

    def find(self, keys: PageKeys, *, not_before: float = -np.inf) -> tuple[Records, Any]:
        """Return the record of each key, zeros if it is unknown, and which are known, (n,) bool.

        not_before: records stored earlier than this (monotonic seconds) do not count. Records found
                    become the most recently used ones.
        """
        records: Records = np.empty(len(keys), RECORD)
        known = np.empty(len(keys), np.bool_)
        into, marks = (
            ctypes.addressof(Begin.from_buffer(records)),
            ctypes.addressof(Begin.from_buffer(known)),
        )
        with self._lock:
            self._compiled.find(self._at, keys.tobytes(), len(keys), not_before, into, marks)
        return records, known

    def holders(
        self, keys: PageKeys, *, not_before: float, are_touched: bool = False
    ) -> list[int] | None:
        """Return the holders of the keys; None unless recent records of all say "in memory".

        are_touched: whether the holders must also have been notified that the pages will be read.
        """
        packed = keys.tobytes()
        with self._lock:
            found: int = self._compiled.holders(
                self._at, packed, len(keys), not_before, are_touched, self._holders_at, HOLDERS_MAX
            )
            return self._holders[:found].tolist() if found > 0 else None

    def has_any_at(self, holder: int, keys: PageKeys) -> bool:
        """Return whether any of the keys was last seen in the memory of this holder."""
        packed = keys.tobytes()
        with self._lock:
            return bool(self._compiled.any_at(self._at, holder, packed, len(keys)))

    def store(
        self, records: Records, now: float, *, epoch: int | None = None, are_touched: bool = False
    ) -> None:
        """Store records, one per key.

        epoch:       the epoch before the caller requested them; None: they are current.
        are_touched: the caller notifies their holders now that the pages are about to be read.
        """
        self.store_packed(records.tobytes(), now, epoch=epoch, are_touched=are_touched)

    def store_packed(
        self, packed: bytes, now: float, *, epoch: int | None = None, are_touched: bool = False
    ) -> None:
        """Store packed records, as in a message."""
        count = len(packed) // RECORD_BYTES
        with self._lock:
            if self._sets and epoch in (None, self.epoch):
                self._compiled.store(self._at, packed, count, now, are_touched)

    def drop(self, records: Records) -> None:
        """Remove exactly these records; a newer one of the same key stays."""
        packed = records.tobytes()
        with self._lock:
            self._compiled.drop(self._at, packed, len(records))

    def forget(self, keys: PageKeys) -> None:
        """Remove the records of these keys."""
        packed = keys.tobytes()
        with self._lock:
            self._compiled.forget(self._at, packed, len(keys))

    def end(self, keys: PageKeys | None = None) -> None:
        """Forget removed pages, all without `keys`; calls in progress cannot store them again."""
        with self._lock:
            self.epoch += 1
        if keys is None:
            self.clear()
        else:
            self.forget(keys)

    def close(self) -> None:
        """Release the memory and stay empty.

        A closed client is part of reference cycles: until they are collected, which may take
        minutes, it would keep these megabytes.
        """
        with self._lock:
            self._sets = self._ways = 0
        self.clear()

    def clear(self) -> None:
        """Remove all records."""
        memory = np.zeros(LINE_BYTES + HEADER_BYTES + self._sets * SET_BYTES, np.uint8)
        begin = -ctypes.addressof(Begin.from_buffer(memory)) % LINE_BYTES
        header: npt.NDArray[np.uint64] = memory[begin : begin + HEADER_BYTES].view(np.uint64)
        header[:2] = self._sets, self._ways
        with self._lock:
            # `header` keeps the memory alive.
            self._header, self._at = header, ctypes.addressof(Begin.from_buffer(header))


@functools.cache
def _compiled() -> _Calls:
    return _Calls()


@final
class _Calls:
    """The compiled functions. They take a microsecond or a few, so they keep the GIL."""

    def __init__(self) -> None:
        at, keys, count, now = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_double

        def named(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
            found: Callable[..., Any] = function(
                f"peercache_locations_{name}", result, at, *arguments, keeps_gil=True
            )
            return found

        holders = (keys, count, now, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)
        self.find = named(
            "find", ctypes.c_int64, keys, count, now, ctypes.c_void_p, ctypes.c_void_p
        )
        self.holders = named("holders", ctypes.c_int64, *holders)
        self.any_at = named("any_at", ctypes.c_int, ctypes.c_uint64, keys, count)
        self.store = named("store", None, keys, count, now, ctypes.c_int)
        self.drop = named("drop", None, keys, count)
        self.forget = named("forget", None, keys, count)


Mask = npt.NDArray[np.bool_]

ANSWERS_MAX = 2
"""Number of owners whose answers are enough, even if all of them are behind, and one more during a
hand-over: if every host owns every key, asking all of them would take as many round trips."""


@attrs.define(eq=False)
class Whereabouts:
    """Where the pages of a batch are.

    records: (n,) RECORD; valid where `known`.
    fresh:   whether the record came from an answer in this call, not from the cache.
    reasons: why a page is not known, a miss reason each; "" if it is known.
    strangers: holders of unknown pages, which are not in the view either.
    """

    records: Records
    known: Mask
    fresh: Mask
    reasons: list[str]
    strangers: frozenset[int] = frozenset()


@final
class Search:
    """The state of one search."""

    def __init__(
        self,
        keys: PageKeys,
        names: list[bytes],
        cluster: Cluster,
        avoid: frozenset[int],
        failed: frozenset[bytes],
        may_read: Callable[[Iterable[int], Cluster], bool],
    ) -> None:
        count = len(keys)
        self.keys = keys
        self.names = names
        self.records: Records = np.zeros(count, RECORD)
        self.known: Mask = np.zeros(count, np.bool_)
        self.fresh: Mask = np.zeros(count, np.bool_)
        self.answered: npt.NDArray[np.int8] = np.zeros(count, np.int8)
        """How many owners of each key have answered; counts only a few."""
        self._settled: Mask = np.zeros(count, np.bool_)
        self._absent: Mask = np.zeros(count, np.bool_)
        self._on_disk: Mask = np.zeros(count, np.bool_)
        self._held_out_of_reach: Mask = np.zeros(count, np.bool_)
        self._strangers: dict[int, int] = {}
        """By index: a holder that is not in the view."""
        self._column = np.zeros(count, np.int64)
        self._position = dict(zip(self.names, range(count), strict=True))
        self._cluster = cluster
        self._avoid = avoid
        self._failed = failed
        self._may_read = may_read
        self.cost_of: Callable[[int], tuple[int, int]] = lambda _: (0, 0)
        self._usable: dict[int, bool] = {}
        # A key that is repeated in the batch is looked up once, at its last index.
        self._repeats = len(self._position) < count
        if self._repeats:
            last = np.zeros(count, np.bool_)
            last[list(self._position.values())] = True
            self._shadow = ~last
            self.known |= self._shadow
        self._missing = len(self._position)

    @cached_property
    def owners(self) -> npt.NDArray[np.intp]:
        """(n, owners): the owners of each key in query order, as indices of `ring.members`.

        Owners from before the last view change are last.
        """
        cluster = self._cluster
        if not cluster.ring.members:
            return np.empty((len(self.keys), 0), np.intp)
        owners: npt.NDArray[np.intp] = cluster.query_order[self._arcs]
        return owners

    @cached_property
    def _arcs(self) -> npt.NDArray[np.intp]:
        """(n,): the arc of each key; the ring must have members."""
        return self._cluster.ring.arcs(self.keys)

    def take_cached(self, records: Records, known: Mask) -> None:
        """Start with the cached records; the search modifies them from now on."""
        usable = known & self._reachable(records["holder"]) & is_somewhere(records)
        if self._repeats:
            usable &= ~self._shadow
        self.records = records
        self.known |= usable
        self._on_disk = usable & ((records["flags"] & RESIDENT) == 0)
        self._missing = len(self.known) - int(np.count_nonzero(self.known))

    def has_all(self, answers: Iterable[Message | None]) -> bool:
        """Return whether these answers name every missing page, and none only on a disk.

        Changes nothing: `take` adds the answers.
        """
        raw = [answer.records for answer in answers if isinstance(answer, Located)]
        if sum(map(len, raw)) < self._missing * RECORD_BYTES:
            return False
        records = np.frombuffer(b"".join(raw), RECORD)
        places = self._places_of(records)
        good = self._is_usable(records, places) & self._reachable(records["holder"])
        good &= (records["flags"] & RESIDENT) != 0
        in_memory = self.known & ~self._on_disk
        in_memory[places[good]] = True
        return bool(in_memory.all())

    def take(self, answers: Iterable[Message | None]) -> None:
        """Add answers."""
        raw = [answer.records for answer in answers if isinstance(answer, Located)]
        self._settle(b"".join(raw))

    def _settle(self, raw: bytes) -> None:
        if not raw:
            return
        records = np.frombuffer(raw, RECORD)
        places = self._places_of(records)
        usable = self._is_usable(records, places)
        reachable = self._reachable(records["holder"])
        if not reachable.all():
            out_of_reach = usable & ~reachable
            self._held_out_of_reach[places[out_of_reach]] = True
            for place, holder in zip(
                places[out_of_reach].tolist(), records["holder"][out_of_reach].tolist(), strict=True
            ):
                if holder not in self._cluster.members:
                    self._strangers[place] = holder
            usable &= reachable
        if not usable.all():
            records, places = picked(records, usable), places[usable]
        if len(set(places.tolist())) < len(places) or self.known[places].any():
            self._choose(places, records)
        else:
            self._put(places, records)
        self._missing = len(self.known) - int(np.count_nonzero(self.known))

    def _places_of(self, records: Records) -> npt.NDArray[np.intp]:
        """Return the index of each record's key; -1 for one that is not searched."""
        found = list(map(self._position.get, records["key"].tolist(), repeat(-1)))
        return np.array(found, np.intp)

    def _is_usable(self, records: Records, places: npt.NDArray[np.intp]) -> Mask:
        """Return which records are of a searched page, and have not failed."""
        usable: Mask = (places >= 0) & is_somewhere(records)
        if self._failed:
            usable &= [name not in self._failed for name in names_of_records(records)]
        return usable

    def _choose(self, places: npt.NDArray[np.intp], records: Records) -> None:
        """Keep the best of several records for one key, an earlier one included."""
        # Of one holder, only the newest record counts.
        order = np.lexsort((records["generation"], records["holder"], places))
        records, places = picked(records, order), places[order]
        is_newest = np.ones(len(places), np.bool_)
        is_newest[:-1] = places[1:] != places[:-1]
        is_newest[:-1] |= records["holder"][1:] != records["holder"][:-1]
        there = picked(self.records, places)
        is_known = self.known[places]
        is_newest &= ~(
            is_known
            & (there["holder"] == records["holder"])
            & (there["generation"] >= records["generation"])
        )
        records, places = picked(records, is_newest), places[is_newest]
        holders = records["holder"].tolist()
        best_last = sorted(dict.fromkeys(holders), key=self._worth, reverse=True)
        rank = {holder: at for at, holder in enumerate(best_last)}
        # The worst first, so that the best is written last and stays. Pages that are only on disk
        # come first of all: any copy in memory is better.
        ranks = np.array([rank[holder] for holder in holders], np.int64)
        order = np.lexsort((ranks, records["flags"] & RESIDENT))
        records, places = picked(records, order), places[order]
        is_known = self.known[places]
        for at in np.flatnonzero(is_known).tolist():
            self._offer(int(places[at]), records[at])
        self._put(places[~is_known], picked(records, ~is_known))

    def _put(self, places: npt.NDArray[np.intp], records: Records) -> None:
        """Set the records at these indices; of several for one index the last stays."""
        self.records.view(ROW)[places] = records.view(ROW)
        self.known[places] = self.fresh[places] = True
        self._on_disk[places] = (records["flags"] & RESIDENT) == 0

    def found(self) -> Records:
        """Return the records from answers, one per key."""
        fresh = self.fresh & self.known
        return self.records if fresh.all() else picked(self.records, fresh)

    def _worth(self, holder: int) -> tuple[int, tuple[int, int]]:
        """Return the cost of reading from a holder: less is better, and near is best."""
        return self._cluster.distance(holder), self.cost_of(holder)

    def _offer(self, place: int, record: Any) -> None:
        """Replace the record at an index if this one is better."""
        there = self.records[place]
        on_disk = not record["flags"] & RESIDENT
        if there["holder"] == record["holder"]:
            better = record["generation"] > there["generation"]
        elif self._on_disk[place] != on_disk:
            better = not on_disk
        else:
            better = self._worth(int(record["holder"])) < self._worth(int(there["holder"]))
        if better:
            self.records[place] = record
            self.fresh[place] = True
            self._on_disk[place] = on_disk

    def next_owners(
        self, is_available: Callable[[int], bool], *, in_handover: bool
    ) -> dict[int, npt.NDArray[np.intp]]:
        """Return the keys to ask each peer for: each key is sent to its next available owner."""
        owners, members = self.owners, self._cluster.ring.members
        columns = owners.shape[1] if in_handover else min(owners.shape[1], self._cluster.replicas)
        settled = self.known | self._absent | (self.answered >= ANSWERS_MAX + in_handover)
        if not in_handover:
            settled |= self._settled
        left = (~settled).nonzero()[0]
        chosen = np.full(len(self.keys), -1, np.intp)
        for column in range(columns):
            places = left[self._column[left] <= column]
            owner = owners[places, column]
            closed = [one for one in _distinct(owner) if not is_available(members[one])]
            if closed:
                is_open = ~np.isin(owner, closed)
                places, owner = places[is_open], owner[is_open]
            chosen[places] = owner
            self._column[places] = column + 1
            left = left[chosen[left] < 0]
            if not len(left):
                break
        asked = [owner for owner in _distinct(chosen) if owner >= 0]
        return {members[owner]: (chosen == owner).nonzero()[0] for owner in asked}

    def note_answer(self, peer: int, positions: npt.NDArray[np.intp], *, is_behind: bool) -> None:
        """Note that a peer has answered for the keys at these positions.

        is_behind: it knows that it lacks records, so the next owner of missing keys is also asked.
        """
        # Only an owner's answer can mean "absent": the home node answers only for its own pages.
        owned = self._owned(peer, positions)
        self.answered[owned] += 1
        if not is_behind:
            self._settled[owned] = True

    def left(self) -> npt.NDArray[np.intp]:
        """Return the keys that are neither known nor absent according to a table."""
        left: npt.NDArray[np.intp] = (~(self.known | self._absent)).nonzero()[0]
        return left

    def to_look_up(self, peer: int) -> npt.NDArray[np.intp]:
        """Return the keys to look up in a node's table: all for the home node, else its own."""
        left = self.left()
        return left if peer == self._cluster.home else self._owned(peer, left)

    def take_looked(self, peer: int, positions: npt.NDArray[np.intp], looked: Looked) -> None:
        """Add the result of a node's table for the keys at these positions."""
        self._settle(looked.records)
        if self._missing and looked.is_final:
            owned = self._owned(peer, positions)
            self.answered[owned] += 1
            self._absent[owned] = True

    def _owned(self, peer: int, positions: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return the positions of keys that a peer owns."""
        if not self._cluster.ring.members:
            return positions[:0]
        owned = self._cluster.owned_arcs(peer)[self._arcs[positions]]
        chosen: npt.NDArray[np.intp] = positions[owned]
        return chosen

    def spread_repeats(self) -> None:
        """Copy the result of a repeated key from its last index to the others."""
        if not self._repeats:
            return
        for place in np.flatnonzero(self._shadow).tolist():
            source = self._position[self.names[place]]
            self.records[place] = self.records[source]
            self.known[place] = self.known[source]
            self.fresh[place] = self.fresh[source]
            self.answered[place] = self.answered[source]
            self._held_out_of_reach[place] = self._held_out_of_reach[source]

    def whereabouts(self, *, timed_out: bool) -> Whereabouts:
        whys = [""] * len(self.keys)
        for place in (~self.known).nonzero()[0].tolist():
            if self._held_out_of_reach[place]:
                whys[place] = reasons.PEER_UNREACHABLE
            elif self.answered[place]:
                whys[place] = reasons.ABSENT
            else:
                whys[place] = reasons.DEADLINE if timed_out else reasons.PEER_UNREACHABLE
        strangers = frozenset(h for place, h in self._strangers.items() if not self.known[place])
        return Whereabouts(self.records, self.known, self.fresh, whys, strangers)

    def _reachable(self, holders: npt.NDArray[np.uint64]) -> Mask:
        usable, names = self._usable, holders.tolist()
        for holder in dict.fromkeys(names):
            if holder not in usable:
                usable[holder] = holder not in self._avoid and self._may_read(
                    (holder,), self._cluster
                )
        return np.array([usable[holder] for holder in names], np.bool_)


def names_of_records(records: Records) -> list[bytes]:
    """Return the identity of each record's commit: key, holder, offset and generation."""
    packed = records.tobytes()
    return [packed[at : at + 40] for at in range(0, len(packed), RECORD_BYTES)]


def is_somewhere(records: Records) -> Mask:
    somewhere: Mask = (records["flags"] & (RESIDENT | ON_DISK)) != 0
    return somewhere


def picked(records: Records, which: npt.NDArray[Any]) -> Records:
    """Return some records, by their indices or a mask."""
    picked: Records = records.view(ROW)[which].view(RECORD)
    return picked


def _distinct(places: npt.NDArray[np.intp]) -> list[int]:
    """Return the distinct indices, in order."""
    return sorted(set(places.tolist()))


LOOKUP_KEYS_MAX = 2048
"""Keys of one Lookup, the most that an owner accepts: its answer has room for two holders."""

EXISTS_TRUSTS_S = 1.0
"""How old a record may be to answer `exists` without a request: a page that was evicted since only
shortens the get that follows."""


@final
@attrs.define(eq=False, kw_only=True)
class Locator:
    """Finds the nearest reachable holder of each page of a batch.

    cache, breakers: those of the reader and the writer.
    cost_of:  the cost of a holder: of two equally distant ones the cheaper one is read.
    tables:   returns the nodes of this host whose directory tables can be read.
    removals: returns the removal count of a node of this host; 0: no removal, or it cannot be read.
    """

    _cache: LocationCache
    _breakers: Breakers
    _clock: Callable[[], float]
    _cost_of: Callable[[int], tuple[int, int]] = lambda _: (0, 0)
    _tables: Callable[[], Iterable[int]] = tuple
    _removals: Callable[[int], int] = lambda _: 0
    _removed: tuple[int, int] = attrs.field(default=(0, 0), init=False)

    def locate(
        self,
        keys: PageKeys,
        cluster: Cluster,
        until: float,
        *,
        cached_since: float = -np.inf,
        avoid: frozenset[int] = frozenset(),
        failed: frozenset[bytes] = frozenset(),
    ) -> Generator[Step, Any, Whereabouts]:
        """Find a record for each key.

        cached_since: records cached earlier do not count; +inf bypasses the cache.
        avoid:        holders that have just failed us.
        failed:       records that have just failed verification, as `names_of_records` names them:
                      an owner may return them until their holder has withdrawn them.
        """
        epoch = self._cache.epoch
        cached: tuple[Records, Mask] | None = None
        if cached_since < np.inf:
            cached = self._cache.find(keys, not_before=cached_since)
            where = self._all_known(*cached, cluster, avoid)
            if where is not None:
                return where
        search = Search(keys, keys.tolist(), cluster, avoid, failed, self._may_read)
        search.cost_of = self._cost_of
        if cached is not None:
            search.take_cached(*cached)
        yield from self._look(search, cluster)
        asked_home = False
        while not search.known.all():
            now = self._clock()
            if now >= until:
                break
            targets = search.next_owners(
                self._availability(now), in_handover=now < cluster.handover_until
            )
            left = search.left()
            may_ask_home = cluster.home and not asked_home and len(left)
            if may_ask_home and self._breakers.available(cluster.home, now):
                targets[cluster.home] = left
            asked_home = True
            if not targets:
                break
            yield from self._ask(search, targets, now, until)
        self._cache.store(search.found(), self._clock(), epoch=epoch)
        search.spread_repeats()
        return search.whereabouts(timed_out=self._clock() >= until)

    def glance(
        self, keys: PageKeys, cluster: Cluster, *, touch: bool
    ) -> Generator[Step, Any, tuple[Mask, Records] | None]:
        """Find every page in the directory tables of this host; None if a search is needed.

        Returns which pages are in a memory that can be read, (n,) bool, and their records, in the
        order of the keys; the other pages are certainly absent. The fast path of `exists`: an
        engine's call for a new prompt costs a lookup or two, and no search.

        touch: the caller notifies the holders that it will read these pages.
        """
        if not cluster.ring.members:
            return None
        epoch = self._cache.epoch
        records: Records = np.empty(len(keys), RECORD)
        known: Mask = np.zeros(len(keys), np.bool_)
        absent: Mask = np.zeros(len(keys), np.bool_)
        left: npt.NDArray[np.intp] = np.arange(len(keys))
        placed = 0
        arcs = None
        for peer in self._readable(cluster):
            if cluster.owns_all(peer):
                owned = left
            else:
                arcs = cluster.ring.arcs(keys) if arcs is None else arcs
                owned = left[cluster.owned_arcs(peer)[arcs[left]]]
            asked = left if peer == cluster.home else owned
            if not len(asked):
                continue
            some = keys if len(asked) == len(keys) else keys[asked]
            looked = yield ReadTable(peer, some.tobytes(), cluster.ring.version)
            if looked is None:
                continue
            if looked.is_final:
                absent[owned] = True
            if len(looked.places):
                places = asked[looked.places]
                records.view(ROW)[places] = np.frombuffer(looked.records, ROW)
                known[places] = True
                placed += len(places)
            left = (~(known | absent)).nonzero()[0]
            if not len(left):
                break
        # Of several holders of a page a search chooses the nearest.
        if len(left) or placed != np.count_nonzero(known):
            return None
        if not placed:
            return known, records[:0]
        found = picked(records, known)
        if not self._are_readable(found, cluster):
            return None
        self._cache.store(found, self._clock(), epoch=epoch, are_touched=touch)
        return known, found

    def forget_removed(self, home: int) -> None:
        """Clear the cache if the home node knows of a removal since the last call."""
        count = self._removals(home)
        if count and (home, count) != self._removed:
            # In this order: another thread that sees the new number must not see old records.
            self._cache.end()
            self._removed = (home, count)

    def all_cached(
        self, keys: PageKeys, cluster: Cluster, since: float, *, are_touched: bool
    ) -> bool:
        """Return whether every page has a cached record since then, at a readable holder.

        are_touched: whether the holders must have been notified since then that they will be read.

        The fast path of a repeated `exists`: it creates no array per key.
        """
        holders = self._cache.holders(keys, not_before=since, are_touched=are_touched)
        return holders is not None and self._may_read(holders, cluster)

    def may_ask(self, holder: int) -> bool:
        """Return whether to send a request to this holder now."""
        return self._breakers.available(holder, self._clock())

    @property
    def stall_s(self) -> float:
        """Return the silence after which a holder counts as hung."""
        return self._breakers.stall_s

    def _all_known(
        self, records: Records, known: Mask, cluster: Cluster, avoid: frozenset[int]
    ) -> Whereabouts | None:
        """Return where all pages are if the cache knows readable holders of all; else None.

        The fast path: a get of known pages needs no search.
        """
        if not len(known) or not known.all():
            return None
        holders = set(records["holder"].tolist())
        if holders & avoid or not self._may_read(holders, cluster):
            return None
        if not (records["flags"] & (RESIDENT | ON_DISK)).all():
            return None
        count = len(records)
        return Whereabouts(records, known, np.zeros(count, np.bool_), [""] * count)

    def _may_read(self, holders: Iterable[int], cluster: Cluster) -> bool:
        # Only the data port matters: shared memory of a paused node can still be read. And no probe
        # is taken: a read takes it, and `exists` never reads.
        return all(holder in cluster.members for holder in holders) and self._breakers.may_read(
            holders, self._clock()
        )

    def _look(self, search: Search, cluster: Cluster) -> Generator[Step, Any, None]:
        """Read the directory tables of this host: the home node's, then those of other owners."""
        for peer in self._readable(cluster):
            positions = search.to_look_up(peer)
            if not len(positions):
                continue
            packed = search.keys[positions].tobytes()
            looked = yield ReadTable(peer, packed, cluster.ring.version)
            if looked is not None:
                search.take_looked(peer, positions, looked)

    def _readable(self, cluster: Cluster) -> list[int]:
        """Return the members whose tables can be read, the home node first."""
        nodes = [node for node in self._tables() if node in cluster.members]
        return sorted(nodes, key=lambda node: (node != cluster.home, node))

    def _are_readable(self, records: Records, cluster: Cluster) -> bool:
        """Return whether all of these pages are in a memory that can be read."""
        if not (records["flags"] & RESIDENT).all():
            return False
        return self._may_read(set(records["holder"].tolist()), cluster)

    def _ask(
        self, search: Search, targets: dict[int, npt.NDArray[np.intp]], now: float, until: float
    ) -> Generator[Step, Any, None]:
        asked = [
            (peer, positions[begin : begin + LOOKUP_KEYS_MAX])
            for peer, positions in sorted(targets.items())
            for begin in range(0, len(positions), LOOKUP_KEYS_MAX)
        ]
        questions = tuple(
            (peer, Lookup(0, search.keys[positions].tobytes())) for peer, positions in asked
        )
        # Half of the remaining time, so that a hung owner leaves time for its replica.
        timeout = min(until, now + min(self._breakers.stall_s, (until - now) / 2))
        answers: Sequence[Message | None] = yield Ask(questions, timeout, search.has_all)
        search.take(answers)
        if search.known.all():
            return
        for (peer, positions), answer in zip(asked, answers, strict=True):
            if isinstance(answer, Located):
                search.note_answer(peer, positions, is_behind=answer.behind)

    def _availability(self, now: float) -> Callable[[int], bool]:
        """Return a filter of peers to ask: each breaker is checked once, as that may take a
        probe.
        """
        memo: dict[int, bool] = {}

        def is_available(peer: int) -> bool:
            if peer not in memo:
                memo[peer] = self._breakers.available(peer, now)
            return memo[peer]

        return is_available
