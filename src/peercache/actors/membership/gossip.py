"""Gossip: what this node sends of its view, what it merges of others, and which members are silent.
Pure.

Log: a digest names the set of live entries. So "what changed since the view had this digest" is
exact: a peer that has it needs those entries and no others. If the log does not know a digest, or
too much has changed since, views are compared, or the whole view is sent in messages of a bounded
size.

Merge: `model/view.py` defines how two entries merge. Which entries to merge is decided here: a
member that sent a message recently is not dead; only the judges of a member end it, but not a judge
that has just come back itself; a tombstone stays, and an address has one holder. Otherwise one node
that was cut off, and comes back with a view full of dead members, would empty every view until the
last of them has refuted.

The failure detector keeps two clocks per member, because they answer two questions. *When did its
last message arrive?* is evidence, and only a message of the member sets it. *How long is it
silent?* is suspicion, and starts again whenever this node could not have received a message: when
it begins to judge the member, when another node shows that the member was alive, when this process
was paused. Both are measured by this host's clock.

Claims are nodes that members hold alive, and that have not answered a master. A member judges only
the masters itself, and no master judges a node that it does not hold alive: without claims, a
member that refutes to one node, and then dies, would stay in that node's view.

Tombstones: the entry of a member that ended, dead or left, stays in the view for FORGET_S, so that
it wins against every view that still has the member alive. Then the entry leaves the view, and a
tombstone keeps its last counter, on this node only. An entry without a higher counter is an old one
of the same dead member.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, final

import attrs

from peercache.actors.effects import (
    Effect,
    NotifyDirectory,
    NotifyPlacement,
    NotifyRemoval,
    NotifyRing,
)
from peercache.actors.mailboxes import ViewChanged
from peercache.model.member import ALIVE, DEAD, LEFT, SUSPECT, Member
from peercache.model.view import MEMBERS_MAX, STATE_NAMES, View, is_live, is_newer
from peercache.observability.metrics import Metrics
from peercache.wire.messages.membership import (
    ReportViewChanges,
    RequestView,
    RequestViewChanges,
    ShareView,
)


@final
class FailureDetector:
    """The clocks of the members that this node judges, and of those that it has seen."""

    def __init__(self) -> None:
        """Judge no member."""
        self._seen_at: dict[int, float] = {}
        self._silent_since: dict[int, float] = {}
        self._back_since: dict[int, float] = {}

    def __len__(self) -> int:
        """Return how many members have a recorded last message."""
        return len(self._seen_at)

    def judge(self, incarnations: Iterable[int], now: float) -> None:
        """Judge exactly these from now on; members judged already keep their clocks."""
        known = self._silent_since
        self._silent_since = {member: known.get(member, now) for member in incarnations}

    def watch(self, incarnation: int, now: float) -> None:
        """Judge this one too; its clock goes on if it is judged already."""
        self._silent_since.setdefault(incarnation, now)

    def seen(self, incarnation: int, now: float) -> None:
        """Record a message of a live member."""
        self._seen_at[incarnation] = now
        if incarnation in self._silent_since:
            self._silent_since[incarnation] = now

    def seen_within(self, incarnation: int, now: float, span_s: float) -> bool:
        """Return whether a message of this member arrived less than `span_s` ago."""
        return now - self._seen_at.get(incarnation, -math.inf) < span_s

    def restart(self, incarnation: int) -> None:
        """Start the clock of a member again at the next `judge`: it was alive recently."""
        self._silent_since.pop(incarnation, None)

    def restart_all(self, now: float) -> None:
        """Start every clock again: this node could not have received anything from members."""
        self._silent_since = dict.fromkeys(self._silent_since, now)

    def ended(self, incarnation: int) -> None:
        """Stop to judge a member that is dead or has left, and drop its clocks."""
        self._seen_at.pop(incarnation, None)
        self._silent_since.pop(incarnation, None)
        self._back_since.pop(incarnation, None)

    def back(self, incarnation: int, now: float) -> None:
        """Note that a member is alive that this node has held dead."""
        self._back_since[incarnation] = now

    def back_within(self, incarnation: int, now: float, span_s: float) -> bool:
        """Return whether this node held a member dead less than `span_s` ago."""
        return now - self._back_since.get(incarnation, -math.inf) < span_s

    def silent_for(self, span_s: float, now: float) -> list[tuple[int, float]]:
        """Return members silent for `span_s` or longer, with how long, in the order of `judge`."""
        return [
            (member, now - at) for member, at in self._silent_since.items() if now - at >= span_s
        ]


CLAIMED_MAX: Final = 1024
"""Claims remembered."""


@final
class Claims:
    """When each such node was first and last claimed to be alive."""

    def __init__(self, *, dead_s: float) -> None:
        """Consider a node dead that has not answered for `dead_s`."""
        self._dead_s = dead_s
        self._claimed: dict[int, tuple[float, float]] = {}

    def silent(self, unmet: Iterable[Member], now: float) -> tuple[Member, ...]:
        """Return as dead those of the entries that have not answered for long."""
        found: list[Member] = []
        for entry in unmet:
            since, _ = self._claimed.get(entry.incarnation, (now, now))
            if entry.incarnation in self._claimed or len(self._claimed) < CLAIMED_MAX:
                self._claimed[entry.incarnation] = (since, now)
            if now - since >= self._dead_s:
                found.append(attrs.evolve(entry, state=DEAD))
        return tuple(found)

    def forget(self, now: float, *, view: View) -> None:
        """Forget nodes that are no longer claimed, or are alive in this node's view by now."""
        self._claimed = {
            incarnation: (since, last)
            for incarnation, (since, last) in self._claimed.items()
            if now - last < self._dead_s and not _lives(view.get(incarnation))
        }


def _lives(entry: Member | None) -> bool:
    return entry is not None and is_live(entry)


FORGET_S = 300.0
"""How long an ended entry stays in the view: long after it has reached every node."""

ENDED_MAX = 1024
"""Ended entries kept in the view and shared with it; beyond that, the oldest leave it early."""

TOMBSTONES_MAX = 65_536
"""Tombstones kept, of about 150 bytes. Without one an old view revives its member for `dead_s`: the
member is silent, and so becomes dead again."""


@final
class Tombstones:
    """When each ended member ended, and the last counters of those that left the view."""

    def __init__(self) -> None:
        """Start with no ended member."""
        self._ended_at: dict[int, float] = {}  # oldest first
        self._counters: dict[int, int] = {}  # oldest first

    def __len__(self) -> int:
        """Return the number of tombstones."""
        return len(self._counters)

    def ended(self, incarnation: int, now: float) -> None:
        """Note that an entry of the view has ended."""
        self._ended_at.setdefault(incarnation, now)
        self._counters.pop(incarnation, None)

    def lives(self, incarnation: int) -> None:
        """Note that a member is alive, by a counter higher than any known one."""
        self._ended_at.pop(incarnation, None)
        self._counters.pop(incarnation, None)

    def holds(self, member: Member) -> bool:
        """Return whether a tombstone stands for this very entry or for a newer one."""
        return member.counter <= self._counters.get(member.incarnation, -1)

    def as_dead(self, member: Member) -> Member:
        """Return the entry that its tombstone stands for: dead, with the counter it died with."""
        return attrs.evolve(member, state=DEAD, counter=self._counters[member.incarnation])

    def due(self, now: float) -> list[int]:
        """Return the ended members that leave the view now, oldest first."""
        gone: list[int] = []
        for incarnation, ended_at in self._ended_at.items():
            if now - ended_at < FORGET_S and len(self._ended_at) - len(gone) <= ENDED_MAX:
                break
            gone.append(incarnation)
        return gone

    def set(self, member: Member) -> None:
        """Record the counter of an entry that leaves the view."""
        del self._ended_at[member.incarnation]
        self._counters[member.incarnation] = member.counter
        if len(self._counters) > TOMBSTONES_MAX:
            del self._counters[next(iter(self._counters))]


LOG_MAX: Final = 1024
"""Changes remembered: those of a start of a thousand nodes, or of hours of a steady cluster."""

CHANGES_SENT_MAX: Final = 64
"""Entries sent as changes, 20 KB at most: beyond that, views are compared."""

BEHIND_BEATS: Final = 3
"""Heartbeats for which a peer with an earlier view of this node counts as behind; afterwards it may
differ by more than heartbeats report, and the views are compared."""


@final
class ViewLog:
    """The last changes of a view, and the position in them at which each digest ended."""

    def __init__(self, *, heartbeat_s: float) -> None:
        """Start with no change."""
        self._recent_s = BEHIND_BEATS * heartbeat_s
        self._changes: deque[int] = deque()  # incarnations, oldest first
        self._forgotten = 0
        self._left: dict[bytes, tuple[int, float]] = {}  # by digest: changes before its end

    def __len__(self) -> int:
        """Return how many changes are remembered."""
        return len(self._changes)

    def changed(self, before: bytes, after: bytes, touched: Iterable[int], now: float) -> None:
        """Note that these entries have changed, and the view's digest with them."""
        if before == after:
            return  # Only ended entries changed: no peer has to learn of them.
        self._left.pop(before, None)
        self._left[before] = (self._forgotten + len(self._changes), now)
        self._changes.extend(touched)
        while len(self._changes) > LOG_MAX:
            self._changes.popleft()
            self._forgotten += 1
        while self._left and next(iter(self._left.values()))[0] < self._forgotten:
            del self._left[next(iter(self._left))]

    def was(self, digest: bytes, now: float) -> bool:
        """Return whether the view had this digest recently: a peer that still has it is behind."""
        left = self._left.get(digest)
        return left is not None and now - left[1] < self._recent_s

    def since(self, digest: bytes) -> list[int] | None:
        """Return the entries that changed since the view had this digest; None if not known."""
        left = self._left.get(digest)
        count = 0 if left is None else self._forgotten + len(self._changes) - left[0]
        if not 0 < count <= 4 * CHANGES_SENT_MAX:
            return None
        changed = dict.fromkeys(self._changes[at - count] for at in range(count))
        return list(changed) if len(changed) <= CHANGES_SENT_MAX else None


PART_BYTES_MAX = 192 * 1024
"""Bytes of the entries in one message, three quarters of what a message may have: about 1,200."""

PART_MEMBERS_MAX = 1024
"""Entries in one message: their decoding takes a few milliseconds."""

MEMBER_BYTES_ABOUT = 80
"""Size of an entry without its texts: four numbers and the heads of all fields."""


def parts_of(members: Iterable[Member]) -> list[tuple[Member, ...]]:
    """Cut entries into parts, in their order, each for one message."""
    parts: list[list[Member]] = []
    room = 0
    for member in members:
        size = bytes_of(member)
        if size > room or len(parts[-1]) >= PART_MEMBERS_MAX:
            parts.append([])
            room = PART_BYTES_MAX
        parts[-1].append(member)
        room -= size
    return [tuple(part) for part in parts]


def parts_of_sender(me: Member, others: Iterable[Member]) -> list[tuple[Member, ...]]:
    """Cut entries into parts that each begin with the sender's own, which identifies the sender.

    Entries of one address stand together, so that a successor is seen with its predecessor.
    """
    ordered = sorted(others, key=lambda member: (member.control, member.incarnation))
    return [(me, *part) for part in parts_of(ordered)] or [(me,)]


def part_asked(view: View, asked: RequestView) -> ShareView:
    """Return the part of the view that a client asks for."""
    if not asked.after and asked.digest == view.digest():
        return ShareView(asked.request, ())
    left = [member for member in view.live() if member.incarnation > asked.after]
    parts = parts_of(left)
    return ShareView(asked.request, parts[0] if parts else (), len(parts) > 1)


def changes_asked(view: View, log: ViewLog, asked: RequestViewChanges) -> ReportViewChanges:
    """Return the changes for a client with an earlier view of this node, or of an equal one."""
    digest = view.digest()
    if asked.digest == digest:
        return ReportViewChanges(asked.request, digest, digest, (), ())
    changed = log.since(asked.digest)
    if changed is None:
        return ReportViewChanges(asked.request, b"", digest, (), ())
    found = [(incarnation, view.get(incarnation)) for incarnation in changed]
    live = tuple([entry for _, entry in found if entry is not None and is_live(entry)])
    gone = tuple([i for i, entry in found if entry is None or not is_live(entry)])
    return ReportViewChanges(asked.request, asked.digest, digest, live, gone)


def bytes_of(member: Member) -> int:
    """Return the most bytes that an entry takes."""
    texts = (member.host_name, member.control, member.data, member.boot_id, member.segment)
    length = sum([len(text.encode()) for text in (*texts, member.name)])
    return length + len(member.nonce) + MEMBER_BYTES_ABOUT


COUNTER_JUMP_MAX = 2**16
"""How far a member's counter may be ahead in another node's view: further than a member raises it
while two sides are partitioned. A counter at the end of its range could not be refuted."""


@final
@attrs.frozen
class JudgedView:
    """What to do with the entries of a view.

    merged:  entries to merge. doubted: DEAD or SUSPECT entries of members that may be alive.
    to_meet: addresses at which members may be that this node does not know, or holds dead.
    unmet:   the entries among them that are live, and newer than what this node knows.
    """

    merged: list[Member]
    doubted: list[Member]
    to_meet: list[str]
    unmet: list[Member]


def speaks_for_itself(sender: int, member: Member) -> bool:
    """Return whether `sender` brings its own entry, in a state that only members themselves
    report.
    """
    return member.incarnation == sender and member.state in (ALIVE, LEFT)


def introduced(
    member: Member,
    *,
    me: int,
    view: View,
    tombstones: Tombstones,
    live_at: Mapping[str, Collection[int]],
) -> list[Member]:
    """Return the entries that follow from a node's own message that it is alive at its address.

    live_at: the incarnations of the other live members at each control address.
    """
    known = view.get(member.incarnation)
    if known is None and tombstones.holds(member):
        return [tombstones.as_dead(member)]
    if known is not None or member.state != ALIVE:
        return [member]
    # One process binds an address, so the member that had it before is gone. Checked only when the
    # member is first seen: two nodes that advertise one address by mistake would end each other
    # forever.
    before = [view.get(other) for other in sorted(live_at.get(member.control, ()))]
    return [member] + [
        attrs.evolve(other, state=DEAD)
        for other in before
        if other is not None and other.incarnation != me
    ]


def judge_view(
    theirs: Mapping[int, Member],
    *,
    sender: int,
    me: int,
    view: View,
    tombstones: Tombstones,
    live_at: Mapping[str, Collection[int]],
    seen_recently: Callable[[int], bool],
    is_master: bool,
    is_back: bool,
) -> JudgedView:
    """Divide the entries of a known sender's view: to merge, to doubt, and to look for.

    seen_recently: whether a message of the member itself arrived within suspect_s.
    is_master:    whether the sender is a master: other nodes are not trusted about third nodes.
    is_back:      whether this node held the sender dead until lately: it comes from the other side
                  of a partition, and does not know yet which members of this side are alive.
    """
    holders = {member.control: member.incarnation for member in theirs.values() if is_live(member)}
    judged = JudgedView([], [], [], [])
    for incarnation, entry in theirs.items():
        mine = view.get(incarnation)
        if incarnation == me:
            continue
        if incarnation == sender:
            if speaks_for_itself(sender, entry):
                judged.merged.extend(
                    introduced(entry, me=me, view=view, tombstones=tombstones, live_at=live_at)
                )
        elif mine is None:
            if is_live(entry):
                judged.to_meet.append(entry.control)
                judged.unmet.append(entry)
        elif not is_newer(entry, mine):
            if is_master and is_live(entry) and not is_live(mine):
                # It may be alive, and not know of this report: its own answer lets it refute. The
                # masters cannot notify it, because they do not trust this node about others.
                judged.to_meet.append(entry.control)
        elif entry.counter > mine.counter + COUNTER_JUMP_MAX:
            continue
        elif entry.state in (SUSPECT, DEAD) and (
            is_live(mine)
            and (is_back or seen_recently(incarnation))
            and holders.get(entry.control, incarnation) == incarnation
        ):
            judged.doubted.append(entry)
        elif is_master:
            judged.merged.append(entry)
        elif is_live(entry) and not is_live(mine):
            judged.to_meet.append(entry.control)
            judged.unmet.append(entry)
    return judged


SHARES_PER_BEAT: Final = 4
"""Answers with entries to one peer in one heartbeat: an exchange takes two, a heal three."""

DIFFERING_MAX: Final = 64
"""Remembered peers with different views: each is asked in its turn, and reports it again."""

BUSY_BEATS: Final = 3
"""Heartbeats between two comparisons while there are addresses to try: their answers come first."""


@final
class ViewExchange:
    """The limits of what is sent, and the peers with different views."""

    def __init__(self, *, turn_s: float, heartbeat_s: float) -> None:
        """Ask one peer every `turn_s`."""
        self._turn_s = turn_s
        self._busy_s = BUSY_BEATS * heartbeat_s
        self._shares: dict[int, int] = {}
        self._differing: dict[int, bytes] = {}  # the next one to ask first
        self._asked_at = float("-inf")

    def __len__(self) -> int:
        """Return with how many peers entries were shared in this heartbeat."""
        return len(self._shares)

    def may_share(self, peer: int) -> bool:
        """Count an answer to a peer; False if it has had enough in this heartbeat."""
        sent = self._shares.get(peer, 0)
        if sent >= SHARES_PER_BEAT or len(self._shares) >= MEMBERS_MAX:
            return False
        self._shares[peer] = sent + 1
        return True

    def next_beat(self) -> None:
        """Start to count again."""
        self._shares.clear()

    def differs(self, peer: int, digest: bytes) -> None:
        """Note that a peer's view is different, as of its last message."""
        self._differing.pop(peer, None)
        if len(self._differing) < DIFFERING_MAX:
            self._differing[peer] = digest

    def next_peer(self, now: float, *, own: bytes, members: View, is_busy: bool) -> int | None:
        """Return the peer to ask for the differences of its view, or None in this turn.

        own: this view's digest: the last answer may have brought all differences.
        """
        if now - self._asked_at < (self._busy_s if is_busy else self._turn_s):
            return None
        while self._differing:
            peer = next(iter(self._differing))
            if self._differing.pop(peer) != own and peer in members:
                self._asked_at = now
                return peer
        return None


ANNOUNCED_AT_ONCE_MAX: Final = 64
"""Up to this many members, each change of a view is announced at once: that takes less than a tenth
of a millisecond."""

ANNOUNCE_GAP_S: Final = 0.1
"""Least time between two announcements of a larger view: a thousand members that join within some
seconds do not cause a thousand rings."""


@final
class Announcing:
    """When the view was last announced, and when it must be announced again.

    due: when a pending change must be announced; inf if there is none.
    """

    def __init__(self, metrics: Metrics) -> None:
        """Start with nothing announced."""
        self._metrics = metrics
        self._announced_at = -math.inf
        self.due = math.inf

    def changed(self, view: View, now: float) -> list[Effect]:
        """Announce a change, or let it wait."""
        if len(view) > ANNOUNCED_AT_ONCE_MAX and now - self._announced_at < ANNOUNCE_GAP_S:
            self.due = self._announced_at + ANNOUNCE_GAP_S
            return []
        return self.announce(view, now)

    def announce(self, view: View, now: float) -> list[Effect]:
        """Announce the view."""
        self._announced_at, self.due = now, math.inf
        changed = ViewChanged(view.members())
        for state, name in enumerate(STATE_NAMES):
            count = sum([member.state == state for member in changed.members])
            self._metrics.members.labels(state=name).set(count)
        return [
            NotifyRing(changed),
            NotifyDirectory(changed),
            NotifyRemoval(changed),
            NotifyPlacement(changed),
        ]
