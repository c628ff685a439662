"""Locating pages: cache, then home node and directory owners, all at once.

One question a peer and batch. An owner that does not answer is replaced by its replica at once; so
is one that knows nothing, for `handover_s` after a view change.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache import observe
from peercache.keys import PageKeys
from peercache.messages import Located, Lookup, Message
from peercache.ports import Ask, Step
from peercache.records import RECORD, RESIDENT, Records
from peercache.records import from_bytes as records_from_bytes
from peercache.transfer.breaker import STALL_S, Breakers, data_port
from peercache.transfer.cache import LocationCache, unpack
from peercache.transfer.cluster import Cluster

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
            records, known = unpack(self._cache.find(search.names, not_before=cached_since))
            search.take_cached(records, known)
        asked_home = False
        while not search.known.all():
            now = self._clock()
            if now >= until:
                break
            targets = search.next_owners(
                self._open_for(now), in_handover=now < cluster.handover_until
            )
            if not asked_home and cluster.home and self._breakers.available(cluster.home, now):
                targets[cluster.home] = np.flatnonzero(~search.known)
            asked_home = True
            if not targets:
                break
            yield from self._ask(search, targets, now, until)
        self._cache.store(search.records[search.fresh & search.known], self._clock())
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
        for (peer, positions), answer in zip(asked, answers, strict=True):
            if isinstance(answer, Located):
                # "Absent" is an owner's word alone: the home node is asked for what it holds.
                owners = search.owners[positions, : search.replicas]
                owned = (owners == peer).any(axis=1)
                search.answered[positions[owned]] = True

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
        self.replicas = cluster.replicas
        self.names: list[bytes] = keys.tolist()
        self.records: Records = np.zeros(count, RECORD)
        self.known: Mask = np.zeros(count, np.bool_)
        self.fresh: Mask = np.zeros(count, np.bool_)
        self.answered: Mask = np.zeros(count, np.bool_)
        self._held_out_of_reach: Mask = np.zeros(count, np.bool_)
        self._column = np.zeros(count, np.int64)
        self._position = {name: i for i, name in enumerate(self.names)}
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

    @cached_property
    def owners(self) -> npt.NDArray[np.uint64]:
        """The owners of each key; not asked for where the cache knows all."""
        return self._cluster.ring.owners(self.keys)

    def take_cached(self, records: Records, known: Mask) -> None:
        usable = known & self._reachable(records["holder"]) & self._resident(records)
        if self._repeats:
            usable &= ~self._shadow
        self.records[usable] = records[usable]
        self.known |= usable

    def take(self, answer: Message) -> bool:
        """Take one answer in; return whether nothing is missing any more."""
        if not isinstance(answer, Located):
            return False
        records = records_from_bytes(answer.records)
        places = [self._position.get(key, -1) for key in records["key"].tolist()]
        asked_for = np.array(places, np.int64) >= 0
        records = records[asked_for & self._resident(records)]
        reachable = self._reachable(records["holder"])
        out_of_reach = [self._position[key] for key in records["key"][~reachable].tolist()]
        self._held_out_of_reach[out_of_reach] = True
        records = records[reachable]
        if not len(records):
            return bool(self.known.all())
        distance = np.array(
            [self._cluster.distance(holder) for holder in records["holder"].tolist()]
        )
        # Farthest first, so that the nearest is written last and stays; of one holder the newest.
        for i in np.lexsort((records["generation"], -distance)).tolist():
            self._offer(records[i], int(distance[i]))
        return bool(self.known.all())

    def _offer(self, record: Any, distance: int) -> None:
        place = self._position[record["key"].tobytes()]
        if self.known[place]:
            there = self.records[place]
            nearer = distance < self._cluster.distance(int(there["holder"]))
            newer = (
                there["holder"] == record["holder"] and record["generation"] > there["generation"]
            )
            if not (nearer or newer):
                return
        self.records[place] = record
        self.known[place] = self.fresh[place] = True

    def next_owners(
        self, is_open_for: Callable[[int], bool], *, in_handover: bool
    ) -> dict[int, npt.NDArray[np.intp]]:
        """Return whom to ask next for which keys, each key's next owner that may be asked."""
        owners = self.owners
        columns = owners.shape[1] if in_handover else min(owners.shape[1], self.replicas)
        wanted = ~self.known if in_handover else ~self.known & ~self.answered
        chosen = np.zeros(len(self.keys), np.uint64)
        for column in range(columns):
            open_here = wanted & (chosen == 0) & (self._column <= column)
            for peer in np.unique(owners[open_here, column]).tolist():
                if is_open_for(peer):
                    mine = open_here & (owners[:, column] == peer)
                    chosen[mine] = peer
                    self._column[mine] = column + 1
        return {peer: np.flatnonzero(chosen == peer) for peer in np.unique(chosen).tolist() if peer}

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
        reasons = [""] * len(self.keys)
        for place in np.flatnonzero(~self.known).tolist():
            if self._held_out_of_reach[place]:
                reasons[place] = observe.PEER_UNREACHABLE
            elif self.answered[place]:
                reasons[place] = observe.ABSENT
            else:
                reasons[place] = observe.DEADLINE if timed_out else observe.PEER_UNREACHABLE
        return Whereabouts(self.records, self.known, self.fresh, reasons)

    def _reachable(self, holders: npt.NDArray[np.uint64]) -> Mask:
        usable = self._usable
        for holder in np.unique(holders).tolist():
            if holder not in usable:
                usable[holder] = (
                    holder in self._cluster.members
                    and holder not in self._avoid
                    and self._may_read(holder)
                )
        return np.array([usable[holder] for holder in holders.tolist()], np.bool_)

    @staticmethod
    def _resident(records: Records) -> Mask:
        resident: Mask = (records["flags"] & RESIDENT) != 0
        return resident
