"""The write path: reserve at the home node, copy, commit. Without I/O, as the read path.

A slot that is not wholly copied by the deadline is aborted, never committed. Nothing reads the
caller's memory after the call has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.keys import PageKeys
from peercache.model.records import PAGE_BYTES_MAX, RECORD, RECORD_BYTES
from peercache.model.runs import U64, PageRuns
from peercache.observability import reasons
from peercache.paths.breaker import STALL_S, Breakers
from peercache.paths.locating import LocationCache
from peercache.paths.reserving import Ahead, ClientReservations, offsets_of
from peercache.paths.steps import Ask, Checksum, Drain, Place, Post, Step
from peercache.paths.verify import (
    checksum_portions,
    refuses_without_checksum,
    wants_checksum,
)
from peercache.wire.envelope import Message
from peercache.wire.messages.pool import (
    ABORTED,
    COMMITTED,
    HERE,
    REFUSED_FULL,
    REFUSED_SIZE,
    REFUSED_TOO_LARGE,
    REPEATED,
    RESERVED,
    Abort,
    Commit,
    Committed,
    Granted,
    Reserve,
)

RESERVE_PAGES_MAX = 2048
"""Pages of one Reserve, the most that a home node takes: 48 KiB of keys and lengths."""

RESEND_S = STALL_S / 2
"""Silence after which the home node is asked again: a lost message costs a retry, and only a second
silence opens its breaker."""

PUBLISH_PATIENCE_S = 0.1
"""How long a Commit waits for a directory owner; its answer must arrive by the deadline even so."""

COMMIT_S = 0.1
"""Kept back from the copy for the Commit, so that pages that were copied in time are stored."""

CHECKSUM_PART = 1 / 3
"""Of the copy's time, where every page needs a checksum: kept back for the checksums. They take no
longer than the copy."""

assert PUBLISH_PATIENCE_S + RESEND_S < STALL_S, "one slow Commit would open the breaker"

Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.intp]

_REASONS = {
    REFUSED_SIZE: reasons.WRONG_SIZE,
    REFUSED_TOO_LARGE: reasons.TOO_LARGE,
    REFUSED_FULL: reasons.POOL_FULL,
    ABORTED: reasons.DEADLINE,
}


@attrs.define(eq=False)
class WriteOutcome:
    """The outcome of a set.

    stored:      (n,) bool, committed at home, by this call or before it.
    reasons:     why a page is not stored, "" where it is.
    copied/here: how many pages this call committed, and how many were there.
    unpublished: pages committed that no directory owner acknowledged in time.
    """

    stored: Mask
    reasons: list[str]
    copied: int = 0
    copied_bytes: int = 0
    here: int = 0
    unpublished: int = 0


@attrs.frozen(eq=False)
class _Slots:
    """The slots of a batch. unnamed: its keys, packed, if the home node does not know them."""

    sequence: int
    states: npt.NDArray[np.uint8]
    offsets: U64
    unnamed: bytes


@final
class Writer:
    """Writes batches of pages into the home node's pool."""

    def __init__(
        self,
        *,
        cache: LocationCache,
        breakers: Breakers,
        verify: str,
        namespace_tag: int,
        clock: Callable[[], float],
    ) -> None:
        """Write pages under `namespace_tag`, with checksums as `verify` says."""
        self._cache = cache
        self._breakers = breakers
        self._verify = verify
        self._namespace_tag = namespace_tag
        self._clock = clock

    def set(
        self,
        keys: PageKeys,
        runs: PageRuns,
        *,
        home: int,
        reservations: ClientReservations,
        until: float,
    ) -> Generator[Step, Any, WriteOutcome]:
        """Store every page that fits, by `until`, in portions of RESERVE_PAGES_MAX pages."""
        outcome = WriteOutcome(np.zeros(len(keys), np.bool_), [""] * len(keys))
        lengths = runs.lengths
        sane = (lengths > 0) & (lengths <= PAGE_BYTES_MAX)
        for place in np.flatnonzero(~sane).tolist():
            outcome.reasons[place] = reasons.TOO_LARGE if lengths[place] else reasons.WRONG_SIZE
        open_places = np.flatnonzero(sane)
        while len(open_places):
            if self._clock() >= until:
                _refuse(outcome, open_places, reasons.DEADLINE)
                break
            portion = open_places[:RESERVE_PAGES_MAX]
            full = yield from self._portion(
                keys[portion], runs.take(portion), portion, home, reservations, until, outcome
            )
            if len(full) == len(portion):
                _refuse(outcome, open_places, outcome.reasons[full[0]] or reasons.POOL_FULL)
                break
            open_places = np.concatenate([full, open_places[RESERVE_PAGES_MAX:]])
        _spread_repeats(keys, outcome)
        return outcome

    def _portion(
        self,
        keys: PageKeys,
        runs: PageRuns,
        places: Places,
        home: int,
        reservations: ClientReservations,
        until: float,
        outcome: WriteOutcome,
    ) -> Generator[Step, Any, Places]:
        """Reserve, copy and commit once; return the places that found no room this time."""
        ahead = yield from self._take_ahead(keys, runs, home, reservations, until)
        sequence = ahead.sequence if ahead is not None else reservations.begin()
        try:
            slots: _Slots | None
            if ahead is not None and ahead.offsets is not None:
                states = np.full(len(keys), RESERVED, np.uint8)
                slots = _Slots(sequence, states, ahead.offsets[: len(keys)], keys.tobytes())
            else:
                slots = yield from self._reserve(sequence, keys, runs, home, until)
            if slots is None:
                _refuse(outcome, places, reasons.NO_HOME)
                return places
            return (
                yield from self._store(
                    slots, keys, runs, places, home, reservations, until=until, outcome=outcome
                )
            )
        finally:
            # Only now: a reservation that is not listed may be freed while its Commit is in flight.
            reservations.end(sequence)

    def _take_ahead(
        self,
        keys: PageKeys,
        runs: PageRuns,
        home: int,
        reservations: ClientReservations,
        until: float,
    ) -> Generator[Step, Any, Ahead | None]:
        """Return granted slots that were reserved ahead, if there are any for such a batch."""
        # Pages that are at home already are asked for by name: they need no copy.
        if self._cache.has_any_at(home, keys.tolist()):
            return None
        if reservations.awaits_grant():
            yield Drain(home)
        ahead = reservations.take_ahead(runs.lengths)
        if ahead is None or ahead.offsets is not None:
            return ahead
        try:
            # The same number again: the home node repeats its answer, or gives it now.
            lengths = ahead.lengths.tobytes()
            reserve = Reserve(0, ahead.sequence, self._namespace_tag, b"", lengths)
            granted = yield from self._insist(home, reserve, until)
            if isinstance(granted, Granted):
                ahead.offsets = offsets_of(granted, len(ahead.lengths))
        finally:
            if ahead.offsets is None:
                reservations.end(ahead.sequence)
        return ahead if ahead.offsets is not None else None

    def _reserve(
        self, sequence: int, keys: PageKeys, runs: PageRuns, home: int, until: float
    ) -> Generator[Step, Any, _Slots | None]:
        """Ask the home node for slots; None where it does not answer."""
        lengths = runs.lengths.tobytes()
        reserve = Reserve(0, sequence, self._namespace_tag, keys.tobytes(), lengths)
        granted = yield from self._insist(home, reserve, until)
        if not isinstance(granted, Granted) or not _fits(granted, len(keys)):
            return None
        states = np.frombuffer(granted.states, np.uint8)
        return _Slots(sequence, states, np.frombuffer(granted.offsets, np.uint64), b"")

    def _store(
        self,
        slots: _Slots,
        keys: PageKeys,
        runs: PageRuns,
        places: Places,
        home: int,
        reservations: ClientReservations,
        *,
        until: float,
        outcome: WriteOutcome,
    ) -> Generator[Step, Any, Places]:
        """Copy into the slots and commit; return the places that found no room this time."""
        wanted = np.flatnonzero(slots.states == RESERVED)
        written = np.zeros(len(keys), np.uint8)
        committed: Committed | None = None
        if len(wanted):
            checksums = yield from self._copy(
                keys, runs, wanted, slots.offsets[wanted], until, written
            )
            if written.any():
                now = self._clock()
                patience_s = max(0.0, min(PUBLISH_PATIENCE_S, (until - now) / 2))
                # Another batch often follows one that was all new.
                ahead = reservations.ask_ahead(runs.lengths, now) if written.all() else ()
                commit = Commit(
                    0,
                    slots.sequence,
                    written.tobytes(),
                    checksums.tobytes(),
                    patience_s,
                    slots.unnamed,
                    ahead,
                )
                answer = yield from self._insist(home, commit, until, patience_s)
                if isinstance(answer, Committed):
                    reservations.told_with(answer)
                    committed = answer if len(answer.states) == len(keys) else None
            else:
                yield Post(((home, Abort(slots.sequence)),))
        return self._settle(places, runs.lengths, slots.states, written, committed, outcome)

    def _copy(
        self,
        keys: PageKeys,
        runs: PageRuns,
        wanted: Places,
        offsets: U64,
        until: float,
        written: npt.NDArray[np.uint8],
    ) -> Generator[Step, Any, U64]:
        """Copy the wanted pages, mark those that are copied whole, return checksums (0: none).

        A page that has no checksum in time, and that no reader of this mode would take without
        one, is not marked: it would stand in the way of the next set of its key.
        """
        checksums = np.zeros(len(keys), np.uint64)
        now = self._clock()
        copied_by = until - min(COMMIT_S, (until - now) / 4)
        # Where every page needs a checksum, they are made in time for what was copied.
        needs_checksums = refuses_without_checksum(self._verify)
        kept_back_s = (copied_by - now) * CHECKSUM_PART if needs_checksums else 0.0
        count: int = yield Place(offsets, runs.take(wanted), copied_by - kept_back_s)
        done = wanted[:count]
        written[done] = 1
        sampled = np.intersect1d(wants_checksum(keys, self._verify), done)
        for part in checksum_portions(sampled, runs.lengths):
            # A late page is lost; without a checksum its generation still verifies it.
            if self._clock() >= copied_by:
                break
            checksums[part] = yield Checksum(runs.take(part))
        if needs_checksums:
            written[checksums == 0] = 0
        return checksums

    def _insist(
        self, home: int, message: Message, until: float, patience_s: float = 0.0
    ) -> Generator[Step, Any, Any]:
        """Ask the home node until it answers, or its breaker opens.

        Reserve and Commit are idempotent, so a lost message is sent again. patience_s: how long the
        home node may take to answer.
        """
        while (now := self._clock()) < until and self._breakers.available(home, now):
            answers: Sequence[Message | None] = yield Ask(
                ((home, message),), min(until, now + RESEND_S + patience_s)
            )
            if answers[0] is not None:
                return answers[0]
        return None

    def _settle(
        self,
        places: Places,
        lengths: U64,
        granted: npt.NDArray[np.uint8],
        written: npt.NDArray[np.uint8],
        committed: Committed | None,
        outcome: WriteOutcome,
    ) -> Places:
        """Note the outcome of each page; return the places that found no room."""
        final_states = granted.copy()
        if committed is not None:
            reserved = granted == RESERVED
            final_states[reserved] = np.frombuffer(committed.states, np.uint8)[reserved]
            self._cache.store(np.frombuffer(committed.records, RECORD), self._clock())
        else:
            final_states[granted == RESERVED] = ABORTED
        ours = (final_states == COMMITTED) & (written == 1)
        stored = ours | (final_states == HERE)
        outcome.stored[places[stored]] = True
        for place in places[stored].tolist():
            # An earlier portion may have found no room for it.
            outcome.reasons[place] = ""
        outcome.copied += int(ours.sum())
        outcome.copied_bytes += int(lengths[ours].sum())
        outcome.here += int((final_states == HERE).sum())
        if committed is not None:
            count = len(committed.records) // RECORD_BYTES
            outcome.unpublished += max(0, count - committed.published)
        for i in np.flatnonzero(~stored & (final_states != REPEATED)).tolist():
            outcome.reasons[places[i]] = _REASONS.get(int(final_states[i]), reasons.NO_HOME)
        full: Places = places[final_states == REFUSED_FULL]
        return full


def _fits(granted: Granted, pages: int) -> bool:
    return len(granted.states) == pages and len(granted.offsets) == 8 * pages


def _spread_repeats(keys: PageKeys, outcome: WriteOutcome) -> None:
    """Copy the outcome of a repeated key from its first place to the others."""
    names = keys.tolist()
    if len(set(names)) == len(names):
        return
    first: dict[bytes, int] = {}
    for place, name in enumerate(names):
        source = first.setdefault(name, place)
        # A place with an outcome of its own keeps it: its page may have another size.
        if source != place and not outcome.stored[place] and not outcome.reasons[place]:
            outcome.stored[place] = outcome.stored[source]
            outcome.reasons[place] = outcome.reasons[source]


def _refuse(outcome: WriteOutcome, places: Places, reason: str) -> None:
    for place in places.tolist():
        if not outcome.stored[place] and not outcome.reasons[place]:
            outcome.reasons[place] = reason
