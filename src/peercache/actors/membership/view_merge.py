"""View merge: which entries of another node's view this node merges into its own. Pure.

How two entries merge is a law (`model/view.py`). Which entries to merge is judged here: a member
heard lately is not dead, only the judges of a member end it, a tombstone stays, and an address has
one holder. Otherwise one node that was cut off, and comes back with a view full of dead members,
would empty every view until the last of them has refuted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

import attrs

from peercache.actors.membership.tombstones import Tombstones
from peercache.model.member import ALIVE, DEAD, LEFT, SUSPECT, Member
from peercache.model.view import View, is_live, is_newer


@final
@attrs.frozen
class JudgedView:
    """merged: entries to merge. doubted: DEAD or SUSPECT entries of members heard lately."""

    merged: list[Member]
    doubted: list[Member]


def speaks_for_itself(sender: int, member: Member) -> bool:
    """Tell whether `sender` brings its own entry, in a state that only a member itself reports."""
    return member.incarnation == sender and member.state in (ALIVE, LEFT)


def introduced(member: Member, *, me: int, view: View, tombstones: Tombstones) -> list[Member]:
    """Return the entries that follow from a node's own message that it lives at its address."""
    known = view.get(member.incarnation)
    if known is None and tombstones.holds(member):
        return [tombstones.as_dead(member)]
    if known is not None or member.state != ALIVE:
        return [member]
    # One process binds an address, so the member that had it before is gone. Judged at first sight
    # only: two nodes that advertise one address by mistake would end each other for ever.
    return [member] + [
        attrs.evolve(other, state=DEAD)
        for other in view.live()
        if other.control == member.control and other.incarnation != me
    ]


def judge_view(
    theirs: Mapping[int, Member],
    *,
    sender: int,
    me: int,
    view: View,
    tombstones: Tombstones,
    heard_lately: Callable[[int], bool],
    may_end: bool,
) -> JudgedView:
    """Part the entries of `sender`'s view into those to merge and those to doubt.

    heard_lately: whether a message of the member itself came within suspect_s.
    may_end:      whether the sender or this node is a master, so that DEAD counts.
    """
    holders = {member.control: member.incarnation for member in theirs.values() if is_live(member)}
    judged = JudgedView([], [])
    for incarnation, entry in theirs.items():
        mine = view.get(incarnation)
        if incarnation == me:
            continue
        if incarnation == sender:
            if speaks_for_itself(sender, entry):
                judged.merged.extend(introduced(entry, me=me, view=view, tombstones=tombstones))
        elif mine is None:
            if not tombstones.holds(entry):
                judged.merged.append(entry)
            elif is_live(entry):
                # Gossip the member as DEAD, so that it can refute.
                judged.merged.append(tombstones.as_dead(entry))
        elif not is_newer(entry, mine):
            continue
        elif entry.state in (ALIVE, LEFT) or not is_live(mine):
            judged.merged.append(entry)
        elif heard_lately(incarnation) and holders.get(entry.control, incarnation) == incarnation:
            judged.doubted.append(entry)
        elif entry.state == DEAD and not may_end:
            # Neither node judges this member; the masters will know.
            judged.merged.append(attrs.evolve(entry, state=SUSPECT))
        else:
            judged.merged.append(entry)
    return judged
