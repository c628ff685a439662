"""View parts: how a view is cut into messages of a bounded size. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from peercache.actors.membership.view_log import ViewLog
from peercache.model.member import Member
from peercache.model.view import View, is_live
from peercache.wire.messages.membership import (
    ViewAsked,
    ViewChanges,
    ViewChangesAsked,
    ViewShared,
)

PART_BYTES_MAX = 192 * 1024
"""Bytes of the entries in one message, three quarters of what a message may have: about 1,200."""

PART_MEMBERS_MAX = 1024
"""Entries in one message: their decoding takes a few milliseconds."""

MEMBER_BYTES_ABOUT = 80
"""What an entry takes beside its texts: four numbers and the heads of all fields."""


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
    """Cut entries into parts that each begin with the sender's own: it says whose the others are.

    Entries of one address stand together, so that a successor is seen with its predecessor.
    """
    ordered = sorted(others, key=lambda member: (member.control, member.incarnation))
    return [(me, *part) for part in parts_of(ordered)] or [(me,)]


def part_asked(view: View, asked: ViewAsked) -> ViewShared:
    """Return the part of the view that a client asks for."""
    if not asked.after and asked.digest == view.digest():
        return ViewShared(asked.request, ())
    left = [member for member in view.live() if member.incarnation > asked.after]
    parts = parts_of(left)
    return ViewShared(asked.request, parts[0] if parts else (), len(parts) > 1)


def changes_asked(view: View, log: ViewLog, asked: ViewChangesAsked) -> ViewChanges:
    """Return what a client needs that holds an earlier view of this node's, or of an equal one."""
    digest = view.digest()
    if asked.digest == digest:
        return ViewChanges(asked.request, digest, digest, (), ())
    changed = log.since(asked.digest)
    if changed is None:
        return ViewChanges(asked.request, b"", digest, (), ())
    found = [(incarnation, view.get(incarnation)) for incarnation in changed]
    live = tuple([entry for _, entry in found if entry is not None and is_live(entry)])
    gone = tuple([i for i, entry in found if entry is None or not is_live(entry)])
    return ViewChanges(asked.request, asked.digest, digest, live, gone)


def bytes_of(member: Member) -> int:
    """Return how many bytes an entry takes at most."""
    texts = (member.host_name, member.control, member.data, member.boot_id, member.segment)
    length = sum([len(text.encode()) for text in (*texts, member.name)])
    return length + len(member.nonce) + MEMBER_BYTES_ABOUT
