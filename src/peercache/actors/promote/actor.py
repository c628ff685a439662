"""Promote: brings pages from this node's disk back into its pool, for readers that ask.

Owns    the waiters, with their requests and timeouts; the wanted pages, and the loads in flight
        with their reservations in the pool; the promoted pages that are not read yet.
Takes   Promote, from readers; PoolGrew, Granted and Committed, from the pool; PagesFound,
        PagesLoaded, LateEnded and DiskEnded, from the disk actor.
Sends   PagesSought, Reserve, Commit and PromoteAnswered to the pool, which answers readers with its
        current records; RequestLoad to the disk actor.
Keeps   each request has one answer, within its timeout. A page is loaded once, however many readers
        wait. A slot that the store may still write to stays reserved.
Limits  WAITERS_MAX requests, WANTED_MAX pages, LOADS_MAX loads of LOAD_BYTES_MAX; half of the pool
        for pages that are loading or unread; `wish_rate` bytes a second for requests without a
        timeout.

The promote actor is a client of its own pool: it reserves slots, has the disk actor load pages
straight into them, and commits what arrived. A reservation ends when the disk is done with its
slots, never by time: a read that is stuck may still write. Bytes that were promoted and may not
have been read yet must not be evicted for the next portion, so they count against the promote
actor's share of the pool until their readers have had time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf
from typing import Final, final

import attrs
import numpy as np
from typing_extensions import assert_never

from peercache.actors.effects import Effect, NotifyDisk, NotifyPool
from peercache.actors.mailboxes import (
    PagesFound,
    PagesLoaded,
    PagesSought,
    PoolGrew,
    PromoteAnswered,
    PromoteMessage,
    RequestLoad,
)
from peercache.actors.origin import Origin
from peercache.actors.ports import (
    DISK_DAMAGED,
    DISK_DONE,
    DISK_FAILED,
    DISK_LATE,
    DISK_REPLACED,
    DiskEnded,
    LateEnded,
)
from peercache.model.keys import KEY_BYTES, Tag, split_keys, tag_of
from peercache.observability.metrics import Metrics
from peercache.wire.messages.pool import (
    COMMITTED,
    HERE,
    LATER,
    LOST,
    PROMOTED,
    REFUSED_FULL,
    RESERVED,
    Commit,
    Committed,
    Granted,
    Promote,
    Reserve,
)

READ_WITHIN_S: Final = 0.25
"""How long a reader has to read its portion; afterwards its pages count like any other page."""


@final
@attrs.define(eq=False)
class _Portion:
    at: float
    size: int
    readers: dict[int, None]


@final
@attrs.define(eq=False)
class UnreadPages:
    """The bytes of promoted pages that are not read yet, by reader. size: their sum."""

    size: int = 0
    _portions: deque[_Portion] = attrs.field(factory=deque)

    def add(self, now: float, size: int, readers: dict[int, None]) -> None:
        """Record the bytes that were promoted for these readers; a wish has no reader."""
        self._portions.append(_Portion(now, size, readers))
        self.size += size

    def read_by(self, reader: int) -> None:
        """Note that a reader has read what was promoted for it."""
        for portion in self._portions:
            if reader in portion.readers:
                del portion.readers[reader]
                if not portion.readers:
                    self.size -= portion.size
                    portion.size = 0

    def expire(self, now: float) -> None:
        """Remove the portions whose time is over."""
        while self._portions and self._portions[0].at + READ_WITHIN_S <= now:
            self.size -= self._portions.popleft().size

    def deadline(self) -> float:
        """Return when the oldest portion's time is over; inf without one."""
        return self._portions[0].at + READ_WITHIN_S if self._portions else inf


WAITERS_MAX: Final = 4096
"""Waiters at a time; further ones are answered at once, with the pages in memory."""


@final
@attrs.define(eq=False)
class Waiter:
    """A reader that waits. open: how many of its pages are pending."""

    origin: Origin
    request: int
    keys: list[bytes]
    states: bytearray
    asked_at: float
    until: float
    open: int = 0


@final
@attrs.define(eq=False)
class Waiters:
    """All waiters, by page."""

    metrics: Metrics = attrs.field(factory=Metrics)
    now: float = -inf
    """The time of the current step."""
    _waiters: dict[int, Waiter] = attrs.field(factory=dict)
    _pending: dict[bytes, dict[tuple[int, int], None]] = attrs.field(factory=dict)
    """By key: the waiters for it, and the page's position in their requests. Many may wait for one
    prefix, and all time out in one tick: each is removed without a scan of the others."""
    _last: int = 0

    def __len__(self) -> int:
        """Return the number of waiters."""
        return len(self._waiters)

    def admit(self, waiter: Waiter, positions: list[int]) -> list[Effect]:
        """Let a reader wait for the pages at these positions, or answer at once."""
        waiter.open = len(positions)
        states = waiter.states
        has_news = PROMOTED in states or LOST in states or not states
        # An answer without progress waits for the timeout: otherwise the reader would poll without
        # pause.
        if (not positions and has_news) or len(self._waiters) >= WAITERS_MAX:
            return [self._answer(waiter)]
        self._last += 1
        self._waiters[self._last] = waiter
        for at in positions:
            self._pending.setdefault(waiter.keys[at], {})[self._last, at] = None
        return []

    def want(self, key: bytes) -> bool:
        """Return whether a reader waits for a page."""
        return key in self._pending

    def identities(self, key: bytes) -> dict[int, None]:
        """Return the readers that wait for a page."""
        pending = [self._waiters.get(number) for number, _ in self._pending.get(key, ())]
        return {waiter.origin.identity: None for waiter in pending if waiter is not None}

    def wanted_keys(self) -> list[bytes]:
        """Return all pages that readers wait for."""
        return list(self._pending)

    def settle(self, key: bytes, state: int) -> list[Effect]:
        """Report a page's state to its waiters; answer those with no page pending."""
        effects: list[Effect] = []
        for number, at in self._pending.pop(key, ()):
            waiter = self._waiters.get(number)
            if waiter is not None:
                waiter.states[at] = state
                waiter.open -= 1
                if not waiter.open:
                    effects.append(self._answer(self._waiters.pop(number)))
        return effects

    def expire(self) -> list[Effect]:
        """Answer the waiters whose timeout has passed, with the pages that were loaded."""
        over = [number for number, waiter in self._waiters.items() if waiter.until <= self.now]
        effects: list[Effect] = []
        for number in over:
            waiter = self._waiters.pop(number)
            for at, key in enumerate(waiter.keys):
                pending = self._pending.get(key, {})
                pending.pop((number, at), None)
                if not pending:
                    self._pending.pop(key, None)
            effects.append(self._answer(waiter))
        return effects

    def deadline(self) -> float:
        """Return when the next timeout passes; inf without waiters."""
        return min((waiter.until for waiter in self._waiters.values()), default=inf)

    def _answer(self, waiter: Waiter) -> Effect:
        """Have the pool answer, which has the current records."""
        self.metrics.promote_s.observe(self.now - waiter.asked_at)
        keys, states = tuple(waiter.keys), bytes(waiter.states)
        return NotifyPool(PromoteAnswered(waiter.origin, waiter.request, keys, states))


LOAD_BYTES_MAX: Final = 8 * 2**20
LOAD_PAGES_MAX: Final = 64
"""Pages of one job: the first page waits for at most this many, and a stuck read holds them."""

LOADS_MAX: Final = 8
"""Jobs at once: enough to keep a fast disk busy in both directions."""

LOAD_S: Final = 5.0
"""Deadline of a job. Its readers have their own timeouts."""

WANTED_MAX: Final = 65_536
"""Pages that wait for a job; readers ask again for those beyond."""

PORTION_DIVISOR: Final = 4
"""One answer covers a quarter of the pool at most: the reader reads it before it asks for more."""

HELD_DIVISOR: Final = 2
"""Half of the pool may be loading or unread: a promoted page is not evicted by the next promote."""

FULL_AGAIN_S: Final = 0.02
"""Back-off after the pool had no room: everything was reserved."""


@final
@attrs.frozen
class WantedPage:
    """A page on disk, as the disk actor reported it."""

    length: int
    namespace: Tag


@final
@attrs.define(eq=False)
class _Job:
    """One load. chosen: the positions in `keys` of pages that have a slot."""

    namespace: Tag
    keys: list[bytes]
    lengths: list[int]
    written: bytearray
    checksums: list[int]
    chosen: list[int] = attrs.field(factory=list)
    again: list[int] = attrs.field(factory=list)
    """Positions of pages for which the pool had no free slot."""
    late: dict[int, None] = attrs.field(factory=dict)
    """Indices of `chosen` whose slots may still be written to."""


@final
@attrs.define(eq=False)
class Promotions:
    """The wanted pages, and those that are being loaded.

    pool_bytes: the usable size of the pool.
    """

    waiters: Waiters
    metrics: Metrics = attrs.field(factory=Metrics)
    pool_bytes: int = 0
    now: float = -inf
    """The time of the current step."""
    unread: UnreadPages = attrs.field(factory=UnreadPages)
    _wanted: dict[bytes, WantedPage] = attrs.field(factory=dict)
    """Oldest first."""
    _jobs: dict[int, _Job] = attrs.field(factory=dict)
    _loading: dict[bytes, None] = attrs.field(factory=dict)
    _loading_bytes: int = 0
    _last_job: int = 0
    _full_until: float = -inf
    _has_ended: bool = False

    @property
    def portion_bytes(self) -> int:
        """Return how many bytes one answer may cover."""
        return self.pool_bytes // PORTION_DIVISOR

    def portion(self, positions: Sequence[int], lengths: Sequence[int], bytes_max: float) -> int:
        """Return how many of these pages to load: up to `bytes_max`, but at least one."""
        if not positions:
            return 0
        sums = np.cumsum(np.array(lengths, np.int64))
        room = max(0, WANTED_MAX - len(self._wanted))
        return min(room, max(1, int((sums <= bytes_max).sum())))

    def want(self, key: bytes, page: WantedPage) -> bool:
        """Queue a page for loading; False if its load is in flight."""
        if key in self._loading:
            return False
        self._wanted.setdefault(key, page)
        return True

    def deadline(self) -> float:
        """Return when to try again to get room in the pool."""
        due = inf
        if self._wanted:
            if len(self._jobs) < LOADS_MAX:
                due = min(due, self.unread.deadline())
            due = min(due, self._full_until) if self._full_until > -inf else due
        return due

    def pump(self) -> list[Effect]:
        """Start jobs: reserve slots for the oldest wanted pages."""
        self.unread.expire(self.now)
        if self.now < self._full_until:
            return []
        self._full_until = -inf
        effects: list[Effect] = []
        while self._wanted and len(self._jobs) < LOADS_MAX and self._has_room():
            effects.append(self._begin())
        return effects

    def granted(self, granted: Granted) -> list[Effect]:
        """Accept the slots of a job, and have the disk actor load into them."""
        job = self._jobs[granted.sequence]
        effects: list[Effect] = []
        for at, state in enumerate(granted.states):
            if state == RESERVED:
                job.chosen.append(at)
            elif state == REFUSED_FULL:
                job.again.append(at)
                self._full_until = self.now + FULL_AGAIN_S
            else:
                # The page is in memory already, is larger than this pool, or has another length.
                effects += self.waiters.settle(job.keys[at], PROMOTED if state == HERE else LOST)
        if not job.chosen:
            return [*effects, *self._over(granted.sequence)]
        load = RequestLoad(
            granted.sequence,
            b"".join([job.keys[at] for at in job.chosen]),
            job.namespace,
            np.array([job.lengths[at] for at in job.chosen], np.int64),
            np.frombuffer(granted.offsets, "<u8")[job.chosen],
            self.now + LOAD_S,
        )
        return [*effects, NotifyDisk(load)]

    def loaded(self, loaded: PagesLoaded) -> list[Effect]:
        """Handle the outcome of a load; commit, unless a slot may still be written to."""
        job = self._jobs[loaded.job]
        effects: list[Effect] = []
        checksums: list[int] = loaded.checksums.tolist()
        for index, (at, outcome) in enumerate(zip(job.chosen, loaded.outcomes, strict=True)):
            if outcome == DISK_DONE:
                job.written[at] = True
                job.checksums[at] = checksums[index]
            elif outcome == DISK_LATE:
                job.late[index] = None
            elif outcome in (DISK_DAMAGED, DISK_FAILED, DISK_REPLACED):
                effects += self.waiters.settle(job.keys[at], LOST)
            else:
                effects += self.waiters.settle(job.keys[at], LATER)
        return effects if job.late else [*effects, self._commit(loaded.job, job)]

    def late_ended(self, number: int, indices: Iterable[int]) -> list[Effect]:
        """Note slots that are no longer written to; the reservation ends with the last of them."""
        job = self._jobs[number]
        effects: list[Effect] = []
        for index in indices:
            del job.late[index]
            effects += self.waiters.settle(job.keys[job.chosen[index]], LATER)
        return effects if job.late else [*effects, self._commit(number, job)]

    def committed(self, committed: Committed) -> list[Effect]:
        """Note which pages are in the pool now, and notify their waiters."""
        job = self._jobs[committed.sequence]
        effects: list[Effect] = []
        arrived = [
            at for at in job.chosen if job.written[at] and committed.states[at] in (COMMITTED, HERE)
        ]
        readers: dict[int, None] = {}
        for at in arrived:
            readers |= self.waiters.identities(job.keys[at])
            effects += self.waiters.settle(job.keys[at], PROMOTED)
        if arrived:
            size = sum(job.lengths[at] for at in arrived)
            self.unread.add(self.now, size, readers)
            self.metrics.pages_promoted.inc(len(arrived))
            self.metrics.bytes_promoted.inc(size)
        return [*effects, *self._over(committed.sequence)]

    def stop(self) -> list[Effect]:
        """Stop all loading: the disk has ended."""
        self._has_ended = True
        self._wanted.clear()
        effects: list[Effect] = []
        for key in self.waiters.wanted_keys():
            if key not in self._loading:
                effects += self.waiters.settle(key, LOST)
        return effects

    def check(self) -> None:
        """Assert the totals, in constant time."""
        assert len(self._jobs) <= LOADS_MAX, f"{len(self._jobs)} loads at once"
        assert self._loading_bytes >= 0, f"{self._loading_bytes} bytes loading"
        assert self.unread.size >= 0, f"{self.unread.size} bytes unread"
        assert bool(self._loading) == bool(self._jobs), "pages loading in no job"

    def _has_room(self) -> bool:
        held = self._loading_bytes + self.unread.size
        return not held or held < self.pool_bytes // HELD_DIVISOR

    def _begin(self) -> Effect:
        """Take the oldest wanted pages, all of one namespace, and reserve slots for them."""
        namespace = next(iter(self._wanted.values())).namespace
        bytes_max = min(LOAD_BYTES_MAX, self.portion_bytes)
        keys: list[bytes] = []
        lengths: list[int] = []
        size = 0
        for key, page in islice(self._wanted.items(), LOAD_PAGES_MAX):
            if page.namespace != namespace:
                continue
            if keys and size + page.length > bytes_max:
                break
            keys.append(key)
            lengths.append(page.length)
            size += page.length
        self._last_job = number = self._last_job + 1
        count = len(keys)
        self._jobs[number] = _Job(namespace, keys, lengths, bytearray(count), [0] * count)
        self._loading_bytes += size
        for key in keys:
            del self._wanted[key]
            self._loading[key] = None
        sizes = np.array(lengths, "<u8").tobytes()
        return NotifyPool(Reserve(number, number, namespace, b"".join(keys), sizes))

    def _commit(self, number: int, job: _Job) -> Effect:
        checksums = np.array(job.checksums, "<u8").tobytes()
        return NotifyPool(Commit(number, number, bytes(job.written), checksums, 0.0))

    def _over(self, number: int) -> list[Effect]:
        """End a job: its slots are free again, or hold pages."""
        job = self._jobs.pop(number)
        self._loading_bytes -= sum(job.lengths)
        for key in job.keys:
            del self._loading[key]
        again = {
            job.keys[at]: WantedPage(job.lengths[at], job.namespace)
            for at in job.again
            if not self._has_ended and self.waiters.want(job.keys[at])
        }
        self._wanted = again | self._wanted
        effects: list[Effect] = []
        for key in job.keys:
            if key not in self._wanted:
                effects += self.waiters.settle(key, LOST if self._has_ended else LATER)
        return effects


TIMEOUT_MAX_S: Final = 60.0

ASKED_MAX: Final = 2048
"""Pages of one request that are looked up: as many as a reader asks for, and 112 KiB of answer."""


@final
@attrs.frozen(eq=False)
class _Question:
    """A Promote whose pages the pool and the disk actor are looking up."""

    origin: Origin
    message: Promote
    asked_at: float


@final
@attrs.define(kw_only=True, eq=False)
class Promoter:
    """The promote actor of one node.

    wish_rate: bytes a second that are loaded for requests without a timeout.
    """

    wish_rate: int
    metrics: Metrics = attrs.field(factory=Metrics)
    waiters: Waiters = attrs.field(init=False)
    promotions: Promotions = attrs.field(init=False)
    _questions: dict[int, _Question] = attrs.field(factory=dict)
    _last: int = 0
    _allowance: float = 0.0
    _allowed_at: float = -inf

    def __attrs_post_init__(self) -> None:
        """Start without waiters."""
        self.waiters = Waiters(self.metrics)
        self.promotions = Promotions(self.waiters, self.metrics)

    def on_message(self, sender: Origin, message: PromoteMessage, now: float) -> list[Effect]:
        """Handle one message; the effects must be performed in the order of the list."""
        self.waiters.now = self.promotions.now = now
        return [*self._apply(sender, message), *self.promotions.pump()]

    def on_tick(self, now: float) -> list[Effect]:
        """Answer the waiters whose timeout has passed, and start loads that have room now."""
        self.waiters.now = self.promotions.now = now
        return [*self.waiters.expire(), *self.promotions.pump()]

    def deadline(self) -> float:
        """Return when a timeout passes, or when there may be room for a load."""
        return min(self.waiters.deadline(), self.promotions.deadline())

    def check(self) -> None:
        """Assert the totals, in constant time."""
        self.promotions.check()

    def _apply(self, sender: Origin, message: PromoteMessage) -> list[Effect]:
        match message:
            case Promote():
                return self._ask(sender, message)
            case PagesFound():
                return self._found(message)
            case Granted():
                return self.promotions.granted(message)
            case PagesLoaded():
                return self.promotions.loaded(message)
            case LateEnded(job, indices):
                return self.promotions.late_ended(job, indices)
            case Committed():
                return self.promotions.committed(message)
            case PoolGrew(usable_bytes):
                self.promotions.pool_bytes = usable_bytes
                return []
            case DiskEnded():
                return self.promotions.stop()
        assert_never(message)

    def _ask(self, origin: Origin, message: Promote) -> list[Effect]:
        """Look up the pages of a request: in the pool first, then on disk."""
        # A reader that asks for more has read its portion.
        self.promotions.unread.read_by(origin.identity)
        self._last += 1
        self._questions[self._last] = _Question(origin, message, self.waiters.now)
        return [NotifyPool(PagesSought(self._last, message.keys[: KEY_BYTES * ASKED_MAX]))]

    def _found(self, found: PagesFound) -> list[Effect]:
        """Queue the pages that a request needs from disk, and let its reader wait for them."""
        question = self._questions.pop(found.number)
        message = question.message
        keys = split_keys(message.keys)
        lengths: list[int] = found.lengths.tolist()
        states = bytearray(
            PROMOTED if is_resident else LATER if length else LOST
            for is_resident, length in zip(found.resident, lengths, strict=True)
        )
        on_disk = np.flatnonzero(np.frombuffer(states, np.uint8) == LATER).tolist()
        is_wish = message.timeout_s <= 0
        bytes_max = float(self.promotions.portion_bytes)
        if is_wish:
            bytes_max = min(bytes_max, self._allowed())
            if bytes_max <= 0:
                return []
        count = self.promotions.portion(on_disk, [lengths[at] for at in on_disk], bytes_max)
        wanted = on_disk[:count]
        for at in wanted:
            page = WantedPage(lengths[at], tag_of(*found.namespaces[at].item()))
            if self.promotions.want(keys[at], page) and is_wish:
                self._allowance -= page.length
        if is_wish:
            return []
        states += bytes((LATER,)) * (len(keys) - len(states))
        until = question.asked_at + min(message.timeout_s, TIMEOUT_MAX_S)
        waiter = Waiter(question.origin, message.request, keys, states, question.asked_at, until)
        return self.waiters.admit(waiter, wanted)

    def _allowed(self) -> float:
        """Return how many bytes may be loaded for requests without a timeout."""
        passed_s = min(1.0, self.waiters.now - self._allowed_at)
        self._allowance = min(self._allowance + self.wish_rate * passed_s, float(self.wish_rate))
        self._allowed_at = self.waiters.now
        return self._allowance
