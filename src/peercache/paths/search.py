"""The state of one search for pages: what was found, which owners are next, and what is absent.

Of several records of a page, `Search` keeps that of the nearest holder, and prefers any copy in
memory to one that is only on a disk. It performs no steps and has no clock: `paths/lookup.py` sends
the requests, and adds the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.keys import PageKeys
from peercache.model.reads import Looked
from peercache.model.records import ON_DISK, RECORD, RECORD_BYTES, RESIDENT, ROW, Records
from peercache.observability import reasons
from peercache.paths.cluster import Cluster
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import Located

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


@attrs.define(eq=False)
class Asked:
    """A Lookup that was sent.

    positions: of its keys. late_at: when its answer takes longer than usual. is_noted: whether its
    answer is in the search.
    """

    peer: int
    positions: npt.NDArray[np.intp]
    late_at: float
    is_noted: bool = False


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
        lagging: set[int],
    ) -> None:
        count = len(keys)
        self.keys = keys
        self.names = names
        self.records: Records = np.zeros(count, RECORD)
        self.known: Mask = np.zeros(count, np.bool_)
        self.fresh: Mask = np.zeros(count, np.bool_)
        self.answered: npt.NDArray[np.int8] = np.zeros(count, np.int8)
        """How many owners of each key have answered; counts only a few."""
        self.lagging = lagging
        """Peers that did not answer lately: they are asked last."""
        self.silent: set[int] = set()
        """Peers that have not answered this search."""
        self._unanswered: Mask = np.zeros(count, np.bool_)
        """Keys of which one of those is an owner."""
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
        if self.lagging:
            current = owners[:, : cluster.replicas]
            last = [at for at, node in enumerate(cluster.ring.members) if node in self.lagging]
            order = np.isin(current, last).argsort(axis=1, kind="stable")
            owners[:, : cluster.replicas] = np.take_along_axis(current, order, axis=1)
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

    def is_settled(
        self, asked: Sequence[Asked], answers: Sequence[Message | None], *, in_handover: bool
    ) -> bool:
        """Return whether it is useless to wait for the answers that are missing.

        It is for a key that was found, that enough owners do not have, or of which one owner has
        answered and all others lag since before this call. During a hand-over, an owner that does
        not answer in its usual time is not awaited in addition to ANSWERS_MAX others. Changes
        nothing.
        """
        done = self._located(answers) | self._absent
        count, final = self.answered.copy(), self._settled.copy()
        awaited: Mask = np.zeros(len(done), np.bool_)
        for one, answer in zip(asked, answers, strict=True):
            owned = self._owned(one.peer, one.positions)
            if isinstance(answer, Located):
                if not one.is_noted:
                    count[owned] += 1
                    final[owned] |= not answer.behind
            elif answer is None and one.peer not in self.lagging:
                awaited[owned] = True
        done |= (count >= ANSWERS_MAX) | ((count > 0) & ~awaited)
        if not in_handover:
            done |= final
        return bool(done.all())

    def _located(self, answers: Iterable[Message | None]) -> Mask:
        """Return which pages are found, with these answers."""
        known = self.known.copy()
        raw = b"".join(answer.records for answer in answers if isinstance(answer, Located))
        if raw:
            records = np.frombuffer(raw, RECORD)
            places = self._places_of(records)
            good = self._is_usable(records, places) & self._reachable(records["holder"])
            known[places[good]] = True
        return known

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
        self,
        is_available: Callable[[int], bool],
        *,
        in_handover: bool,
        awaited: Iterable[npt.NDArray[np.intp]] = (),
    ) -> dict[int, npt.NDArray[np.intp]]:
        """Return the keys to ask each peer for: each key is sent to its next available owner.

        awaited: positions of keys that another owner may still answer for.
        """
        owners, members = self.owners, self._cluster.ring.members
        columns = owners.shape[1] if in_handover else min(owners.shape[1], self._cluster.replicas)
        settled = self.known | self._absent | (self.answered >= ANSWERS_MAX + in_handover)
        if not in_handover:
            settled |= self._settled
        for positions in awaited:
            settled[positions] = True
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

    def note_silence(self, peer: int) -> None:
        """Note that a peer has not answered: this search does not ask it again."""
        self.silent.add(peer)
        self._unanswered[self._owned(peer, np.arange(len(self.keys)))] = True

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
        if not looked.is_at_work:
            self.lagging.add(peer)
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

    def _spread_repeats(self) -> None:
        """Copy the result of a repeated key from its last index to the others."""
        if not self._repeats:
            return
        for place in np.flatnonzero(self._shadow).tolist():
            source = self._position[self.names[place]]
            self.records[place] = self.records[source]
            self.known[place] = self.known[source]
            self.fresh[place] = self.fresh[source]
            self.answered[place] = self.answered[source]
            self._unanswered[place] = self._unanswered[source]
            self._settled[place] = self._settled[source]
            self._absent[place] = self._absent[source]
            self._held_out_of_reach[place] = self._held_out_of_reach[source]

    def whereabouts(self, *, timed_out: bool) -> Whereabouts:
        """Return the result for each key of the batch, at the end of the search."""
        self._spread_repeats()
        whys = [""] * len(self.keys)
        for place in (~self.known).nonzero()[0].tolist():
            if self._held_out_of_reach[place]:
                whys[place] = reasons.PEER_UNREACHABLE
            elif self._is_absent(place):
                whys[place] = reasons.ABSENT
            else:
                whys[place] = reasons.DEADLINE if timed_out else reasons.PEER_UNREACHABLE
        strangers = frozenset(h for place, h in self._strangers.items() if not self.known[place])
        return Whereabouts(self.records, self.known, self.fresh, whys, strangers)

    def _is_absent(self, place: int) -> bool:
        """Return whether owners have answered that a page is absent: silence is no answer."""
        if self._settled[place] or self._absent[place]:
            return True
        return bool(self.answered[place] >= (ANSWERS_MAX if self._unanswered[place] else 1))

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
