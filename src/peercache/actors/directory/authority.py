"""Authority: whether a shard has all that it should own of every live holder.

Only then an absent key is no page. A holder is *in sync* for a ring while it has told all that this
node owns of it on that ring, a summary has matched, each message since then has followed the one
before, and the view has the holder alive. Authority needs all holders of the ring and all records
of the own pool, and goes with the first doubt. What readers of the table see of it is one word and
a time.

After this process stood still, a summary counts only if the holder made it later than that: one
that waited in a socket says nothing of what the holder stored meanwhile, and told this node in
vain. The owner asks for a number that no earlier message of the stream can have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import attrs

from peercache.actors.directory.holdings import Holdings
from peercache.actors.directory.table import DirectoryTable
from peercache.model.hash_ring import HashRing
from peercache.model.member import ALIVE
from peercache.model.reads import TICK_AGE_MAX_S
from peercache.model.records import DOUBTED_NUMBERS, NUMBERS_AHEAD_MAX

TICK_S = 0.025
"""Between two ticks: a busy loop may be late by twice as much again before readers ask."""

BEHIND_S = 30.0
"""How long an owner says that it is behind because of one holder: one that differs without end
must not double all questions."""

WANTED_FIRST_S = 0.25
WANTED_MAX_S = 4.0
"""Pauses between two questions to a holder that is in doubt, the first and the longest. Most come
into sync by themselves: a holder tells when it has handed over."""

HEARD_MAX_S = 5.0
HEARD_MEMBER_S = 0.4
"""How long no summary of a holder may have come, and so much for each member: in a large cluster
summaries are rare. A holder that cannot reach this node, though others reach both, is in doubt, and
where no member reaches this node it has no authority by when they have it dead."""

HEARD_LOOK_S = 1.0

assert TICK_AGE_MAX_S > 2 * TICK_S, "one late tick would take all authority"


@final
@attrs.define(eq=False, kw_only=True)
class ShardAuthority:
    """Which holders are in sync. It looks at holdings and the view, and changes neither."""

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
    """Holders of which this shard lacks records, the own pool among them, and since when."""
    _wanted: dict[int, tuple[float, float]] = attrs.field(factory=dict)
    """When to ask a holder in doubt for a summary, and the pause before the next time."""
    _least: dict[int, int] = attrs.field(factory=dict)
    """By holder of before the last own stall: the least number of a hand-over that counts."""
    _has_stalled: bool = False
    _granted: bytes = b""
    _heard_look_at: float = 0.0

    @property
    def ring(self) -> bytes:
        """The version of the ring for which an absent key is no page; b"" for none."""
        return self._granted

    @property
    def doubted(self) -> int:
        """How many other members of the ring are not in sync."""
        return len(self._members) - len(self._in_sync)

    def is_behind(self, now: float) -> bool:
        """Return whether this shard lacks records of a holder: then "absent" is not certain."""
        return any(now - since < BEHIND_S for since in self._behind.values())

    def turn(self, ring: HashRing, now: float) -> None:
        """Follow a ring: every holder must say that it has handed over what is owned on it."""
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
        """Judge a holder anew, of which something was heard."""
        if holder in self._members:
            self._judge(holder, now)
            self._decide()

    def look_at_all(self, now: float) -> None:
        """Judge every holder anew, after the view has changed."""
        self._least = {h: number for h, number in self._least.items() if h in self.states}
        for holder in sorted(self._members):
            self._judge(holder, now)
        self._decide()

    def note_differing(self, holder: int, now: float) -> None:
        """Note that records of a holder are missing, whether or not the ring has it."""
        self._behind.setdefault(holder, now)
        self.look(holder, now)

    def note_matching(self, holder: int, now: float) -> None:
        """Note that all of a holder is there that it has told."""
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
        """Note that nothing is held of a holder any more: the view has none such that lives."""
        self._behind.pop(holder, None)

    def doubt_all(self, now: float) -> None:
        """Ask all holders: this process stood still, and they may have stopped to wait for it."""
        self._has_stalled = True
        for holder, held in self.held.items():
            held.is_whole = False
            # Also above what was asked for before: that answer may lie in the socket by now.
            number = max(held.number, self._least.get(holder, 0))
            self._least[holder] = number + DOUBTED_NUMBERS
        for holder in sorted(self._members):
            self._wanted[holder] = (now, WANTED_FIRST_S)
        self.look_at_all(now)

    def note_false_number(self, holder: int, number: int) -> None:
        """Note that a stream is at this number, and not at the much higher one that was held."""
        if self.least(holder) > number + NUMBERS_AHEAD_MAX:
            self._least[holder] = number + DOUBTED_NUMBERS

    def least(self, holder: int) -> int:
        """Return the least number of a hand-over that counts, 0 for any."""
        # A holder that came later may have sent its first hand-over while this process stood still.
        return self._least.get(holder, DOUBTED_NUMBERS if self._has_stalled else 0)

    def due(self, now: float) -> list[int]:
        """Return the holders to ask for a summary now."""
        if now >= self._heard_look_at:
            self._heard_look_at = now + HEARD_LOOK_S
            self.look_at_all(now)
        asked = []
        for holder, (at, pause_s) in self._wanted.items():
            held = self.held.get(holder)
            # A holder whose records are whole tells by itself when it has handed over.
            if at <= now and not (held is not None and held.is_whole):
                asked.append(holder)
                self._wanted[holder] = (now + pause_s, min(2 * pause_s, WANTED_MAX_S))
        return asked

    def _judge(self, holder: int, now: float) -> None:
        held = self.held.get(holder)
        heard_s = max(HEARD_MAX_S, HEARD_MEMBER_S * len(self._members))
        if held is not None and now - held.heard_at > heard_s:
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
        # Before the first ring there are no members, and the version to be granted is none.
        has_all = len(self._in_sync) == len(self._members) and self.incarnation not in self._behind
        granted = self._ring if has_all else b""
        if granted == self._granted:
            return
        self._granted = granted
        if granted:
            self.table.grant(granted)
        else:
            self.table.revoke()
