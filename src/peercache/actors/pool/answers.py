"""What the pool sends: answers to clients, changed records, pages of a drain, figures for metrics.

A page has one record. It is RESIDENT while the page is in memory, else ON_DISK while the page is on
disk. The pool alone numbers records, so the disk actor sends it the facts (`PagesWritten`,
`PagesForgotten`) and the pool decides what follows. Of pages in memory it notes under which length
they are on disk (`Slot.disk_length`), because eviction must know; of pages on disk only it keeps
nothing, as the next fact of the disk actor says all that is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from heapq import merge
from typing import Final, final

import numpy as np

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
    PageAges,
    PagesCommitted,
    PagesDemoted,
    PagesStored,
    PagesToGive,
    PagesWritten,
    PromoteAnswered,
    RecordsChanged,
    RequestResident,
    ReserveAhead,
    Resident,
)
from peercache.actors.origin import Origin
from peercache.actors.pool.page_table import Page, PageTable
from peercache.actors.pool.reservations import Reservation, Reservations
from peercache.actors.pool.size_classes import HELD, Slot
from peercache.actors.pool.slots import SlotAllocator
from peercache.model.keys import KEY_BYTES, split_keys
from peercache.model.records import DROP, RECORD, Records
from peercache.model.reuse import MEMORY_NAMES
from peercache.observability.metrics import Metrics
from peercache.wire.messages.pool import (
    LATER,
    PROMOTED,
    Commit,
    Committed,
    Granted,
    Promoted,
    Reserve,
)
from peercache.wire.messages.session import Refused

AHEAD_MAX: Final = 4
"""Reservations that one Commit may ask for ahead."""


def refused(origin: Origin, request: int, reason: str, detail: str) -> list[Effect]:
    """Refuse a message, with the reason."""
    return [Send(origin, Refused(request, reason, detail))]


def granted(
    origin: Origin, reserve: Reserve, states: bytes, offsets: bytes
) -> Send | NotifyPromote | NotifyPlacement:
    """Answer a Reserve."""
    answer = Granted(reserve.request, reserve.sequence, states, offsets)
    if origin == TAKER:
        return NotifyPlacement(answer)
    return NotifyPromote(answer) if origin == PROMOTER else Send(origin, answer)


TAKEN_OVER_S: Final = 1.0
"""How long the owners of records are waited for until an offer is answered."""


def committed(
    origin: Origin,
    commit: Commit,
    states: bytes,
    records: Records,
    here: Records,
    ahead: tuple[int, bytes] = (0, b""),
    then: tuple[ReserveAhead, ...] = (),
) -> NotifyPromote | NotifyPublisher:
    """Answer a Commit: the publisher does, once directory owners have the records.

    ahead: the sequence and the offsets of a reservation made ahead, sent with the answer.
    """
    request, sequence = commit.request, commit.sequence
    if origin == PROMOTER:
        packed = records.tobytes() + here.tobytes()
        return NotifyPromote(Committed(request, sequence, states, packed, 0))
    timeout_s = TAKEN_OVER_S if origin == TAKER else commit.timeout_s
    return NotifyPublisher(
        PagesCommitted(origin, request, sequence, states, records, here, timeout_s, *ahead, then),
    )


def requested_ahead(
    origin: Origin, commit: Commit, reservation: Reservation
) -> tuple[ReserveAhead, ...]:
    """Return the request for slots ahead that a Commit includes, for after its answer."""
    return tuple(
        ReserveAhead(origin, Reserve(0, sequence, reservation.namespace, b"", reservation.lengths))
        for sequence in commit.ahead[:AHEAD_MAX]
    )


NO_RECORDS: Final = np.empty(0, RECORD)
NO_DROPS: Final = np.empty(0, DROP)


def changed(records: Records, drops: Records) -> list[Effect]:
    """Send records and drops to the directory and the publisher, if there are any."""
    if not len(records) and not len(drops):
        return []
    fact = RecordsChanged(records, drops)
    return [NotifyDirectory(fact), NotifyPublisher(fact)]


def spilled(pages: PageTable, fact: PagesWritten) -> list[Effect]:
    """Note of pages in memory that they are on disk; give all others an ON_DISK record."""
    keys: list[bytes] = []
    lengths: list[int] = []
    for key, length in zip(split_keys(fact.keys), fact.lengths.tolist(), strict=True):
        page = pages.find(key)
        if page is None:
            keys.append(key)
            lengths.append(length)
        else:
            page.slot.disk_length = length
    return changed(pages.on_disk_records(keys, lengths), NO_DROPS)


def forgotten(pages: PageTable, packed: bytes) -> list[Effect]:
    """Note of pages in memory that they are on disk no longer; withdraw all others' records."""
    gone: list[bytes] = []
    for key in split_keys(packed):
        page = pages.find(key)
        if page is None:
            gone.append(key)
        else:
            page.slot.disk_length = 0
    return changed(NO_RECORDS, pages.drops_of(gone))


def demoted(
    pages: PageTable, evicted: list[Page], drops: Records, slots: SlotAllocator
) -> list[Effect]:
    """Return the records of an eviction: ON_DISK for each page on disk, a drop for the others."""
    kept = [page for page in evicted if page.slot.disk_length]
    if not kept:
        return changed(NO_RECORDS, drops)
    lost = np.array([not page.slot.disk_length for page in evicted], np.bool_)
    keys = [page.key for page in kept]
    records = pages.on_disk_records(keys, [page.slot.disk_length for page in kept])
    effects = changed(records, drops[lost])
    # What goes at once was used at about the same time: one look instead of one for each.
    age_s = slots.ages.age(max(page.slot.touched for page in kept), slots.now)
    return [*effects, NotifyDisk(PagesDemoted(b"".join(keys), age_s))]


def residents(pages: PageTable, packed: bytes) -> bytes:
    """Return one byte a page: 1 where it is in memory."""
    find = pages.find
    return bytes(find(key) is not None for key in split_keys(packed))


def unchanged(
    pages: PageTable, asked: RequestResident, slots: SlotAllocator, now: float
) -> Resident:
    """Return which pages are in memory under the generations that are asked for."""
    states = bytearray(len(asked.generations) // 8)
    ages = np.zeros(len(states))
    generations = np.frombuffer(asked.generations, "<u8").tolist()
    for at, key in enumerate(split_keys(asked.keys)):
        page = pages.find(key)
        if page is not None and page.generation == generations[at]:
            states[at] = 1
            if asked.with_ages:
                ages[at] = slots.ages.age(page.slot.touched, now)
    return Resident(asked.number, bytes(states), ages)


def ages_of(pages: PageTable, slots: SlotAllocator, keys: bytes, now: float) -> PageAges:
    """Return how long ago pages were used; a retained page counts as used now."""
    ages = np.full(len(keys) // KEY_BYTES, np.inf)
    for at, key in enumerate(split_keys(keys)):
        page = pages.find(key)
        if page is not None:
            is_retained = page.slot.retained_until > now
            ages[at] = 0.0 if is_retained else slots.ages.age(page.slot.touched, now)
    return PageAges(keys, ages)


def promote_answer(pages: PageTable, asked: PromoteAnswered) -> Send:
    """Answer a reader with the records of this moment: a page evicted since is LATER."""
    states = bytearray(asked.states)
    found: list[Page] = []
    for at, state in enumerate(states):
        if state == PROMOTED:
            page = pages.find(asked.keys[at])
            if page is None:
                states[at] = LATER
            else:
                found.append(page)
    records = pages.records(found).tobytes()
    return Send(asked.origin, Promoted(asked.request, bytes(states), records))


PORTION_PAGES: Final = 1024
"""Pages that are named at once: two milliseconds."""

PORTION_BYTES: Final = 256 * 2**20
"""Their bytes, unless one page has more: what is named early may be evicted before it is read."""


@final
class GivingOrder:
    """The order in which pages are handed over; what changes meanwhile is looked at in its turn."""

    def __init__(self, slots: SlotAllocator, granule: int) -> None:
        """Take the pages of this moment; a copy of the list of slots, and no look at any page.

        granule: bytes.
        """
        hottest_first = [list(held)[::-1] for held in slots.own_coldest_first()]
        self.left = sum(map(len, hottest_first))
        self._granule = granule
        self._left_granules = sum(_granules(held[0]) * len(held) for held in hottest_first if held)
        self._slots: Iterator[Slot] = merge(*hottest_first, key=lambda slot: -slot.touched)

    def next(self, pages: PageTable, unfinished: int) -> PagesToGive:
        """Return the next portion, by namespace."""
        by_namespace: dict[int, list[Page]] = {}
        count = size = 0
        while count < PORTION_PAGES and size < PORTION_BYTES:
            slot = next(self._slots, None)
            if slot is None:
                break
            self.left -= 1
            self._left_granules -= _granules(slot)
            if slot.state != HELD or slot.is_mirror:
                continue
            (page,) = pages.in_slots([slot])
            by_namespace.setdefault(page.namespace, []).append(page)
            count, size = count + 1, size + page.length
        groups = tuple(PagesStored(pages.records(some), tag) for tag, some in by_namespace.items())
        return PagesToGive(groups, self.left, unfinished, self._left_granules * self._granule)


def _granules(slot: Slot) -> int:
    return slot.extent.size_class.granules


_BYTE_STATES: Final = ("used", "reserved", "free")


def pool_figures(
    slots: SlotAllocator,
    pages: PageTable,
    reservations: Reservations,
    granule: int,
    page_bytes: int,
) -> dict[str, int]:
    """Return named figures; used + reserved + free is what is usable, to the byte."""
    taken = slots.held_granules + slots.reserved_granules
    return {
        "pool_bytes": page_bytes,
        "pool_bytes_usable": slots.usable * granule,
        "pool_bytes_used": slots.held_granules * granule,
        "pool_bytes_reserved": slots.reserved_granules * granule,
        "pool_bytes_free": (slots.usable - taken) * granule,
        "pool_bytes_stored": pages.stored_bytes,
        "pool_bytes_mirrored": slots.mirror_granules * granule,
        "pool_bytes_retained": sum(one.retained for one in slots.tenants.all()) * granule,
        "pool_pages": len(pages),
        "pool_size_classes": slots.class_count,
        "pool_extents_reclaimed": slots.reclaims,
        "pool_reservations": reservations.open_count,
        "pool_clients": reservations.client_count,
    }


def show_pool(
    metrics: Metrics,
    read: Callable[[], Mapping[str, float]],
    hit_rates: Callable[[], Mapping[str, float]],
) -> None:
    """Compute the gauges of a pool when they are read: messages cost nothing for them."""
    shown = {f"pool_bytes_{state}": metrics.pool_bytes.labels(state) for state in _BYTE_STATES}
    shown |= {
        "pool_pages": metrics.pool_pages,
        "pool_bytes_mirrored": metrics.pool_bytes_mirrored,
        "pool_bytes_retained": metrics.pool_bytes_retained,
        "pool_reservations": metrics.reservations,
    }
    for figure, gauge in shown.items():
        gauge.set_function(partial(_figure, read, figure))
    for memory in MEMORY_NAMES:
        gauge = metrics.hit_rate_estimate.labels(memory)
        gauge.set_function(partial(_figure, hit_rates, memory))


def _figure(read: Callable[[], Mapping[str, float]], name: str) -> float:
    return read()[name]
