"""Finds pages: in the cache, then in directory tables of this host, then by requests in parallel.

`LocationCache` has the last records that a client has seen. It is always safe, because a stale
record fails verification. It never caches an absence: a page may appear anywhere at any moment.
Every operation is one compiled call per batch: an `exists` of known pages, which an engine calls
for each prompt, does little else.

The tables of this host's nodes are read in shared memory, without a request. A page that is missing
in such a table is absent only if the table has authority for the key; otherwise another owner is
asked.

A search sends one request per peer and batch. An owner that refuses is replaced by its replica at
once. If an owner does not answer in its usual time, its replica is asked, too, and the answers that
arrive first are used (ADR 0040): silence never means "absent". An owner without a record is
replaced by its replica for `handover_s` after a view change, or if it reports that it is behind:
then ANSWERS_MAX owners must agree. In a settled cluster an absent page costs one request.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from threading import Lock
from typing import Any, Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.installation.library import Begin, function
from peercache.model.keys import PageKeys
from peercache.model.records import ON_DISK, RECORD, RECORD_BYTES, RESIDENT, ROW, Records
from peercache.net.breaker import HEDGE_MIN_S, AnswerTimes, Breakers
from peercache.paths.cluster import Cluster
from peercache.paths.search import Asked, Mask, Search, Whereabouts, picked
from peercache.paths.steps import Answers, Ask, Questions, ReadTable, Step
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


@final
class Round:
    """The Lookups of one step: those for the next owner of each key, and those that follow them in
    place of owners without an answer.
    """

    def __init__(self, search: Search, cluster: Cluster, locator: Locator) -> None:
        self.hedge_at = np.inf
        """When to call `hedge`."""
        self._search = search
        self._cluster = cluster
        self._locator = locator
        self._asked: list[Asked] = []
        self._is_hedged = False
        self._in_handover = False

    def questions(self, targets: dict[int, npt.NDArray[np.intp]]) -> tuple[tuple[int, Lookup], ...]:
        """Return the requests to these peers; their answers will be expected."""
        keys, now = self._search.keys, self._locator.now()
        asked = [
            Asked(
                peer,
                positions[begin : begin + LOOKUP_KEYS_MAX],
                now + self._locator.usual_s(peer, self._search),
            )
            for peer, positions in sorted(targets.items())
            for begin in range(0, len(positions), LOOKUP_KEYS_MAX)
        ]
        self._asked += asked
        self.hedge_at = min(self.hedge_at, *(one.late_at for one in asked))
        return tuple((one.peer, Lookup(0, keys[one.positions].tobytes())) for one in asked)

    def is_enough(self, answers: Sequence[Message | None]) -> bool:
        """Return whether these answers make the others unnecessary; changes nothing."""
        if self._search.has_all(answers):
            return True
        return self._is_hedged and self._search.is_settled(
            self._asked, answers, in_handover=self._in_handover
        )

    def hedge(self, answers: Answers) -> tuple[Questions, float]:
        """Ask the next owners in place of those whose answers are late; see `Ask.hedge`."""
        self.note(answers)
        locator, now = self._locator, self._locator.now()
        self._is_hedged = True
        self._in_handover = now < self._cluster.handover_until
        missing = [one for one, answer in self._with(answers) if answer is None]
        for one in missing:
            if one.late_at <= now and not locator.is_closed(one.peer):
                locator.times.lags(one.peer, now)
        if self._search.is_settled(self._asked, answers, in_handover=self._in_handover):
            return (), np.inf
        in_time = [one for one in missing if one.late_at > now]
        self.hedge_at = min((one.late_at for one in in_time), default=np.inf)
        if not locator.times.may_hedge():
            return (), self.hedge_at
        targets = self._search.next_owners(
            locator.availability(now, self._search),
            in_handover=self._in_handover,
            awaited=[one.positions for one in in_time],
        )
        if not targets:
            return (), self.hedge_at
        locator.times.hedged()
        questions = self.questions(targets)
        return questions, self.hedge_at

    def _with(self, answers: Answers) -> Iterator[tuple[Asked, Message | None]]:
        return zip(self._asked, answers, strict=True)

    def note(self, answers: Sequence[Message | None]) -> None:
        """Add the answers that are new to the search."""
        search = self._search
        new = [
            (one, answer)
            for one, answer in self._with(answers)
            if isinstance(answer, Located) and not one.is_noted
        ]
        search.take([answer for _, answer in new])
        for one, answer in new:
            one.is_noted = True
            search.note_answer(one.peer, one.positions, is_behind=answer.behind)

    def end(self, answers: Sequence[Message | None]) -> None:
        """Add the last answers, and which owners have not answered."""
        self.note(answers)
        if self._search.known.all():
            return
        for one, answer in self._with(answers):
            if answer is None and not self._locator.is_closed(one.peer):
                self._search.note_silence(one.peer)


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
        lagging = self._lagging(cluster)
        search = Search(keys, keys.tolist(), cluster, avoid, failed, self._may_read, lagging)
        search.cost_of = self._cost_of
        if cached is not None and cached[1].any():
            search.take_cached(*cached)
        yield from self._look(search, cluster)
        asked_home = False
        while not search.known.all():
            now = self._clock()
            if now >= until:
                break
            targets = search.next_owners(
                self.availability(now, search), in_handover=now < cluster.handover_until
            )
            left = search.left()
            may_ask_home = cluster.home and not asked_home and len(left)
            may_ask_home = may_ask_home and cluster.home not in search.lagging
            if may_ask_home and self._breakers.available(cluster.home, now):
                targets[cluster.home] = left
            asked_home = True
            if not targets:
                break
            yield from self._ask(search, cluster, targets, now, until)
        self._cache.store(search.found(), self._clock(), epoch=epoch)
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

    def _lagging(self, cluster: Cluster) -> set[int]:
        """Return the peers that did not answer this client in time, or other members."""
        lagging = self.times.lagging(self._clock())
        lagging.update(cluster.suspects)
        return lagging

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
                if search.known.all():
                    return

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
        self,
        search: Search,
        cluster: Cluster,
        targets: dict[int, npt.NDArray[np.intp]],
        now: float,
        until: float,
    ) -> Generator[Step, Any, None]:
        asking = Round(search, cluster, self)
        # Half of the remaining time, so that a hung owner leaves time for its replica.
        timeout = min(until, now + min(self._breakers.stall_s, (until - now) / 2))
        questions = asking.questions(targets)
        answers: Answers = yield Ask(
            questions,
            timeout,
            asking.is_enough,
            (asking.hedge_at, asking.hedge),
        )
        asking.end(answers)

    # --- for the rounds of a search ---------------------------------------------------------------

    def now(self) -> float:
        """Return the time."""
        return self._clock()

    @property
    def times(self) -> AnswerTimes:
        """Return the usual answer times of the peers."""
        return self._breakers.times

    def usual_s(self, peer: int, search: Search) -> float:
        """Return how long to wait for a peer's answer before another owner is asked."""
        return HEDGE_MIN_S if peer in search.lagging else self.times.hedge_s(peer)

    def is_closed(self, peer: int) -> bool:
        """Return whether a peer is not asked at the moment, because it failed."""
        return self._breakers.is_open(peer)

    def availability(self, now: float, search: Search) -> Callable[[int], bool]:
        """Return a filter of peers to ask: each breaker is checked once, as that may take a
        probe.
        """
        memo: dict[int, bool] = {}

        def is_available(peer: int) -> bool:
            if peer not in memo:
                memo[peer] = peer not in search.silent and self._breakers.available(peer, now)
            return memo[peer]

        return is_available
