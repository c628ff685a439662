"""Membership: which nodes are in the cluster, by their own messages and by their silence.

Owns    this node's view, its own entry in it, and the failure detector's clocks.
Takes   Join, Heartbeat, HeartbeatSeen, ShareView, RequestView, RequestViewChanges, CompareView;
        PeerAnswered and AddressesFound from the node; a tick four times a heartbeat.
Sends   Join to discovery addresses and to lost members, Heartbeat to the masters, HeartbeatSeen and
        ShareView in answer, CompareView to peers with a different view, ShareView to candidates;
        ViewChanged to ring and directory, Republish to the publisher, HeldDead to directory and
        pool.
Keeps   its own entry is in its view, and alive until `leave`; it refutes every entry that states
        otherwise by a higher counter. Masters judge all members, other nodes judge the masters,
        each by its own clock. A member that has sent a message recently is not dead, whatever other
        nodes report: they notify it, so that it can refute. A dead incarnation comes back only by
        its own counter. A node becomes a member when it has answered at its own address; before
        that, reports about it are only addresses to try. Only masters are trusted about third
        nodes, and a master that was dead itself a moment ago is not trusted about their end. Peers
        get only the entries in which their view differs: a peer with an earlier view of this node
        gets the changes since. The cost of a message depends on what it changes, not on the size of
        the view.
Limits  MEMBERS_MAX entries of a view; the limits of `candidates` and `gossip`; LEAVE_MAX goodbyes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import final

import attrs
from typing_extensions import assert_never

from peercache.actors.effects import (
    Effect,
    NotifyDirectory,
    NotifyPool,
    NotifyPublisher,
    Send,
    SendTo,
)
from peercache.actors.mailboxes import (
    AddressesFound,
    HeldDead,
    MembershipMessage,
    PeerAnswered,
    Republish,
)
from peercache.actors.membership.candidates import Candidates, Places, Reconnect
from peercache.actors.membership.gossip import (
    COUNTER_JUMP_MAX,
    Announcing,
    Claims,
    FailureDetector,
    Tombstones,
    ViewExchange,
    ViewLog,
    changes_asked,
    introduced,
    judge_view,
    part_asked,
    parts_of_sender,
    speaks_for_itself,
)
from peercache.actors.origin import Origin
from peercache.model.member import ALIVE, DEAD, LEFT, SUSPECT, Member
from peercache.model.view import MEMBERS_MAX, View, is_live, is_newer, may_replace
from peercache.observability.metrics import Metrics
from peercache.wire.messages.membership import (
    CompareView,
    Heartbeat,
    HeartbeatSeen,
    Join,
    RequestView,
    RequestViewChanges,
    ShareView,
)

TICKS_PER_BEAT = 4
"""Ticks in a heartbeat: the resolution of silence, and of notices to a new master."""

DIAL_MAX_S = 5.0
"""Longest back-off, or three heartbeats if that is less: partitions heal in ten seconds."""

LEAVE_MAX = 256
"""Goodbyes sent when leaving, masters first; the other nodes are notified by a master."""

WANTING_MAX = 1024
"""Remembered newcomers that asked for the view: they get it when they have answered."""

REPUBLISH_GAP_S = 30.0
"""Least time between two Republish: a peer that loses this node again and again causes no flood."""


@final
class Membership:
    """One node's part in keeping the view. Never awaits; time and randomness are parameters."""

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
        self._announcing = Announcing(metrics or Metrics())
        self._log = ViewLog(heartbeat_s=heartbeat_s)
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
        self._claims = Claims(dead_s=dead_s)
        self._view = View.of([me])
        self._masters: tuple[Member, ...] = (me,)
        self._detector = FailureDetector()
        self._tombstones = Tombstones()
        self._exchange = ViewExchange(turn_s=self._turn_s, heartbeat_s=heartbeat_s)
        self._places = Places()
        self._ran_at = self._turn_at = self._beat_at = self._shares_until = 0.0
        # When another node last showed that it has this one in its view.
        self._held_at = -math.inf
        self._republish_owed = False
        # The highest counter with which another node held this one dead.
        self._dead_at = -1
        self._republish_from = -math.inf

    @property
    def view(self) -> View:
        """The view as it is now."""
        return self._view

    @property
    def me(self) -> Member:
        """The entry of this node, with its current counter."""
        return self._me

    @property
    def is_joined(self) -> bool:
        """Whether a live member has shown recently that it holds this node for a member.

        A node may know members that never reached it: those do not have it in their views.
        """
        return len(self._view.live()) > 1 and self._ran_at - self._held_at < self._dead_s

    def member(self, incarnation: int) -> Member | None:
        """Return the entry of an incarnation, in whatever state, or None."""
        return self._view.get(incarnation)

    def masters(self) -> tuple[Member, ...]:
        """Return the active masters, in the order of their ranks."""
        return self._masters

    def dialled(self) -> frozenset[str]:
        """Return the addresses that this node is dialling to find members."""
        return self._candidates.dialled

    def start(self, now: float) -> list[Effect]:
        """Notify the other actors that this node is alone, and dial every discovery address."""
        self._ran_at = now
        self._turn_at = now + self._turn_s
        self._beat_at = self._shares_until = now + self._heartbeat_s
        return [*self._announcing.announce(self._view, now), *self._dial(now)]

    def leave(self, now: float) -> list[Effect]:
        """Send goodbye. Final for this incarnation: it sends nothing and ignores messages
        afterwards.
        """
        if self._me.state == LEFT:
            return []
        self._me = attrs.evolve(self._me, state=LEFT, counter=self._me.counter + 1)
        masters = [m.incarnation for m in self._masters if m.incarnation != self._me.incarnation]
        others = [m.incarnation for m in self._view.live() if m.incarnation not in masters]
        goodbye = ShareView(0, (self._me,))
        sent = [i for i in masters + others if i != self._me.incarnation][:LEAVE_MAX]
        return [*self._merge([self._me], now), *[Send(i, goodbye) for i in sent]]

    def move(self, now: float, *, control: str, data: str, head_rank: int) -> list[Effect]:
        """Notify the others of a new address, or head rank, of this node."""
        if self._me.state == LEFT:
            return []
        self._me = attrs.evolve(
            self._me, counter=self._me.counter + 1, control=control, data=data, head_rank=head_rank
        )
        self._reconnect.is_own(control, head_rank)
        return [*self._merge([self._me], now), *self._beat(now), *self._join_heads()]

    def on_message(self, sender: Origin, message: MembershipMessage, now: float) -> list[Effect]:
        """Handle a message of a node, or the RequestView of a client."""
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
            case ShareView(_, members):
                return self._on_view(sender, members, now)
            case RequestView():
                return [Send(_reply_target(sender), part_asked(self._view, message))]
            case RequestViewChanges():
                return [Send(_reply_target(sender), changes_asked(self._view, self._log, message))]
            case CompareView(buckets):
                return self._on_compared(sender, buckets)
            case PeerAnswered(address, member):
                return self._on_answered(address, member, now)
            case AddressesFound(addresses):
                self._candidates.found(addresses, now)
                return self._try_candidates(now)
        assert_never(message)

    def on_tick(self, now: float) -> list[Effect]:
        """Judge silent members, forget ended ones, send heartbeats, redial lost addresses."""
        if self._me.state == LEFT:
            return []
        self._notice_pause(now)
        sent = self._announcing.announce(self._view, now) if now >= self._announcing.due else []
        if now < min(self._turn_at, self._beat_at):
            return sent
        self._turn_at = now + self._turn_s
        effects = [*sent, *self._judge(now), *self._forget(now)]
        if now >= self._shares_until:
            self._claims.forget(now, view=self._view)
            self._exchange.next_beat()
            self._shares_until = now + self._heartbeat_s
        if now >= self._beat_at:
            effects += self._beat(now)
        effects += [*self._ask_next(now), *self._dial(now), *self._try_candidates(now)]
        return [*effects, *self._republish(now)]

    def deadline(self) -> float:
        """Return when the next tick is due."""
        if self._me.state == LEFT:
            return math.inf
        return min(self._turn_at, self._beat_at, self._announcing.due)

    def check(self) -> None:
        """Assert what must hold after every step."""
        assert self._view.get(self._me.incarnation) is self._me, "the own entry is not in the view"
        assert self._masters or self._me.state == LEFT, "a living node knows at least itself"
        assert len(self._view) <= MEMBERS_MAX, f"a view of {len(self._view)}"
        assert len(self._detector) < len(self._view), "clocks of members that are not in the view"
        assert len(self._exchange) <= MEMBERS_MAX, f"{len(self._exchange)} peers in one heartbeat"

    # --- messages ---------------------------------------------------------------------------------

    def _on_join(self, sender: Origin, member: Member, now: float) -> list[Effect]:
        if not speaks_for_itself(sender.identity, member):
            return []
        if self._is_new(member):
            if len(self._wants_view) < WANTING_MAX:
                self._wants_view[member.incarnation] = None
            return self._look_for([member.control], sender.identity, now, is_own=True)
        return [*self._meet(member, now), *self._greet(sender)]

    def _on_heartbeat(
        self, sender: Origin, member: Member, digest: bytes, now: float
    ) -> list[Effect]:
        if not speaks_for_itself(sender.identity, member):
            return []
        if self._is_new(member):
            return self._look_for([member.control], sender.identity, now, is_own=True)
        known = self._view.get(member.incarnation)
        effects = self._meet(member, now)
        if known is not None and member.counter > known.counter:
            effects += self._notify_masters([member])
        if known is not None and not is_live(known):
            effects += self._report_end(sender, known)
        self._held_at = now
        effects += [*self._catch_up(sender, digest, now), *self._greet(sender)]
        return [*effects, *self._compare(sender.identity, digest, now)]

    def _on_compared(self, sender: Origin, buckets: bytes) -> list[Effect]:
        """Send a member the entries in which this view differs from its own."""
        if sender.identity not in self._view:
            return []
        differing = [member for member in self._view.differing(buckets) if member is not self._me]
        # The own entry identifies the sender of the others, and may itself be what differs.
        return self._share(sender, (self._me, *differing))

    def _on_answered(self, address: str, member: Member, now: float) -> list[Effect]:
        """Handle the answer of a member at an address that this node dialled."""
        self._candidates.answered(address, now)
        incarnation = member.incarnation
        if incarnation == self._me.incarnation or member.state != ALIVE:
            return self._try_candidates(now)
        if member.control != address and address not in self._heads:
            # Only an answer at its own address shows that others reach it there.
            if incarnation not in self._view:
                self._candidates.name(member.control, incarnation, now)
            return self._try_candidates(now)
        wants_view = incarnation in self._wants_view
        self._wants_view.pop(incarnation, None)
        effects = self._meet(member, now)
        known = self._view.get(incarnation)
        if known is not None and (wants_view or not is_live(known)):
            effects += self._greet(Origin(incarnation))
        return [*effects, *self._try_candidates(now)]

    def _is_new(self, member: Member) -> bool:
        """Return whether this node knows nothing of a member yet, not even its end."""
        return member.incarnation not in self._view and not self._tombstones.holds(member)

    def _look_for(
        self, addresses: list[str], source: int, now: float, *, is_own: bool = False
    ) -> list[Effect]:
        """Dial addresses that a peer has named, a few at a time."""
        for address in addresses:
            if address != self._me.control:
                self._candidates.name(address, source, now, is_own=is_own)
        return self._try_candidates(now)

    def _try_candidates(self, now: float) -> list[Effect]:
        me = ShareView(0, (self._me,))
        due = self._candidates.due(now, reached=self._places.reached, own=self._me.control)
        return [SendTo(address, me) for address in due]

    def _meet(self, member: Member, now: float) -> list[Effect]:
        known = introduced(
            member, me=self._me.incarnation, view=self._view, tombstones=self._tombstones,
            live_at=self._places.live_at,
        )  # fmt: skip
        effects = self._merge(known, now)
        self._note_message(member.incarnation, now)
        return effects

    def _on_seen(self, sender: Origin, digest: bytes, now: float) -> list[Effect]:
        if sender.identity not in self._view:
            return []
        self._note_message(sender.identity, now)
        self._held_at = now
        return self._compare(sender.identity, digest, now)

    def _greet(self, sender: Origin) -> list[Effect]:
        """Send a member the digest of this view, or that it is held dead, so that it refutes."""
        known = self._view.get(sender.identity)
        if known is None or is_live(known):
            return [Send(_reply_target(sender), HeartbeatSeen(self._view.digest()))]
        # Its answer comes before its refutation: until then a master of the other side of a
        # partition is not trusted about members of this side, and by then it must have learned of
        # them.
        sent = self._share(sender, (self._me, known))
        return [*self._ask(sender), *sent]

    def _report_end(self, sender: Origin, before: Member) -> list[Effect]:
        """Notify a member that is alive again that it was dead here: its records were dropped."""
        lives = self._view.get(sender.identity)
        is_back = lives is not None and is_live(lives)
        return self._share(sender, (self._me, before)) if is_back else []

    def _catch_up(self, sender: Origin, digest: bytes, now: float) -> list[Effect]:
        """Send the changes since to a member with a recent earlier view of this node."""
        changed = (self._log.since(digest) if self._log.was(digest, now) else None) or []
        entries = [self._view.get(incarnation) for incarnation in changed]
        others = tuple([entry for entry in entries if entry not in (None, self._me)])
        return self._share(sender, (self._me, *others)) if changed else []

    def _compare(self, peer: int, digest: bytes, now: float) -> list[Effect]:
        """Ask a member with a different view for the differences, when its turn comes."""
        known = self._view.get(peer)
        if digest == self._view.digest() or known is None or not is_live(known):
            return []
        if self._log.was(digest, now):
            return []  # It is behind: it is sent the changes, or asks itself.
        self._exchange.differs(peer, digest)
        return self._ask_next(now)

    def _ask_next(self, now: float) -> list[Effect]:
        peer = self._exchange.next_peer(
            now, own=self._view.digest(), members=self._view, is_busy=len(self._candidates) > 0
        )
        return [] if peer is None else self._ask(Origin(peer))

    def _ask(self, to: Origin) -> list[Effect]:
        if not self._exchange.may_share(to.identity):
            return []
        return [Send(_reply_target(to), CompareView(self._view.bucket_digests()))]

    def _on_view(self, sender: Origin, members: tuple[Member, ...], now: float) -> list[Effect]:
        theirs = {member.incarnation: member for member in members}
        before = self._view.get(sender.identity)
        if before is None:
            own = theirs.get(sender.identity)
            if own is None or not speaks_for_itself(sender.identity, own):
                return []
            if self._is_new(own):
                return self._look_for([own.control], sender.identity, now, is_own=True)
            # It was dead, and this node has forgotten it: it can refute now.
            return [*self._meet(own, now), *self._greet(sender)]
        masters = {master.incarnation for master in self._masters}
        judged = judge_view(
            theirs,
            sender=sender.identity,
            me=self._me.incarnation,
            view=self._view,
            tombstones=self._tombstones,
            live_at=self._places.live_at,
            seen_recently=lambda one: self._detector.seen_within(one, now, self._suspect_s),
            is_master=sender.identity in masters,
            is_back=self._detector.back_within(sender.identity, now, self._suspect_s),
        )
        of_me = theirs.get(self._me.incarnation)
        if of_me is not None and is_live(of_me):
            self._held_at = now
        refuted = self._refute(of_me)
        ended = self._note_end(of_me)
        effects = [*ended, *self._merge([*judged.merged, self._me], now)]
        self._note_message(sender.identity, now)
        for entry in judged.doubted:
            # The member refutes, and the sender corrects the entry. This node cannot refute it.
            effects += self._share(Origin(entry.incarnation), (self._me, entry))
        if refuted:
            effects += self._beat(now)
            if sender.identity not in masters:
                effects += self._share(sender, (self._me,))
        effects += self._republish(now)
        # After a partition each side has entries that the other lacks.
        if before.state in (DEAD, LEFT):
            effects += [*self._report_end(sender, before), *self._greet(sender)]
        effects += self._contradict(sender, judged.unmet, now)
        return [*effects, *self._look_for(judged.to_meet, sender.identity, now)]

    def _contradict(self, sender: Origin, unmet: list[Member], now: float) -> list[Effect]:
        """As a master, report to a member which of those that it holds alive have not answered."""
        if not any(master is self._me for master in self._masters):
            return []
        silent = self._claims.silent(unmet, now)
        # If this node holds it ended too, it reports that counter: otherwise their views would
        # differ.
        ended = [entry for entry in silent if entry.incarnation in self._view]
        sent = self._share(sender, (self._me, *silent)) if silent else []
        return [*self._merge(ended, now), *sent]

    def _refute(self, entry: Member | None) -> bool:
        """Raise this node's counter above an entry about this node that would replace its own."""
        if entry is None or not is_newer(entry, self._me):
            return False
        if entry.counter > self._me.counter + COUNTER_JUMP_MAX:
            return False  # No node would trust it.
        self._me = attrs.evolve(self._me, counter=entry.counter + 1)
        return True

    def _note_end(self, entry: Member | None) -> list[Effect]:
        """Publish all again: nodes that held this node dead have dropped its records.

        Nor did they wait for its shard when pages were stored, and they have forgotten which of
        their pages it relies on as copies. Their notice may arrive after it has
        refuted, if it had to refute a suspicion in the meantime.
        """
        if entry is None or is_live(entry) or not self._dead_at < entry.counter < self._me.counter:
            return []
        self._dead_at = entry.counter
        self._republish_owed = True
        return [NotifyDirectory(HeldDead()), NotifyPool(HeldDead())]

    # --- time -----------------------------------------------------------------------------------

    def _notice_pause(self, now: float) -> None:
        """Start every clock again if this process was paused: it received nothing from members."""
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
                # A successor may answer there.
                self._reconnect.lost(member.control, now)
        return [*self._merge(found, now), *self._notify_masters(found)]

    def _notify_masters(self, news: list[Member]) -> list[Effect]:
        """Notify the masters at once of what they may doubt, so that a member refutes in time.

        They find everything else when they compare views.
        """
        masters = [master for master in self._masters if news and master is not self._me]
        return [e for m in masters for e in self._share(Origin(m.incarnation), (self._me, *news))]

    def _forget(self, now: float) -> list[Effect]:
        gone = self._tombstones.due(now)
        for incarnation in gone:
            entry = self._view.get(incarnation)
            assert entry is not None, "an ended member is in the view until it has a tombstone"
            self._tombstones.set(entry)
        return self._adopt(self._view.without(gone), gone, now) if gone else []

    def _beat(self, now: float) -> list[Effect]:
        self._beat_at = now + self._heartbeat_s
        beat = Heartbeat(self._me, self._view.digest())
        own = self._me.incarnation
        return [Send(m.incarnation, beat) for m in self._masters if m.incarnation != own]

    def _dial(self, now: float) -> list[Effect]:
        due = self._reconnect.due(now, reached=self._places.reached, ranks=self._places.ranks)
        return [SendTo(address, Join(self._me)) for address in due]

    def _join_heads(self) -> list[Effect]:
        return [SendTo(address, Join(self._me)) for address in self._reconnect.heads()]

    def _republish(self, now: float) -> list[Effect]:
        if not self._republish_owed or now < self._republish_from:
            return []
        self._republish_owed = False
        self._republish_from = now + REPUBLISH_GAP_S
        return [NotifyPublisher(Republish())]

    # --- the view -------------------------------------------------------------------------------

    def _merge(self, entries: list[Member], now: float) -> list[Effect]:
        view, changed = self._view.merge(entries)
        touched = dict.fromkeys(member.incarnation for member in entries)
        return self._adopt(view, touched, now) if changed else []

    def _adopt(self, view: View, touched: Iterable[int], now: float) -> list[Effect]:
        """Replace the view, and update all that depends on the entries that differ."""
        old, self._view = self._view, view
        pairs = [(old.get(one), view.get(one), one == self._me.incarnation) for one in touched]
        changed = [(before, after) for before, after, _ in pairs if before is not after]
        touched = [one.incarnation for pair in changed if (one := pair[1] or pair[0]) is not None]
        self._log.changed(old.digest(), view.digest(), touched, now)
        for before, after, is_me in pairs:
            if not is_me:
                self._places.change(before, after)
        for before, after in changed:
            if after is not None and after is not self._me:
                self._follow(after, before, now)
        if len(self._masters) < self._max_masters or may_replace(
            self._masters, [after or before for before, after in changed]
        ):
            self._find_masters(now)
        elif any(master is self._me for master in self._masters):
            for _, after in changed:
                if after is not None and is_live(after) and after is not self._me:
                    self._detector.watch(after.incarnation, now)
        return self._announcing.changed(view, now)

    def _find_masters(self, now: float) -> None:
        masters = self._view.masters(self._max_masters)
        if [m.incarnation for m in masters] != [m.incarnation for m in self._masters]:
            # A new master must learn of this node before it starts to measure its silence.
            self._beat_at = min(self._beat_at, self._turn_at)
        self._masters = masters
        followed = self._view.live() if any(m is self._me for m in masters) else masters
        self._detector.judge([m.incarnation for m in followed if m is not self._me], now)

    def _follow(self, member: Member, before: Member | None, now: float) -> None:
        """Update clocks, tombstones and redialling after the change of one entry."""
        incarnation = member.incarnation
        if is_live(member):
            self._tombstones.lives(incarnation)
            if member.state == ALIVE:
                self._reconnect.found(member.control)
            if before is None or member.counter > before.counter:
                # Only a member raises its own counter: it was alive recently, though this node got
                # no message.
                self._detector.restart(incarnation)
            if before is not None and not is_live(before):
                self._detector.back(incarnation, now)
            return
        self._detector.ended(incarnation)
        self._tombstones.ended(incarnation, now)
        if member.state == LEFT:
            self._reconnect.found(member.control)
        elif member.control not in self._places.reached and member.control != self._me.control:
            self._reconnect.lost(member.control, now)

    def _note_message(self, incarnation: int, now: float) -> None:
        member = self._view.get(incarnation)
        if member is not None and is_live(member):
            self._detector.seen(incarnation, now)

    def _share(self, to: Origin, members: tuple[Member, ...]) -> list[Effect]:
        """Send these entries, the own one first, unless this peer already got SHARES_PER_BEAT."""
        if not self._exchange.may_share(to.identity):
            return []
        parts = parts_of_sender(self._me, members[1:])
        return [Send(_reply_target(to), ShareView(0, part)) for part in parts]


def _reply_target(sender: Origin) -> int | Origin:
    return sender if sender.pipe else sender.identity
