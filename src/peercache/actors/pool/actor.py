"""Pool: the pages of this node, and who may write where.

Owns    the page memory of one node: its slots, the generation words, the pages and their recency,
        the reservations of its clients.
Hears   Reserve, Commit, Abort, LiveReservations, Touched, Remove, Clear; ClientGone, PoolGrew,
        and ReserveAhead from the publisher.
Says    Granted, Removed, Refused to whoever asked; StoreWords; RecordsChanged to directory and
        publisher; PagesCommitted to the publisher, which answers the Commit. With a disk tier:
        PagesStored and PagesRemoved to it, and what the tier asks for, as a client of its own.
Keeps   a record's word never moves; a byte under a committed record changes only after its word is
        odd; a word never again holds an even value it had. A slot that may be written to is
        never evicted, never freed by time or by a lost connection, and its word is odd.
Limits  BATCH_PAGES_MAX pages a Reserve; `client_uncommitted_max` bytes a client may hold reserved.

The order of the effects is the promise: words go odd, then the records are withdrawn (or turned
to "on disk", where the tier has the page), then the slots are granted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import inf
from typing import Final, final

import numpy as np
from typing_extensions import assert_never

from peercache.actors.effects import (
    Effect,
    Send,
    TellDirectory,
    TellDisk,
    TellPublisher,
)
from peercache.actors.mailboxes import (
    DISK_TIER,
    ClientGone,
    PagesRemoved,
    PagesStored,
    PoolGrew,
    PoolHears,
    RecordsChanged,
    ReserveAhead,
)  # fmt: skip
from peercache.actors.origin import Origin
from peercache.actors.pool.answers import NO_RECORDS, asked_beside, committed, granted, refused
from peercache.actors.pool.committing import commit_pages
from peercache.actors.pool.figures import pool_figures, show_pool
from peercache.actors.pool.granting import (
    coldest_pages,
    granules_of,
    problem_of,
    states_ahead,
    take_slots,
)
from peercache.actors.pool.page_table import Page, PageTable, split_keys
from peercache.actors.pool.reservations import Reservation, Reservations
from peercache.actors.pool.slots import SlotAllocator
from peercache.model.ids import Incarnation
from peercache.model.records import DROP, PAGE_BYTES_MAX, Records
from peercache.observability.metrics import Metrics
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    HERE,
    REFUSED_FULL,
    RESERVED,
    Abort,
    Clear,
    Commit,
    LiveReservations,
    Remove,
    Removed,
    Reserve,
    Touched,
)  # fmt: skip

AHEAD_PAUSE_S: Final = 0.001
"""Between the answer to a Commit and the slots it asked for ahead: whoever was answered may wait
for our processor, and nobody for those slots."""

_NO_DROPS: Final = np.frombuffer(b"", DROP)


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
        on_disk: Callable[[Sequence[Page]], list[int]] | None = None,
    ) -> None:
        """Start empty, over page memory whose generation table is all zeros.

        page_bytes:   of the page memory, a multiple of granule; usable_bytes: populated so far.
        client_uncommitted_max: bytes; 0 is half of page_bytes.
        on_disk:      tells under which length the disk tier of this node has each page, 0 if not at
                      all; None without a tier.
        """
        assert page_bytes >= granule > 0, f"{page_bytes} bytes in granules of {granule}"
        assert page_bytes % granule == 0, f"{page_bytes} bytes are no whole granules of {granule}"
        granules = page_bytes // granule
        self._granule = granule
        self._page_bytes = page_bytes
        self._uncommitted_max = (client_uncommitted_max or page_bytes // 2) // granule
        self._slots = SlotAllocator(granules=granules, usable=usable_bytes // granule)
        self.pages = self._pages = PageTable(
            incarnation=incarnation,
            granule=granule,
            granules=granules,
            sequence=rng.randrange(1, 2**61),
        )
        self._reservations = Reservations()
        self._asked_ahead: list[ReserveAhead] = []
        self._due = inf
        self._evicted_count = 0
        self._on_disk = on_disk
        self._metrics = metrics
        if metrics is not None:
            show_pool(metrics, self.figures)

    def on_message(self, sender: Origin, message: PoolHears, now: float) -> list[Effect]:
        """Take one message; the effects must be performed in the order of the list."""
        match message:
            case Reserve():
                return self._reserve(sender, message)
            case Commit():
                return self._commit(sender, message)
            case Abort(sequence):
                return self._free([self._reservations.end(sender.identity, sequence)])
            case LiveReservations(newest, sequences):
                return self._free(
                    self._reservations.end_unlisted(sender.identity, newest, sequences)
                )
            case Touched(drops):
                return self._touch(drops)
            case Remove(_, keys):
                named = dict.fromkeys(split_keys(keys))
                return self._remove(sender, message, self._pages.of_keys(named))
            case Clear(_, namespace):
                return self._remove(sender, message, self._pages.of_namespace(namespace))
            case ClientGone(client):
                return self._free(self._reservations.forget(client))
            case PoolGrew(usable_bytes):
                self._slots.grow(usable_bytes // self._granule)
                return []
            case ReserveAhead():
                self._asked_ahead.append(message)
                self._due = min(self._due, now + AHEAD_PAUSE_S)
                return []
        assert_never(message)

    def on_tick(self, now: float) -> list[Effect]:  # noqa: ARG002 - nothing else depends on time
        """Reserve what was asked for ahead; nothing in a pool ends by time."""
        asked, self._asked_ahead, self._due = self._asked_ahead, [], inf
        return [effect for one in asked for effect in self._reserve_ahead(one)]

    def deadline(self) -> float:
        """Return when what was asked for ahead is reserved."""
        return self._due

    def check(self) -> None:
        """Assert that pages, slots and reservations add up, in constant time."""
        self._slots.check()
        self._reservations.check()
        self._pages.check()
        pages, slots = len(self._pages), self._slots.held_count
        assert pages == slots, f"{pages} pages in {slots} slots"
        reserved, known = self._slots.reserved_granules, self._reservations.granules
        assert reserved == known, f"{reserved} granules reserved, reservations of {known}"
        stored, held = self._pages.stored_bytes, self._slots.held_granules * self._granule
        assert stored <= held, f"{stored} bytes stored in {held}"

    def records_of(self, keys: bytes) -> Records:
        """Return the records of those of these packed keys that are here, in their order."""
        return self._pages.records(self._pages.of_keys(split_keys(keys)))

    def usable_bytes(self) -> int:
        """Return how much of the page memory is populated."""
        return self._slots.usable * self._granule

    def coldest(self, full_part: float) -> list[PagesStored]:
        """Return the pages that go next, once so much of the pool is taken."""
        return coldest_pages(self._slots, self._pages, full_part)

    def figures(self) -> dict[str, int]:
        """Return the figures for Stats; used + reserved + free is what is usable, to the byte."""
        return pool_figures(
            self._slots, self._pages, self._reservations, self._granule, self._page_bytes
        ) | {"pool_pages_evicted": self._evicted_count}

    # --- Reserve -------------------------------------------------------------------------------

    def _reserve(self, origin: Origin, reserve: Reserve) -> list[Effect]:
        count, client = len(reserve.lengths) // 8, origin.identity
        if detail := problem_of(reserve):
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
        return self._grant(origin, reserve)

    def _grant(self, origin: Origin, reserve: Reserve) -> list[Effect]:
        """Begin a reservation: evict what must go, and only then grant."""
        lengths: list[int] = np.frombuffer(reserve.lengths, "<u8").tolist()
        # What this batch finds here is touched first, so that its own evictions spare it.
        untouched_since = self._slots.clock
        bytes_max = min(self._page_bytes, PAGE_BYTES_MAX)
        granules = granules_of(lengths, self._granule)
        if reserve.keys:
            states, here = self._pages.judge(split_keys(reserve.keys), lengths, bytes_max)
            for page in reversed(here):
                self._slots.touch(page.slot)
        else:
            wanted = self._reservations.ahead_granules + sum(granules)
            states = states_ahead(lengths, bytes_max, granules=wanted, usable=self._slots.usable)
        before = self._slots.reserved_granules
        slots, evicted = take_slots(
            self._slots,
            states,
            granules,
            uncommitted=self._reservations.granules_of(origin.identity),
            uncommitted_max=self._uncommitted_max,
            untouched_since=untouched_since,
        )
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
        )
        self._reservations.begin(origin.identity, reserve.sequence, reservation)
        effects = self._end(self._pages.in_slots(evicted), firsts)
        self._evicted_count += len(evicted)
        if self._metrics is not None and evicted:
            self._metrics.pages_evicted.inc(len(evicted))
        effects.append(granted(origin, reserve, reservation.states, reservation.offsets))
        return effects

    def _reserve_ahead(self, asked: ReserveAhead) -> list[Effect]:
        """Reserve what a Commit asked for beside; the answer may wait for that of the next one."""
        client, sequence = asked.origin.identity, asked.reserve.sequence
        effects = self._reserve(asked.origin, asked.reserve)
        known = self._reservations.find(client, sequence)
        if isinstance(known, Reservation) and self._reservations.hold_back(client, sequence):
            effects.pop()
        return effects

    # --- Commit, and other ends of a reservation -------------------------------------------------

    def _commit(self, origin: Origin, commit: Commit) -> list[Effect]:
        count, client = len(commit.written), origin.identity
        known = self._reservations.find(client, commit.sequence)
        fits = len(commit.checksums) == 8 * count
        if not fits or (isinstance(known, Reservation) and not known.fits(count, commit.keys)):
            detail = f"written, checksums and keys do not fit reservation {commit.sequence}"
            return refused(origin, commit.request, "malformed", detail)
        if isinstance(known, Reservation):
            if known.is_ahead:
                named = np.frombuffer(known.lengths, "<u8")[:count].tolist()
                granules = sum(granules_of(named, self._granule))
                known, spare = self._reservations.name(
                    client, commit.sequence, commit.keys, granules
                )
                for slot in spare:
                    self._slots.release(slot)
            return self._commit_open(origin, commit, known)
        if known is None:
            self._reservations.end(client, commit.sequence)
            return [committed(origin, commit, bytes((ABORTED,)) * count, NO_RECORDS, NO_RECORDS)]
        states = known.states if len(known.states) == count else bytes((ABORTED,)) * count
        # What the first Commit made was published then; now it is merely here, if it still is.
        here = self._pages.records_in_state(known.keys, known.states, (HERE, COMMITTED))
        return [committed(origin, commit, states, NO_RECORDS, here)]

    def _commit_open(
        self, origin: Origin, commit: Commit, reservation: Reservation
    ) -> list[Effect]:
        """Make the written pages readable."""
        states, made = commit_pages(self._slots, self._pages, reservation, commit)
        self._reservations.end(origin.identity, commit.sequence, states)
        ahead = self._reservations.tell(origin.identity)
        then = asked_beside(origin, commit, reservation)
        here = self._pages.records_in_state(reservation.keys, states, (HERE,))
        if not made:
            return [committed(origin, commit, states, NO_RECORDS, here, ahead, then)]
        records, words = self._pages.publish(made)
        changed = RecordsChanged(records, _NO_DROPS)
        answer = committed(origin, commit, states, records, here, ahead, then)
        effects: list[Effect] = [words, TellDirectory(changed)]
        if origin == DISK_TIER:
            return [*effects, TellPublisher(changed), answer]
        effects.append(answer)
        if self._on_disk is not None:
            effects.append(TellDisk(PagesStored(records, reservation.namespace)))
        return effects

    def _free(self, reservations: Sequence[Reservation | None]) -> list[Effect]:
        """Free the slots of ended reservations; their words are odd and stay so."""
        for reservation in reservations:
            for slot in reservation.slots if reservation is not None else ():
                if slot is not None:
                    self._slots.release(slot)
        return []

    # --- pages -------------------------------------------------------------------------------

    def _touch(self, drops: bytes) -> list[Effect]:
        """Note what was read, in reverse order: a chain loses its tail first."""
        read = np.frombuffer(drops, DROP)[::-1]
        for key, generation in zip(read["key"].tolist(), read["generation"].tolist(), strict=True):
            page = self._pages.find(key)
            if page is not None and page.generation == generation:
                self._slots.touch(page.slot)
        return []

    def _remove(self, origin: Origin, message: Remove | Clear, pages: list[Page]) -> list[Effect]:
        effects = self._end(pages, [], is_removed=True)
        for page in pages:
            self._slots.release(page.slot)
        if self._on_disk is None:
            effects.append(Send(origin, Removed(message.request, len(pages))))
        else:
            # Removed is removed from disk as well: the tier has the last word, and tells it.
            keys = b"".join([page.key for page in pages])
            effects.append(TellDisk(PagesRemoved(origin, message, keys)))
        return effects

    def _end(
        self, pages: list[Page], reserved: list[int], *, is_removed: bool = False
    ) -> list[Effect]:
        """End the records of these pages, and make their words and those of `reserved` odd.

        The one place where pages leave memory: what the disk tier has stays known, as on disk.
        """
        effects: list[Effect] = []
        firsts = dict.fromkeys([page.slot.first for page in pages] + reserved)
        drops, records = self._pages.end(pages) if pages else _NO_DROPS, NO_RECORDS
        words = self._pages.protect(list(firsts))
        if words is not None:
            effects.append(words)
        if pages and self._on_disk is not None and not is_removed:
            lengths = self._on_disk(pages)
            kept = [page.key for page, length in zip(pages, lengths, strict=True) if length]
            drops = drops[np.array(lengths) == 0]
            records = self._pages.on_disk_records(kept, [length for length in lengths if length])
        if pages:
            changed = RecordsChanged(records, drops)
            effects += [TellDirectory(changed), TellPublisher(changed)]
        return effects
