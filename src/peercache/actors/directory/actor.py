"""Directory shard: which nodes hold which pages, as far as this node was told.

Owns    the records that holders publish to this node, and those of its own pool.
Hears   Lookup and Disputed, from readers; Put, Delete, Repair and StreamSummary, from holders;
        RecordsChanged, from the own pool; ViewChanged, from membership.
Says    Located, to readers; Acknowledged, SummaryMatches and SummaryDiffers, to holders.
Keeps   only a holder's own records are taken from it, in the order of its stream's numbers; no
        answer names a node that the view has not, or has dead or left; a record gives way only to a
        newer one of its holder, to a delete that is not older, to a repair, or to a dispute.
Limits  UNKNOWN_HOLDERS_MAX, UNKNOWN_RECORDS_MAX, UNKNOWN_S, HOLDER_RECORDS_MAX, HOLDERS_TOLD_MAX,
        LOCATED_MAX, SWEEP_KEYS_MAX, SHARED_TUPLES_MAX.

The directory is a hint: whatever is wrong here costs a miss, or a read that its generation check
refuses, until the holder's next summary repairs it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import final

import attrs
import numpy as np
from typing_extensions import assert_never

from peercache.actors.directory.holdings import Holdings, Parts
from peercache.actors.effects import Effect, Send
from peercache.actors.mailboxes import (
    DirectoryHears,
    RecordsChanged,
    StreamMessage,
    ViewChanged,
)
from peercache.actors.origin import Origin
from peercache.model import records
from peercache.model.keys import from_bytes as keys_from_bytes
from peercache.model.member import ALIVE, SUSPECT
from peercache.model.records import DROP_BYTES, RECORD_BYTES
from peercache.observability.metrics import Metrics
from peercache.wire.messages.directory import (
    Acknowledged,
    Delete,
    Disputed,
    Located,
    Lookup,
    Put,
    Repair,
    StreamSummary,
    SummaryDiffers,
    SummaryMatches,
)

UNKNOWN_HOLDERS_MAX = 64
"""Holders that the view does not know yet: a burst of joins whose records came before the view."""

UNKNOWN_RECORDS_MAX = 65_536
"""Records kept for each of those: 20 MB. What is refused comes with the first summary after."""

UNKNOWN_S = 60.0
"""How long they are kept: ten times what a view needs to spread."""

HOLDER_RECORDS_MAX = 2**25
"""Records kept for one member: half a terabyte in pages of 16 KiB."""

HOLDERS_TOLD_MAX = 8
"""Holders named for one page: a ninth copy adds no bandwidth, and costs a slot in every answer."""

LOCATED_MAX = 131_072
"""Records in one answer: 7.3 MB, within the 8 MiB of a message."""

SWEEP_KEYS_MAX = 1024
"""Keys of ended holders that one tick sweeps: about 2 ms."""

SWEEP_EVERY_S = 0.01
"""Pause between two sweeps, in which questions are answered."""

SHARED_TUPLES_MAX = 4096
"""Distinct holder tuples that are shared between keys; beyond, sharing starts anew."""


@final
@attrs.define(kw_only=True, eq=False)
class DirectoryShard:
    """The records that this node knows, by holder and by key."""

    incarnation: int
    metrics: Metrics | None = None
    _held: dict[int, Holdings] = attrs.field(factory=dict, init=False)
    _serving: dict[int, Parts] = attrs.field(factory=dict, init=False)
    """The parts of the holders that answers may name."""
    _holders_of: dict[bytes, tuple[int, ...]] = attrs.field(factory=dict, init=False)
    """Every holder that may hold a key, oldest first; a holder that ended stays until swept."""
    _shared: dict[tuple[int, ...], tuple[int, ...]] = attrs.field(factory=dict, init=False)
    _states: dict[int, int] = attrs.field(factory=dict, init=False)
    """The view: the state of each member."""
    _unknown: dict[int, float] = attrs.field(factory=dict, init=False)
    """Holders that no view has named, oldest first, and since when."""
    _ended: dict[int, int] = attrs.field(factory=dict, init=False)
    """The last stream number of members that are dead or left, should one refute."""
    _sweeping: deque[tuple[int, Parts]] = attrs.field(factory=deque, init=False)
    _sweep_at: float = attrs.field(default=math.inf, init=False)
    _count: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        """Serve the own pool's records from the start, whatever a view says of this node."""
        own = self._held[self.incarnation] = Holdings()
        self._serving[self.incarnation] = own.parts

    @property
    def record_count(self) -> int:
        """How many records this shard holds, its own node's included."""
        return self._count

    def on_message(self, sender: Origin, message: DirectoryHears, now: float) -> list[Effect]:
        """Answer a question, or take what a holder, a reader, the pool or the view says."""
        match message:
            case Lookup(request, keys):
                return [Send(sender, Located(request, self._locate(keys, sender.identity)))]
            case Put() | Delete() | Repair():
                return self._apply(sender, message, now)
            case StreamSummary():
                return self._compare(sender, message, now)
            case Disputed(disputed):
                self._dispute(disputed)
                return []
            case RecordsChanged():
                own = self._held[self.incarnation]
                self._index(self.incarnation, fresh=own.put(message.records.tobytes()))
                self._index(self.incarnation, gone=own.drop(message.drops.tobytes()))
                return []
            case ViewChanged():
                self._follow(message, now)
                return []
        assert_never(message)

    def on_tick(self, now: float) -> list[Effect]:
        """Sweep a bounded part of what ended holders left; drop holders that no view names."""
        for holder, since in list(self._unknown.items()):
            if since + UNKNOWN_S > now:
                break
            del self._unknown[holder]
            self._end(holder, now)
        if self._sweep_at <= now:
            self._sweep(SWEEP_KEYS_MAX)
            self._sweep_at = now + SWEEP_EVERY_S if self._sweeping else math.inf
        return []

    def deadline(self) -> float:
        """Return when the next sweep is due, or the oldest unknown holder is given up."""
        oldest = next(iter(self._unknown.values()), math.inf)
        return min(self._sweep_at, oldest + UNKNOWN_S)

    def check(self) -> None:
        """Assert the invariants that cost nothing to look at."""
        assert self.incarnation in self._serving, "the own pool is always served"
        assert len(self._unknown) <= UNKNOWN_HOLDERS_MAX, "too many unknown holders"
        assert len(self._serving) + len(self._unknown) == len(self._held), "a holder in no state"
        assert bool(self._sweeping) == (self._sweep_at < math.inf), "a sweep without a time"
        assert self._count >= 0, "fewer records than none"

    # --- questions --------------------------------------------------------------------------------

    def _locate(self, keys: bytes, asker: int) -> bytes:
        """Return the packed records of these keys, in key order."""
        found: list[bytes] = []
        names = keys_from_bytes(keys).tolist()
        before: tuple[int, ...] = ()
        parts_of: list[Parts] = []
        for key, holders in zip(names, map(self._holders_of.get, names), strict=True):
            if holders is None:
                continue
            # The pages of a batch most often have the same holders, and then share their tuple.
            if holders is not before:
                before, parts_of = holders, self._parts_of(holders, asker)
            bucket = key[0]
            for parts in parts_of:
                record = parts[bucket].get(key)
                if record is not None:
                    found.append(record)
        return b"".join(found[:LOCATED_MAX])

    def _parts_of(self, holders: tuple[int, ...], asker: int) -> list[Parts]:
        """Return the parts of the holders that an answer to this asker names."""
        if len(holders) > HOLDERS_TOLD_MAX:
            # Askers start at different places, so that no copy is read by all of them.
            first = asker % len(holders)
            holders = (holders[first:] + holders[:first])[:HOLDERS_TOLD_MAX]
        serving = self._serving
        return [serving[holder] for holder in holders if holder in serving]

    def _dispute(self, disputed: bytes) -> None:
        for holder, packed in _by_holder(disputed):
            held = self._held.get(holder)
            # Only the own pool decides about its records.
            if held is None or holder == self.incarnation:
                continue
            for at in range(0, len(packed), RECORD_BYTES):
                gone = held.drop_equal(packed[at : at + RECORD_BYTES])
                self._index(holder, gone=gone)

    # --- streams ----------------------------------------------------------------------------------

    def _apply(self, sender: Origin, message: StreamMessage, now: float) -> list[Effect]:
        """Apply one numbered message of a holder's stream."""
        holder = sender.identity
        held = self._holdings_of(holder, now)
        if held is None:
            self._refuse("not_a_member", _items(message))
            return []
        if message.number <= held.number:
            # A repeated or late message: applied now, it could bring back what was deleted since.
            # Whether an earlier one than the last was ever applied is not remembered, so it is not
            # acknowledged either; the summary tells.
            return self._acknowledge(sender, held, message.number)
        if not self._has_room(holder, held, message):
            self._refuse("too_many", _items(message))
            return []
        # A gap is no reason to refuse: each change is safe by itself, and the summary finds what
        # was lost.
        held.number = message.number
        match message:
            case Put(_, packed):
                self._index(holder, fresh=held.put(self._own_words(holder, packed)))
            case Delete(_, drops):
                self._index(holder, gone=held.drop(drops))
            case Repair(_, buckets, packed):
                fresh, gone = held.replace(buckets, self._own_words(holder, packed))
                self._index(holder, fresh=fresh, gone=gone)
        return self._acknowledge(sender, held, message.number)

    def _compare(self, sender: Origin, summary: StreamSummary, now: float) -> list[Effect]:
        """Tell a holder whether its summary is what is held of it."""
        held = self._holdings_of(sender.identity, now)
        if held is None or summary.number < held.number:
            return []  # A late summary speaks of what has changed since.
        content = held.content
        if content.count == summary.count and content.digest() == summary.digest:
            # Whatever was lost on the way is of no interest any more, and must not come late.
            held.number = summary.number
            return [Send(sender, SummaryMatches(summary.number))]
        return [Send(sender, SummaryDiffers(summary.number, content.buckets.tobytes()))]

    def _acknowledge(self, sender: Origin, held: Holdings, number: int) -> list[Effect]:
        return [Send(sender, Acknowledged(number))] if number == held.number else []

    def _holdings_of(self, holder: int, now: float) -> Holdings | None:
        """Return what is held of a holder, from now on if need be; None if it may not be."""
        if holder == self.incarnation:
            return None  # The own pool speaks by RecordsChanged; this is a forger.
        held = self._held.get(holder)
        if held is not None:
            return held
        state = self._states.get(holder)
        if state is None:
            if len(self._unknown) >= UNKNOWN_HOLDERS_MAX:
                return None
            self._unknown[holder] = now
        elif state not in (ALIVE, SUSPECT):
            return None  # Dead until the view says otherwise; then its summary brings all of it.
        held = self._held[holder] = Holdings(number=self._ended.pop(holder, 0))
        if state is not None:
            self._serving[holder] = held.parts
        return held

    def _has_room(self, holder: int, held: Holdings, message: StreamMessage) -> bool:
        limit = UNKNOWN_RECORDS_MAX if holder in self._unknown else HOLDER_RECORDS_MAX
        return isinstance(message, Delete) or held.content.count + _items(message) <= limit

    def _own_words(self, holder: int, packed: bytes) -> bytes:
        """Return the records whose holder is the sender: only a holder speaks for its pool."""
        theirs = records.from_bytes(packed)
        honest = theirs["holder"] == np.uint64(holder)
        if honest.all():
            return packed
        self._refuse("forged", len(theirs) - int(honest.sum()))
        taken: bytes = theirs[honest].tobytes()
        return taken

    def _refuse(self, reason: str, count: int) -> None:
        if self.metrics is not None:
            self.metrics.records_refused.labels(reason).inc(count)

    # --- the view, and holders that end -----------------------------------------------------------

    def _follow(self, view: ViewChanged, now: float) -> None:
        self._states = {member.incarnation: member.state for member in view.members}
        for holder, held in list(self._held.items()):
            state = self._states.get(holder)
            if holder == self.incarnation or (state is None and holder in self._unknown):
                continue
            self._unknown.pop(holder, None)
            if state in (ALIVE, SUSPECT):
                self._serving[holder] = held.parts
                continue
            self._end(holder, now)
            self._ended[holder] = held.number
        # A member that the view has forgotten does not come back.
        self._ended = {h: number for h, number in self._ended.items() if h in self._states}

    def _end(self, holder: int, now: float) -> None:
        """Stop serving a holder now; its keys are swept later, a few at a time."""
        held = self._held.pop(holder)
        self._serving.pop(holder, None)
        self._count -= held.content.count
        self._tell_count()
        self._sweeping.append((holder, held.parts))
        if self._sweep_at == math.inf:
            self._sweep_at = now + SWEEP_EVERY_S

    def _sweep(self, budget: int) -> None:
        while self._sweeping and budget > 0:
            holder, parts = self._sweeping[0]
            current = self._held.get(holder)
            while parts and budget > 0:
                part = parts[-1]
                while part and budget > 0:
                    key, _ = part.popitem()
                    budget -= 1
                    # It may have refuted and published this page again meanwhile.
                    if current is None or key not in current.parts[key[0]]:
                        self._unlist(key, holder)
                if not part:
                    parts.pop()
            if not parts:
                self._sweeping.popleft()

    # --- the index by key -------------------------------------------------------------------------

    def _index(self, holder: int, fresh: Iterable[bytes] = (), gone: Iterable[bytes] = ()) -> None:
        """Note which keys a holder has come to hold, and which it no longer holds."""
        holders_of, alone = self._holders_of, self._share((holder,))
        before = self._count
        for key in fresh:
            self._count += 1
            holders = holders_of.get(key)
            if holders is None:
                holders_of[key] = alone
            elif holder not in holders:
                holders_of[key] = self._share((*holders, holder))
        for key in gone:
            self._count -= 1
            self._unlist(key, holder)
        if self._count != before:
            self._tell_count()

    def _unlist(self, key: bytes, holder: int) -> None:
        holders = self._holders_of.get(key, ())
        rest = tuple(other for other in holders if other != holder)
        if rest:
            self._holders_of[key] = self._share(rest)
        else:
            self._holders_of.pop(key, None)

    def _share(self, holders: tuple[int, ...]) -> tuple[int, ...]:
        """Return one tuple for all keys with the same holders: a million keys share a few."""
        if len(self._shared) >= SHARED_TUPLES_MAX:
            self._shared.clear()
        return self._shared.setdefault(holders, holders)

    def _tell_count(self) -> None:
        if self.metrics is not None:
            self.metrics.directory_records.set(self._count)


def _items(message: StreamMessage) -> int:
    """Return how many records or drops a message carries."""
    if isinstance(message, Delete):
        return len(message.drops) // DROP_BYTES
    return len(message.records) // RECORD_BYTES


def _by_holder(packed: bytes) -> list[tuple[int, bytes]]:
    """Return packed records as one (holder, packed records) a holder, in order of appearance."""
    # Row by row: to look through all rows for each holder would take a minute of a message in which
    # every record names another one.
    parts: dict[int, list[bytes]] = {}
    for index, holder in enumerate(records.from_bytes(packed)["holder"].tolist()):
        row = packed[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]
        parts.setdefault(holder, []).append(row)
    return [(holder, b"".join(rows)) for holder, rows in parts.items()]
