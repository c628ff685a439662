"""Membership: which nodes are in the cluster, by their own messages and by their silence.

Owns    this node's view, its own entry in it, and the failure detector's clocks.
Hears   Join, Heartbeat, HeartbeatSeen, ViewShared, ViewAsked; PeerAnswered from the node; a tick
        four times a heartbeat.
Says    Join to discovery addresses and to lost members, Heartbeat to the masters, HeartbeatSeen and
        ViewShared in answer, ViewShared to candidates; ViewChanged to ring and directory, Republish
        to the publisher.
Keeps   its own entry is in its view, and alive until `leave`; it refutes every entry that says
        otherwise by a higher counter. Masters judge all members, other nodes judge the masters,
        each by its own clock. A member heard lately is not dead, whatever other nodes say: they
        tell it, so that it can refute. A dead incarnation comes back only by its own counter.
        A node becomes a member when it has answered at its own address; what others say of it
        before is an address to try. Only masters are believed about others.
Limits  MEMBERS_MAX entries of a view; the limits of `candidates`, `tombstones` and `reconnect`;
        SHARES_PER_BEAT views a peer and heartbeat, LEAVE_MAX goodbyes.
"""

from __future__ import annotations

import math
import random
from typing import final

import attrs
from typing_extensions import assert_never

from peercache.actors.effects import (
    Effect,
    Send,
    SendTo,
    TellDirectory,
    TellPublisher,
    TellRemoval,
    TellRing,
)
from peercache.actors.mailboxes import MembershipHears, PeerAnswered, Republish, ViewChanged
from peercache.actors.membership.candidates import Candidates
from peercache.actors.membership.failure_detector import FailureDetector
from peercache.actors.membership.reconnect import Reconnect
from peercache.actors.membership.tombstones import Tombstones
from peercache.actors.membership.view_merge import (
    COUNTER_JUMP_MAX,
    introduced,
    judge_view,
    speaks_for_itself,
)
from peercache.actors.membership.view_parts import parts_of
from peercache.actors.origin import Origin
from peercache.model.member import ALIVE, DEAD, LEFT, SUSPECT, Member
from peercache.model.view import MEMBERS_MAX, STATE_NAMES, View, is_live, is_newer
from peercache.observability.metrics import Metrics
from peercache.wire.messages.membership import Heartbeat, HeartbeatSeen, Join, ViewAsked, ViewShared

TICKS_PER_BEAT = 4
"""Turns in one heartbeat: how finely silence is judged, and how soon a new master hears of this
node."""

DIAL_MAX_S = 5.0
"""Longest back-off, or three heartbeats if that is less: partitions heal in ten seconds."""

SHARES_PER_BEAT = 4
"""Views sent to one peer in one heartbeat: an exchange takes two, a heal three."""

LEAVE_MAX = 256
"""Goodbyes said when leaving, masters first; the other nodes hear it from a master."""

WANTING_MAX = 1024
"""Newcomers remembered that asked for the view: they get it when they have answered."""

CLAIMED_MAX = 1024
"""Nodes remembered that others hold alive and that have not answered this one."""

REPUBLISH_GAP_S = 30.0
"""Least time between two Republish: a peer that loses this node again and again floods no node."""


@final
class Membership:
    """One node's part in keeping the view. Never awaits; time and randomness are handed in."""

    def __init__(
        self,
        *,
        me: Member,
        discovery_addr: tuple[str, ...],
        max_masters: int,
        heartbeat_s: float,
        suspect_s: float,
        dead_s: float,
        rng: random.Random,
        metrics: Metrics | None = None,
    ) -> None:
        """Begin alone. `me` is alive; its head_rank is its own place in `discovery_addr`."""
        assert me.state == ALIVE, "a node starts alive"
        assert heartbeat_s * 2 < suspect_s < dead_s, "two lost heartbeats make no suspect"
        self._me = me
        self._max_masters = max_masters
        self._heartbeat_s = heartbeat_s
        self._suspect_s = suspect_s
        self._dead_s = dead_s
        self._turn_s = heartbeat_s / TICKS_PER_BEAT
        self._metrics = metrics
        self._reconnect = Reconnect(
            {
                address: rank
                for rank, address in enumerate(discovery_addr)
                if address != me.control and rank != me.head_rank
            },
            first_s=heartbeat_s / 2,
            longest_s=min(DIAL_MAX_S, 3 * heartbeat_s),
            rng=rng,
        )
        self._candidates = Candidates(rng=rng)
        self._heads = frozenset(discovery_addr)
        self._wants_view: dict[int, None] = {}
        # Nodes that members hold alive and this one does not: since when, and until when.
        self._claimed: dict[int, tuple[float, float]] = {}
        self._view = View.of([me])
        self._masters: tuple[Member, ...] = (me,)
        self._detector = FailureDetector()
        self._tombstones = Tombstones()
        self._shares: dict[int, int] = {}
        # Control addresses and head ranks of the others that are alive.
        self._reached: frozenset[str] = frozenset()
        self._ranks: frozenset[int] = frozenset()
        self._ran_at = self._turn_at = self._beat_at = self._shares_until = 0.0
        # When another node last showed that this one is a member for it.
        self._held_at = -math.inf
        self._republish_owed = False
        self._republish_from = -math.inf

    @property
    def view(self) -> View:
        """The view as it is now."""
        return self._view

    @property
    def me(self) -> Member:
        """The entry of this node, with the counter that it has reached."""
        return self._me

    @property
    def is_joined(self) -> bool:
        """Whether a live member has shown lately that this node is one for it too.

        A node may know members that never reached it: those do not hold it for one.
        """
        return len(self._view.live()) > 1 and self._ran_at - self._held_at < self._dead_s

    def member(self, incarnation: int) -> Member | None:
        """Return the entry of an incarnation, in whatever state, or None."""
        return self._view.get(incarnation)

    def masters(self) -> tuple[Member, ...]:
        """Return the active masters, in their order."""
        return self._masters

    def dialled(self) -> frozenset[str]:
        """Return the addresses at which this node looks for members now."""
        return self._candidates.dialled

    def start(self, now: float) -> list[Effect]:
        """Tell the other actors that this node is alone, and dial every discovery address."""
        self._ran_at = now
        self._turn_at = now + self._turn_s
        self._beat_at = self._shares_until = now + self._heartbeat_s
        return [*self._announce(), *self._dial(now)]

    def leave(self, now: float) -> list[Effect]:
        """Say goodbye. Final for this incarnation: afterwards it hears and says nothing."""
        if self._me.state == LEFT:
            return []
        self._me = attrs.evolve(self._me, state=LEFT, counter=self._me.counter + 1)
        masters = [m.incarnation for m in self._masters if m.incarnation != self._me.incarnation]
        others = [m.incarnation for m in self._view.live() if m.incarnation not in masters]
        goodbye = ViewShared(0, (self._me,))
        told = [i for i in masters + others if i != self._me.incarnation][:LEAVE_MAX]
        return [*self._merge([self._me], now), *[Send(i, goodbye) for i in told]]

    def move(self, now: float, *, control: str, data: str, head_rank: int) -> list[Effect]:
        """Tell the others another address, or head rank, of this node."""
        if self._me.state == LEFT:
            return []
        self._me = attrs.evolve(
            self._me, counter=self._me.counter + 1, control=control, data=data, head_rank=head_rank
        )
        self._reconnect.is_own(control, head_rank)
        return [*self._merge([self._me], now), *self._beat(now), *self._join_heads()]

    def on_message(self, sender: Origin, message: MembershipHears, now: float) -> list[Effect]:
        """Take a message of a node, or the ViewAsked of a client."""
        if self._me.state == LEFT or sender.identity == self._me.incarnation:
            return []
        self._notice_pause(now)
        match message:
            case Join(member):
                return self._on_join(sender, member, now)
            case Heartbeat(member, digest):
                return self._on_heartbeat(sender, member, digest, now)
            case HeartbeatSeen(digest):
                return self._on_seen(sender, digest, now)
            case ViewShared(_, members):
                return self._on_view(sender, members, now)
            case ViewAsked():
                return [Send(_way_back(sender), self._part(message))]
            case PeerAnswered(address, member):
                return self._on_answered(address, member, now)
        assert_never(message)

    def on_tick(self, now: float) -> list[Effect]:
        """Judge silent members, forget ended ones, send heartbeats, redial lost addresses."""
        if self._me.state == LEFT:
            return []
        self._notice_pause(now)
        self._turn_at = now + self._turn_s
        effects = [*self._judge(now), *self._forget(now)]
        if now >= self._shares_until:
            self._claimed = {
                incarnation: (since, last)
                for incarnation, (since, last) in self._claimed.items()
                if now - last < self._dead_s and not self._holds_alive(incarnation)
            }
            self._shares.clear()
            self._shares_until = now + self._heartbeat_s
        if now >= self._beat_at:
            effects += self._beat(now)
        return [*effects, *self._dial(now), *self._try_candidates(now), *self._republish(now)]

    def deadline(self) -> float:
        """Return when the next turn is due."""
        if self._me.state == LEFT:
            return math.inf
        return min(self._turn_at, self._beat_at)

    def check(self) -> None:
        """Assert what must hold after every step."""
        assert self._view.get(self._me.incarnation) is self._me, "the own entry is not in the view"
        assert self._masters or self._me.state == LEFT, "a living node knows at least itself"
        assert len(self._view) <= MEMBERS_MAX, f"a view of {len(self._view)}"
        assert len(self._detector) < len(self._view), "clocks of members that are gone"
        assert len(self._shares) <= MEMBERS_MAX, f"{len(self._shares)} peers in one heartbeat"

    # --- messages ---------------------------------------------------------------------------------

    def _on_join(self, sender: Origin, member: Member, now: float) -> list[Effect]:
        if not speaks_for_itself(sender.identity, member):
            return []
        if self._is_new(member):
            if len(self._wants_view) < WANTING_MAX:
                self._wants_view[member.incarnation] = None
            return self._look_for([member.control], sender.identity, now)
        effects = self._meet(member, now)
        return [*effects, *self._share(sender)]

    def _on_heartbeat(
        self, sender: Origin, member: Member, digest: bytes, now: float
    ) -> list[Effect]:
        if not speaks_for_itself(sender.identity, member):
            return []
        if self._is_new(member):
            return self._look_for([member.control], sender.identity, now)
        effects = self._meet(member, now)
        self._held_at = now
        own = self._view.digest()
        if digest != own:
            # Before the answer: by that digest the sender judges what this node still misses.
            effects += self._share(sender)
        return [*effects, Send(_way_back(sender), HeartbeatSeen(own))]

    def _on_answered(self, address: str, member: Member, now: float) -> list[Effect]:
        """Take a member that has answered at an address that this node dialled."""
        self._candidates.answered(address)
        incarnation = member.incarnation
        if incarnation == self._me.incarnation or member.state != ALIVE:
            return self._try_candidates(now)
        if member.control != address and address not in self._heads:
            # Only its own address shows that others reach it there.
            if incarnation not in self._view:
                self._candidates.name(member.control, incarnation, now)
            return self._try_candidates(now)
        wants_view = incarnation in self._wants_view
        self._wants_view.pop(incarnation, None)
        effects = self._meet(member, now)
        known = self._view.get(incarnation)
        if known is not None and (wants_view or not is_live(known)):
            effects += self._share(Origin(incarnation))
        return [*effects, *self._try_candidates(now)]

    def _is_new(self, member: Member) -> bool:
        """Return whether this node knows nothing of a member yet, not even its end."""
        return member.incarnation not in self._view and not self._tombstones.holds(member)

    def _look_for(self, addresses: list[str], source: int, now: float) -> list[Effect]:
        """Try addresses that a peer has named, a few at a time."""
        for address in addresses:
            if address != self._me.control:
                self._candidates.name(address, source, now)
        return self._try_candidates(now)

    def _try_candidates(self, now: float) -> list[Effect]:
        me = ViewShared(0, (self._me,))
        return [SendTo(address, me) for address in self._candidates.due(now)]

    def _meet(self, member: Member, now: float) -> list[Effect]:
        own = self._me.incarnation
        known = introduced(member, me=own, view=self._view, tombstones=self._tombstones)
        effects = self._merge(known, now)
        self._hear(member.incarnation, now)
        return effects

    def _on_seen(self, sender: Origin, digest: bytes, now: float) -> list[Effect]:
        if sender.identity not in self._view:
            return []
        self._hear(sender.identity, now)
        self._held_at = now
        # The sender's view came before this message, so a difference is what the sender lacks.
        return [] if digest == self._view.digest() else self._share(sender)

    def _on_view(self, sender: Origin, members: tuple[Member, ...], now: float) -> list[Effect]:
        theirs = {member.incarnation: member for member in members}
        before = self._view.get(sender.identity)
        if before is None:
            own = theirs.get(sender.identity)
            if own is None or not speaks_for_itself(sender.identity, own):
                return []
            if self._is_new(own):
                return self._look_for([own.control], sender.identity, now)
            # It was dead, and this node has forgotten it: it can refute now.
            return [*self._meet(own, now), *self._share(sender)]
        masters = {master.incarnation for master in self._masters}
        judged = judge_view(
            theirs,
            sender=sender.identity,
            me=self._me.incarnation,
            view=self._view,
            tombstones=self._tombstones,
            heard_lately=lambda one: self._detector.heard_within(one, now, self._suspect_s),
            is_master=sender.identity in masters,
        )
        of_me = theirs.get(self._me.incarnation)
        if of_me is not None and is_live(of_me):
            self._held_at = now
        refuted = self._refute(of_me)
        effects = self._merge([*judged.merged, self._me], now)
        self._hear(sender.identity, now)
        for entry in judged.doubted:
            # The member refutes, and its sender takes the entry back. This node cannot refute it.
            effects += self._share(Origin(entry.incarnation), (self._me, entry))
        if refuted:
            effects += [*self._beat(now), *self._republish(now)]
            if sender.identity not in masters:
                effects += self._share(sender, (self._me,))
        # After a partition each side has what the other lacks. Members that know each other need
        # no answer here: they learn the rest from the masters.
        if before.state in (DEAD, LEFT) and self._view.adds_to(theirs):
            effects += self._share(sender)
        effects += self._contradict(sender, judged.unmet, now)
        return [*effects, *self._look_for(judged.to_meet, sender.identity, now)]

    def _contradict(self, sender: Origin, unmet: list[Member], now: float) -> list[Effect]:
        """As a master, tell a member which of those that it holds alive have not answered for long.

        It judges only the masters itself, and no master judges what it does not hold alive: a
        member that refutes to one node, and then is gone, would stay in that node's view.
        """
        if not any(master is self._me for master in self._masters):
            return []
        silent: list[Member] = []
        for entry in unmet:
            since, _ = self._claimed.get(entry.incarnation, (now, now))
            if entry.incarnation in self._claimed or len(self._claimed) < CLAIMED_MAX:
                self._claimed[entry.incarnation] = (since, now)
            if now - since >= self._dead_s:
                silent.append(attrs.evolve(entry, state=DEAD))
        if not silent:
            return []
        # What this node holds ended too is ended under that counter: else their views differ.
        effects = self._merge([entry for entry in silent if entry.incarnation in self._view], now)
        return [*effects, *self._share(sender, (self._me, *silent))]

    def _holds_alive(self, incarnation: int) -> bool:
        entry = self._view.get(incarnation)
        return entry is not None and is_live(entry)

    def _refute(self, entry: Member | None) -> bool:
        """Raise this node's counter above an entry about it that would win against its own."""
        if entry is None or not is_newer(entry, self._me):
            return False
        if entry.counter > self._me.counter + COUNTER_JUMP_MAX:
            return False  # No node believes it.
        self._me = attrs.evolve(self._me, counter=entry.counter + 1)
        # Nodes that held this node dead have dropped its records.
        self._republish_owed = self._republish_owed or not is_live(entry)
        return True

    # --- time -----------------------------------------------------------------------------------

    def _notice_pause(self, now: float) -> None:
        """Start every clock anew if this process was stopped: it heard no member meanwhile."""
        if now - self._ran_at > self._turn_s + self._heartbeat_s:
            self._detector.restart_all(now)
            self._held_at += now - self._ran_at
        self._ran_at = now

    def _judge(self, now: float) -> list[Effect]:
        found: list[Member] = []
        for incarnation, silent_s in self._detector.silent_for(self._suspect_s, now):
            member = self._view.get(incarnation)
            assert member is not None, "only members of the view are judged"
            if silent_s >= self._dead_s:
                found.append(attrs.evolve(member, state=DEAD))
            elif member.state == ALIVE:
                found.append(attrs.evolve(member, state=SUSPECT))
                # Perhaps a successor answers there.
                self._reconnect.lost(member.control, now)
        return self._merge(found, now)

    def _forget(self, now: float) -> list[Effect]:
        gone = self._tombstones.due(now)
        for incarnation in gone:
            entry = self._view.get(incarnation)
            assert entry is not None, "an ended member is in the view until it has a tombstone"
            self._tombstones.set(entry)
        return self._adopt(self._view.without(gone), now) if gone else []

    def _beat(self, now: float) -> list[Effect]:
        self._beat_at = now + self._heartbeat_s
        beat = Heartbeat(self._me, self._view.digest())
        own = self._me.incarnation
        return [Send(m.incarnation, beat) for m in self._masters if m.incarnation != own]

    def _dial(self, now: float) -> list[Effect]:
        due = self._reconnect.due(now, reached=self._reached, ranks=self._ranks)
        return [SendTo(address, Join(self._me)) for address in due]

    def _join_heads(self) -> list[Effect]:
        return [SendTo(address, Join(self._me)) for address in self._reconnect.heads()]

    def _republish(self, now: float) -> list[Effect]:
        if not self._republish_owed or now < self._republish_from:
            return []
        self._republish_owed = False
        self._republish_from = now + REPUBLISH_GAP_S
        return [TellPublisher(Republish())]

    # --- the view -------------------------------------------------------------------------------

    def _merge(self, entries: list[Member], now: float) -> list[Effect]:
        view, changed = self._view.merge(entries)
        return self._adopt(view, now) if changed else []

    def _adopt(self, view: View, now: float) -> list[Effect]:
        """Replace the view, and bring everything that follows it up to date."""
        old, self._view = self._view, view
        members = view.members()
        others = [member for member in members if member is not self._me]
        alive = [member for member in others if member.state == ALIVE]
        self._reached = frozenset(member.control for member in alive)
        self._ranks = frozenset(member.head_rank for member in alive)
        for member in others:
            before = old.get(member.incarnation)
            if before is not member:
                self._follow(member, before, now)
        masters = view.masters(self._max_masters)
        if [m.incarnation for m in masters] != [m.incarnation for m in self._masters]:
            # A new master must hear of this node before it begins to count its silence.
            self._beat_at = min(self._beat_at, self._turn_at)
        self._masters = masters
        followed = others if any(m is self._me for m in masters) else masters
        self._detector.judge(
            [m.incarnation for m in followed if is_live(m) and m is not self._me], now
        )
        return self._announce()

    def _follow(self, member: Member, before: Member | None, now: float) -> None:
        """Note what the change of one entry means for clocks, tombstones and redialling."""
        incarnation = member.incarnation
        if is_live(member):
            self._tombstones.lives(incarnation)
            if member.state == ALIVE:
                self._reconnect.found(member.control)
            if before is None or member.counter > before.counter:
                # Only a member raises its own counter: it lived lately, though unheard here.
                self._detector.restart(incarnation)
            return
        self._detector.ended(incarnation)
        self._tombstones.ended(incarnation, now)
        if member.state == LEFT:
            self._reconnect.found(member.control)
        elif member.control not in self._reached and member.control != self._me.control:
            self._reconnect.lost(member.control, now)

    def _hear(self, incarnation: int, now: float) -> None:
        member = self._view.get(incarnation)
        if member is not None and is_live(member):
            self._detector.heard(incarnation, now)

    def _part(self, asked: ViewAsked) -> ViewShared:
        """Return the part of the view that a client asks for."""
        if not asked.after and asked.digest == self._view.digest():
            return ViewShared(asked.request, ())
        left = [member for member in self._view.live() if member.incarnation > asked.after]
        parts = parts_of(left)
        return ViewShared(asked.request, parts[0] if parts else (), len(parts) > 1)

    def _share(self, to: Origin, members: tuple[Member, ...] = ()) -> list[Effect]:
        """Send these entries, or all, unless this peer has got SHARES_PER_BEAT already."""
        sent = self._shares.get(to.identity, 0)
        if sent >= SHARES_PER_BEAT or len(self._shares) >= MEMBERS_MAX:
            return []
        self._shares[to.identity] = sent + 1
        told = members or self._view.members()
        parts = parts_of(told)
        if len(parts) > 1:
            # Entries of one address stand together, so that a successor is seen with its
            # predecessor. And each part has this node's own: it says whose the others are.
            others = sorted(
                (member for member in told if member is not self._me),
                key=lambda member: (member.control, member.incarnation),
            )
            parts = [(self._me, *part) for part in parts_of(others)]
        return [Send(_way_back(to), ViewShared(0, part)) for part in parts]

    def _announce(self) -> list[Effect]:
        members = self._view.members()
        if self._metrics is not None:
            for state, name in enumerate(STATE_NAMES):
                count = sum(member.state == state for member in members)
                self._metrics.members.labels(state=name).set(count)
        changed = ViewChanged(members)
        return [TellRing(changed), TellDirectory(changed), TellRemoval(changed)]


def _way_back(sender: Origin) -> int | Origin:
    return sender if sender.pipe else sender.identity
