"""View merge: which entries of another node's view this node merges into its own. Pure.

How two entries merge is a law (`model/view.py`). Which entries to merge is judged here: a member
heard lately is not dead, only the judges of a member end it, and none that comes back itself just
now; a tombstone stays, and an address has one holder. Otherwise one node that was cut off, and
comes back with a view full of dead members, would empty every view until the last of them has
refuted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import final

import attrs

from peercache.actors.membership.tombstones import Tombstones
from peercache.model.member import ALIVE, DEAD, LEFT, SUSPECT, Member
from peercache.model.view import View, is_live, is_newer

COUNTER_JUMP_MAX = 2**16
"""How far a member's counter may be ahead in another node's view: further than a member refutes
while two sides do not hear each other. A counter at the end of its range could not be refuted."""


@final
@attrs.frozen
class JudgedView:
    """What follows from a view.

    merged:  entries to merge. doubted: DEAD or SUSPECT entries of members that may well live.
    to_meet: addresses at which members may be that this node does not know, or holds dead.
    unmet:   the entries among them that are live, and newer than what this node knows.
    """

    merged: list[Member]
    doubted: list[Member]
    to_meet: list[str]
    unmet: list[Member]


def speaks_for_itself(sender: int, member: Member) -> bool:
    """Tell whether `sender` brings its own entry, in a state that only a member itself reports."""
    return member.incarnation == sender and member.state in (ALIVE, LEFT)


def introduced(
    member: Member,
    *,
    me: int,
    view: View,
    tombstones: Tombstones,
    live_at: Mapping[str, Collection[int]],
) -> list[Member]:
    """Return the entries that follow from a node's own message that it lives at its address.

    live_at: the incarnations of the other live members at each control address.
    """
    known = view.get(member.incarnation)
    if known is None and tombstones.holds(member):
        return [tombstones.as_dead(member)]
    if known is not None or member.state != ALIVE:
        return [member]
    # One process binds an address, so the member that had it before is gone. Judged at first sight
    # only: two nodes that advertise one address by mistake would end each other for ever.
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
    heard_lately: Callable[[int], bool],
    is_master: bool,
    is_back: bool,
) -> JudgedView:
    """Part the entries of a known `sender`'s view: to merge, to doubt, and to look for.

    heard_lately: whether a message of the member itself came within suspect_s.
    is_master:    whether the sender is a master: what others say of third nodes is not believed.
    is_back:      whether this node held the sender dead until lately: it comes from another side of
                  a partition, and has not heard yet who lives on this one.
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
                # It may live, and not know what is said of it: its own answer lets it refute. The
                # masters cannot tell it, for they do not believe this node about others.
                judged.to_meet.append(entry.control)
        elif entry.counter > mine.counter + COUNTER_JUMP_MAX:
            continue
        elif entry.state in (SUSPECT, DEAD) and (
            is_live(mine)
            and (is_back or heard_lately(incarnation))
            and holders.get(entry.control, incarnation) == incarnation
        ):
            judged.doubted.append(entry)
        elif is_master:
            judged.merged.append(entry)
        elif is_live(entry) and not is_live(mine):
            judged.to_meet.append(entry.control)
            judged.unmet.append(entry)
    return judged
