"""Locating pages: the cache, then directory tables of this host, then questions, all at once.

The tables of this host's nodes are read in their memory, without a question. What such a table
lacks is absent only where it has authority for the key; otherwise another owner is asked.

A search asks one question a peer and batch. An owner that does not answer is replaced by its
replica at once; so is one that knows nothing, for `handover_s` after a view change, or if it says
that it is behind: then ANSWERS_MAX owners have the last word. In a settled cluster an absent page
costs one question.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from peercache.model.keys import PageKeys
from peercache.model.records import ON_DISK, RECORD, RESIDENT, ROW, Records
from peercache.net.breaker import Breakers
from peercache.paths.cluster import Cluster
from peercache.paths.location_cache import LocationCache
from peercache.paths.searching import Mask, Search, Whereabouts, picked
from peercache.paths.steps import Ask, ReadTable, Step
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import Located, Lookup

LOOKUP_KEYS_MAX = 2048
"""Keys of one Lookup, the most that an owner takes: its answer has room for two holders of each."""

EXISTS_TRUSTS_S = 1.0
"""How old a record may be to answer `exists` without a question: a page that was evicted meanwhile
only shortens the get that follows."""


@final
class Locator:
    """Finds the nearest reachable holder of each page of a batch."""

    def __init__(
        self,
        *,
        cache: LocationCache,
        breakers: Breakers,
        clock: Callable[[], float],
        cost_of: Callable[[int], tuple[int, int]] = lambda _: (0, 0),
        tables: Callable[[], Iterable[int]] = tuple,
        removals: Callable[[int], int] = lambda _: 0,
    ) -> None:
        """Share the cache and the breakers with the reader and the writer.

        cost_of: which of two holders that are equally far to read from: the one that costs less.
        tables:  returns the nodes of this host whose directory tables can be read.
        removals: returns how often a node of this host knows pages to have been removed; 0: never,
                  or it cannot be read.
        """
        self._cost_of = cost_of
        self._tables = tables
        self._removals = removals
        self._removed = (0, 0)
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
        failed: frozenset[bytes] = frozenset(),
    ) -> Generator[Step, Any, Whereabouts]:
        """Find a record for each key.

        cached_since: records cached earlier do not count; +inf bypasses the cache.
        avoid:        holders that have just failed us.
        failed:       records that have just failed verification, as `names_of_records` names them:
                      an owner may tell of them until their holder has withdrawn them.
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
        """Find every page by the directory tables of this host; None where that takes a search.

        Returns which pages are in a memory that can be read, (n,) bool, and their records, in the
        order of the keys; the other pages are absent for certain. The fast path of `exists`: what
        an engine asks for every new prompt costs a look or two, and no search.

        touch: the caller tells the holders that it will read these pages.
        """
        if not cluster.ring.members:
            return None
        epoch = self._cache.epoch
        records: Records = np.empty(len(keys), RECORD)
        known: Mask = np.zeros(len(keys), np.bool_)
        absent: Mask = np.zeros(len(keys), np.bool_)
        left: npt.NDArray[np.intp] = np.arange(len(keys))
        told = 0
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
                told += len(places)
            left = (~(known | absent)).nonzero()[0]
            if not len(left):
                break
        # Of several holders of a page a search takes the nearest.
        if len(left) or told != np.count_nonzero(known):
            return None
        if not told:
            return known, records[:0]
        found = picked(records, known)
        if not self._are_readable(found, cluster):
            return None
        self._cache.store(found, self._clock(), epoch=epoch, are_touched=touch)
        return known, found

    def forget_removed(self, home: int) -> None:
        """Forget what is remembered, if the home node knows of a removal since the last time."""
        count = self._removals(home)
        if count and (home, count) != self._removed:
            # In this order: another thread that sees the new number must not see old records.
            self._cache.end()
            self._removed = (home, count)

    def all_cached(
        self, keys: PageKeys, cluster: Cluster, since: float, *, are_touched: bool
    ) -> bool:
        """Return whether every page is known since then, at a readable holder: the fast path.

        are_touched: whether the holders must have been told since then that they will be read.

        An `exists` that is repeated costs no array a key.
        """
        holders = self._cache.holders(keys, not_before=since, are_touched=are_touched)
        return holders is not None and self._may_read(holders, cluster)

    def may_ask(self, holder: int) -> bool:
        """Return whether to ask this holder something, now."""
        return self._breakers.available(holder, self._clock())

    @property
    def stall_s(self) -> float:
        """Return the silence after which a holder counts as hung."""
        return self._breakers.stall_s

    def _all_known(
        self, records: Records, known: Mask, cluster: Cluster, avoid: frozenset[int]
    ) -> Whereabouts | None:
        """Return where all pages are if the cache knows that, at readable holders: the fast path.

        A get of known pages needs no search.
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
        # Only the data port decides: shared memory of a stopped node is read as ever. And without
        # taking a probe: a read takes it, and `exists` never reads.
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
        # Half of what is left, so that a hung owner leaves time for its replica.
        timeout = min(until, now + min(self._breakers.stall_s, (until - now) / 2))
        answers: Sequence[Message | None] = yield Ask(questions, timeout, search.has_all)
        search.take(answers)
        if search.known.all():
            return
        for (peer, positions), answer in zip(asked, answers, strict=True):
            if isinstance(answer, Located):
                search.note_answer(peer, positions, is_behind=answer.behind)

    def _availability(self, now: float) -> Callable[[int], bool]:
        """Return whether to ask a peer: each breaker is looked at once, for it may take a probe."""
        memo: dict[int, bool] = {}

        def is_available(peer: int) -> bool:
            if peer not in memo:
                memo[peer] = self._breakers.available(peer, now)
            return memo[peer]

        return is_available
