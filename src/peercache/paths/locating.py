"""Locating pages: cache, then home node and directory owners, all at once.

One question a peer and batch. An owner that does not answer is replaced by its replica at once; so
is one that knows nothing, for `handover_s` after a view change.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.keys import PageKeys
from peercache.model.records import ON_DISK, RECORD, RECORD_BYTES, RESIDENT, ROW, Records
from peercache.model.records import from_bytes as records_from_bytes
from peercache.observability import reasons
from peercache.paths.breaker import STALL_S, Breakers, data_port
from peercache.paths.cluster import Cluster
from peercache.paths.location_cache import LocationCache, unpack
from peercache.paths.steps import Ask, Step
from peercache.wire.envelope import Message
from peercache.wire.messages.directory import Located, Lookup

Mask = npt.NDArray[np.bool_]

LOOKUP_KEYS_MAX = 16_384
"""Keys of one Lookup: with eight holders each, the answer is as large as a message may be."""


@attrs.define(eq=False)
class Whereabouts:
    """Where the pages of a batch are.

    records:     (n,) RECORD; valid where `known`.
    fresh:       where the record came from an answer in this call, not from the cache.
    reasons:     why a page is not known, a miss reason each; "" where it is.
    """

    records: Records
    known: Mask
    fresh: Mask
    reasons: list[str]


@final
class Locator:
    """Finds the nearest reachable holder of each page of a batch."""

    def __init__(
        self, *, cache: LocationCache, breakers: Breakers, clock: Callable[[], float]
    ) -> None:
        """Share the cache and the breakers with whoever reads and writes."""
        self._cache = cache
        self._breakers = breakers
        self._clock = clock

    def locate(
        self,
        keys: PageKeys,
        cluster: Cluster,
        until: float,
        *,
        cached_since: float = -np.inf,
        avoid: frozenset[int] = frozenset(),
    ) -> Generator[Step, Any, Whereabouts]:
        """Find a record for each key.

        cached_since: records cached earlier do not count; +inf bypasses the cache.
        avoid:        holders that have just failed us.
        """
        search = _Search(keys, cluster, avoid, self._may_read)
        if cached_since < np.inf:
            found = self._cache.find(search.names, not_before=cached_since)
            if any(found):
                search.take_cached(*unpack(found))
        asked_home = False
        while not search.known.all():
            now = self._clock()
            if now >= until:
                break
            targets = search.next_owners(
                self._open_for(now), in_handover=now < cluster.handover_until
            )
            if not asked_home and cluster.home and self._breakers.available(cluster.home, now):
                targets[cluster.home] = (~search.known).nonzero()[0]
            asked_home = True
            if not targets:
                break
            yield from self._ask(search, targets, now, until)
        self._cache.store(search.found(), self._clock())
        search.spread_repeats()
        return search.whereabouts(timed_out=self._clock() >= until)

    def believes(self, keys: PageKeys, cluster: Cluster, since: float) -> bool:
        """Return whether every page is known since then, at a holder that can be read: the hot way.

        What `exists` asks again and again costs no array a key.
        """
        holders = self._cache.holders(keys.tolist(), not_before=since)
        return holders is not None and all(
            holder in cluster.members and self._may_read(holder) for holder in holders
        )

    def may_ask(self, holder: int) -> bool:
        """Return whether to ask this holder something, now."""
        return self._breakers.available(holder, self._clock())

    def _may_read(self, holder: int) -> bool:
        # Of the data port only: over shared memory a node that is stopped is read as ever. And
        # without taking a probe: that is for whoever reads, and `exists` never does.
        return self._breakers.may_be_available(data_port(holder), self._clock())

    def _ask(
        self, search: _Search, targets: dict[int, npt.NDArray[np.intp]], now: float, until: float
    ) -> Generator[Step, Any, None]:
        asked = [
            (peer, positions[begin : begin + LOOKUP_KEYS_MAX])
            for peer, positions in sorted(targets.items())
            for begin in range(0, len(positions), LOOKUP_KEYS_MAX)
        ]
        questions = tuple(
            (peer, Lookup(0, search.keys[positions].tobytes())) for peer, positions in asked
        )
        # Half of what is left, so that a hung owner leaves time for its replica.
        patience = min(until, now + min(STALL_S, (until - now) / 2))
        answers: Sequence[Message | None] = yield Ask(questions, patience, search.take)
        search.settle()
        if search.known.all():
            return
        for (peer, positions), answer in zip(asked, answers, strict=True):
            if isinstance(answer, Located):
                search.note_answer(peer, positions)

    def _open_for(self, now: float) -> Callable[[int], bool]:
        memo: dict[int, bool] = {}

        def is_open_for(peer: int) -> bool:
            if peer not in memo:
                memo[peer] = self._breakers.available(peer, now)
            return memo[peer]

        return is_open_for


class _Search:
    """The state of one locate."""

    def __init__(
        self,
        keys: PageKeys,
        cluster: Cluster,
        avoid: frozenset[int],
        may_read: Callable[[int], bool],
    ) -> None:
        count = len(keys)
        self.keys = keys
        self.names: list[bytes] = keys.tolist()
        self.records: Records = np.zeros(count, RECORD)
        self.known: Mask = np.zeros(count, np.bool_)
        self.fresh: Mask = np.zeros(count, np.bool_)
        self.answered: Mask = np.zeros(count, np.bool_)
        self._on_disk: Mask = np.zeros(count, np.bool_)
        self._held_out_of_reach: Mask = np.zeros(count, np.bool_)
        self._column = np.zeros(count, np.int64)
        self._position = dict(zip(self.names, range(count), strict=True))
        self._cluster = cluster
        self._avoid = avoid
        self._may_read = may_read
        self._usable: dict[int, bool] = {}
        # A key that is repeated in the batch is looked up once, at its last place.
        self._repeats = len(self._position) < count
        if self._repeats:
            last = np.zeros(count, np.bool_)
            last[list(self._position.values())] = True
            self._shadow = ~last
            self.known |= self._shadow
        self._untaken = b""
        self._missing = len(self._position)

    @cached_property
    def owners(self) -> npt.NDArray[np.intp]:
        """Whom to ask about each key; not asked for where the cache knows all."""
        return self._cluster.owners(self.keys)

    def take_cached(self, records: Records, known: Mask) -> None:
        """Begin with what the cache knows; the records are ours from now on."""
        usable = known & self._reachable(records["holder"]) & _is_somewhere(records)
        if self._repeats:
            usable &= ~self._shadow
        self.records = records
        self.known |= usable
        self._on_disk = usable & ((records["flags"] & RESIDENT) == 0)
        self._missing = len(self.known) - int(np.count_nonzero(self.known))

    def take(self, answer: Message) -> bool:
        """Take one answer in; return whether nothing is missing, and nothing only on a disk."""
        if not isinstance(answer, Located):
            return False
        self._untaken += answer.records
        if len(self._untaken) < self._missing * RECORD_BYTES:
            # This cannot be all: the next answer comes soon, and both cost one look.
            return False
        self.settle()
        return not self._missing and not self._on_disk.any()

    def settle(self) -> None:
        """Look at the answers taken so far."""
        if not self._untaken:
            return
        records, self._untaken = records_from_bytes(self._untaken), b""
        found = list(map(self._position.get, records["key"].tolist(), repeat(-1)))
        places: npt.NDArray[np.intp] = np.array(found, np.intp)
        usable = (places >= 0) & _is_somewhere(records)
        reachable = self._reachable(records["holder"])
        if not reachable.all():
            self._held_out_of_reach[places[usable & ~reachable]] = True
            usable &= reachable
        if not usable.all():
            records, places = _picked(records, usable), places[usable]
        if len(set(found)) < len(found) or self.known[places].any():
            self._choose(places, records)
        else:
            self._put(places, records)
        self._missing = len(self.known) - int(np.count_nonzero(self.known))

    def _choose(self, places: npt.NDArray[np.intp], records: Records) -> None:
        """Take of several records for one place the best, of those there already as well."""
        # Of one holder only the newest counts.
        order = np.lexsort((records["generation"], records["holder"], places))
        records, places = _picked(records, order), places[order]
        is_newest = np.ones(len(places), np.bool_)
        is_newest[:-1] = places[1:] != places[:-1]
        is_newest[:-1] |= records["holder"][1:] != records["holder"][:-1]
        there = _picked(self.records, places)
        is_known = self.known[places]
        is_newest &= ~(
            is_known
            & (there["holder"] == records["holder"])
            & (there["generation"] >= records["generation"])
        )
        records, places = _picked(records, is_newest), places[is_newest]
        holders = records["holder"].tolist()
        far = {holder: self._cluster.distance(holder) for holder in dict.fromkeys(holders)}
        distance = np.array([far[holder] for holder in holders], np.int64)
        # Farthest first, so that the nearest is written last and stays. Before all of them what is
        # on disk only: any copy in memory is better.
        order = np.lexsort((-distance, records["flags"] & RESIDENT))
        records, places, distance = _picked(records, order), places[order], distance[order]
        is_known = self.known[places]
        for at in np.flatnonzero(is_known).tolist():
            self._offer(int(places[at]), records[at], int(distance[at]))
        self._put(places[~is_known], _picked(records, ~is_known))

    def _put(self, places: npt.NDArray[np.intp], records: Records) -> None:
        """Take records for these places; of several for one place the last."""
        self.records.view(ROW)[places] = records.view(ROW)
        self.known[places] = self.fresh[places] = True
        self._on_disk[places] = (records["flags"] & RESIDENT) == 0

    def found(self) -> Records:
        """Return the records that came from answers, one a key."""
        fresh = self.fresh & self.known
        return self.records if fresh.all() else _picked(self.records, fresh)

    def _offer(self, place: int, record: Any, distance: int) -> None:
        """Take a record for a place that has one already, if it is better."""
        there = self.records[place]
        on_disk = not record["flags"] & RESIDENT
        if there["holder"] == record["holder"]:
            better = record["generation"] > there["generation"]
        elif self._on_disk[place] != on_disk:
            better = not on_disk
        else:
            better = distance < self._cluster.distance(int(there["holder"]))
        if better:
            self.records[place] = record
            self.fresh[place] = True
            self._on_disk[place] = on_disk

    def next_owners(
        self, is_open_for: Callable[[int], bool], *, in_handover: bool
    ) -> dict[int, npt.NDArray[np.intp]]:
        """Return whom to ask next for which keys, each key's next owner that may be asked."""
        owners, members = self.owners, self._cluster.ring.members
        columns = owners.shape[1] if in_handover else min(owners.shape[1], self._cluster.replicas)
        settled = self.known if in_handover else self.known | self.answered
        left = (~settled).nonzero()[0]
        chosen = np.full(len(self.keys), -1, np.intp)
        for column in range(columns):
            places = left[self._column[left] <= column]
            owner = owners[places, column]
            closed = [one for one in _distinct(owner) if not is_open_for(members[one])]
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

    def note_answer(self, peer: int, positions: npt.NDArray[np.intp]) -> None:
        """Note that a peer has told what it knows of the keys at these positions."""
        # "Absent" is an owner's word alone: the home node is asked for what it holds.
        place = self._cluster.ring.members.index(peer)
        owned = (self.owners[positions, : self._cluster.replicas] == place).any(axis=1)
        self.answered[positions[owned]] = True

    def spread_repeats(self) -> None:
        """Give the repeated places of a key what was found at its last."""
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
        return Whereabouts(self.records, self.known, self.fresh, whys)

    def _reachable(self, holders: npt.NDArray[np.uint64]) -> Mask:
        usable, names = self._usable, holders.tolist()
        for holder in dict.fromkeys(names):
            if holder not in usable:
                usable[holder] = (
                    holder in self._cluster.members
                    and holder not in self._avoid
                    and self._may_read(holder)
                )
        return np.array([usable[holder] for holder in names], np.bool_)


def _is_somewhere(records: Records) -> Mask:
    somewhere: Mask = (records["flags"] & (RESIDENT | ON_DISK)) != 0
    return somewhere


def _picked(records: Records, which: npt.NDArray[Any]) -> Records:
    """Return some records, by their places or a mask."""
    picked: Records = records.view(ROW)[which].view(RECORD)
    return picked


def _distinct(places: npt.NDArray[np.intp]) -> list[int]:
    """Return the different places, in their order."""
    return sorted(set(places.tolist()))
