"""Locating pages: the cache, then directory tables of this host, then questions, all at once.

The tables of this host's nodes are read in their memory, without a question. What such a table
lacks is absent only where it has authority for the key; otherwise another owner is asked.

The cache is always safe, because a stale record fails verification. It never remembers an absence:
a page may appear anywhere at any moment.

A search asks one question a peer and batch. An owner that does not answer is replaced by its
replica at once; so is one that knows nothing, for `handover_s` after a view change, or if it says
that it is behind: then ANSWERS_MAX owners have the last word. In a settled cluster an absent page
costs one question.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import islice, repeat
from operator import itemgetter
from threading import Lock
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from peercache.model.keys import PageKeys
from peercache.model.records import ON_DISK, RECORD, RECORD_BYTES, RESIDENT, ROW, Records
from peercache.paths.breaker import STALL_S, Breakers
from peercache.paths.cluster import Cluster
from peercache.paths.searching import Mask, Search, Whereabouts, picked, unpacked
from peercache.paths.steps import Ask, ReadTable, Step
from peercache.wire.envelope import Message
from peercache.wire.messages.directory import Located, Lookup

LOOKUP_KEYS_MAX = 2048
"""Keys of one Lookup, the most that an owner takes: its answer has room for two holders of each."""

EXISTS_TRUSTS_S = 1.0
"""How old a record may be to answer `exists` without a question: a page that was evicted meanwhile
only shortens the get that follows."""

EVICTED_PART = 64
"""A full cache drops 1/64 of its records at once. A dict walks over the gaps at its front whenever
its oldest entry is looked up: one at a time, 128 of 262,144 took 9 ms, together 0.1."""


@final
class _Stored:
    """When records were stored (monotonic seconds), and their holder: one for many entries.

    is_touched: the holder was told then that these pages are about to be read.
    """

    __slots__ = ("at", "holder", "is_touched")

    def __init__(self, at: float, holder: int, *, is_touched: bool) -> None:
        self.at = at
        self.holder = holder
        self.is_touched = is_touched


_Entry: TypeAlias = tuple[_Stored, bytes]
"""When a record was stored, its holder, and the packed record."""

_stored_of = itemgetter(0)

NOT_RESIDENT = 0
"""Stands for the holder of a page that is not in its holder's memory: no incarnation is 0."""


@final
class LocationCache:
    """A bounded map from page key to the record last seen, least recently used first out."""

    def __init__(self, *, entries_max: int) -> None:
        """Hold at most `entries_max` records (about 250 bytes each); 0 remembers nothing.

        Whenever there are more, a 64th of the oldest goes.
        """
        self._entries_max = entries_max
        self._entries: dict[bytes, _Entry] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        """Return how many records are remembered."""
        return len(self._entries)

    def find(self, keys: Sequence[bytes], *, not_before: float = -np.inf) -> list[bytes | None]:
        """Return the packed record of each key, or None; what was found becomes most recent.

        not_before: records stored earlier than this (monotonic seconds) do not count.
        """
        with self._lock:
            entries = self._entries
            taken = list(map(entries.pop, keys, repeat(None)))
            found = [entry for entry in taken if entry]
            if len(found) == len(keys):
                # The fast path of a get: moved to the end with few steps a key.
                entries.update(zip(keys, found, strict=True))
            else:
                # A key that is repeated was there at its first place only.
                known = {key: entry for key, entry in zip(keys, taken, strict=True) if entry}
                entries.update(known)
                taken = [known.get(key) for key in keys]
        if not_before == -np.inf:
            return [entry[1] if entry else None for entry in taken]
        return [entry[1] if entry and entry[0].at >= not_before else None for entry in taken]

    def holders(
        self, keys: Sequence[bytes], *, not_before: float, are_touched: bool = False
    ) -> set[int] | None:
        """Return the holders of the keys, or None unless all are resident by records that new.

        are_touched: whether the holders must have been told, too, that the pages will be read.
        """
        if not keys:
            return None
        try:
            with self._lock:
                # The first key twice: one alone would come without a tuple.
                found = itemgetter(keys[0], *keys)(self._entries)
        except KeyError:
            return None
        stored = set(map(_stored_of, found))
        if any(one.at < not_before or one.holder == NOT_RESIDENT for one in stored):
            return None
        if are_touched and not all(one.is_touched for one in stored):
            return None
        return {one.holder for one in stored}

    def has_any_at(self, holder: int, keys: Sequence[bytes]) -> bool:
        """Return whether any of the keys was last seen in the memory of this holder."""
        with self._lock:
            get = self._entries.get
            return any(entry[0].holder == holder for key in keys if (entry := get(key)) is not None)

    def store(self, records: Records, now: float, *, are_touched: bool = False) -> None:
        """Remember records, one a key.

        are_touched: the caller tells their holders now that the pages are about to be read.
        """
        if not self._entries_max or not len(records):
            return
        keys, packed = records["key"].tolist(), records.view(ROW).tolist()
        holders = np.where(records["flags"] & RESIDENT, records["holder"], NOT_RESIDENT).tolist()
        stored = {holder: _Stored(now, holder, is_touched=are_touched) for holder in set(holders)}
        with self._lock:
            entries = self._entries
            # A record that was there already moves to the end.
            deque(map(entries.pop, keys, repeat(None)), maxlen=0)
            said = zip(map(stored.__getitem__, holders), packed, strict=True)
            entries.update(zip(keys, said, strict=True))
            if len(entries) > self._entries_max:
                kept = self._entries_max - self._entries_max // EVICTED_PART
                for key in list(islice(entries, len(entries) - kept)):
                    del entries[key]

    def drop(self, records: Records) -> None:
        """Forget these very records; a newer one under the same key stays."""
        blob = records.tobytes()
        with self._lock:
            for start in range(0, len(blob), RECORD_BYTES):
                record = blob[start : start + RECORD_BYTES]
                entry = self._entries.get(record[:16])
                if entry is not None and entry[1] == record:
                    del self._entries[record[:16]]

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget the records of these keys."""
        with self._lock:
            for key in keys:
                self._entries.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()


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
    ) -> None:
        """Share the cache and the breakers with the reader and the writer.

        cost_of: which of two holders that are equally far to read from: the one that costs less.
        tables:  returns the nodes of this host whose directory tables can be read.
        """
        self._cost_of = cost_of
        self._tables = tables
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
        names: list[bytes] = keys.tolist()
        found: list[bytes | None] = []
        if cached_since < np.inf:
            found = self._cache.find(names, not_before=cached_since)
            where = self._all_known(found, cluster, avoid)
            if where is not None:
                return where
        search = Search(keys, names, cluster, avoid, failed, self._may_read)
        search.cost_of = self._cost_of
        if any(found):
            search.take_cached(*unpacked(found))
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
        self._cache.store(search.found(), self._clock())
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
        records: Records = np.empty(len(keys), RECORD)
        known: Mask = np.zeros(len(keys), np.bool_)
        absent: Mask = np.zeros(len(keys), np.bool_)
        left, told = np.arange(len(keys)), 0
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
        self._cache.store(found, self._clock(), are_touched=touch)
        return known, found

    def all_cached(
        self, keys: PageKeys, cluster: Cluster, since: float, *, are_touched: bool
    ) -> bool:
        """Return whether every page is known since then, at a readable holder: the fast path.

        are_touched: whether the holders must have been told since then that they will be read.

        An `exists` that is repeated costs no array a key.
        """
        holders = self._cache.holders(keys.tolist(), not_before=since, are_touched=are_touched)
        return holders is not None and self._may_read(holders, cluster)

    def may_ask(self, holder: int) -> bool:
        """Return whether to ask this holder something, now."""
        return self._breakers.available(holder, self._clock())

    def _all_known(
        self, found: Sequence[bytes | None], cluster: Cluster, avoid: frozenset[int]
    ) -> Whereabouts | None:
        """Return where all pages are if the cache knows that, at readable holders: the fast path.

        A get of known pages needs no search.
        """
        if not found or not all(found):
            return None
        records: Records = np.frombuffer(b"".join(found), RECORD)  # type: ignore[arg-type]
        holders = set(records["holder"].tolist())
        if holders & avoid or not self._may_read(holders, cluster):
            return None
        if not (records["flags"] & (RESIDENT | ON_DISK)).all():
            return None
        count = len(records)
        return Whereabouts(
            records, np.ones(count, np.bool_), np.zeros(count, np.bool_), [""] * count
        )

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
        patience = min(until, now + min(STALL_S, (until - now) / 2))
        answers: Sequence[Message | None] = yield Ask(questions, patience, search.take)
        search.settle()
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
