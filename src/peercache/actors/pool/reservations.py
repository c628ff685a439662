"""Reservations: slots granted to a writer, from its Reserve to the commit of its pages.

A reservation is named by its client and the client's own sequence number. It ends once: by commit,
abort, the client's word that it is over, or the exit of the client's process. There is no clock
here, because a client that was paused for an hour may still be writing.

Messages come twice and late, so what has ended is remembered: the last outcomes of each client with
what they said, everything older by one number below which nothing new begins.

A client mirrors a page when it has read it from another host: it asks for a slot before it reads,
and commits the verified bytes after that. They may be older than a removal: the removal came to
this node first, and to the page's holder after the read. So a removal voids the mirrored pages of
its namespace that are being written, and those whose slot is asked for while other members may
still be removing. A removal states to each member how long its sender waits for them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.mailboxes import PagesHeld, PagesStored
from peercache.actors.pool.page_table import PackedPages, Page, PageTable
from peercache.actors.pool.size_classes import NEVER_TOUCHED, Slot
from peercache.actors.pool.slots import SlotAllocator
from peercache.actors.tenants import Tenant
from peercache.model.keys import COPIES, KEY, KEY_BYTES, space_of, split_keys
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    HERE,
    REFUSED_FULL,
    REFUSED_SIZE,
    RESERVED,
    Commit,
    Reserve,
)

ENDED_MAX: Final = 64
"""Outcomes remembered per client: far more than the calls it can have waiting for an answer."""

GONE_MAX: Final = 4096
"""Exited clients remembered, so that what they had sent before cannot reserve anything."""

_RESERVED = bytes((RESERVED,))
_ABORT_THE_REST = bytes.maketrans(bytes((RESERVED,)), bytes((ABORTED,)))
_NO_SLOT_AGAIN = bytes.maketrans(bytes((COMMITTED, ABORTED)), bytes((REFUSED_FULL, REFUSED_FULL)))


@final
@attrs.frozen(eq=False)
class Reservation:
    """What one Reserve was granted.

    keys, lengths: as asked, packed (n × 16 and n × 8 bytes); no keys for slots ahead.
    states:        as granted, n bytes; offsets: n × u64, 0 where not reserved.
    slots:         n, None where not reserved; granules: their sum.
    mirrored_at:   when slots for mirrored pages were asked for; None: the pages are the client's.
    """

    namespace: int
    keys: bytes
    lengths: bytes
    states: bytes
    offsets: bytes
    slots: tuple[Slot | None, ...]
    granules: int
    mirrored_at: float | None = None

    @property
    def is_ahead(self) -> bool:
        """Return whether its pages have no names yet."""
        return not self.keys

    def fits(self, count: int, keys: bytes) -> bool:
        """Return whether a Commit of `count` pages speaks of each, and names what has no name."""
        if self.is_ahead:
            return 0 < count <= len(self.slots) and len(keys) == count * KEY_BYTES
        return count == len(self.slots) and not keys


@final
@attrs.frozen(eq=False)
class FromOther:
    """What is known of pages that come from another node.

    asked_at: when slots for them were asked for. limits: of pages that another node evicts, the
    last touch of a page here that may be evicted for each; () for others.
    """

    asked_at: float
    limits: Sequence[int] = ()


@final
@attrs.frozen
class Ended:
    """How a reservation ended: the state of each page of `keys`."""

    keys: bytes
    states: bytes

    def states_if_asked_again(self, count: int) -> bytes:
        """Return the answer to a late duplicate of the Reserve: never a slot."""
        if len(self.states) != count:
            return bytes((REFUSED_FULL,)) * count
        return self.states.translate(_NO_SLOT_AGAIN)


@final
@attrs.define(eq=False)
class _Client:
    open: dict[int, Reservation] = attrs.field(factory=dict)
    ended: dict[int, Ended] = attrs.field(factory=dict)
    closed_up_to: int = 0
    """Up to here every sequence that is not open, ended or awaited is over and forgotten."""
    awaited: dict[int, None] = attrs.field(factory=dict)
    """Sequences that the client has listed and we have not seen: their Reserve may yet arrive."""
    granules: int = 0
    ahead_granules: int = 0
    held_back: dict[int, None] = attrs.field(factory=dict)
    """Reservations made ahead that the answer to its next Commit reports."""


@final
@attrs.define(eq=False)
class Reservations:
    """The reservations of all clients of one pool."""

    open_count: int = 0
    granules: int = 0
    """Granules reserved by all clients."""
    ahead_granules: int = 0
    """Those of them that are reserved ahead."""
    ahead_count: int = 0
    """Open reservations made ahead."""
    _clients: dict[int, _Client] = attrs.field(factory=dict)
    _gone: dict[int, None] = attrs.field(factory=dict)

    @property
    def client_count(self) -> int:
        """Return the number of clients that have reserved something and have not exited."""
        return len(self._clients)

    def granules_of(self, client: int) -> int:
        """Return the granules a client has reserved and neither committed nor given back.

        Slots ahead have a bound of their own: else they would take room from pages that need it.
        """
        known = self._clients.get(client)
        return known.granules - known.ahead_granules if known else 0

    def is_gone(self, client: int) -> bool:
        """Return whether the client's process has exited (a client id never comes back)."""
        return client in self._gone

    def find(self, client: int, sequence: int) -> Reservation | Ended | None:
        """Return the reservation, or how it ended; None if it never was or is forgotten."""
        known = self._clients.get(client)
        if known is None:
            return None
        return known.open.get(sequence) or known.ended.get(sequence)

    def is_over(self, client: int, sequence: int) -> bool:
        """Return whether a Reserve with this unknown sequence can only be a late duplicate."""
        known = self._clients.get(client)
        return known is not None and (
            sequence <= known.closed_up_to and sequence not in known.awaited
        )

    def open_of(self, client: int) -> list[tuple[int, Reservation]]:
        """Return a client's open reservations, by sequence."""
        known = self._clients.get(client)
        return list(known.open.items()) if known is not None else []

    def begin(self, client: int, sequence: int, reservation: Reservation) -> None:
        """Keep a new reservation; one that holds no slot has ended at once."""
        assert client not in self._gone, f"client {client:016x} is gone"
        known = self._clients.setdefault(client, _Client())
        if not reservation.granules:
            self._remember(known, sequence, _outcome(reservation, reservation.states))
            return
        known.open[sequence] = reservation
        known.awaited.pop(sequence, None)
        known.granules += reservation.granules
        self.granules += reservation.granules
        if reservation.is_ahead:
            known.ahead_granules += reservation.granules
            self.ahead_granules += reservation.granules
            self.ahead_count += 1
        self.open_count += 1

    def name(
        self, client: int, sequence: int, keys: bytes, granules: int
    ) -> tuple[Reservation, list[Slot]]:
        """Name the first pages of an open reservation made ahead, of so many granules.

        Return it with those pages alone, and the slots of the others, which are to be released.
        """
        known = self._clients[client]
        ahead = known.open[sequence]
        assert ahead.is_ahead, f"reservation {sequence} has its names"
        count = len(keys) // KEY_BYTES
        known.held_back.pop(sequence, None)
        named = known.open[sequence] = Reservation(
            ahead.namespace,
            keys,
            ahead.lengths[: 8 * count],
            ahead.states[:count],
            ahead.offsets[: 8 * count],
            ahead.slots[:count],
            granules,
        )
        known.ahead_granules -= ahead.granules
        self.ahead_granules -= ahead.granules
        self.ahead_count -= 1
        known.granules -= ahead.granules - granules
        self.granules -= ahead.granules - granules
        return named, [slot for slot in ahead.slots[count:] if slot is not None]

    def hold_back(self, client: int, sequence: int) -> bool:
        """Return whether the answer to the next Commit reports these slots: the client has others.

        One message less: it needs them only after the others. The answer to a Commit names no
        states, so it only reports a reservation with a slot for every page: the offset of a page
        without one would be that of another page.
        """
        known = self._clients[client]
        others = [s for s, r in known.open.items() if r.is_ahead and s not in known.held_back]
        is_whole = sequence in others and not known.open[sequence].states.strip(_RESERVED)
        is_needed_later = is_whole and len(others) > 1
        if is_needed_later:
            known.held_back[sequence] = None
        return is_needed_later

    def next_held_back(self, client: int) -> tuple[int, bytes]:
        """Return a reservation that was held back, and its offsets; 0 and b"" without one."""
        known = self._clients[client]
        if not known.held_back:
            return 0, b""
        sequence = next(iter(known.held_back))
        del known.held_back[sequence]
        return sequence, known.open[sequence].offsets

    def end(self, client: int, sequence: int, states: bytes | None = None) -> Reservation | None:
        """End a reservation and return it, if it is open; without `states` nothing came of it.

        Ending one that never was is remembered too: its Reserve may come later than its end.
        """
        known = self._clients.get(client)
        if known is None:
            return None
        reservation = known.open.pop(sequence, None)
        if reservation is not None:
            known.granules -= reservation.granules
            self.granules -= reservation.granules
            if reservation.is_ahead:
                known.ahead_granules -= reservation.granules
                self.ahead_granules -= reservation.granules
                self.ahead_count -= 1
            self.open_count -= 1
            known.held_back.pop(sequence, None)
            outcome = states or reservation.states.translate(_ABORT_THE_REST)
            self._remember(known, sequence, _outcome(reservation, outcome))
        elif sequence not in known.ended and not self.is_over(client, sequence):
            self._remember(known, sequence, Ended(b"", b""))
        return reservation

    def end_unlisted(
        self, client: int, newest: int, sequences: tuple[int, ...]
    ) -> list[Reservation]:
        """End what the client, at its sequence `newest`, did not list; return it."""
        known = self._clients.get(client)
        if known is None:
            return []
        listed = dict.fromkeys(sequences)
        over = [s for s in known.open if s <= newest and s not in listed]
        ended = [self.end(client, sequence) for sequence in over]
        # A list that was overtaken by a newer one says nothing new about what is awaited.
        if newest >= known.closed_up_to:
            known.closed_up_to = newest
            known.awaited = {
                s: None for s in listed if s not in known.open and s not in known.ended
            }
        return [reservation for reservation in ended if reservation is not None]

    def forget(self, client: int) -> list[Reservation]:
        """Forget a client whose process has exited; return what it had open."""
        self._gone[client] = None
        if len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]
        known = self._clients.pop(client, None)
        if known is None:
            return []
        self.granules -= known.granules
        self.ahead_granules -= known.ahead_granules
        self.ahead_count -= sum(reservation.is_ahead for reservation in known.open.values())
        self.open_count -= len(known.open)
        return list(known.open.values())

    def check(self) -> None:
        """Assert the sums, in time that does not grow with the reservations."""
        assert self.granules >= self.open_count >= 0, (
            f"{self.open_count} reservations of {self.granules} granules"
        )
        assert 0 <= self.ahead_granules <= self.granules, f"{self.ahead_granules} granules ahead"
        assert 0 <= self.ahead_count <= self.open_count, f"{self.ahead_count} made ahead"

    def _remember(self, known: _Client, sequence: int, outcome: Ended) -> None:
        known.awaited.pop(sequence, None)
        known.ended[sequence] = outcome
        if len(known.ended) > ENDED_MAX:
            oldest = next(iter(known.ended))
            del known.ended[oldest]
            known.closed_up_to = max(known.closed_up_to, oldest)


def _outcome(reservation: Reservation, states: bytes) -> Ended:
    """Return how a reservation ended: pages without names are not reported."""
    return Ended(b"", b"") if reservation.is_ahead else Ended(reservation.keys, states)


BATCH_PAGES_MAX = 2048
"""Pages of one Reserve: the Committed that ends it has 65 bytes a page, 130 KiB."""

AHEAD_DIVISOR = 32
"""Slots may be reserved ahead in at most 1/32 of the pool, by all clients together: they are in use
in the next moments, or come back within three seconds."""

COLDEST_MAX = 1024
"""Pages of one size that are looked at ahead of their eviction: a millisecond."""


UNCOMMITTED_DIVISOR = 2
"""The uncommitted pages of all writers together take at most 1/2 of the pool: writers that stop
keep theirs for as long as they live."""


@final
@attrs.frozen
class Shares:
    """How many granules writers may hold uncommitted.

    together_max: all of them; each_max: one of them, 0 for as many as are left of together_max.

    Without `each_max` a writer's share is what it leaves to the others (the dynamic threshold of
    shared buffers: Choudhury and Hahne, 1998): the first one may take half of what there is, a
    second one half of the rest. So no number of writers that stop takes all of it.
    """

    together_max: int
    each_max: int

    @classmethod
    def of(cls, *, granules: int, client_max: int) -> Shares:
        """Divide a pool of so many granules. client_max: the setting, in granules."""
        return cls(max(granules // UNCOMMITTED_DIVISOR, client_max), client_max)

    def allow(self, size: int, *, own: int, together: int) -> bool:
        """Return whether a writer may have one more page.

        own, together: granules that this writer and all writers hold. One page is always allowed
        while there is room for it, and any page to the only writer: else it could never be stored.
        """
        left = self.together_max - together - size
        if not own:
            return left >= 0 or not together
        return left >= 0 and own + size <= (self.each_max or left)

    def allow_all(self, size: int, count: int, own: int, together: int) -> bool:
        """Return whether a writer may have `count` more pages, as `allow` would say one by one.

        Each page leaves less than the one before, so the last one decides.
        """
        before = (count - 1) * size
        left = self.together_max - together - before - size
        return left >= 0 and own + before + size <= (self.each_max or left)


def _one_size(states: bytearray, granules: list[int]) -> int:
    """Return the granules of every page of a batch that is all RESERVED; 0 for any other batch."""
    is_plain = states.count(RESERVED) == len(states) > 0
    return granules[0] if is_plain and granules.count(granules[0]) == len(granules) else 0


@final
@attrs.frozen(eq=False)
class Terms:
    """What a Reserve may have.

    own:         granules that its client has reserved already.
    shares:      None for slots ahead, which have a bound of their own.
    limit:       the last touch of a page that may be evicted for it; -1: none may.
    limits:      the same for each page of an offer, instead; -2: nor is free room given.
    mirrors_max: granules that mirrored pages may have; None: its pages are not mirrored.
    """

    own: int
    tenant: Tenant
    shares: Shares | None
    limit: int = NEVER_TOUCHED
    limits: Sequence[int] = ()
    mirrors_max: int | None = None


def take_slots(
    slots: SlotAllocator, states: bytearray, granules: list[int], terms: Terms
) -> tuple[list[Slot | None], list[Slot]]:
    """Return a slot for each page that is RESERVED, or make it REFUSED_FULL; and the evicted slots.

    granules: of each page.
    """
    taken: list[Slot | None] = [None] * len(states)
    evicted: list[Slot] = []
    own, shares, most, tenant = terms.own, terms.shares, terms.mirrors_max, terms.tenant
    is_plain = most is None and not terms.limits
    if (size := _one_size(states, granules) if is_plain else 0) and (
        shares is None or shares.allow_all(size, len(states), own, slots.reserved_granules)
    ):
        # What nearly every batch is.
        many = slots.take_many(
            size, len(states), untouched_since=terms.limit, evicted=evicted, tenant=tenant
        )
        taken[: len(many)] = many
        states[len(many) :] = bytes((REFUSED_FULL,)) * (len(states) - len(many))
        return taken, evicted
    take = slots.take if most is None else partial(slots.take_mirror, most=most)
    limits = terms.limits or [terms.limit] * len(states)
    refused: dict[int, int] = {}
    places = range(len(states))
    # Pages are offered coldest first: of a prompt that has no room as a whole, its begin is taken.
    for index in reversed(places) if terms.limits else places:
        if states[index] != RESERVED:
            continue
        size, limit, slot = granules[index], limits[index], None
        # What found no room finds none with the same or a lower limit, and to look is slow.
        if limit > refused.get(size, NEVER_TOUCHED - 1) and (
            shares is None or shares.allow(size, own=own, together=slots.reserved_granules)
        ):
            slot = take(size, untouched_since=limit, evicted=evicted, tenant=tenant)
        if slot is None:
            states[index] = REFUSED_FULL
            refused[size] = max(limit, refused.get(size, limit))
        else:
            taken[index] = slot
            own += size
    return taken, evicted


def problem_of(reserve: Reserve, *, is_mirror: bool) -> str:
    """Return what is malformed about a Reserve, a sentence for a person; "" for nothing.

    is_mirror: its pages were asked of another host, by name.
    """
    count = len(reserve.lengths) // 8
    if len(reserve.lengths) != count * 8 or len(reserve.keys) not in (0, count * KEY_BYTES):
        return "keys and lengths do not agree"
    if is_mirror and not reserve.keys:
        return "no slots are reserved ahead for mirrored pages: it has to name them"
    if count > BATCH_PAGES_MAX:
        return f"{count} pages in one Reserve, {BATCH_PAGES_MAX} at most"
    return ""


def granules_of(lengths: list[int], granule: int) -> list[int]:
    """Return how many granules each page of these lengths (bytes) takes."""
    return [-(-length // granule) for length in lengths]


def states_ahead(lengths: list[int], bytes_max: int, *, granules: int, usable: int) -> bytearray:
    """Return what the pages of a Reserve without keys come to: a slot for each, or none for any.

    granules: that would be reserved ahead, with these, of so many usable ones.
    """
    has_room = granules * AHEAD_DIVISOR <= usable
    is_sane = all(0 < length <= bytes_max for length in lengths)
    return bytearray((RESERVED if has_room and is_sane else REFUSED_FULL,)) * len(lengths)


def coldest_pages(slots: SlotAllocator, pages: PageTable, full_part: float) -> list[PagesStored]:
    """Return the eviction candidates of each size, once the pool is so full; by namespace."""
    taken = slots.held_granules + slots.reserved_granules
    if taken <= full_part * slots.usable:
        return []
    by_namespace: dict[int, list[Page]] = {}
    for held in slots.coldest_first():
        for page in pages.in_slots(islice(held, COLDEST_MAX)):
            by_namespace.setdefault(page.namespace, []).append(page)
    return [PagesStored(pages.records(some), tag) for tag, some in by_namespace.items()]


def held_pages(slots: SlotAllocator, pages: PageTable) -> PagesHeld:
    """Return all pages that are not on disk, retained ones first, then the hottest; for a stop."""
    by_namespace: dict[int, list[Page]] = {}
    for held in slots.own_coldest_first():
        for page in reversed(pages.in_slots(held)):
            if not page.slot.disk_length:
                by_namespace.setdefault(page.namespace, []).append(page)
    groups = [PagesStored(pages.records(some), tag) for tag, some in by_namespace.items()]
    return PagesHeld(tuple(groups))


LATELY_S: Final = 10.0
"""No mirrored page takes the place of a page that was read or stored within this time."""

LOOK_FRACTION: Final = 1 / 8
"""How exact that is: the part of that time between two notes of the pool's count of touches."""

CLOCKS_DIFFER: Final = 1.2
"""A member that removes waits by its own clock, for an answer that takes time too."""

NEWCOMER_S: Final = 2.5
"""How long a new node mirrors nothing: removals of before its time, with the usual deadline of a
call, are under way elsewhere and come to this node no more."""

NAMESPACES_MAX: Final = 1024
"""Namespaces whose removals are kept apart; beyond that the oldest ones count for all."""


@final
@attrs.define(eq=False)
class Mirrors:
    """The rules for mirrored pages of one pool.

    granules_max: what all of them may have; lately_s: how long a page that was touched stays.
    """

    granules_max: int
    lately_s: float = LATELY_S
    _void_until: dict[int, float] = attrs.field(factory=dict)
    """By namespace: what is asked for until then is void."""
    _all_void_until: float = -math.inf
    _looks: deque[tuple[float, int]] = attrs.field(factory=deque)
    """When, and how many touches there had been."""

    def started(self, now: float) -> None:
        """Note that the node has begun to have room; only the first time counts."""
        if self._all_void_until == -math.inf:
            self._all_void_until = now + NEWCOMER_S

    def removed(self, namespace: int, timeout_s: float, now: float) -> None:
        """Note that pages of a namespace are being removed by all members within `timeout_s`."""
        until = now + max(timeout_s, 0.0) * CLOCKS_DIFFER
        if namespace == COPIES:
            self._all_void_until = max(self._all_void_until, until)
            return
        until = max(until, self._void_until.pop(namespace, -math.inf))
        self._void_until[namespace] = until
        if len(self._void_until) > NAMESPACES_MAX:
            oldest = next(iter(self._void_until))
            self._all_void_until = max(self._all_void_until, self._void_until.pop(oldest))

    def is_void(self, namespace: int, asked_at: float) -> bool:
        """Return whether a page whose slot was asked for then may have been removed since."""
        # A name may have been cleared whole, by its space tag.
        tags = [namespace, space_of(namespace)]
        if namespace == space_of(namespace):
            # Of a page from another node no more is known: it may be of every geometry.
            tags += [tag for tag in self._void_until if space_of(tag) == namespace]
        until = max(self._void_until.get(tag, -math.inf) for tag in tags)
        return max(until, self._all_void_until) >= asked_at

    def begin(self, now: float, clock: int) -> int:
        """Return the touch after which a page counts as touched lately; clock: touches so far."""
        if not self._looks or self._looks[-1][0] + self.lately_s * LOOK_FRACTION <= now:
            self._looks.append((now, clock))
        while len(self._looks) > 1 and self._looks[1][0] + self.lately_s <= now:
            self._looks.popleft()
        at, touches = self._looks[0]
        return touches if at + self.lately_s <= now else -1


def commit_pages(
    slots: SlotAllocator, pages: PageTable, reservation: Reservation, commit: Commit
) -> tuple[bytes, PackedPages | None]:
    """Hold the written pages and enter them; return the state of each page, and those entered.

    It goes from the last page to the first, which so becomes the hottest: a chain loses its tail
    first. What was not written, or is here already, gives its slot back.
    """
    keys = split_keys(reservation.keys)
    lengths: list[int] = np.frombuffer(reservation.lengths, "<u8").tolist()
    checksums: list[int] = np.frombuffer(commit.checksums, "<u8").tolist()
    last_first = [slot for slot in reversed(reservation.slots) if slot is not None]
    slots.begin_batch()
    is_whole = len(last_first) == len(keys) == commit.written.count(1)
    if is_whole and pages.are_new(keys):
        # What nearly every batch is, in a third of the time.
        slots.hold(last_first)
        pages.add(keys[::-1], last_first, lengths[::-1], reservation.namespace, checksums[::-1])
        return bytes((COMMITTED,)) * len(keys), _batch(reservation, commit.checksums)
    packed = (keys, lengths, checksums)
    states = _page_by_page(slots, pages, reservation, commit.written, packed)
    made = np.frombuffer(states, np.uint8) == COMMITTED
    return states, _batch(reservation, commit.checksums, made) if made.any() else None


def _page_by_page(
    slots: SlotAllocator,
    pages: PageTable,
    reservation: Reservation,
    written: bytes,
    packed: tuple[Sequence[bytes], Sequence[int], Sequence[int]],
) -> bytes:
    keys, lengths, checksums = packed
    states = bytearray(reservation.states)
    for index in range(len(keys) - 1, -1, -1):
        slot: Slot | None = reservation.slots[index]
        rival = pages.find(keys[index])
        if slot is None:
            if rival is not None and states[index] == HERE:
                slots.touch(rival.slot)
        elif not written[index]:
            states[index] = ABORTED
            slots.release(slot)
        elif rival is not None:
            # Another client was faster: its commit stays, and this copy is dropped.
            slots.release(slot)
            fits = rival.length == lengths[index]
            states[index] = HERE if fits else REFUSED_SIZE
            if fits:
                slots.touch(rival.slot)
        else:
            states[index] = COMMITTED
            slots.hold([slot])
            one = slice(index, index + 1)
            pages.add(keys[one], [slot], lengths[one], reservation.namespace, checksums[one])
    return bytes(states)


def _batch(
    reservation: Reservation, checksums: bytes, chosen: npt.NDArray[np.bool_] | None = None
) -> PackedPages:
    """Return pages of a reservation, packed: all of them, or those that are chosen."""
    keys, offsets, lengths = reservation.keys, reservation.offsets, reservation.lengths
    if chosen is not None:
        keys = np.frombuffer(keys, KEY)[chosen].tobytes()
        offsets, lengths, checksums = (
            np.frombuffer(packed, "<u8")[chosen].tobytes()
            for packed in (offsets, lengths, checksums)
        )
    return PackedPages(reservation.namespace, keys, offsets, lengths, checksums)
