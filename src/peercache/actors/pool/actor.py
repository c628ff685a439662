"""Pool: the pages of this node, their slots, and the reservations of clients.

Owns    the page memory of one node: its slots, the generation words, the pages and their recency,
        the reservations of its clients.
Takes   Reserve, ReserveMirror, Commit, Abort, LiveReservations, Touched, Remove, Clear, Retain,
        Demote; RequestRoom, from members; ClientGone, PoolGrew, NamespaceNamed, and
        ReserveAhead from the publisher. From the disk actor: PagesWritten, PagesForgotten,
        RequestResident, RequestAges, RequestColdest, RequestHeld, RemovalDone. From the promote
        actor: PagesSought, PromoteAnswered, and Reserve and Commit, as a client of its own node.
        From the placement actor: TakeOver, TakenOver, DrainChanged, RequestGive, RequestSpill,
        PagesGiven, RequestCopies, CopiesMade, CopiesLost, HoldersChanged. HeldDead, from
        membership.
Sends   Granted, Retained, Refused to the client that asked; Committed for mirrored pages;
        StoreWords; RecordsChanged to directory and publisher; PagesCommitted and RemovalDone to the
        publisher, which has the Commit or the removal answered. With a disk tier:
        PagesStored, PagesDemoted, PagesRemoved, Resident, PageAges, PagesColdest, PagesHeld,
        PagesSought to the disk actor; Granted, Committed, PoolGrew to the promote actor; Promoted
        to readers. Granted, PagesToGive, ColdPages and PagesToCopy to the placement actor; what it
        commits the publisher has answered. ReportRoom, CopiesEvicted and Retain to members.
Keeps   a record's word never moves; a byte under a committed record changes only after its word is
        odd; a word never again holds an even value it had. A slot that may be written to is
        never evicted, never freed by time or by a lost connection, and its word is odd. A page
        that is retained is not evicted before its time.
        The pool alone numbers records. A page in memory has a RESIDENT record; a page of which the
        disk actor has sent PagesWritten, and no PagesForgotten since, has an ON_DISK one otherwise.
        What was removed is not committed by a promote that was in flight, nor as a mirrored page
        or one that was handed over, if it was read before (`Mirrors`).
Limits  BATCH_PAGES_MAX pages a Reserve; `Shares` of the pool for pages that are reserved and not
        committed, and AHEAD_DIVISOR of it for slots ahead.

The order of the effects is the promise: words go odd, then the records are withdrawn (or turned
to ON_DISK, where the page is on disk), then the slots are granted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Final, final

import attrs
import numpy as np
import numpy.typing as npt
from typing_extensions import assert_never

from peercache.actors.effects import (
    Effect,
    NotifyDirectory,
    NotifyDisk,
    NotifyPlacement,
    NotifyPromote,
    NotifyPublisher,
    Send,
)
from peercache.actors.mailboxes import (
    PROMOTER,
    TAKER,
    ClientGone,
    CopiesLost,
    CopiesMade,
    DrainChanged,
    HeldDead,
    HoldersChanged,
    NamespaceNamed,
    PageAges,
    PagesColdest,
    PagesForgotten,
    PagesGiven,
    PagesHeld,
    PagesRemoved,
    PagesSought,
    PagesStored,
    PagesWritten,
    PoolGrew,
    PoolMessage,
    PromoteAnswered,
    RecordsChanged,
    RemovalDone,
    RequestAges,
    RequestColdest,
    RequestCopies,
    RequestGive,
    RequestHeld,
    RequestResident,
    RequestSpill,
    ReserveAhead,
    Resident,
    TakenOver,
    TakeOver,
)  # fmt: skip
from peercache.actors.origin import Origin
from peercache.actors.pool.answers import (
    NO_DROPS,
    NO_RECORDS,
    GivingOrder,
    ages_of,
    changed,
    committed,
    demoted,
    forgotten,
    granted,
    pool_figures,
    promote_answer,
    refused,
    requested_ahead,
    residents,
    show_pool,
    spilled,
    unchanged,
)
from peercache.actors.pool.copies import Copies
from peercache.actors.pool.page_table import Expiry, Page, PageTable, Retention, owners_of
from peercache.actors.pool.reservations import (
    FromOther,
    Mirrors,
    Reservation,
    Reservations,
    Shares,
    Terms,
    coldest_pages,
    commit_pages,
    granules_of,
    held_pages,
    problem_of,
    states_ahead,
    take_slots,
)
from peercache.actors.pool.size_classes import NEVER_TOUCHED
from peercache.actors.pool.slots import SlotAllocator
from peercache.actors.pool.spill_order import SpillOrder
from peercache.actors.tenants import Tenant, TenantMetrics, Tenants
from peercache.model.ids import Incarnation
from peercache.model.keys import KEY_BYTES, Tag, covers, space_of, split_keys
from peercache.model.records import DROP, DROP_BYTES, PAGE_BYTES_MAX, Records
from peercache.model.reuse import MEMORY, MEMORY_NAMES, ReuseSample, hashes_in
from peercache.model.room import QuotaRule
from peercache.model.runs import U64
from peercache.observability.metrics import Metrics
from peercache.wire.messages.membership import ReportRoom, RequestRoom
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    DEMOTED,
    HERE,
    NOT_HERE,
    REFUSED_DRAINING,
    REFUSED_FULL,
    RESERVED,
    STAYS,
    Abort,
    Clear,
    Commit,
    Committed,
    Demote,
    LiveReservations,
    Remove,
    Removed,
    Reserve,
    ReserveMirror,
    Retain,
    Retained,
    Touched,
)  # fmt: skip

AHEAD_PAUSE_S: Final = 0.001
"""Pause between the answer to a Commit and the slots that it asked for ahead: the client that has
the answer may need this processor, and no client waits for those slots."""


@final
class Pool:
    """The pool of one node. Single-threaded; it stores no word and no byte itself."""

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        granule: int,
        page_bytes: int,
        usable_bytes: int,
        client_uncommitted_max: int,
        rng: random.Random,
        metrics: Metrics | None = None,
        has_disk: bool = False,
        mirror_share: float = 0.0,
        quotas: Sequence[QuotaRule] = (),
        copies: int = 1,
        reuse_seed: int = 0,
    ) -> None:
        """Start empty, over page memory whose generation table is all zeros.

        page_bytes:   of the page memory, a multiple of granule; usable_bytes: populated so far.
        client_uncommitted_max: bytes; 0 is a writer's share of half of page_bytes.
        has_disk:     the node has a disk actor and a promote actor.
        mirror_share: of page_bytes, for copies of pages that other hosts hold.
        quotas:       which namespaces are guaranteed which part of page_bytes.
        copies:       of each page in all; 2: a second one on another node.
        reuse_seed:   64 bits that no client knows.
        """
        assert page_bytes >= granule > 0, f"{page_bytes} bytes in granules of {granule}"
        assert page_bytes % granule == 0, f"{page_bytes} bytes are no whole granules of {granule}"
        granules = page_bytes // granule
        self._granule = granule
        self._page_bytes = page_bytes
        self._shares = Shares.of(granules=granules, client_max=client_uncommitted_max // granule)
        self.tenants = Tenants(quotas, whole=granules, unit_bytes=granule)
        self._slots = SlotAllocator(
            granules=granules, usable=usable_bytes // granule, tenants=self.tenants
        )
        self.pages = self._pages = PageTable(
            incarnation=incarnation,
            granule=granule,
            granules=granules,
            sequence=rng.randrange(1, 2**61),
        )
        self.copies = self._copies = Copies(self._pages, self._slots, is_wanted=copies > 1)
        self._retention = Retention(self._slots)
        self._expiry = Expiry(self.tenants)
        self.reuse = ReuseSample(MEMORY[-1] * page_bytes, reuse_seed)
        """Of the pages that clients read here, and set here."""
        self._reservations = Reservations()
        self.mirrors = self._mirrors = Mirrors(int(granules * mirror_share))
        self._asked_ahead: list[ReserveAhead] = []
        self._due = inf
        self._evicted_count = 0
        self._has_disk = has_disk
        self._is_draining = False
        self._giving: GivingOrder | None = None
        self._spill = SpillOrder(self._slots, self._pages, granule)
        self._removed_in_promotes: dict[int, dict[bytes, None]] = {}
        """By open reservation of the promote actor: pages that its Commit must not bring back."""
        self._metrics = metrics = metrics or Metrics()
        show_pool(metrics, self.figures, self.hit_rates)
        metrics.pages_single.set_function(partial(getattr, self._copies, "single_count"))
        self._tenant_metrics = TenantMetrics(metrics, self.tenants, "pool", granule)

    def on_message(self, sender: Origin, message: PoolMessage, now: float) -> list[Effect]:
        """Take one message; the effects must be performed in the order of the list."""
        self._slots.pass_time(now)
        match message:
            case Reserve():
                return self._reserve(sender, message)
            case ReserveMirror():
                return self._reserve_copies(sender, Reserve(*attrs.astuple(message)), now)
            case Commit():
                return self._commit(sender, message, now)
            case Abort(sequence):
                return self._free([self._reservations.end(sender.identity, sequence)])
            case LiveReservations(newest, live):
                return self._free(self._reservations.end_unlisted(sender.identity, newest, live))
            case Touched(drops):
                return self._touch(sender, drops, now)
            case Remove(_, namespace, keys):
                self._mirrors.removed(namespace, message.timeout_s, now)
                return self._remove(sender, message, self._pages.found(keys, namespace))
            case Clear(namespace=namespace):
                self._mirrors.removed(namespace, message.timeout_s, now)
                return self._remove(sender, message, self._pages.of_namespace(namespace))
            case Retain():
                return self._retain(sender, message, now)
            case Demote():
                return self._demote(sender, message)
            case ClientGone(client):
                return self._free(self._reservations.forget(client))
            case PoolGrew(usable_bytes):
                self._mirrors.started(now)
                self._slots.grow(usable_bytes // self._granule)
                return [NotifyPromote(message)] if self._has_disk else []
            case NamespaceNamed(name):
                if self.tenants.named(name) is not None:
                    self._tenant_metrics.renew()
                return [NotifyDisk(message)] if self._has_disk else []
            case PagesWritten():
                return spilled(self._pages, message)
            case PagesForgotten(keys):
                return forgotten(self._pages, keys)
            case RequestResident() | RequestAges() | RequestColdest() | RequestHeld():
                return [NotifyDisk(self._reported(message, now))]
            case PagesSought(number, keys):
                return [NotifyDisk(PagesSought(number, keys, residents(self._pages, keys)))]
            case PromoteAnswered():
                return [promote_answer(self._pages, message)]
            case TakeOver() | TakenOver() | RequestGive() | RequestSpill() | PagesGiven():
                return self._place(message, now)
            case RequestCopies() | CopiesMade() | HoldersChanged() | CopiesLost() | HeldDead():
                return self._copy(message, now)
            case RemovalDone():
                return [NotifyPublisher(message)]
            case DrainChanged(is_draining):
                self._is_draining, self._giving = is_draining, None
                return []
            case RequestRoom():
                return [Send(sender, self._room(message, now))]
            case ReserveAhead():
                self._asked_ahead.append(message)
                self._due = min(self._due, now + AHEAD_PAUSE_S)
                return []
        assert_never(message)

    def on_tick(self, now: float) -> list[Effect]:
        """Reserve what was asked for ahead; let pages go that are retained or kept no longer."""
        # First, as what it evicts is reported some time after `self._slots.now`.
        self._slots.pass_time(now)
        self._retention.lapse(now)
        effects = [*self._expire(now), *self._copies.on_tick(now)]
        asked, self._asked_ahead, self._due = self._asked_ahead, [], inf
        return effects + [effect for one in asked for effect in self._reserve_ahead(one)]

    def deadline(self) -> float:
        """Return when what was asked for ahead is reserved, or pages are let go."""
        ends = min(self._retention.deadline(), self._expiry.deadline())
        return min(self._due, ends, self._copies.deadline())

    def check(self) -> None:
        """Assert that pages, slots and reservations add up, in constant time."""
        self._slots.check()
        self._retention.check()
        self._reservations.check()
        self._pages.check()
        self._copies.check()
        pages, slots = len(self._pages), self._slots.held_count
        assert pages == slots, f"{pages} pages in {slots} slots"
        reserved, known = self._slots.reserved_granules, self._reservations.granules
        assert reserved == known, f"{reserved} granules reserved, reservations of {known}"
        stored, held = self._pages.stored_bytes, self._slots.held_granules * self._granule
        assert stored <= held, f"{stored} bytes stored in {held}"

    def records_of(self, keys: bytes) -> Records:
        """Return the records of those of these packed keys that are here, in their order."""
        return self._pages.records(self._pages.of_keys(split_keys(keys)))

    def figures(self) -> dict[str, int]:
        """Return the figures for Stats; used + reserved + free is what is usable, to the byte."""
        return pool_figures(
            self._slots, self._pages, self._reservations, self._granule, self._page_bytes
        ) | {"pool_pages_evicted": self._evicted_count}

    def hit_rates(self) -> dict[str, float]:
        """Return the estimated hit rates in so many times this memory; NaN before any use."""
        rates = self.reuse.hit_rates([times * self._page_bytes for times in MEMORY])
        return dict(zip(MEMORY_NAMES, rates, strict=True))

    def pages_of_tenants(self) -> dict[Tenant, int]:
        """Return how many pages each tenant has here."""
        return self._slots.pages_of_tenants()

    # --- Reserve -------------------------------------------------------------------------------

    def _reserve(
        self, origin: Origin, reserve: Reserve, copied: FromOther | None = None
    ) -> list[Effect]:
        count, client = len(reserve.lengths) // 8, origin.identity
        if detail := problem_of(reserve, is_mirror=copied is not None):
            return refused(origin, reserve.request, "malformed", detail)
        if self._reservations.is_gone(client):
            return refused(origin, reserve.request, "gone", "the process of this client has exited")
        known = self._reservations.find(client, reserve.sequence)
        if isinstance(known, Reservation):
            if (known.keys, known.lengths) != (reserve.keys, reserve.lengths):
                detail = f"reservation {reserve.sequence} is of other pages"
                return refused(origin, reserve.request, "malformed", detail)
            return [granted(origin, reserve, known.states, known.offsets)]
        if known is not None or self._reservations.is_over(client, reserve.sequence):
            states = known.states_if_asked_again(count) if known else bytes((REFUSED_FULL,)) * count
            return [granted(origin, reserve, states, bytes(8 * count))]
        if self._is_draining and origin != PROMOTER:
            # Pages on disk still come back for readers.
            return [granted(origin, reserve, bytes((REFUSED_DRAINING,)) * count, bytes(8 * count))]
        return self._grant(origin, reserve, copied)

    def _take_over(self, message: TakeOver, now: float) -> list[Effect]:
        """Reserve room for pages that another node offers."""
        reserve, spilled = message.reserve, message.spilled
        offered_at = min(message.offered_at, now)
        if self._mirrors.is_void(reserve.namespace, offered_at):
            # A removal is under way, or came while the offer waited: nothing could be committed.
            full = bytes((REFUSED_FULL,)) * (len(reserve.lengths) // 8)
            return [granted(TAKER, reserve, full, bytes(len(reserve.lengths)))]
        if spilled is None:
            return self._reserve_copies(TAKER, reserve, offered_at)
        ttl_s = self.tenants.of(reserve.namespace).ttl_s or inf
        limits = [
            self._slots.ages.clock_at(now - max(age * spilled.times, spilled.min_age_s))
            if age >= 0
            else -1
            for age in spilled.ages.tolist()
        ]
        # What has expired by this node's own setting is not taken.
        expired = (np.abs(spilled.ages) >= ttl_s).tolist()
        limits = [-2 if is_over else limit for limit, is_over in zip(limits, expired, strict=True)]
        return self._reserve_copies(TAKER, reserve, offered_at, limits)

    def _reserve_copies(
        self, origin: Origin, reserve: Reserve, now: float, limits: Sequence[int] = ()
    ) -> list[Effect]:
        """Reserve slots for pages that come from another node, which are kept under their space.

        Of the rest of a tag nothing but an offer says that it is that of the keys, and a clear of
        their true namespace must find them. It also separates them from pages that clients set
        here.
        """
        reserve = attrs.evolve(reserve, namespace=space_of(reserve.namespace))
        return self._reserve(origin, reserve, FromOther(now, limits))

    def _grant(self, origin: Origin, reserve: Reserve, copied: FromOther | None) -> list[Effect]:
        """Begin a reservation: evict what must go, and only then grant."""
        lengths: list[int] = np.frombuffer(reserve.lengths, "<u8").tolist()
        # What this batch finds here is touched first, so that its own evictions spare it.
        untouched_since = self._slots.clock
        bytes_max = min(self._page_bytes, PAGE_BYTES_MAX)
        granules = granules_of(lengths, self._granule)
        if reserve.keys:
            states, here = self._pages.judge(split_keys(reserve.keys), lengths, bytes_max)
            for page in reversed(here):
                if page.slot.is_mirror and (copied is None or origin == TAKER):
                    self._slots.adopt(page.slot)
                    self._copies.adopted(page)
                elif copied is None or not copied.limits:
                    self._slots.touch(page.slot)
                else:
                    # No use of it, but the offerer evicts its own: this one is not given meanwhile.
                    page.named_touched = NEVER_TOUCHED
        else:
            wanted = self._reservations.ahead_granules + sum(granules)
            states = states_ahead(lengths, bytes_max, granules=wanted, usable=self._slots.usable)
        before = self._slots.reserved_granules
        terms = self._terms(origin, reserve, copied, untouched_since)
        slots, evicted = take_slots(self._slots, states, granules, terms)
        firsts = [slot.first for slot in slots if slot is not None]
        offsets = np.zeros(len(states), "<u8")
        if firsts:
            reserved = np.frombuffer(states, np.uint8) == RESERVED
            offsets[reserved] = np.array(firsts, np.uint64) * np.uint64(self._granule)
        reservation = Reservation(
            reserve.namespace,
            reserve.keys,
            reserve.lengths,
            bytes(states),
            offsets.tobytes(),
            tuple(slots),
            self._slots.reserved_granules - before,
            copied and copied.asked_at,
        )
        self._reservations.begin(origin.identity, reserve.sequence, reservation)
        if copied is None and reserve.keys:
            self._spill.stored(reservation.granules, terms.tenant, self._slots.now)
        effects = self._end(self._pages.in_slots(evicted), firsts)
        self._evicted_count += len(evicted)
        if evicted:
            self._metrics.pages_evicted.inc(len(evicted))
            if self.tenants.are_several:
                self._tenant_metrics.count_evicted(owners_of(evicted))
        effects.append(granted(origin, reserve, reservation.states, reservation.offsets))
        return effects

    def _terms(
        self, origin: Origin, reserve: Reserve, copied: FromOther | None, untouched_since: int
    ) -> Terms:
        """Return what a Reserve may have."""
        own = self._reservations.granules_of(origin.identity)
        tenant, shares = self.tenants.of(reserve.namespace), self._shares
        if copied is None:
            return Terms(own, tenant, shares if reserve.keys else None, untouched_since)
        if origin == TAKER:
            # What another node hands over takes free room only.
            return Terms(own, tenant, shares, limits=copied.limits)
        since = self._mirrors.begin(copied.asked_at, untouched_since)
        return Terms(own, tenant, shares, since, mirrors_max=self._mirrors.granules_max)

    def _reserve_ahead(self, asked: ReserveAhead) -> list[Effect]:
        """Reserve the slots ahead that a Commit requested; that of the next may report them."""
        client, sequence = asked.origin.identity, asked.reserve.sequence
        effects = self._reserve(asked.origin, asked.reserve)
        known = self._reservations.find(client, sequence)
        if isinstance(known, Reservation) and self._reservations.hold_back(client, sequence):
            effects.pop()
        return effects

    # --- Commit, and other ends of a reservation -------------------------------------------------

    def _commit(
        self, origin: Origin, commit: Commit, now: float, *, is_copy: bool = False
    ) -> list[Effect]:
        count, client = len(commit.written), origin.identity
        known = self._reservations.find(client, commit.sequence)
        fits = len(commit.checksums) == 8 * count
        if not fits or (isinstance(known, Reservation) and not known.fits(count, commit.keys)):
            detail = f"written, checksums and keys do not fit reservation {commit.sequence}"
            return refused(origin, commit.request, "malformed", detail)
        if isinstance(known, Reservation):
            if known.is_ahead and self._is_draining:
                self._free([self._reservations.end(client, commit.sequence)])
                states = bytes((REFUSED_DRAINING,)) * count
                return [committed(origin, commit, states, NO_RECORDS, NO_RECORDS)]
            if known.is_ahead:
                named = np.frombuffer(known.lengths, "<u8")[:count].tolist()
                granules = sum(granules_of(named, self._granule))
                known, spare = self._reservations.name(
                    client, commit.sequence, commit.keys, granules
                )
                self._spill.stored(granules, self.tenants.of(known.namespace), now)
                for slot in spare:
                    self._slots.release(slot)
            if known.mirrored_at is None and origin != PROMOTER:
                # What a client sets it missed before, or nothing had it yet.
                lengths = np.frombuffer(known.lengths, np.uint64)
                length = int(lengths.mean()) if len(lengths) else 0
                self._note_use(origin, hashes_in(known.keys, KEY_BYTES), length, now)
            return self._commit_open(origin, commit, known, is_copy=is_copy)
        if known is None:
            self._reservations.end(client, commit.sequence)
            return [committed(origin, commit, bytes((ABORTED,)) * count, NO_RECORDS, NO_RECORDS)]
        states = known.states if len(known.states) == count else bytes((ABORTED,)) * count
        # What the first Commit made is merely here now, if it still is; the publisher knows which
        # of it still waits for owners.
        here = self._pages.records_in_state(known.keys, known.states, (HERE, COMMITTED))
        return [committed(origin, commit, states, NO_RECORDS, here)]

    def _commit_open(
        self, origin: Origin, commit: Commit, reservation: Reservation, *, is_copy: bool
    ) -> list[Effect]:
        """Make the written pages readable."""
        if origin == PROMOTER:
            commit = self._without_removed(commit, reservation)
        asked_at = reservation.mirrored_at
        is_mirrored = asked_at is not None and origin != TAKER
        if asked_at is not None and self._mirrors.is_void(reservation.namespace, asked_at):
            commit = attrs.evolve(commit, written=bytes(len(commit.written)))
        states, made = commit_pages(self._slots, self._pages, reservation, commit)
        self._reservations.end(origin.identity, commit.sequence, states)
        effects: list[Effect] = []
        records: Records = NO_RECORDS
        if made is not None:
            if not is_copy and not is_mirrored:
                self._copies.stored(split_keys(made.keys))
            records, words = self._pages.publish(made)
            changes = RecordsChanged(records, NO_DROPS)
            effects += [words, NotifyDirectory(changes)]
            if is_mirrored or origin == PROMOTER:
                effects.append(NotifyPublisher(changes))
        if is_mirrored:
            # No client waits until directory owners know these pages.
            here = self._pages.records_in_state(reservation.keys, states, (HERE, COMMITTED))
            request, sequence = commit.request, commit.sequence
            effects.append(Send(origin, Committed(request, sequence, states, here.tobytes(), 0)))
        else:
            here = self._pages.records_in_state(reservation.keys, states, (HERE,))
            ahead = self._reservations.next_held_back(origin.identity)
            then = requested_ahead(origin, commit, reservation)
            effects.append(committed(origin, commit, states, records, here, ahead, then))
        if made is not None and self._has_disk:
            effects.append(NotifyDisk(PagesStored(records, reservation.namespace)))
        return effects

    def _taken_over(
        self, commit: Commit, ages: npt.NDArray[np.float64] | None, now: float, *, is_copy: bool
    ) -> list[Effect]:
        """Commit what was read of an offer; a page that was spilled is as old as it was there."""
        known = self._reservations.find(TAKER.identity, commit.sequence)
        effects = self._commit(TAKER, commit, now, is_copy=is_copy)
        if ages is not None and isinstance(known, Reservation):
            for key, slot, age in zip(
                split_keys(known.keys), known.slots, np.abs(ages).tolist(), strict=True
            ):
                page = self._pages.find(key)
                if page is not None and page.slot is slot:
                    self._slots.move_in(slot, max(self._slots.ages.clock_at(now - age), 0))
        return effects

    def _reported(
        self, message: RequestResident | RequestAges | RequestColdest | RequestHeld, now: float
    ) -> Resident | PageAges | PagesColdest | PagesHeld:
        """Return what the disk actor asks about the pages in memory."""
        match message:
            case RequestResident():
                return unchanged(self._pages, message, self._slots, now)
            case RequestAges(keys):
                return ages_of(self._pages, self._slots, keys, now)
            case RequestColdest(full_part):
                return PagesColdest(tuple(coldest_pages(self._slots, self._pages, full_part)))
            case RequestHeld():
                return held_pages(self._slots, self._pages)
        assert_never(message)

    def _place(
        self, message: TakeOver | TakenOver | RequestGive | RequestSpill | PagesGiven, now: float
    ) -> list[Effect]:
        """Do what the placement actor says about pages that move between nodes."""
        match message:
            case TakeOver():
                return [*self._copies.report(now), *self._take_over(message, now)]
            case TakenOver(commit, ages, is_copy):
                return self._taken_over(commit, ages, now, is_copy=is_copy)
            case RequestGive(again):
                if again or self._giving is None:
                    self._giving = GivingOrder(self._slots, self._granule)
                unfinished = self._reservations.open_count - self._reservations.ahead_count
                return [NotifyPlacement(self._giving.next(self._pages, unfinished))]
            case RequestSpill(only_new):
                return [NotifyPlacement(self._spill.next(now, only_new=only_new))]
            case PagesGiven(drops):
                return self._give(drops)
        assert_never(message)

    def _copy(
        self,
        message: RequestCopies | CopiesMade | HoldersChanged | CopiesLost | HeldDead,
        now: float,
    ) -> list[Effect]:
        """Note where copies are, or name pages without one."""
        match message:
            case RequestCopies(only_new, again):
                if only_new:
                    self._spill.withhold()
                named = self._copies.named(self._spill.after, now, again=again)
                return [*self._copies.report(now), NotifyPlacement(named)]
            case CopiesMade():
                self._copies.made(message)
                return self._retain_copies(message, now)
            case HoldersChanged(nodes):
                self._copies.changed(frozenset(nodes))
            case CopiesLost(node, report):
                self._copies.lost(node, report, now)
            case HeldDead():
                self._copies.doubt_all(now)
            case _:
                assert_never(message)
        return []

    def _retain_copies(self, made: CopiesMade, now: float) -> list[Effect]:
        """Let the node that has new copies of retained pages retain them for as long.

        Of a page that has its copy already it is asked by the home node, as every member is.
        """
        if not made.node or not self._slots.retained_count:
            return []
        ends: dict[tuple[Tag, float], list[bytes]] = {}
        for page in self._pages.of_keys(made.drops["key"].tolist()):
            until = page.slot.retained_until
            if until > now and page.slot.copy_at == made.node:
                ends.setdefault((page.namespace, until), []).append(page.key)
        return [
            Send(made.node, Retain(0, namespace, b"".join(keys), until - now))
            for (namespace, until), keys in ends.items()
        ]

    def _give(self, drops: Records) -> list[Effect]:
        """Evict pages that another node holds now, but those touched since they were named.

        Nor one of which this node has answered meanwhile that it is here: two nodes that offer each
        other the same page both keep it, however late the answers come.
        """
        pages = self._spill.given(drops)
        effects = self._end(pages, [])
        for page in pages:
            self._slots.release(page.slot)
        return effects

    def _expire(self, now: float) -> list[Effect]:
        """Evict pages whose time to live is over."""
        expired = self._expiry.expired(self._slots, now)
        if not expired:
            return []
        effects = self._end(self._pages.in_slots(expired), [])
        self._tenant_metrics.count_expired(owners_of(expired))
        for slot in expired:
            self._slots.release(slot)
        return effects

    def _room(self, asked: RequestRoom, now: float) -> ReportRoom:
        """Return what another node may hope for here."""
        if self._is_draining:
            return ReportRoom(asked.number, 0, 0.0)
        spare, age_s = self._spill.room(now, is_copy=asked.is_copy)
        return ReportRoom(asked.number, spare * self._granule, age_s)

    def _without_removed(self, commit: Commit, reservation: Reservation) -> Commit:
        """Return a Commit of the promote actor without the pages that were removed meanwhile."""
        removed = self._removed_in_promotes.pop(commit.sequence, None)
        if not removed:
            return commit
        written = bytes(
            is_written and key not in removed
            for key, is_written in zip(split_keys(reservation.keys), commit.written, strict=True)
        )
        return attrs.evolve(commit, written=written)

    def _free(self, reservations: Sequence[Reservation | None]) -> list[Effect]:
        """Free the slots of ended reservations; their words are odd and stay so."""
        for reservation in reservations:
            for slot in reservation.slots if reservation is not None else ():
                if slot is not None:
                    self._slots.release(slot)
        return []

    # --- pages -------------------------------------------------------------------------------

    def _touch(self, origin: Origin, drops: bytes, now: float) -> list[Effect]:
        """Note what was read, the hottest last: it stands first, as a chain loses its tail."""
        read = np.frombuffer(drops, DROP)[::-1]
        keys = read["key"].tolist()
        for key, generation in zip(keys, read["generation"].tolist(), strict=True):
            page = self._pages.find(key)
            if page is not None and page.generation == generation:
                self._slots.touch(page.slot)
        first = self._pages.find(keys[-1]) if keys else None
        self._note_use(origin, hashes_in(drops, DROP_BYTES), first.length if first else 0, now)
        return []

    def _note_use(self, origin: Origin, hashes: U64, length: int, now: float) -> None:
        """Note that a client used pages, of this length on average, for the estimate."""
        granules = -(-min(length, self._page_bytes) // self._granule)
        self.reuse.use(hashes, max(1, granules) * self._granule, origin.identity, now)

    def _remove(self, origin: Origin, message: Remove | Clear, pages: list[Page]) -> list[Effect]:
        effects = self._end(pages, [], is_removed=True)
        for page in pages:
            self._slots.release(page.slot)
        self._retention.sweep()
        if not self._has_disk:
            removed = Removed(message.request, len(pages))
            effects.append(NotifyPublisher(RemovalDone(origin, removed, message.timeout_s)))
        else:
            self._remove_in_promotes(message)
            # The disk actor removes the pages from disk too, and says when that is done.
            keys = b"".join([page.key for page in pages])
            effects.append(NotifyDisk(PagesRemoved(origin, message, keys)))
        return effects

    def _retain(self, origin: Origin, asked: Retain, now: float) -> list[Effect]:
        pages = self._theirs(asked)
        mirrors = [page for page in pages if page is not None and page.slot.is_mirror]
        states = self._retention.retain(pages, asked.seconds, now)
        for page in mirrors:
            if not page.slot.is_mirror:
                self._copies.adopted(page)
        return [Send(origin, Retained(asked.request, states))]

    def _demote(self, origin: Origin, asked: Demote) -> list[Effect]:
        """Let pages be evicted next, the last one first: a chain loses its tail first."""
        states = bytearray()
        for page in self._theirs(asked):
            if page is None:
                states.append(NOT_HERE)
            else:
                states.append(DEMOTED if self._slots.demote(page.slot) else STAYS)
        return [Send(origin, Retained(asked.request, bytes(states)))]

    def _theirs(self, asked: Retain | Demote) -> list[Page | None]:
        """Return the pages that are named, None for one that is not here or of another name."""
        found = [self._pages.find(key) for key in split_keys(asked.keys)]
        space = space_of(asked.namespace)
        return [page if page and space_of(page.namespace) == space else None for page in found]

    def _remove_in_promotes(self, message: Remove | Clear) -> None:
        """Note removed pages that the promote actor is loading: its Commit may still come."""
        for sequence, reservation in self._reservations.open_of(PROMOTER.identity):
            removed = split_keys(reservation.keys)
            if isinstance(message, Remove):
                is_theirs = space_of(message.namespace) == space_of(reservation.namespace)
                named = dict.fromkeys(split_keys(message.keys) if is_theirs else ())
                removed = [key for key in removed if key in named]
            elif not covers(message.namespace, reservation.namespace):
                removed = []
            if removed:
                noted = self._removed_in_promotes.setdefault(sequence, {})
                noted.update(dict.fromkeys(removed))

    def _end(
        self, pages: list[Page], reserved: list[int], *, is_removed: bool = False
    ) -> list[Effect]:
        """End the records of these pages, and make their words and those of `reserved` odd.

        The one place where pages leave memory: an evicted page that is on disk stays known so.
        """
        effects: list[Effect] = []
        self._copies.ended(pages, is_removed=is_removed)
        firsts = dict.fromkeys([page.slot.first for page in pages] + reserved)
        drops = self._pages.end(pages) if pages else NO_DROPS
        words = self._pages.protect(list(firsts))
        if words is not None:
            effects.append(words)
        if is_removed:
            effects += changed(NO_RECORDS, drops)
        elif pages:
            effects += demoted(self._pages, pages, drops, self._slots)
        return effects
