"""The only read path: locate, read the word, all the bytes, the seal, verify.

Generators without I/O: they yield `Step`s, which the bridge performs in the caller's thread, or a
simulation in a task.

`Awaited` has the pages that are only on disks of their holders, the requests to load them, and the
meaning of the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from threading import Lock
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.keys import PageKeys
from peercache.model.reads import Fetched, PeerRead
from peercache.model.records import DROP, RECORD, RECORDS_A_MESSAGE_MAX, RESIDENT, Records
from peercache.model.runs import PageRuns
from peercache.model.seal import ODD
from peercache.observability import reasons
from peercache.observability.latency import ASKED, DISK, HOME, HOST, KNOWN, RDMA, TABLE, TCP
from peercache.paths.cluster import Cluster, Strangers
from peercache.paths.costs import ReadCosts
from peercache.paths.lookup import EXISTS_TRUSTS_S, LocationCache, Locator
from peercache.paths.mirror import MirroredBatch, Mirrorer, MirrorHome
from peercache.paths.search import Mask, Whereabouts, names_of_records
from peercache.paths.steps import Ask, Checksum, Fetch, Post, Renew, Step
from peercache.paths.verify import (
    checksum_portions,
    checksums_agree,
    names_another,
    owed_checksums,
    verified,
)
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import ReportStale
from peercache.wire.messages.pool import LOST, PROMOTED, Promote, Promoted, Touched

ATTEMPTS_MAX = 3
"""First a stale cached record, then a stale directory record, then the current one."""

PROMOTE_TIMEOUT_S = 0.1
"""How long a holder may take to answer with loaded pages: the request is repeated until the
deadline."""

_WHY = (reasons.ABSENT, "")
"""The reason of a page, by whether it is known."""

TOUCHES_MAX = 8192
"""Most touches of one message to a holder: 192 KiB; further ones are dropped, which only affects
the order of eviction."""

RUN_ENDS_MAX = 1024
"""Batches of which a client remembers the first missing page, about 250 bytes each: an engine has
fewer requests in its queue."""

Places = npt.NDArray[np.intp]


@attrs.define(eq=False)
class ReadOutcome:
    """The result of a get.

    hits: (n,) bool; reasons: a miss reason each, "" for a hit; bytes_by_fabric: verified bytes.
    mirrored: number of pages that the home node has mirrored because of this get.
    tier: the farthest place that pages were read from (`observability.latency`), "" for none.
    """

    hits: Mask
    reasons: list[str]
    pages_by_fabric: dict[str, int]
    bytes_by_fabric: dict[str, int]
    mirrored: int = 0
    tier: str = ""


@attrs.frozen
class Leading:
    """The leading run of a batch.

    why: the reason of the page that ends it, "" if all have a holder. tier: which one answered.
    is_again: whether the batch was asked for before, and had a missing page.
    """

    run: int
    why: str
    tier: str
    is_again: bool = False


@final
class RunEnds:
    """The page that was missing in each of the last batches. Thread-safe.

    It is never an answer, because a page may appear at any moment. It decides which page of a batch
    is asked for first when the batch comes again: if that page is still missing, the others need no
    question.
    """

    def __init__(self) -> None:
        """Start without batches."""
        self._lock = Lock()
        self._ends: dict[bytes, tuple[int, bytes]] = {}
        """By the last key of a batch, which in an engine's keys identifies the whole prefix: how
        many keys from the end the missing one is, and its key."""

    def pages_before(self, keys: PageKeys) -> int | None:
        """Return how many pages come before the one that was missing; None for a new batch."""
        back, missing = self._ends.get(keys[-1].tobytes(), (0, b""))
        at = len(keys) - back
        return at if 0 <= at < len(keys) and keys[at].tobytes() == missing else None

    def note(self, keys: PageKeys, run: int, *, is_absent: bool) -> None:
        """Remember where the leading run of a batch ends; only an absent page is remembered."""
        name = keys[-1].tobytes()
        with self._lock:
            self._ends.pop(name, None)
            if is_absent:
                self._ends[name] = len(keys) - run, keys[run].tobytes()
                if len(self._ends) > RUN_ENDS_MAX:
                    del self._ends[next(iter(self._ends))]


@final
class Touches:
    """The pages that were read from each holder since its last notification. Thread-safe."""

    def __init__(self) -> None:
        """Start without pages."""
        self._lock = Lock()
        self._by_holder: dict[int, list[bytes]] = {}
        self._count: dict[int, int] = {}

    def add(self, holder: int, records: Records) -> None:
        """Record that one call has read these records of a holder, in this order."""
        drops = _drops(records)
        with self._lock:
            count = self._count.get(holder, 0)
            drops = drops[: TOUCHES_MAX - count]
            if len(drops):
                self._by_holder.setdefault(holder, []).append(drops.tobytes())
                self._count[holder] = count + len(drops)

    def take(self) -> dict[int, bytes]:
        """Return the touches to report to each holder, and forget them.

        The last call comes first: a holder treats the first pages as the hottest.
        """
        with self._lock:
            reported = {holder: b"".join(parts[::-1]) for holder, parts in self._by_holder.items()}
            self._by_holder, self._count = {}, {}
        return reported


@final
@attrs.define(eq=False, kw_only=True)
class Reader:
    """Reads batches of pages from their holders' memory.

    verify: generation, sampled or full checksums.
    space:  the only space of which pages are read.
    """

    _locator: Locator
    _cache: LocationCache
    _verify: str
    _space: int
    _clock: Callable[[], float]
    mirrorer: Mirrorer | None = None
    _costs: ReadCosts = attrs.field()
    touches: Touches = attrs.field(factory=Touches, init=False)
    _run_ends: RunEnds = attrs.field(factory=RunEnds, init=False)
    _strangers: Strangers = attrs.field(factory=Strangers, init=False)

    @_costs.default
    def _no_costs(self) -> ReadCosts:
        return ReadCosts(salt=0, clock=self._clock)

    def exists(
        self, keys: PageKeys, cluster: Cluster, until: float, *, touch: bool = False
    ) -> Generator[Step, Any, tuple[Mask, list[str], str]]:
        """Return which pages have a holder, (n,) bool, the reasons, and which tier answered.

        A hint, like everything before a read.

        touch: notify each holder at once, in one message, of its pages that are reported: they are
               evicted last from then on. It pins nothing, and the message may be lost. Pages that
               were touched within EXISTS_TRUSTS_S are not sent again.
        """
        self._locator.forget_removed(cluster.home)
        since = self._clock() - EXISTS_TRUSTS_S
        if self._locator.all_cached(keys, cluster, since, are_touched=touch):
            return np.ones(len(keys), np.bool_), [""] * len(keys), KNOWN
        glanced = yield from self._locator.glance(keys, cluster, touch=touch)
        if glanced is not None:
            known, records = glanced
            if touch and len(records):
                yield Post(_touches(records))
            return known, list(map(_WHY.__getitem__, known.tolist())), TABLE
        where, _ = yield from self._locate(keys, cluster, until, cached_since=since)
        if touch:
            # Before the wishes: pages in memory must not be evicted for pages that are loaded.
            reported = _touches(where.records[where.known])
            if reported:
                yield Post(reported)
        wished = wishes(keys, where)
        if wished:
            # The caller will read these pages soon: their holders load them in the meantime.
            yield Post(wished)
        return where.known, where.reasons, ASKED

    def leading(
        self, keys: PageKeys, cluster: Cluster, until: float, *, touch: bool = False
    ) -> Generator[Step, Any, Leading]:
        """Return how many leading pages have a holder: `exists`, up to the first missing page.

        A batch that was asked for before is asked again only up to the page that was missing then.
        An engine does this for each request in its queue (SGLang up to eight times), and in a large
        cluster a new question for all pages would go to as many owners.
        """
        if not len(keys):
            return Leading(0, "", "")
        before = self._run_ends.pages_before(keys)
        first = len(keys) if before is None else before + 1
        known, whys, tier = yield from self.exists(keys[:first], cluster, until, touch=touch)
        run = first if known.all() else int(np.argmin(known))
        why = "" if run == first else whys[run]
        if run == first < len(keys):
            # It was set meanwhile: the rest is a new question.
            known, whys, tier = yield from self.exists(keys[first:], cluster, until, touch=touch)
            more = len(known) if known.all() else int(np.argmin(known))
            run, why = first + more, "" if more == len(known) else whys[more]
        self._run_ends.note(keys, run, is_absent=why == reasons.ABSENT)
        return Leading(run, why, tier, is_again=before is not None)

    def lengths(
        self, keys: PageKeys, cluster: Cluster, until: float
    ) -> Generator[Step, Any, list[int]]:
        """Return the size of each page, 0 for one without a holder. A hint, like `exists`."""
        since = self._clock() - EXISTS_TRUSTS_S
        where, _ = yield from self._locate(keys, cluster, until, cached_since=since)
        found: list[int] = np.where(where.known, where.records["length"], 0).tolist()
        return found

    def get(
        self,
        keys: PageKeys,
        runs: PageRuns,
        cluster: Cluster,
        until: float,
        home: MirrorHome | None = None,
        mirrorer: Mirrorer | None = None,
    ) -> Generator[Step, Any, ReadOutcome]:
        """Fill the runs of every page that verifies by `until`.

        home: where pages of other hosts may be mirrored, by this mirrorer or that of the reader.
        """
        batch, mirrorer = _Batch(keys, runs), mirrorer or self.mirrorer
        if mirrorer is None or home is None:
            return (yield from self._get(batch, cluster, until))
        mirrored = batch.mirrored = MirroredBatch(mirrorer, home, keys, runs)
        try:
            outcome = yield from self._get(batch, cluster, until)
            yield from mirrored.keep(outcome.hits, until)
        finally:
            mirrored.end()
        outcome.mirrored = mirrored.kept
        return outcome

    def load(
        self, keys: PageKeys, cluster: Cluster, until: float, *, is_cached: bool = False
    ) -> Generator[Step, Any, tuple[Whereabouts, Mask, Cluster]]:
        """Have holders load pages from their disks; return where all of them are by `until`.

        And which of them were loaded for that, (n,) bool. Nothing is read. A page that is still
        only on a disk is known, and not resident. is_cached: cached records count, which may name
        memory that a page has left.
        """
        epoch = self._cache.epoch
        since = -np.inf if is_cached else np.inf
        where, cluster = yield from self._locate(keys, cluster, until, cached_since=since)
        chosen = np.flatnonzero(where.known & ((where.records["flags"] & RESIDENT) == 0))
        awaited = Awaited(chosen, where.records[chosen], where.fresh[chosen])
        loaded: Mask = np.zeros(len(keys), np.bool_)
        while len(awaited.places) and self._clock() < until:
            for holder in awaited.holders():
                if not self._locator.may_ask(holder):
                    awaited.give_up(holder)
            arrived, lost = yield from self._ask_to_load(awaited, until)
            where.records[arrived.places] = arrived.records
            loaded[arrived.places] = True
            self._cache.store(arrived.records, self._clock(), epoch=epoch)
            where.known[lost.places] = False
            self._cache.drop(lost.records)
        return where, loaded, cluster

    def _get(
        self, batch: _Batch, cluster: Cluster, until: float
    ) -> Generator[Step, Any, ReadOutcome]:
        cached_since = -np.inf
        for _ in range(ATTEMPTS_MAX):
            cluster = yield from self._attempt(batch, cluster, until, cached_since)
            if not len(batch.open) or self._clock() >= until:
                break
            # The open pages failed with the records that we had: ask again, and bypass the cache.
            cached_since = np.inf
        for holder, records in batch.touched_by_holder():
            self.touches.add(holder, records)
        return ReadOutcome(
            batch.hits,
            batch.reasons,
            batch.pages_by_fabric,
            batch.bytes_by_fabric,
            tier=batch.tier(cluster.home),
        )

    def _attempt(
        self, batch: _Batch, cluster: Cluster, until: float, cached_since: float
    ) -> Generator[Step, Any, Cluster]:
        """Read the open pages from their recorded holders; return the latest known cluster."""
        places = batch.open
        where, cluster = yield from self._locate(
            batch.keys[places],
            cluster,
            until,
            cached_since=cached_since,
            avoid=frozenset(batch.avoid),
            failed=frozenset(batch.failed),
        )
        batch.open = np.empty(0, np.intp)
        in_memory = (where.records["flags"] & RESIDENT) != 0
        fits = where.known & (where.records["length"] == batch.lengths[places])
        if len(places) and (fits & in_memory).all():
            # The fast path: nothing to filter.
            yield from self._fetch(batch, cluster, until, places, where.records, where.fresh)
            return cluster
        for i in np.flatnonzero(~where.known).tolist():
            # The reason of an earlier attempt stays: evicted, or its holder unreachable.
            batch.reasons[places[i]] = batch.reasons[places[i]] or where.reasons[i]
        misfits = np.flatnonzero(where.known & ~fits)
        batch.reasons_at(places[misfits], reasons.WRONG_SIZE)
        # A cached record may be stale: the page may have been set again since, with another size.
        stale = misfits[~where.fresh[misfits]]
        self._cache.drop(where.records[stale])
        batch.open = places[stale]
        chosen = np.flatnonzero(fits & in_memory)
        if len(chosen):
            yield from self._fetch(
                batch, cluster, until, places[chosen], where.records[chosen], where.fresh[chosen]
            )
        chosen = np.flatnonzero(fits & ~in_memory)
        if len(chosen):
            awaited = Awaited(places[chosen], where.records[chosen], where.fresh[chosen])
            yield from self._promote(batch, cluster, until, awaited)
        return cluster

    def _locate(
        self, keys: PageKeys, cluster: Cluster, until: float, **rest: Any
    ) -> Generator[Step, Any, tuple[Whereabouts, Cluster]]:
        """Find the pages; if a holder has joined since the last view, get the new view first."""
        where = yield from self._locator.locate(keys, cluster, until, **rest)
        if not where.strangers:
            return where, cluster
        now = self._clock()
        if now >= until or not self._strangers.are_new(where.strangers, now):
            return where, cluster
        renewed: Cluster = yield Renew(min(until - (until - now) / 2, now + self._locator.stall_s))
        if not where.strangers & renewed.members.keys():
            # Holders that were found may have left since: they are members of the earlier view.
            return where, cluster
        return (yield from self._locator.locate(keys, renewed, until, **rest)), renewed

    def _promote(
        self, batch: _Batch, cluster: Cluster, until: float, awaited: Awaited
    ) -> Generator[Step, Any, None]:
        """Have holders load pages from disk, and read each portion before the next is loaded."""
        epoch, began = self._cache.epoch, self._clock()
        while self._clock() < until:
            if batch.mirrored is not None:
                # The home node may have to load a page, too, and needs the room for it.
                yield from batch.mirrored.keep(batch.hits, until)
            for holder in awaited.holders():
                if not self._locator.may_ask(holder):
                    batch.fail(awaited.give_up(holder), reasons.PEER_UNREACHABLE)
                    batch.avoid.add(holder)
            if not len(awaited.places):
                break
            arrived, lost = yield from self._ask_to_load(awaited, until)
            if len(lost.places):
                batch.fail(lost.places, reasons.EVICTED)
                batch.failed.update(names_of_records(lost.records))
                self._cache.drop(lost.records)
                yield Post(_disputes(lost.records[lost.fresh], cluster))
            if len(arrived.places):
                self._cache.store(arrived.records, self._clock(), epoch=epoch)
                batch.has_waited = True
                yield from self._fetch(
                    batch, cluster, until, arrived.places, arrived.records, arrived.fresh
                )
                now = self._clock()
                for _, theirs, _ in _by_holder(arrived.places, arrived.records, arrived.fresh):
                    size = int(theirs["length"].sum(dtype=np.uint64))
                    self._costs.add((int(theirs["holder"][0]), True), size, now - began)
                began = now
        batch.reasons_at(awaited.places, reasons.NOT_PROMOTED)
        for holder in awaited.holders():
            size = int(batch.lengths[awaited.places[0]])
            self._costs.add_cut_off((holder, True), [size], self._clock() - began)

    def _ask_to_load(
        self, awaited: Awaited, until: float
    ) -> Generator[Step, Any, tuple[Found, Found]]:
        """Have holders load a portion; return what is in memory now, and what is lost."""
        now = self._clock()
        asked = awaited.questions(min(PROMOTE_TIMEOUT_S, max(until - now, 0.0)))
        if not asked:
            return awaited.take(())
        # A second silence opens the breaker of the holder.
        silence_s = PROMOTE_TIMEOUT_S + self._locator.stall_s / 2
        answers: Sequence[Message | None] = yield Ask(asked, min(until, now + silence_s))
        return awaited.take(answers)

    def _fetch(
        self,
        batch: _Batch,
        cluster: Cluster,
        until: float,
        places: Places,
        records: Records,
        fresh: Mask,
    ) -> Generator[Step, Any, None]:
        if batch.mirrored is not None:
            yield from batch.mirrored.reserve(places, records, cluster, until)
        groups = _by_holder(places, records, fresh)
        reads = tuple(
            PeerRead(
                member=cluster.members[int(theirs["holder"][0])],
                offsets=np.ascontiguousarray(theirs["offset"]),
                lengths=theirs["length"].astype(np.uint64),
                runs=batch.runs if at is batch.everything else batch.runs.take(at),
                generations=np.ascontiguousarray(theirs["generation"]),
            )
            for at, theirs, _ in groups
        )
        self._costs.begin(reads)
        began = self._clock()
        answers: Sequence[Fetched] = ()
        try:
            answers = yield Fetch(reads, until)
        finally:
            self._costs.end(reads, answers, self._clock() - began)
        disputed: list[Records] = []
        for (at, theirs, is_fresh), fetched in zip(groups, answers, strict=True):
            changed = yield from self._judge(batch, until, at, theirs, fetched)
            if len(changed):
                disputed.append(theirs[changed[is_fresh[changed]]])
        reported = np.concatenate(disputed) if disputed else records[:0]
        if len(reported):
            yield Post(_disputes(reported, cluster))

    def _judge(
        self, batch: _Batch, until: float, places: Places, records: Records, fetched: Fetched
    ) -> Generator[Step, Any, Places]:
        """Decide which pages of one holder are hits. No other function does that.

        Returns the positions of wrong records.
        """
        hits = verified(records, self._space, fetched.seals)
        lacking, owed = owed_checksums(batch.keys[places], records, hits, self._verify)
        hits[lacking] = False
        corrupt, unchecked = yield from self._checked(batch, until, places, records, owed)
        hits[corrupt] = False
        hits[unchecked] = False
        holder = int(records["holder"][0])
        batch.hit(places[hits], records[hits], fetched.fabric)
        if hits.any():
            batch.touched.append((places[hits], records[hits]))
            batch.holders.add(holder)
        if hits.all():
            return places[:0]
        has_arrived = fetched.seals["word"] != ODD
        is_wrong = ~hits & has_arrived
        is_wrong[unchecked] = False
        is_wrong[lacking] = False
        changed = np.flatnonzero(is_wrong)
        self._cache.drop(records[changed])
        batch.failed.update(names_of_records(records[changed]))
        batch.reasons_at(places[changed], reasons.EVICTED)
        lies = np.flatnonzero(is_wrong & names_another(records, fetched.seals))
        batch.reasons_at(places[lies], reasons.WRONG_PAGE)
        batch.reasons_at(places[lacking], reasons.NO_CHECKSUM)
        self._cache.drop(records[lacking])
        batch.open = np.union1d(batch.open, places[lacking])
        batch.reasons_at(places[corrupt], reasons.VERIFY_FAILED)
        batch.reasons_at(places[unchecked], reasons.DEADLINE)
        missing = np.flatnonzero(~has_arrived)
        batch.reasons_at(places[missing], fetched.failure or reasons.PEER_UNREACHABLE)
        if len(missing) and fetched.failure != reasons.DEADLINE:
            batch.avoid.add(holder)
            self._cache.drop(records[missing])
            batch.open = np.union1d(batch.open, places[missing])
        batch.open = np.union1d(batch.open, places[changed])
        return changed

    def _checked(
        self, batch: _Batch, until: float, places: Places, records: Records, owed: Places
    ) -> Generator[Step, Any, tuple[Places, Places]]:
        """Return which of the `owed` pages have another checksum than their record's, and which
        were left unchecked for lack of time.
        """
        if not len(owed):
            return owed, owed
        wrong, checked = [owed[:0]], 0
        for part in checksum_portions(owed, batch.lengths[places]):
            # The first portion is always checked: it takes less time than is reserved for the
            # return.
            if checked and self._clock() >= until:
                break
            digests = yield Checksum(batch.runs, places[part])
            wrong.append(part[~checksums_agree(records[part], digests)])
            checked += len(part)
        return np.concatenate(wrong), owed[checked:]


class _Batch:
    """The state of one get."""

    def __init__(self, keys: PageKeys, runs: PageRuns) -> None:
        self.keys = keys
        self.runs = runs
        self.lengths = runs.lengths
        self.everything: Places = np.arange(len(keys))
        self.hits: Mask = np.zeros(len(keys), np.bool_)
        self.reasons = [""] * len(keys)
        self.open: Places = self.everything
        self.avoid: set[int] = set()
        self.mirrored: MirroredBatch | None = None
        self.failed: set[bytes] = set()
        """Records that failed verification in this call (`lookup.names_of_records`)."""
        self.pages_by_fabric: dict[str, int] = {}
        self.bytes_by_fabric: dict[str, int] = {}
        self.holders: set[int] = set()
        """Holders of pages that were hits."""
        self.touched: list[tuple[Places, Records]] = []
        """The hits, in the order in which they arrived, in parts."""
        self.has_waited = False
        """Whether a holder has loaded pages from its disk for this get."""

    def tier(self, home: int) -> str:
        """Return the farthest place that pages were read from; "" if no page was read."""
        if not self.holders:
            return ""
        if self.has_waited:
            return DISK
        for fabric in (TCP, RDMA):
            if self.pages_by_fabric.get(fabric):
                return fabric
        return HOME if self.holders == {home} else HOST

    def touched_by_holder(self) -> list[tuple[int, Records]]:
        """Return the records of each holder's hits, in the order of the batch."""
        if not self.touched:
            return []
        places, records = self.touched[0]
        if len(self.touched) > 1:
            places = np.concatenate([some for some, _ in self.touched])
            order = np.argsort(places)
            places = places[order]
            records = np.concatenate([some for _, some in self.touched])[order]
        groups = _by_holder(places, records, np.zeros(len(places), np.bool_))
        return [(int(theirs["holder"][0]), theirs) for _, theirs, _ in groups]

    def hit(self, places: Places, records: Records, fabric: str) -> None:
        self.hits[places] = True
        self.reasons_at(places, "")
        if self.mirrored is not None:
            self.mirrored.note_checksums(places, records)
        count, size = len(places), int(records["length"].sum())
        self.pages_by_fabric[fabric] = self.pages_by_fabric.get(fabric, 0) + count
        self.bytes_by_fabric[fabric] = self.bytes_by_fabric.get(fabric, 0) + size

    def fail(self, places: Places, reason: str) -> None:
        """Record why these pages could not be read; another attempt may find them elsewhere."""
        self.reasons_at(places, reason)
        self.open = np.union1d(self.open, places)

    def reasons_at(self, places: Places, reason: str) -> None:
        if not reason and not any(self.reasons):
            return
        for place in places.tolist():
            self.reasons[place] = reason


def _by_holder(places: Places, records: Records, fresh: Mask) -> list[tuple[Places, Records, Mask]]:
    """Group places, records and fresh by holder."""
    holders = dict.fromkeys(records["holder"].tolist())
    if len(holders) == 1:
        return [(places, records, fresh)]
    groups = [np.flatnonzero(records["holder"] == holder) for holder in holders]
    return [(places[group], records[group], fresh[group]) for group in groups]


def _touches(records: Records) -> tuple[tuple[int, Touched], ...]:
    """Return one message for each holder: its found pages, in the order of the batch."""
    in_memory = records[(records["flags"] & RESIDENT) != 0]
    count = len(in_memory)
    groups = _by_holder(np.arange(count), in_memory, np.ones(count, np.bool_)) if count else []
    return tuple(
        (int(theirs["holder"][0]), Touched(_drops(theirs[:TOUCHES_MAX]).tobytes()))
        for _, theirs, _ in groups
    )


def _drops(records: Records) -> Records:
    drops: Records = np.empty(len(records), DROP)
    drops["key"], drops["generation"] = records["key"], records["generation"]
    return drops


def _disputes(records: Records, cluster: Cluster) -> tuple[tuple[int, ReportStale], ...]:
    owners = cluster.ring.owners(np.ascontiguousarray(records["key"]))
    return tuple(
        (peer, ReportStale(records[(owners == peer).any(axis=1)][:RECORDS_A_MESSAGE_MAX].tobytes()))
        for peer in np.unique(owners).tolist()
    )


PROMOTE_KEYS_MAX = 2048
"""Keys of one request; the answer has at most as many records: 114 KiB."""

WISHES_MAX = 1024
"""Keys that one holder is asked to load ahead by one `exists`: a prompt of that many pages."""


@attrs.define(eq=False)
class Found:
    """Pages of a batch with their records; fresh: whether the record is from this call."""

    places: Places
    records: Records
    fresh: Mask

    def of(self, chosen: Places | Mask) -> Found:
        """Return the chosen ones."""
        return Found(self.places[chosen], self.records[chosen], self.fresh[chosen])


@final
class Awaited:
    """The pages of a batch that wait for their holders' disks."""

    def __init__(self, places: Places, records: Records, fresh: Mask) -> None:
        """Await the pages at these indices of a batch, with records that say "on disk"."""
        self._found = Found(places, records, fresh)
        self._asked: list[Places] = []

    @property
    def places(self) -> Places:
        """The indices of pages that are still missing."""
        return self._found.places

    def holders(self) -> list[int]:
        """Return the holders of the missing pages, in the order of their first pages."""
        return list(dict.fromkeys(self._found.records["holder"].tolist()))

    def give_up(self, holder: int) -> Places:
        """Stop waiting for a holder; return the indices of its pages."""
        of_holder = self._found.records["holder"] == holder
        left: Places = self._found.places[of_holder]
        self._found = self._found.of(~of_holder)
        return left

    def questions(self, timeout_s: float) -> tuple[tuple[int, Promote], ...]:
        """Return one request for each holder, the first pages first."""
        records = self._found.records
        self._asked = [
            np.flatnonzero(records["holder"] == holder)[:PROMOTE_KEYS_MAX]
            for holder in self.holders()
        ]
        return tuple(
            (
                int(records["holder"][group[0]]),
                Promote(0, records["key"][group].tobytes(), timeout_s),
            )
            for group in self._asked
        )

    def take(self, answers: Sequence[Message | None]) -> tuple[Found, Found]:
        """Handle the answers; return the pages that can be read now, and those that are lost.

        All others stay pending.
        """
        done: Mask = np.zeros(len(self.places), np.bool_)
        lost: Mask = np.zeros(len(self.places), np.bool_)
        records = self._found.records.copy()
        for group, answer in zip(self._asked, answers, strict=True):
            if answer is None:
                continue
            if not isinstance(answer, Promoted) or len(answer.states) != len(group):
                # Refused, or invalid: repeating the request would not end.
                lost[group] = True
                continue
            states = np.frombuffer(answer.states, np.uint8)
            lost[group[states == LOST]] = True
            reported = np.frombuffer(answer.records, RECORD)
            by_key = dict(zip(reported["key"].tolist(), reported, strict=True))
            for at in group[states == PROMOTED].tolist():
                record = by_key.get(records["key"][at].tobytes())
                if record is not None and _is_same(record, records[at]):
                    records[at] = record
                    done[at] = True
                else:
                    lost[at] = True
        fresh = np.ones(len(done), np.bool_)
        arrived = Found(self._found.places, records, fresh).of(done)
        gone = self._found.of(lost)
        self._found = self._found.of(~done & ~lost)
        return arrived, gone


def wishes(keys: PageKeys, where: Whereabouts) -> tuple[tuple[int, Promote], ...]:
    """Return the requests that make holders load the known leading pages from their disks."""
    known = where.known
    lead = len(known) if known.all() else int(np.argmin(known))
    records = where.records[:lead]
    on_disk = np.flatnonzero((records["flags"] & RESIDENT) == 0)
    holders = records["holder"][on_disk]
    return tuple(
        (holder, Promote(0, keys[on_disk[holders == holder][:WISHES_MAX]].tobytes(), 0.0))
        for holder in dict.fromkeys(holders.tolist())
    )


def _is_same(reported: np.void, expected: np.void) -> bool:
    """Return whether a record is of the requested page: same holder and length, in memory."""
    return bool(
        reported["holder"] == expected["holder"]
        and reported["length"] == expected["length"]
        and reported["flags"] & RESIDENT
    )
