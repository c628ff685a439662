"""Directory shard: which nodes hold which pages, as far as this node has been notified.

Owns    the records that holders publish to this node, and those of its own pool.
Takes   Lookup and ReportStale, from readers; Put, Delete, Repair, StreamSummary and HandedOver,
        from holders; RecordsChanged, from the own pool; CommitAnswered and RemovalDone, from the
        publisher; RemovalDone, from removal; ViewChanged and HeldDead, from membership;
        RingChanged, from the ring.
Sends   Located or Refused, to readers; Acknowledged, SummaryMatches, SummaryDiffers,
        RequestSummary, RequestFreshSummary and VerifyRecords, to holders; Committed and Removed, to
        the client of a commit or a removal.
Keeps   only a holder's own records are taken from it, in the order of its stream's numbers; no
        answer names a node that is not in the view, or is dead or has left there; a record is
        replaced only by a newer one of its holder, by a delete that is not older, or by a repair:
        no other node can remove it. A forged number does not end a holder's stream. The table has
        authority only while it has all records of live holders that this node owns.
Limits  RECORDS_MAX in all and each member's share of them; UNKNOWN_HOLDERS_MAX,
        UNKNOWN_RECORDS_MAX, UNKNOWN_S, HOLDERS_NAMED_MAX, LOOKUP_KEYS_MAX, LOCATED_MAX,
        DISPUTES_MAX, SWEEP_KEYS_MAX, GROWTH_SLOTS_MAX, ROWS_MAX.

The directory is a hint: an error here costs a miss, or a read that fails its generation check,
until the holder's next summary repairs it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import final

import attrs
import numpy as np
from typing_extensions import assert_never

from peercache.actors.directory.holdings import (
    NAME_BYTES,
    TICK_S,
    Holdings,
    OwnRecords,
    ShardAuthority,
)
from peercache.actors.directory.table import ROWS_MAX, SEED_BYTES, Change, DirectoryTable
from peercache.actors.effects import Effect, NotifyPlacement, Send
from peercache.actors.mailboxes import (
    TAKER,
    CommitAnswered,
    DirectoryMessage,
    HeldDead,
    RecordsChanged,
    RemovalDone,
    RingChanged,
    StreamMessage,
    Summary,
    ViewChanged,
)
from peercache.actors.origin import Origin
from peercache.model import records
from peercache.model.keys import KEY_BYTES
from peercache.model.member import ALIVE, SUSPECT
from peercache.model.reads import TICK_AGE_MAX_S
from peercache.model.records import DROP_BYTES, RECORD_BYTES
from peercache.observability.metrics import Metrics
from peercache.wire.messages.directory import (
    Acknowledged,
    Delete,
    HandedOver,
    Located,
    Lookup,
    Put,
    Repair,
    ReportStale,
    RequestFreshSummary,
    RequestSummary,
    StreamSummary,
    SummaryDiffers,
    SummaryMatches,
    VerifyRecords,
)
from peercache.wire.messages.session import Refused

UNKNOWN_HOLDERS_MAX = 64
"""Holders that are not in the view yet: in a burst of joins, records may arrive before the view."""

UNKNOWN_RECORDS_MAX = 4096
"""Records kept for each of those: 320 KB. Refused ones come again with the first summary."""

UNKNOWN_S = 60.0
"""How long they are kept: ten times what a view needs to spread."""

RECORDS_MAX = 2**24
"""Records kept for all other members together: about 1.3 GB, and 16 TB in pages of 1 MiB."""

SHARE_MEMBERS_MIN = 4
"""One member may use twice its even share of RECORDS_MAX, and at most half of it: members that
publish without end do not displace the records of others."""

STREAM_GAP_MAX = 2**16
"""How far a delayed summary may be behind: far more messages than are ever in flight in one stream.
If the number held is further ahead of a summary, the holder never sent that number."""

STREAM_LATE_S = 3.0
"""How long all summaries of a holder may be behind the number held, before that number counts as
forged: reordered messages are not delayed for so long."""

DISPUTES_MAX = 4096
"""ReportStale records that are passed on to their holders in DISPUTES_S; further ones are dropped:
the holder's summaries repair as well."""

DISPUTES_S = 1.0

HOLDERS_NAMED_MAX = 8
"""Holders returned for one page: a ninth copy adds no bandwidth, and takes room in answers."""

LOOKUP_KEYS_MAX = 2048
"""Keys of one Lookup; a longer one is refused."""

LOCATED_MAX = 4096
"""Records in one answer: 224 KiB. A lookup of 512 keys is answered with all holders up to
HOLDERS_NAMED_MAX a key. A longer one may be answered with fewer, the same number for each key."""

SWEEP_KEYS_MAX = 1024
"""Keys of ended holders that one tick sweeps: about half a millisecond."""

SWEEP_EVERY_S = 0.01
"""Pause between two sweeps, in which lookups are answered."""

GROWTH_SLOTS_MAX = 2**17
"""Slots of the table's index that one tick moves while it grows: about 1 ms."""


@final
@attrs.define(kw_only=True, eq=False)
class DirectoryShard:
    """The records that this node knows, by holder and by key."""

    incarnation: int
    metrics: Metrics = attrs.field(factory=Metrics)
    records_max: int = RECORDS_MAX
    seed: bytes = bytes(SEED_BYTES)
    """The seed of the hash of keys. Each node has its own, which no peer can find out."""
    table_file: int = -1
    """Descriptor of the file for the table; -1 for private memory."""
    clock: Callable[[], float] | None = None
    """CLOCK_MONOTONIC, with which readers compare the table's tick; None: the actors' time."""
    tick_s: float = TICK_S
    _table: DirectoryTable = attrs.field(init=False)
    _held: dict[int, Holdings] = attrs.field(factory=dict, init=False)
    _serving: set[int] = attrs.field(factory=set, init=False)
    """The holders that answers may name."""
    _states: dict[int, int] = attrs.field(factory=dict, init=False)
    """The view: the state of each member."""
    _unknown: dict[int, float] = attrs.field(factory=dict, init=False)
    """Holders that no view has named, and since when, oldest first."""
    _ended: dict[int, int] = attrs.field(factory=dict, init=False)
    """The last stream number of members that are dead or have left, in case one refutes."""
    authority: ShardAuthority = attrs.field(init=False)
    _own: OwnRecords = attrs.field(init=False)
    _tick_at: float = attrs.field(default=math.inf, init=False)
    _disputed: dict[bytes, None] = attrs.field(factory=dict, init=False)
    """What was recently passed on to holders: key, holder, offset and generation of each record."""
    _disputed_until: float = attrs.field(default=-math.inf, init=False)
    _sweeping: deque[int] = attrs.field(factory=deque, init=False)
    """The table's entries of holders that ended."""
    _sweep_at: float = attrs.field(default=math.inf, init=False)
    """When the next step of a sweep, or of the table's growth, is due."""
    _count: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        """Serve the own pool's records from the start, in whatever state a view has this node."""
        self._table = DirectoryTable(
            self.seed, answer_max=LOCATED_MAX, rows_max=ROWS_MAX,
            file=self.table_file, incarnation=self.incarnation, loads_ahead=self.table_file >= 0,
        )  # fmt: skip
        self.authority = ShardAuthority(
            incarnation=self.incarnation, table=self._table, held=self._held
        )
        own = self._begun(self.incarnation, is_served=True)
        assert own is not None, "a new table has no room for one holder"
        self._held[self.incarnation] = own
        self._own = OwnRecords(own)
        # Computed on access, so that it adds no cost to messages.
        self.metrics.directory_records.set_function(lambda: self._count)

    @property
    def record_count(self) -> int:
        """How many records this shard holds, its own node's included."""
        return self._count

    @property
    def table(self) -> DirectoryTable:
        """The table, for readers other than this actor."""
        return self._table

    def on_message(self, sender: Origin, message: DirectoryMessage, now: float) -> list[Effect]:
        """Answer a lookup, or apply a message from a holder, a reader, the pool or membership."""
        self._notice_stall(now)
        match message:
            case Lookup(request, keys):
                count = len(keys) // KEY_BYTES
                if count > LOOKUP_KEYS_MAX:
                    detail = f"{count} keys in one Lookup, {LOOKUP_KEYS_MAX} at most"
                    return [Send(sender, Refused(request, "malformed", detail))]
                located = self._locate(keys, sender.identity)
                return [Send(sender, Located(request, located, self.authority.is_behind(now)))]
            case Put() | Delete() | Repair():
                return self._apply(sender, message, now)
            case StreamSummary() | HandedOver():
                return self._compare(sender, message, now)
            case ReportStale(disputed):
                return self._dispute(disputed, now)
            case RecordsChanged():
                for change in self._own.change(message, now):
                    self._refuse("too_many", self._note(change, now).refused)
                self.authority.note_own(is_whole=self._own.is_whole, now=now)
                return []
            case ViewChanged():
                self._follow(message, now)
                return []
            case RingChanged(ring):
                self.authority.turn(ring, now)
                if self._tick_at == math.inf:
                    self._tick_at = now
                return []
            case HeldDead():
                self.authority.doubt_all(now)
                return []
            case CommitAnswered(origin, committed):
                if origin == TAKER:
                    return [NotifyPlacement(committed)]
                return [Send(origin, committed)]
            case RemovalDone(origin, removed):
                # Clients of this host may have cached the locations of the pages.
                self.table.count_removal()
                return [Send(origin, removed)]
        assert_never(message)

    def on_tick(self, now: float) -> list[Effect]:
        """Drop holders that no view names; do a bounded step of the table's sweep and growth."""
        for holder, since in list(self._unknown.items()):
            if since + UNKNOWN_S > now:
                break
            del self._unknown[holder]
            self._end(holder, now)
        if self._sweep_at <= now:
            self._sweep(SWEEP_KEYS_MAX)
            is_growing = self._table.is_growing and self._table.tend(GROWTH_SLOTS_MAX)
            has_more = self._sweeping or is_growing
            self._sweep_at = now + SWEEP_EVERY_S if has_more else math.inf
        if self._own.retry_at <= now:
            self._note(self._own.retry(now), now)
            self.authority.note_own(is_whole=self._own.is_whole, now=now)
        if self._tick_at > now or self._tick_at == math.inf:
            return []
        self._notice_stall(now)
        wanted: list[Effect] = []
        for holder in self.authority.due(now):
            least = self.authority.least(holder)
            wanted.append(Send(holder, RequestFreshSummary(least) if least else RequestSummary()))
        self._tick_at = now + self.tick_s
        self._table.tick(now if self.clock is None else self.clock())
        return wanted

    def deadline(self) -> float:
        """Return when the table has work again, or when the oldest unknown holder is dropped."""
        oldest = next(iter(self._unknown.values()), math.inf)
        return min(self._sweep_at, oldest + UNKNOWN_S, self._tick_at, self._own.retry_at)

    def check(self) -> None:
        """Assert the invariants that are cheap to check."""
        assert self.incarnation in self._serving, "the own pool is always served"
        assert len(self._unknown) <= UNKNOWN_HOLDERS_MAX, "too many unknown holders"
        assert len(self._serving) + len(self._unknown) == len(self._held), "a holder in no state"
        has_work = bool(self._sweeping) or self._table.is_growing
        # Messages advance a growth, too: it may be finished before its next tick.
        assert not has_work or self._sweep_at < math.inf, "a sweep or a growth without a time"
        assert self._count >= 0, "fewer records than none"

    # --- questions --------------------------------------------------------------------------------

    def _locate(self, keys: bytes, asker: int) -> bytes:
        """Return the packed records of these keys, in key order."""
        count, found = self._table.locate(keys, asker, HOLDERS_NAMED_MAX)
        if count > LOCATED_MAX:
            fewer = LOCATED_MAX // (len(keys) // KEY_BYTES)
            _, found = self._table.locate(keys, asker, fewer)
        return found

    def _notice_stall(self, now: float) -> None:
        """Doubt all holders if this process was paused for longer than readers tolerate."""
        if now - self._tick_at > TICK_AGE_MAX_S - self.tick_s:
            self.authority.doubt_all(now)
            self._tick_at = now

    def _dispute(self, disputed: bytes, now: float) -> list[Effect]:
        """Ask holders about the disputed records that are held here: only they withdraw them."""
        if now >= self._disputed_until:
            self._disputed.clear()
            self._disputed_until = now + DISPUTES_S
        effects: list[Effect] = []
        for holder, packed in _by_holder(disputed):
            held = self._held.get(holder)
            # The own pool has reported this to the shard already.
            if held is None or holder == self.incarnation or holder not in self._serving:
                continue
            doubted: list[bytes] = []
            for index, is_held in enumerate(held.has(packed)):
                record = packed[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]
                name = record[:NAME_BYTES]
                if not is_held or name in self._disputed:
                    continue
                if len(self._disputed) >= DISPUTES_MAX:
                    self._refuse("disputes", 1)
                    continue
                self._disputed[name] = None
                doubted.append(record)
            if doubted:
                effects.append(Send(holder, VerifyRecords(b"".join(doubted))))
        return effects

    # --- streams ----------------------------------------------------------------------------------

    def _apply(self, sender: Origin, message: StreamMessage, now: float) -> list[Effect]:
        """Apply one numbered message of a holder's stream."""
        holder = sender.identity
        held = self._holdings_of(holder, now)
        if held is None:
            self._refuse("not_a_member", _items(message))
            return []
        if message.number <= held.number:
            # A repeated or delayed message: applied now, it could bring back what was deleted
            # since. The shard does not remember whether a message before the last one was applied,
            # so it does not acknowledge it either; the summary shows what is missing.
            return self._acknowledge(sender, held, message.number)
        if not self._has_room(holder, held, message):
            self._refuse("too_many", _items(message))
            held.is_whole = False
            self.authority.note_differing(holder, now)
            return []
        match message:
            case Put(_, packed):
                change = held.put(self._own_words(holder, packed))
            case Delete(_, drops):
                change = held.drop(drops)
            case Repair(_, buckets, packed):
                change = held.replace(buckets, self._own_words(holder, packed))
        self._note(change, now)
        if change.refused:
            # This host has no memory for the records. The holder must not rely on records that are
            # not here.
            self._refuse("too_many", change.refused)
            held.is_whole = False
            self.authority.note_differing(holder, now)
            return []
        # A gap is no reason to refuse: each change is safe by itself, and the summary reveals what
        # was lost.
        if held.is_whole and message.number != held.number + 1:
            held.is_whole = False
            self.authority.look(holder, now)
        held.number, held.late_since = message.number, math.inf
        return self._acknowledge(sender, held, message.number)

    def _compare(self, sender: Origin, summary: Summary, now: float) -> list[Effect]:
        """Report to a holder whether its summary matches the records held."""
        holder = sender.identity
        held = self._holdings_of(holder, now)
        if held is None or holder in self._unknown:
            return []
        if summary.number < held.number:
            if not _is_false_number(held, summary.number, now):
                return []  # A late summary describes an earlier state.
            held.number = summary.number
            self.authority.note_false_number(holder, held.number)
        held.late_since = math.inf
        content = held.content
        if content.count == summary.count and content.digest() == summary.digest:
            # Messages that were lost are not needed any more, and must not be applied late.
            held.number = summary.number
            held.matched_at = now
            is_fresh = summary.number >= self.authority.least(holder)
            if isinstance(summary, HandedOver) and is_fresh:
                # Only this ends the doubt: a holder that has restarted its stream may match while
                # it still hands over, because a repair has removed what it published before.
                held.is_whole, held.complete = True, summary.ring
            self.authority.note_matching(holder, now)
            return [Send(sender, SummaryMatches(summary.number))]
        held.is_whole = False
        self.authority.note_differing(holder, now)
        return [Send(sender, SummaryDiffers(summary.number, content.buckets.tobytes()))]

    def _acknowledge(self, sender: Origin, held: Holdings, number: int) -> list[Effect]:
        # Its records are not served, so they do not count as published: no answer names a holder
        # that no view has named.
        is_known = number == held.number and sender.identity in self._serving
        return [Send(sender, Acknowledged(number))] if is_known else []

    def _holdings_of(self, holder: int, now: float) -> Holdings | None:
        """Return the holdings of a holder, new ones if needed; None if it must have none."""
        if holder == self.incarnation:
            return None  # The own pool sends RecordsChanged; this is an attacker.
        held = self._held.get(holder)
        if held is not None:
            return held
        state = self._states.get(holder)
        if state is None and len(self._unknown) >= UNKNOWN_HOLDERS_MAX:
            return None
        if state not in (None, ALIVE, SUSPECT):
            return None  # Dead until the view has it alive; then its summary brings all records.
        held = self._begun(holder, is_served=state is not None)
        if held is None:
            return None
        if state is None:
            self._unknown[holder] = now
        if holder in self._ended:
            # It was dead, and its records are gone: its next summary brings them back.
            self.authority.note_differing(holder, now)
        held.number = self._ended.pop(holder, 0)
        self._held[holder] = held
        return held

    def _begun(self, holder: int, *, is_served: bool) -> Holdings | None:
        """Return new holdings of a holder; None if the table has no room for another holder."""
        entry = self._table.begin(holder, is_served=is_served)
        if entry is None:
            return None
        if is_served:
            self._serving.add(holder)
        return Holdings(self._table, entry)

    def _has_room(self, holder: int, held: Holdings, message: StreamMessage) -> bool:
        if isinstance(message, Delete):
            return True
        more = _items(message)
        if self._count + more <= min(self._share_of(holder), self.records_max):
            return True  # Enough even if all records were this holder's.
        if isinstance(message, Repair):
            more -= held.count_in(message.buckets)
        others = self._count - self._held[self.incarnation].count
        return (
            held.count + more <= self._share_of(holder) and others + more <= self.records_max
        ) or more <= 0

    def _share_of(self, holder: int) -> int:
        """Return how many records are kept of one holder."""
        if holder in self._unknown:
            return UNKNOWN_RECORDS_MAX
        return 2 * self.records_max // max(SHARE_MEMBERS_MIN, len(self._serving))

    def _own_words(self, holder: int, packed: bytes) -> bytes:
        """Return the records that name the sender as holder: only a holder may publish its pool."""
        if records.are_of(packed, holder):
            return packed
        theirs = records.from_bytes(packed)
        honest = theirs["holder"] == np.uint64(holder)
        self._refuse("forged", len(theirs) - int(honest.sum()))
        taken: bytes = theirs[honest].tobytes()
        return taken

    def _refuse(self, reason: str, count: int) -> None:
        if count:
            self.metrics.records_refused.labels(reason).inc(count)

    # --- the view, and holders that end -----------------------------------------------------------

    def _follow(self, view: ViewChanged, now: float) -> None:
        self._states = {member.incarnation: member.state for member in view.members}
        self.authority.states = self._states
        for holder, held in list(self._held.items()):
            state = self._states.get(holder)
            if holder == self.incarnation or (state is None and holder in self._unknown):
                continue
            self._unknown.pop(holder, None)
            if state in (ALIVE, SUSPECT):
                self._serving.add(holder)
                self._table.serve(held.entry, is_served=True)
                continue
            self._end(holder, now)
            self._ended[holder] = held.number
        # A member that the view has forgotten does not come back.
        self._ended = {h: number for h, number in self._ended.items() if h in self._states}
        for holder, held in self._held.items():
            if self._states.get(holder) == SUSPECT:
                # What it has sent may be lost; it reports that itself when it is back.
                held.is_whole = False
        self.authority.look_at_all(now)

    def _end(self, holder: int, now: float) -> None:
        """Stop serving a holder now; its keys are swept later, a few at a time."""
        held = self._held.pop(holder)
        self.authority.forget(holder)
        self._serving.discard(holder)
        self._table.serve(held.entry, is_served=False)
        self._count -= held.count
        self._sweeping.append(held.entry)
        if self._sweep_at == math.inf:
            self._sweep_at = now + SWEEP_EVERY_S

    def _sweep(self, budget: int) -> None:
        while self._sweeping and budget > 0:
            swept = self._table.sweep(self._sweeping[0], budget)
            if swept < budget:
                # No record is left. If the holder has refuted in the meantime, its new records are
                # in another entry.
                self._sweeping.popleft()
            budget -= swept

    def _note(self, change: Change, now: float) -> Change:
        """Count what a batch has changed, and schedule the table's growth."""
        self._count += change.fresh - change.gone
        if self._table.is_growing and self._sweep_at == math.inf:
            self._sweep_at = now + SWEEP_EVERY_S
        return change


def _is_false_number(held: Holdings, number: int, now: float) -> bool:
    """Return whether the number held is forged: the holder's summary has this lower number.

    Another process may have sent it in the holder's name: that must not end the stream.
    """
    if held.number - number > STREAM_GAP_MAX:
        return True
    held.late_since = min(held.late_since, now)
    return now - held.late_since >= STREAM_LATE_S


def _items(message: StreamMessage) -> int:
    """Return how many records or drops a message carries."""
    if isinstance(message, Delete):
        return len(message.drops) // DROP_BYTES
    return len(message.records) // RECORD_BYTES


def _by_holder(packed: bytes) -> list[tuple[int, bytes]]:
    """Return packed records as one (holder, packed records) a holder, in order of appearance."""
    # In one pass: a scan of all rows for each holder would take a minute if every record of a
    # message names a different holder.
    parts: dict[int, list[bytes]] = {}
    for index, holder in enumerate(records.from_bytes(packed)["holder"].tolist()):
        row = packed[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]
        parts.setdefault(holder, []).append(row)
    return [(holder, b"".join(rows)) for holder, rows in parts.items()]
