"""The write path: reserve at the home node, copy, commit. Without I/O, as the read path.

A large batch is written in portions, each with its own reservation: while one is copied, the home
node grants the next one, and commits and publishes the previous one. The call waits for the answers
to its Commits once, at its end.

A slot that is not copied completely by the deadline is aborted, never committed. Nothing reads the
caller's memory after the call has returned.

Slots ahead: a batch that follows similar ones has its slots reserved already. A Commit asks for the
slots of later batches, before their pages are known. The home node reserves them right after its
answer, while the next batch is copied, and reports them with the answer to the next Commit; to a
client without such slots it reports them at once, over the same connection. A batch that uses such
slots names its pages in its own Commit. That saves the round trip of a Reserve, and the time of its
evictions. `ClientReservations` has the numbers of all slots of a client at one home incarnation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import pairwise, zip_longest
from threading import Lock
from typing import Any, Final, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.keys import PageKeys
from peercache.model.records import PAGE_BYTES_MAX, RECORD_BYTES
from peercache.model.runs import U64, PageRuns
from peercache.net.breaker import STALL_S, Breakers
from peercache.observability import reasons
from peercache.paths.lookup import LocationCache
from peercache.paths.steps import Ask, Checksum, Collect, Drain, Place, Post, Step, Submit
from peercache.paths.verify import (
    checksum_portions,
    refuses_without_checksum,
    wants_checksum,
)
from peercache.wire.messages.declared import Message
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    HERE,
    REFUSED_DRAINING,
    REFUSED_FULL,
    REFUSED_SIZE,
    REFUSED_TOO_LARGE,
    REPEATED,
    RESERVED,
    Abort,
    Commit,
    Committed,
    Granted,
    LiveReservations,
    Reserve,
)

AHEAD_S: Final = 2.0
"""How long unused slots ahead are kept, and how soon after another a batch counts as following it.
Unused slots are returned with the next list of live reservations."""

BATCHES_AHEAD: Final = 2
"""Batches for which slots are requested ahead. The home node reserves them after it has answered a
Commit, while the next batch is copied already: that batch uses the slots granted during the
previous one."""

SKIPPED: Final = 64
"""Batches without slots ahead after the home node had no room: its pool is probably small."""


@final
@attrs.define(eq=False)
class Ahead:
    """Slots for pages that are not known yet.

    lengths: the bytes of each page, packed as in a Reserve; offsets: (n,) in the page memory, None
    until granted.
    """

    sequence: int
    lengths: bytes
    asked_at: float
    offsets: U64 | None = None


@final
class ClientReservations:
    """The sequence numbers of one client at one home incarnation. Thread-safe.

    A number is live from before its Reserve is sent until nothing can be written under it any more.
    """

    def __init__(self) -> None:
        """Start without reservations."""
        self._lock = Lock()
        self._newest = 0
        self._live: dict[int, None] = {}
        self._ahead: list[Ahead] = []
        self._followed_at = -np.inf
        self._skipping = 0

    def begin(self) -> int:
        """Return a new number, live."""
        with self._lock:
            return self._begin()

    def end(self, sequence: int) -> None:
        """Mark that no more writes under this number follow."""
        with self._lock:
            self._live.pop(sequence, None)

    def report(self, now: float) -> LiveReservations:
        """Return the list for the home node, each second; drop slots ahead that are too old."""
        with self._lock:
            self._give_up(ahead for ahead in self._ahead if now - ahead.asked_at >= AHEAD_S)
            return LiveReservations(self._newest, tuple(self._live))

    def ask_ahead(self, lengths: U64, now: float) -> tuple[int, ...]:
        """Return the numbers for slots of batches that may follow one of these lengths; live.

        None if this batch does not follow another, or there was recently no room; else as many as
        are missing up to BATCHES_AHEAD.
        """
        with self._lock:
            follows, self._followed_at = now - self._followed_at < AHEAD_S, now
            if self._skipping:
                self._skipping -= 1
                return ()
            wanting = BATCHES_AHEAD - len(self._ahead) if follows else 0
            packed = lengths.tobytes()
            asked = [Ahead(self._begin(), packed, now) for _ in range(wanting)]
            self._ahead += asked
            return tuple(ahead.sequence for ahead in asked)

    def awaits_grant(self) -> bool:
        """Return whether slots ahead were requested, and none is known to be granted."""
        with self._lock:
            return bool(self._ahead) and all(ahead.offsets is None for ahead in self._ahead)

    def granted(self, granted: Granted) -> None:
        """Handle an answer to no pending request: slots ahead, or an answer that came too late."""
        is_whole = granted.states == bytes((RESERVED,)) * (len(granted.offsets) // 8)
        self._take_offsets(granted.sequence, granted.offsets if is_whole else b"")

    def note_ahead(self, committed: Committed) -> None:
        """Store the slots ahead that the answer to a Commit reports, if any."""
        if committed.ahead:
            self._take_offsets(committed.ahead, committed.offsets)

    def take_ahead(self, lengths: U64) -> Ahead | None:
        """Return slots ahead that fit this batch: still live, and owned by the caller from now on.

        A batch with fewer pages leaves some slots unnamed. Slots that do not fit this batch are
        dropped: they would not fit the next one either.
        """
        packed = lengths.tobytes()
        with self._lock:
            self._give_up(ahead for ahead in self._ahead if not ahead.lengths.startswith(packed))
            if not self._ahead:
                return None
            known = [ahead for ahead in self._ahead if ahead.offsets is not None]
            taken = (known or self._ahead)[0]
            self._ahead.remove(taken)
            return taken

    def _take_offsets(self, sequence: int, offsets: bytes) -> None:
        """Store the offsets of slots ahead; too few mean that there was no room."""
        with self._lock:
            for ahead in self._ahead:
                if ahead.sequence == sequence:
                    if len(offsets) == len(ahead.lengths):
                        ahead.offsets = np.frombuffer(offsets, np.uint64)
                    else:
                        self._skipping = SKIPPED
                        self._give_up([ahead])
                    return

    def _begin(self) -> int:
        self._newest += 1
        self._live[self._newest] = None
        return self._newest

    def _give_up(self, aheads: Iterable[Ahead]) -> None:
        """Leave these out of the next report: no writes to them follow."""
        for ahead in list(aheads):
            self._live.pop(ahead.sequence, None)
            self._ahead.remove(ahead)


def offsets_of(granted: Granted, pages: int) -> U64 | None:
    """Return the offset of each page's slot, None unless every page has one."""
    if granted.states != bytes((RESERVED,)) * pages or len(granted.offsets) != 8 * pages:
        return None
    return np.frombuffer(granted.offsets, np.uint64)


RESERVE_PAGES_MAX = 2048
"""Pages of one Reserve, the most that a home node accepts: 48 KiB of keys and lengths."""

PORTION_BYTES = 64 * 2**20
"""Minimum bytes of a portion: 5 ms of copying, as long as the Commit that it hides takes with its
owners. With two cores, smaller portions hide less than their messages cost."""

PORTIONS_MAX = 4
"""Portions of a batch, unless RESERVE_PAGES_MAX requires more: each costs four messages to and from
the home node, and two for each owner."""

RESEND_FRACTION = 1 / 2
"""Fraction of a stall: the silence after which the request to the home node is repeated. A lost
message costs a retry, and only a second silence opens its breaker. Each further silence may be
twice as long, so that an answer which always takes longer than the first one arrives too."""

SILENCE_FRACTION = 1 / 2
"""Fraction of a set's time for which the home node may be silent. On an overloaded host a node is
silent for longer than a stall although it serves. Lookups miss then, because a request waits for
them; engines store in the background, so a set waits. A hung node costs this time once: after it
sets wait only when a probe is due."""

PUBLISH_TIMEOUT_S = 0.1
"""How long a Commit waits for a directory owner; its answer must still arrive by the deadline."""

COMMIT_S = 0.1
"""Time reserved after the copy for the Commit, so that copied pages are stored."""

CHECKSUM_FRACTION = 1 / 3
"""Fraction of the copy's time that is reserved for checksums if every page needs one. They take no
longer than the copy."""

assert PUBLISH_TIMEOUT_S + RESEND_FRACTION * STALL_S < STALL_S, (
    "one slow Commit would open the breaker"
)

Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.intp]

_REASONS = {
    REFUSED_SIZE: reasons.WRONG_SIZE,
    REFUSED_TOO_LARGE: reasons.TOO_LARGE,
    REFUSED_FULL: reasons.POOL_FULL,
    REFUSED_DRAINING: reasons.DRAINING,
}


@attrs.define(eq=False)
class WriteOutcome:
    """The result of a set.

    stored:      (n,) bool, committed at home, by this call or before it.
    reasons:     why a page is not stored, "" if it is. copied/here: how many pages this call
                 committed, and how many were stored already.
    unpublished: stored pages that not every directory owner acknowledged in time.
    """

    stored: Mask
    reasons: list[str]
    copied: int = 0
    copied_bytes: int = 0
    here: int = 0
    unpublished: int = 0


@attrs.frozen(eq=False)
class _Slots:
    """The slots of a portion.

    states: a byte per page; offsets: (n,), those of RESERVED pages.
    unnamed: the packed keys of the slots, if the home node does not know them.
    """

    states: bytes
    offsets: U64
    unnamed: bytes

    def reserved(self) -> Places:
        """Return which pages have a slot to be written."""
        places: Places = (np.frombuffer(self.states, np.uint8) == RESERVED).nonzero()[0]
        return places


@attrs.frozen(eq=False)
class _Question:
    """A request to the home node. number: to collect its answer; 0: it was not sent yet."""

    message: Message
    number: int = 0
    timeout_s: float = 0.0


@attrs.define(eq=False)
class _Portion:
    """Some pages of a batch, with a reservation of their own.

    places:   their indices in the batch.
    sequence: the number of their reservation, 0 before it has begun.
    written:  (n,) uint8, 1 = the slot holds all bytes of the page; checksums: (n,), 0: none.
    """

    places: Places
    keys: PageKeys
    runs: PageRuns
    sequence: int = 0
    reserve: _Question | None = None
    slots: _Slots | None = None
    commit: _Question | None = None
    written: npt.NDArray[np.uint8] = attrs.field(init=False)
    checksums: U64 = attrs.field(init=False)

    @written.default
    def _none_written(self) -> npt.NDArray[np.uint8]:
        return np.zeros(len(self.keys), np.uint8)

    @checksums.default
    def _no_checksums(self) -> U64:
        return np.zeros(len(self.keys), np.uint64)


@final
@attrs.define(eq=False, kw_only=True)
class Writer:
    """Writes batches of pages into the home node's pool, with checksums according to `verify`."""

    cache: LocationCache
    breakers: Breakers
    verify: str
    namespace_tag: int
    clock: Callable[[], float]
    _portion_bytes: int = PORTION_BYTES

    def set(
        self,
        keys: PageKeys,
        runs: PageRuns,
        *,
        home: int,
        reservations: ClientReservations,
        until: float,
    ) -> Generator[Step, Any, WriteOutcome]:
        """Store every page that fits, by `until`."""
        outcome = WriteOutcome(np.zeros(len(keys), np.bool_), [""] * len(keys))
        lengths = runs.lengths
        sane = (lengths > 0) & (lengths <= PAGE_BYTES_MAX)
        places = sane.nonzero()[0]
        if len(places) < len(keys):
            for place in np.flatnonzero(~sane).tolist():
                outcome.reasons[place] = reasons.TOO_LARGE if lengths[place] else reasons.WRONG_SIZE
        while len(places):
            if self.clock() >= until:
                _refuse(outcome, places, reasons.DEADLINE)
                break
            one_round = _Round(self, home, reservations, until, outcome)
            full = yield from one_round.store(_portions_of(keys, runs, places, self._portion_bytes))
            if one_round.ended_by or len(full) == len(places):
                # Pages without room while others were stored may find room now; else the pool stays
                # full.
                _refuse(outcome, places, one_round.ended_by or reasons.POOL_FULL)
                break
            places = full
        if not outcome.stored.all():
            _spread_repeats(keys, outcome)
        return outcome


@final
class _Round:
    """Every open page of a batch is reserved, copied and committed once.

    ended_by: why it ended before its last portion; "" if it did not.
    """

    def __init__(
        self,
        writer: Writer,
        home: int,
        reservations: ClientReservations,
        until: float,
        outcome: WriteOutcome,
    ) -> None:
        self.ended_by = ""
        self._cache = writer.cache
        self._epoch = writer.cache.epoch
        self._breakers = writer.breakers
        self._verify = writer.verify
        self._namespace_tag = writer.namespace_tag
        self._clock = writer.clock
        self._home = home
        self._reservations = reservations
        self._until = until
        self._outcome = outcome
        self._copied_by = until
        self._silence_max_s = (until - self._clock()) * SILENCE_FRACTION

    def store(self, portions: list[_Portion]) -> Generator[Step, Any, Places]:
        """Store the pages for which there is room, by the deadline; return the others' indices."""
        try:
            yield from self._copy_all(portions)
            full: list[Places] = []
            for portion in portions:
                answer: Committed | None = None
                if portion.commit is not None:
                    answer = yield from self._committed(portion.commit, len(portion.keys))
                if portion.slots is not None:
                    full.append(self._settle(portion, portion.slots, answer))
            return np.concatenate(full) if len(full) > 1 else (full or [portions[0].places[:0]])[0]
        finally:
            # Only now: an unlisted reservation may be freed while its Commit is in flight.
            for portion in portions:
                self._reservations.end(portion.sequence)

    def _copy_all(self, portions: list[_Portion]) -> Generator[Step, Any, None]:
        """Copy portion after portion; meanwhile the home node handles the next and the last one."""
        is_alone = len(portions) == 1
        for portion, following in zip_longest(portions, portions[1:]):
            if portion is portions[0]:
                yield from self._take_ahead(portion)
                if portion.slots is None:
                    yield from self._reserve(portion, is_sent=not is_alone)
                self._copied_by = self._until - min(COMMIT_S, (self._until - self._clock()) / 4)
            if following is not None:
                yield from self._reserve(following, is_sent=True)
            if portion.reserve is not None:
                portion.slots = yield from self._granted(portion, portion.reserve)
            if portion.slots is not None:
                yield from self._copy(portion, portion.slots)
                yield from self._commit(
                    portion, portion.slots, is_sent=not is_alone, is_first=portion is portions[0]
                )
                if following is not None and self._clock() >= self._copied_by:
                    self.ended_by = reasons.DEADLINE
            if self.ended_by:
                if following is not None:
                    yield Post(((self._home, Abort(following.sequence)),))
                return

    # --- reserve ----------------------------------------------------------------------------------

    def _take_ahead(self, portion: _Portion) -> Generator[Step, Any, None]:
        """Use granted slots ahead for a portion, if any fit."""
        # Pages that are stored already are requested by key: they need no copy.
        if self._cache.has_any_at(self._home, portion.keys):
            return
        if self._reservations.awaits_grant():
            yield Drain(self._home)
        ahead = self._reservations.take_ahead(portion.runs.lengths)
        if ahead is None:
            return
        portion.sequence, count = ahead.sequence, len(portion.keys)
        if ahead.offsets is None:
            # The same number again: the home node repeats its answer, or sends it now.
            reserve = Reserve(0, ahead.sequence, self._namespace_tag, b"", ahead.lengths)
            granted = yield from self._insist(reserve)
            if isinstance(granted, Granted):
                ahead.offsets = offsets_of(granted, len(ahead.lengths) // 8)
        if ahead.offsets is None:
            self._reservations.end(ahead.sequence)
            return
        states = bytes((RESERVED,)) * count
        portion.slots = _Slots(states, ahead.offsets[:count], portion.keys.tobytes())

    def _reserve(self, portion: _Portion, *, is_sent: bool) -> Generator[Step, Any, None]:
        """Begin a reservation; is_sent: request its slots now, and collect the answer later."""
        portion.sequence = self._reservations.begin()
        keys, lengths = portion.keys.tobytes(), portion.runs.lengths.tobytes()
        message = Reserve(0, portion.sequence, self._namespace_tag, keys, lengths)
        number: int = (yield Submit(self._home, message)) if is_sent else 0
        portion.reserve = _Question(message, number)

    def _granted(
        self, portion: _Portion, reserve: _Question
    ) -> Generator[Step, Any, _Slots | None]:
        """Return the slots of a portion; None, and end the round, if the home node grants none."""
        granted = yield from self._answer(reserve)
        if not isinstance(granted, Granted) or not _fits(granted, len(portion.keys)):
            self.ended_by = self._unanswered() if granted is None else reasons.NO_HOME
            return None
        return _Slots(granted.states, np.frombuffer(granted.offsets, np.uint64), b"")

    # --- copy -------------------------------------------------------------------------------------

    def _copy(self, portion: _Portion, slots: _Slots) -> Generator[Step, Any, None]:
        """Copy the pages with slots, mark those that are copied completely, compute checksums.

        A page without a checksum in time, if readers of this mode require one, is not marked: it
        would block the next set of its key.
        """
        count = slots.states.count(RESERVED)
        if not count:
            return
        runs, written, copied_by = portion.runs, portion.written, self._copied_by
        # If every page needs a checksum, time is left to compute them for the copied pages.
        needs_checksums = refuses_without_checksum(self._verify)
        kept_back_s = (copied_by - self._clock()) * CHECKSUM_FRACTION if needs_checksums else 0.0
        until = copied_by - kept_back_s
        if count == len(written):
            count = yield Place(slots.offsets, runs, until)
            written[:count] = 1
        else:
            wanted = slots.reserved()
            count = yield Place(slots.offsets[wanted], runs.take(wanted), until)
            written[wanted[:count]] = 1
        sampled = wants_checksum(portion.keys, self._verify)
        if count < len(written):
            sampled = sampled[written[sampled] == 1]
        for part in checksum_portions(sampled, runs.lengths):
            # A late page would be lost; without a checksum its generation still verifies it.
            if self._clock() >= copied_by:
                break
            portion.checksums[part] = yield Checksum(runs, part)
        if needs_checksums:
            written[portion.checksums == 0] = 0

    # --- commit -----------------------------------------------------------------------------------

    def _commit(
        self, portion: _Portion, slots: _Slots, *, is_sent: bool, is_first: bool
    ) -> Generator[Step, Any, None]:
        """Commit what was written; is_sent: send it now, and collect its answer later.

        Pages that were stored already are committed again: their owners may not know them yet.
        """
        written = np.count_nonzero(portion.written)
        if not written and HERE not in slots.states:
            if RESERVED in slots.states:
                yield Post(((self._home, Abort(portion.sequence)),))
            return
        now = self._clock()
        timeout_s = self._timeout_s(now)
        ahead: tuple[int, ...] = ()
        if is_first and written == len(portion.written):
            # A batch of only new pages is often followed by another one.
            ahead = self._reservations.ask_ahead(portion.runs.lengths, now)
        message = Commit(
            0,
            portion.sequence,
            portion.written.tobytes(),
            portion.checksums.tobytes(),
            timeout_s,
            slots.unnamed,
            ahead,
        )
        number: int = (yield Submit(self._home, message)) if is_sent else 0
        portion.commit = _Question(message, number, timeout_s)

    def _committed(self, commit: _Question, pages: int) -> Generator[Step, Any, Committed | None]:
        """Return the answer to a Commit; None without a valid one."""
        answer = yield from self._answer(commit)
        if not isinstance(answer, Committed):
            return None
        self._reservations.note_ahead(answer)
        return answer if len(answer.states) == pages else None

    # --- requests ---------------------------------------------------------------------------------

    def _answer(self, question: _Question) -> Generator[Step, Any, Any]:
        """Return the home node's answer to a request, sent already or not; None without one."""
        if question.number:
            now = self._clock()
            wait_s = RESEND_FRACTION * self._breakers.stall_s + question.timeout_s
            if self._breakers.is_open(self._home) and self._silence_left_s() <= 0:
                # An answer that has arrived already still counts.
                wait_s = 0.0
            answer: Message | None = yield Collect(question.number, min(self._until, now + wait_s))
            if answer is not None:
                return answer
        return (yield from self._insist(question.message))

    def _timeout_s(self, now: float) -> float:
        """Return how long a Commit that is sent now may wait for directory owners."""
        return max(0.0, min(PUBLISH_TIMEOUT_S, (self._until - now) / 2))

    def _silence_left_s(self) -> float:
        """Return for how much longer the home node may be silent; less than 0 if it is gone."""
        return self._silence_max_s - self._breakers.silent_s(self._home)

    def _unanswered(self) -> str:
        """Return why there is no answer: the home node is gone or silent, or the time is over."""
        if self._breakers.silent_s(self._home) == math.inf:
            return reasons.NO_HOME
        was_silent = self._silence_left_s() <= 0 or self._breakers.is_open(self._home)
        return reasons.NO_ANSWER if was_silent else reasons.DEADLINE

    def _insist(self, message: Message) -> Generator[Step, Any, Any]:
        """Send a request to the home node until it answers, is gone, or was silent for too long.

        Reserve and Commit are idempotent, so a lost message is sent again. A repeated Commit waits
        like the first one, within the remaining time.
        """
        home, until = self._home, self._until
        silence_s = shortest_s = RESEND_FRACTION * self._breakers.stall_s
        while (now := self._clock()) < until:
            left_s = self._silence_left_s()
            if left_s <= 0 and not self._breakers.available(home, now):
                break
            timeout_s = 0.0
            if isinstance(message, Commit):
                timeout_s = self._timeout_s(now)
                message = attrs.evolve(message, timeout_s=timeout_s)
            wait_s = min(silence_s, max(left_s, shortest_s)) + timeout_s
            silence_s *= 2
            answers: Sequence[Message | None] = yield Ask(
                ((home, message),), min(until, now + wait_s)
            )
            if answers[0] is not None:
                return answers[0]
        return None

    def _settle(self, portion: _Portion, slots: _Slots, committed: Committed | None) -> Places:
        """Record the result of each page; return the indices of pages without room."""
        outcome, places, written = self._outcome, portion.places, portion.written
        if committed is not None:
            self._cache.store_packed(committed.records, self._clock(), epoch=self._epoch)
            count = len(committed.records) // RECORD_BYTES
            outcome.unpublished += max(0, count - committed.published)
            if np.count_nonzero(written) == committed.states.count(COMMITTED) == len(written):
                # All pages, as nearly always: the code below would give the same result.
                self._stored(places)
                outcome.copied += len(places)
                outcome.copied_bytes += int(portion.runs.lengths.sum())
                return places[:0]
        final_states = np.frombuffer(slots.states, np.uint8).copy()
        reserved = slots.reserved()
        why_aborted = reasons.DEADLINE
        if committed is not None:
            final_states[reserved] = np.frombuffer(committed.states, np.uint8)[reserved]
        else:
            final_states[reserved] = ABORTED
            outcome.unpublished += slots.states.count(HERE)
            if portion.commit is not None:
                why_aborted = self._unanswered()
        ours = (final_states == COMMITTED) & (written == 1)
        stored = ours | (final_states == HERE)
        self._stored(places[stored])
        outcome.copied += int(ours.sum())
        outcome.copied_bytes += int(portion.runs.lengths[ours].sum())
        outcome.here += int((final_states == HERE).sum())
        for i in np.flatnonzero(~stored & (final_states != REPEATED)).tolist():
            state = int(final_states[i])
            why = why_aborted if state == ABORTED else _REASONS.get(state, reasons.NO_HOME)
            outcome.reasons[places[i]] = why
        full: Places = places[final_states == REFUSED_FULL]
        return full

    def _stored(self, places: Places) -> None:
        """Record that the pages at these indices of the batch are stored."""
        outcome = self._outcome
        outcome.stored[places] = True
        if any(outcome.reasons):
            # An earlier round may have found no room for it.
            for place in places.tolist():
                outcome.reasons[place] = ""


def _portions_of(
    keys: PageKeys, runs: PageRuns, places: Places, portion_bytes: int
) -> list[_Portion]:
    """Return the portions of the open, ascending indices of a batch."""
    if len(places) < len(keys):
        keys, runs = keys[places], runs.take(places)
    cuts = cuts_of(runs.lengths, portion_bytes)
    if len(cuts) == 2:
        return [_Portion(places, keys, runs)]
    return [
        _Portion(places[begin:end], keys[begin:end], runs.between(begin, end))
        for begin, end in pairwise(cuts)
    ]


def cuts_of(lengths: U64, portion_bytes: int) -> list[int]:
    """Return the limits of portions of about equal size in bytes, the ends included.

    lengths: size of each page. A portion has at least portion_bytes, and at most RESERVE_PAGES_MAX
             pages.
    """
    pages, total = len(lengths), int(lengths.sum())
    count = min(PORTIONS_MAX, total // portion_bytes)
    if count <= 1 and pages <= RESERVE_PAGES_MAX:
        return [0, pages]
    cuts: set[int] = set()
    if count > 1:
        wanted = [total * part // count for part in range(1, count)]
        cuts = set((lengths.cumsum(dtype=np.int64).searchsorted(wanted) + 1).tolist())
    return sorted(cuts | {*range(0, pages, RESERVE_PAGES_MAX), pages})


def _fits(granted: Granted, pages: int) -> bool:
    return len(granted.states) == pages and len(granted.offsets) == 8 * pages


def _spread_repeats(keys: PageKeys, outcome: WriteOutcome) -> None:
    """Copy the result of a repeated key from its first index to the others."""
    names = keys.tolist()
    if len(set(names)) == len(names):
        return
    first: dict[bytes, int] = {}
    for place, name in enumerate(names):
        source = first.setdefault(name, place)
        # An index with a result of its own keeps it: its page may have another size.
        if source != place and not outcome.stored[place] and not outcome.reasons[place]:
            outcome.stored[place] = outcome.stored[source]
            outcome.reasons[place] = outcome.reasons[source]


def _refuse(outcome: WriteOutcome, places: Places, reason: str) -> None:
    for place in places.tolist():
        if not outcome.stored[place] and not outcome.reasons[place]:
            outcome.reasons[place] = reason
