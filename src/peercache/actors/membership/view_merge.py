"""Claims: what a node believes of what others say. Pure.

Merging is a law (model/view.py); whether to merge what somebody says is judgement, and it stands
here: whoever spoke to us lately is not dead, only its judges end a member, the buried stay dead,
and an address has one holder. Without it one node that was cut off for a while, and comes back
with a view full of the dead, would empty everybody's view until the last of them has refuted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

import attrs

from peercache.actors.membership.tombstones import Graves
from peercache.model.member import ALIVE, DEAD, LEFT, SUSPECT, Member
from peercache.model.view import View, is_live, is_newer


@final
@attrs.frozen
class Weighed:
    """news: what to merge. doubted: claims against members that spoke to us lately."""

    news: list[Member]
    doubted: list[Member]


def speaks_for_itself(sender: int, member: Member) -> bool:
    """Return whether this is an entry as only the member itself, `sender`, may bring it."""
    return member.incarnation == sender and member.state in (ALIVE, LEFT)


def introduced(member: Member, *, me: int, view: View, graves: Graves) -> list[Member]:
    """Return what follows from a node's own word that it lives at its address."""
    known = view.get(member.incarnation)
    if known is None and graves.holds(member):
        return [graves.exhumed(member)]
    if known is not None or member.state != ALIVE:
        return [member]
    # An address is bound by one process: whoever had it before is gone. Judged at first sight
    # only, or two nodes that advertise one address by mistake would end each other for ever.
    return [member] + [
        attrs.evolve(other, state=DEAD)
        for other in view.live()
        if other.control == member.control and other.incarnation != me
    ]


def weigh(
    theirs: Mapping[int, Member],
    *,
    sender: int,
    me: int,
    view: View,
    graves: Graves,
    heard_lately: Callable[[int], bool],
    may_end: bool,
) -> Weighed:
    """Part what `sender` says of others into what we take, and what we know better.

    heard_lately: whether a member itself spoke to us within suspect_s.
    may_end:      whether the sender or we judge everybody, so that its word of a death counts.
    """
    holders = {member.control: member.incarnation for member in theirs.values() if is_live(member)}
    weighed = Weighed([], [])
    for incarnation, claim in theirs.items():
        mine = view.get(incarnation)
        if incarnation == me:
            continue
        if incarnation == sender:
            if speaks_for_itself(sender, claim):
                weighed.news.extend(introduced(claim, me=me, view=view, graves=graves))
        elif mine is None:
            if not graves.holds(claim):
                weighed.news.append(claim)
            elif is_live(claim):
                # Shared as dead it reaches those who hear it and tell it to refute, or nobody.
                weighed.news.append(graves.exhumed(claim))
        elif not is_newer(claim, mine):
            continue
        elif claim.state in (ALIVE, LEFT) or not is_live(mine):
            weighed.news.append(claim)
        elif heard_lately(incarnation) and holders.get(claim.control, incarnation) == incarnation:
            weighed.doubted.append(claim)
        elif claim.state == DEAD and not may_end:
            # Neither of us judges this one: our masters will know.
            weighed.news.append(attrs.evolve(claim, state=SUSPECT))
        else:
            weighed.news.append(claim)
    return weighed
