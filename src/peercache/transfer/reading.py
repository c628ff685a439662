"""The read path: locate, read all the bytes, read the word, verify. There is no other.

Generators without I/O: they yield `ports.Step`s and are driven by the caller's thread, or by a
simulated task.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from threading import Lock
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache import observe
from peercache.keys import PageKeys
from peercache.messages import Disputed
from peercache.ports import ODD, Checksum, Fetch, Fetched, PeerRead, Post, Step
from peercache.records import DROP, Records
from peercache.runs import PageRuns
from peercache.transfer.cache import EXISTS_TRUSTS_S, LocationCache
from peercache.transfer.cluster import Cluster
from peercache.transfer.locating import Locator, Mask
from peercache.transfer.verify import (
    checksum_portions,
    checksums_agree,
    verified,
    wants_checksum,
)

ATTEMPTS_MAX = 3
"""A stale cached record, then a stale directory record, then the truth."""

TOUCHES_MAX = 8192
"""Most touches kept for one holder between two reports: 192 KiB; more are not told (LRU only)."""

Places = npt.NDArray[np.intp]


@attrs.define(eq=False)
class ReadOutcome:
    """What a get came to.

    hits: (n,) bool; reasons: a miss reason each, "" for a hit; bytes_by_fabric: verified bytes.
    """

    hits: Mask
    reasons: list[str]
    pages_by_fabric: dict[str, int]
    bytes_by_fabric: dict[str, int]


@final
class Touches:
    """Which pages were read from whom, since the holders were last told. Thread-safe."""

    def __init__(self) -> None:
        """Start with nothing to tell."""
        self._lock = Lock()
        self._by_holder: dict[int, list[bytes]] = {}
        self._count: dict[int, int] = {}

    def add(self, holder: int, records: Records) -> None:
        """Remember that these records of a holder were read."""
        drops = np.empty(len(records), DROP)
        drops["key"], drops["generation"] = records["key"], records["generation"]
        with self._lock:
            count = self._count.get(holder, 0)
            drops = drops[: TOUCHES_MAX - count]
            if len(drops):
                self._by_holder.setdefault(holder, []).append(drops.tobytes())
                self._count[holder] = count + len(drops)

    def take(self) -> dict[int, bytes]:
        """Return what to tell each holder, and start anew."""
        with self._lock:
            told = {holder: b"".join(parts) for holder, parts in self._by_holder.items()}
            self._by_holder, self._count = {}, {}
        return told


@final
class Reader:
    """Reads batches of pages out of their holders' memory."""

    def __init__(
        self,
        *,
        locator: Locator,
        cache: LocationCache,
        verify: str,
        clock: Callable[[], float],
    ) -> None:
        """Read with `verify` = generation, sampled or full checksums."""
        self._locator = locator
        self._cache = cache
        self._verify = verify
        self._clock = clock
        self.touches = Touches()

    def exists(
        self, keys: PageKeys, cluster: Cluster, until: float
    ) -> Generator[Step, Any, tuple[Mask, list[str]]]:
        """Find which pages somebody holds, (n,) bool; a hint, as everything before a read."""
        since = self._clock() - EXISTS_TRUSTS_S
        if self._locator.believes(keys, cluster, since):
            return np.ones(len(keys), np.bool_), [""] * len(keys)
        where = yield from self._locator.locate(keys, cluster, until, cached_since=since)
        return where.known, where.reasons

    def get(
        self, keys: PageKeys, runs: PageRuns, cluster: Cluster, until: float
    ) -> Generator[Step, Any, ReadOutcome]:
        """Fill the runs of every page that verifies by `until`."""
        batch = _Batch(keys, runs)
        cached_since = -np.inf
        for _ in range(ATTEMPTS_MAX):
            yield from self._attempt(batch, cluster, until, cached_since)
            if not len(batch.open) or self._clock() >= until:
                break
            # What is left failed with what we believed: ask again, not the cache.
            cached_since = np.inf
        return ReadOutcome(batch.hits, batch.reasons, batch.pages_by_fabric, batch.bytes_by_fabric)

    def _attempt(
        self, batch: _Batch, cluster: Cluster, until: float, cached_since: float
    ) -> Generator[Step, Any, None]:
        places = batch.open
        where = yield from self._locator.locate(
            batch.keys[places],
            cluster,
            until,
            cached_since=cached_since,
            avoid=frozenset(batch.avoid),
        )
        batch.open = np.empty(0, np.intp)
        for i in np.flatnonzero(~where.known).tolist():
            # An earlier attempt knows better why: its holder was evicted under us, or unreachable.
            batch.reasons[places[i]] = batch.reasons[places[i]] or where.reasons[i]
        fits = where.known & (where.records["length"] == batch.lengths[places])
        misfits = np.flatnonzero(where.known & ~fits)
        batch.reasons_at(places[misfits], observe.WRONG_SIZE)
        # A remembered record may be of a page that was set anew since, with another size.
        stale = misfits[~where.fresh[misfits]]
        self._cache.drop(where.records[stale])
        batch.open = places[stale]
        chosen = np.flatnonzero(fits)
        if not len(chosen):
            return
        yield from self._fetch(
            batch, cluster, until, places[chosen], where.records[chosen], where.fresh[chosen]
        )

    def _fetch(
        self,
        batch: _Batch,
        cluster: Cluster,
        until: float,
        places: Places,
        records: Records,
        fresh: Mask,
    ) -> Generator[Step, Any, None]:
        groups = [
            np.flatnonzero(records["holder"] == holder)
            for holder in dict.fromkeys(records["holder"].tolist())
        ]
        reads = tuple(
            PeerRead(
                member=cluster.members[int(records["holder"][group[0]])],
                offsets=np.ascontiguousarray(records["offset"][group]),
                lengths=records["length"][group].astype(np.uint64),
                runs=batch.runs.take(places[group]),
            )
            for group in groups
        )
        answers: Sequence[Fetched] = yield Fetch(reads, until)
        disputed: list[Records] = []
        for group, fetched in zip(groups, answers, strict=True):
            changed = yield from self._judge(batch, until, places[group], records[group], fetched)
            wrong = group[changed]
            disputed.append(records[wrong[fresh[wrong]]])
        told = np.concatenate(disputed)
        if len(told):
            yield Post(_disputes(told, cluster))

    def _judge(
        self, batch: _Batch, until: float, places: Places, records: Records, fetched: Fetched
    ) -> Generator[Step, Any, Places]:
        """Decide which pages of one holder are hits, the only place that does.

        Returns which records were found to be wrong.
        """
        hits = verified(records, fetched.words)
        corrupt, unchecked = yield from self._checked(batch, until, places, records, hits)
        hits[corrupt] = False
        hits[unchecked] = False
        holder = int(records["holder"][0])
        is_wrong = ~hits & (fetched.words != ODD)
        is_wrong[unchecked] = False
        batch.hit(places[hits], records[hits], fetched.fabric)
        if hits.any():
            self.touches.add(holder, records[hits])
        changed = np.flatnonzero(is_wrong)
        self._cache.drop(records[changed])
        batch.reasons_at(places[changed], observe.EVICTED)
        batch.reasons_at(places[corrupt], observe.VERIFY_FAILED)
        batch.reasons_at(places[unchecked], observe.DEADLINE)
        missing = np.flatnonzero(fetched.words == ODD)
        batch.reasons_at(places[missing], fetched.failure or observe.PEER_UNREACHABLE)
        if len(missing) and fetched.failure != observe.DEADLINE:
            batch.avoid.add(holder)
            self._cache.drop(records[missing])
            batch.open = np.union1d(batch.open, places[missing])
        batch.open = np.union1d(batch.open, places[changed])
        return changed

    def _checked(
        self, batch: _Batch, until: float, places: Places, records: Records, hits: Mask
    ) -> Generator[Step, Any, tuple[Places, Places]]:
        """Return which verified pages have another checksum than their record's, and which were
        left unchecked, for lack of time.
        """
        sampled = np.intersect1d(
            wants_checksum(batch.keys[places], self._verify), np.flatnonzero(hits)
        )
        wrong, checked = [sampled[:0]], 0
        for part in checksum_portions(sampled, batch.lengths[places]):
            # The first portion is always made: it takes less than what is kept for the return.
            if checked and self._clock() >= until:
                break
            digests = yield Checksum(batch.runs.take(places[part]))
            wrong.append(part[~checksums_agree(records[part], digests)])
            checked += len(part)
        return np.concatenate(wrong), sampled[checked:]


class _Batch:
    """The state of one get."""

    def __init__(self, keys: PageKeys, runs: PageRuns) -> None:
        self.keys = keys
        self.runs = runs
        self.lengths = runs.lengths()
        self.hits: Mask = np.zeros(len(keys), np.bool_)
        self.reasons = [""] * len(keys)
        self.open: Places = np.arange(len(keys))
        self.avoid: set[int] = set()
        self.pages_by_fabric: dict[str, int] = {}
        self.bytes_by_fabric: dict[str, int] = {}

    def hit(self, places: Places, records: Records, fabric: str) -> None:
        self.hits[places] = True
        self.reasons_at(places, "")
        count, size = len(places), int(records["length"].sum())
        self.pages_by_fabric[fabric] = self.pages_by_fabric.get(fabric, 0) + count
        self.bytes_by_fabric[fabric] = self.bytes_by_fabric.get(fabric, 0) + size

    def reasons_at(self, places: Places, reason: str) -> None:
        for place in places.tolist():
            self.reasons[place] = reason


def _disputes(records: Records, cluster: Cluster) -> tuple[tuple[int, Disputed], ...]:
    owners = cluster.ring.owners(np.ascontiguousarray(records["key"]))[:, : cluster.replicas]
    return tuple(
        (peer, Disputed(records[(owners == peer).any(axis=1)].tobytes()))
        for peer in np.unique(owners).tolist()
    )
