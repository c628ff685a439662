"""Holdings: the records that a shard has of each holder and of the own pool, and whether they are
complete.

`Holdings` is the receiving end of a record stream. The own pool reports each change once, so
`OwnRecords` keeps what the table refuses, and puts it again.

Authority: the shard may answer that a page does not exist only while it has all records that it
should own of every live holder. A holder is *in sync* for a ring while four things hold: it has
published all of its records that this node owns on that ring, a summary has matched, each message
since then has followed the one before, and the view has the holder alive. Authority needs all
holders of the ring and all records of the own pool, and is lost with the first doubt. Readers of
the table see it as one word and a time.

After this process was paused, a summary counts only if the holder made it later than that: a
summary that waited in a socket does not cover what the holder stored, and tried to publish, in the
meantime. So the owner asks for a summary with a number that no earlier message of the stream can
have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import final

import attrs

from peercache.actors.directory.table import Change, DirectoryTable
from peercache.actors.mailboxes import RecordsChanged
from peercache.model.hash_ring import HashRing
from peercache.model.member import ALIVE
from peercache.model.reads import TICK_AGE_MAX_S
from peercache.model.records import DOUBTED_NUMBERS, NUMBERS_AHEAD_MAX, Content

NAME_BYTES = 40
"""The first bytes of a record: key, holder, offset and generation. They identify one commit."""


@attrs.define(eq=False)
class Holdings:
    """The records of one holder; the shard's table stores them.

    number:  the number of the last message of the stream that was applied.
    late_since: since when all summaries have had lower numbers; inf if the last one did not.
    is_whole:  the holder has handed over, and each message since then has followed the one before.
    complete:  the version of the ring for which the holder has published all that this node owns of
               it.
    matched_at:  when a summary last matched.
    """

    table: DirectoryTable
    entry: int
    number: int = 0
    late_since: float = math.inf
    is_whole: bool = False
    complete: bytes = b""
    matched_at: float = -math.inf

    def put(self, packed: bytes) -> Change:
        """Add the records that are newer than those held."""
        return self.table.put(self.entry, packed)

    def drop(self, packed: bytes) -> Change:
        """Remove each record that is not newer than its drop."""
        return self.table.drop(self.entry, packed)

    def replace(self, buckets: bytes, packed: bytes) -> Change:
        """Replace the content of these buckets; ignore records of other buckets."""
        return self.table.replace(self.entry, buckets, packed)

    def has(self, packed: bytes) -> list[bool]:
        """Return for each record whether this very one is in force: key, place and generation."""
        return self.table.has(self.entry, packed)

    def records(self, bucket: int | None = None) -> bytes:
        """Return the records of one bucket, or all of them."""
        return self.table.read(self.entry, bucket)

    def count_in(self, buckets: bytes) -> int:
        """Return how many records these buckets have."""
        counts, _ = self.table.content(self.entry)
        return sum(int(counts[bucket]) for bucket in set(buckets))

    @property
    def count(self) -> int:
        """The number of records."""
        return self.table.count(self.entry)

    @property
    def content(self) -> Content:
        """Count and digests of the records, for comparison with the holder's own."""
        counts, digests = self.table.content(self.entry)
        return Content(int(counts.sum()), digests)


RETRY_S = 0.25
"""Pause before refused records are put again: a full file system stays full for longer."""

RETRIED_MAX = 1024
"""Records that are put again at once: a third of a millisecond."""


@final
@attrs.define(eq=False)
class OwnRecords:
    """The records of the own pool. retry_at: when to retry refused ones; inf for none."""

    held: Holdings
    retry_at: float = math.inf
    _late: dict[bytes, tuple[int, bytes]] = attrs.field(factory=dict)
    """By key: generation and record of pages that the pool has and the table lacks."""

    @property
    def is_whole(self) -> bool:
        """Whether the table has all of them."""
        return not self._late

    def change(self, changed: RecordsChanged, now: float) -> Iterator[Change]:
        """Apply a change of the pool; yield each change of the table."""
        put = self.held.put(changed.records.tobytes())
        yield put
        if put.refused:
            self._keep(changed)
            self.retry_at = min(self.retry_at, now + RETRY_S)
        elif self._late:
            for key in changed.records["key"].tolist():
                self._late.pop(key, None)
        if len(changed.drops):
            yield self.held.drop(changed.drops.tobytes())
        if self._late:
            self._forget(changed)

    def retry(self, now: float) -> Change:
        """Put some of the refused records again."""
        some = list(islice(self._late, RETRIED_MAX))
        put = self.held.put(b"".join(self._late[key][1] for key in some))
        if not put.refused:
            for key in some:
                del self._late[key]
        self.retry_at = now + RETRY_S if self._late else math.inf
        return put

    def _keep(self, changed: RecordsChanged) -> None:
        keys, generations = changed.records["key"].tolist(), changed.records["generation"].tolist()
        for key, generation, record in zip(keys, generations, changed.records, strict=True):
            if key not in self._late or self._late[key][0] < generation:
                self._late[key] = generation, record.tobytes()

    def _forget(self, changed: RecordsChanged) -> None:
        drops = zip(
            changed.drops["key"].tolist(), changed.drops["generation"].tolist(), strict=True
        )
        for key, generation in drops:
            late = self._late.get(key)
            if late is not None and late[0] <= generation:
                del self._late[key]


TICK_S = 0.025
"""Between two ticks. A busy loop may be late by twice this before readers ask the node instead."""

BEHIND_S = 30.0
"""How long an owner reports that it is behind because of one holder: a holder that always differs
must not double all lookups."""

WANTED_FIRST_S = 0.25
WANTED_MAX_S = 4.0
"""Pauses between two requests to a holder that is in doubt, the first and the longest. Most come
into sync by themselves: a holder reports when it has handed over."""

SUMMARY_AGE_MAX_S = 5.0
SUMMARY_AGE_MEMBER_S = 0.4
"""After how long without a summary a holder is in doubt, plus this much for each member: in a large
cluster summaries are rare. A holder that cannot reach this node, though others reach both, is in
doubt, and if no member reaches this node, it loses authority before they hold it dead."""

SUMMARY_LOOK_S = 1.0

assert TICK_AGE_MAX_S > 2 * TICK_S, "one late tick would take all authority"


@final
@attrs.define(eq=False, kw_only=True)
class ShardAuthority:
    """Tracks which holders are in sync. It reads holdings and the view, and changes neither."""

    incarnation: int
    table: DirectoryTable
    held: Mapping[int, Holdings]
    states: Mapping[int, int] = attrs.field(factory=dict)
    """The view: the state of each member."""
    _ring: bytes = b""
    _members: frozenset[int] = frozenset()
    """The other members of the ring."""
    _in_sync: set[int] = attrs.field(factory=set)
    _behind: dict[int, float] = attrs.field(factory=dict)
    """Holders, the own pool included, of which this shard lacks records, and since when."""
    _wanted: dict[int, tuple[float, float]] = attrs.field(factory=dict)
    """When to ask a holder in doubt for a summary, and the pause before the next request."""
    _least: dict[int, int] = attrs.field(factory=dict)
    """By holder from before the last own stall: the lowest number of a hand-over that counts."""
    _has_stalled: bool = False
    _granted: bytes = b""
    _summaries_look_at: float = 0.0

    @property
    def ring(self) -> bytes:
        """The version of the ring for which an absent key means no page; b"" for no authority."""
        return self._granted

    @property
    def doubted(self) -> int:
        """How many other members of the ring are not in sync."""
        return len(self._members) - len(self._in_sync)

    def is_behind(self, now: float) -> bool:
        """Return whether this shard lacks records of a holder: then "absent" is not certain."""
        return any(now - since < BEHIND_S for since in self._behind.values())

    def turn(self, ring: HashRing, now: float) -> None:
        """Follow a ring: every holder must report that it has handed over its records."""
        before, self._ring = self._members, ring.version
        self._members = frozenset(ring.members) - {self.incarnation}
        self._in_sync.clear()
        for gone in before - self._members:
            self._behind.pop(gone, None)
            self._wanted.pop(gone, None)
        for holder in sorted(self._members):
            self._judge(holder, now)
        self._decide()

    def look(self, holder: int, now: float) -> None:
        """Judge a holder again, after a message from it."""
        if holder in self._members:
            self._judge(holder, now)
            self._decide()

    def look_at_all(self, now: float) -> None:
        """Judge every holder again, after the view has changed."""
        self._least = {h: number for h, number in self._least.items() if h in self.states}
        for holder in sorted(self._members):
            self._judge(holder, now)
        self._decide()

    def note_differing(self, holder: int, now: float) -> None:
        """Note that records of a holder are missing, whether or not the holder is on the ring."""
        self._behind.setdefault(holder, now)
        self.look(holder, now)

    def note_matching(self, holder: int, now: float) -> None:
        """Note that all records that a holder has published are here."""
        if holder not in self._members:
            self._behind.pop(holder, None)
        self.look(holder, now)

    def note_own(self, *, is_whole: bool, now: float) -> None:
        """Note whether the table has all records of the own pool."""
        if is_whole == (self.incarnation not in self._behind):
            return
        if is_whole:
            del self._behind[self.incarnation]
        else:
            self._behind[self.incarnation] = now
        self._decide()

    def forget(self, holder: int) -> None:
        """Note that nothing of a holder is held any more: it is not alive in the view."""
        self._behind.pop(holder, None)

    def doubt_all(self, now: float) -> None:
        """Ask all holders: they may have given up waiting for this node.

        Its process was paused, or they held it dead.
        """
        self._has_stalled = True
        for holder, held in self.held.items():
            held.is_whole = False
            # Also higher than the number of the last request: its answer may be in the socket by
            # now.
            number = max(held.number, self._least.get(holder, 0))
            self._least[holder] = number + DOUBTED_NUMBERS
        for holder in sorted(self._members):
            self._wanted[holder] = (now, WANTED_FIRST_S)
        self.look_at_all(now)

    def note_false_number(self, holder: int, number: int) -> None:
        """Note that a stream is at this number, not at the much higher one that was held."""
        if self.least(holder) > number + NUMBERS_AHEAD_MAX:
            self._least[holder] = number + DOUBTED_NUMBERS

    def least(self, holder: int) -> int:
        """Return the lowest number of a hand-over that counts, 0 for any."""
        # A holder that came later may have sent its first hand-over while this process was paused.
        return self._least.get(holder, DOUBTED_NUMBERS if self._has_stalled else 0)

    def due(self, now: float) -> list[int]:
        """Return the holders to ask for a summary now."""
        if now >= self._summaries_look_at:
            self._summaries_look_at = now + SUMMARY_LOOK_S
            self.look_at_all(now)
        asked = []
        for holder, (at, pause_s) in self._wanted.items():
            held = self.held.get(holder)
            # A holder with complete records reports by itself when it has handed over.
            if at <= now and not (held is not None and held.is_whole):
                asked.append(holder)
                self._wanted[holder] = (now + pause_s, min(2 * pause_s, WANTED_MAX_S))
        return asked

    def _judge(self, holder: int, now: float) -> None:
        held = self.held.get(holder)
        age_s = max(SUMMARY_AGE_MAX_S, SUMMARY_AGE_MEMBER_S * len(self._members))
        if held is not None and now - held.matched_at > age_s:
            held.is_whole = False
        if (
            held is not None
            and held.is_whole
            and held.complete == self._ring
            and self.states.get(holder) == ALIVE
        ):
            self._in_sync.add(holder)
            self._behind.pop(holder, None)
            self._wanted.pop(holder, None)
            return
        self._in_sync.discard(holder)
        self._behind.setdefault(holder, now)
        self._wanted.setdefault(holder, (now + WANTED_FIRST_S, WANTED_FIRST_S))

    def _decide(self) -> None:
        # Before the first ring there are no members, and no version is granted.
        has_all = len(self._in_sync) == len(self._members) and self.incarnation not in self._behind
        granted = self._ring if has_all else b""
        if granted == self._granted:
            return
        self._granted = granted
        if granted:
            self.table.grant(granted)
        else:
            self.table.revoke()
