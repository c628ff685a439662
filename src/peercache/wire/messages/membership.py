"""Messages between members: joining, heartbeats, views."""

from __future__ import annotations

import attrs

from peercache.model.member import Member


@attrs.frozen
class Join:
    """Ask the node at a discovery address to add the sender to its view."""

    member: Member


@attrs.frozen
class Heartbeat:
    """Tell a master that the sender lives. view: the digest of the sender's view."""

    member: Member
    view: bytes


@attrs.frozen
class HeartbeatSeen:
    """Answer a heartbeat. view: the digest of the answerer's view."""

    view: bytes


@attrs.frozen
class ViewShared:
    """Share a whole view; the receiver merges. request: of the ViewAsked it answers, or 0."""

    request: int
    view: tuple[Member, ...]


@attrs.frozen
class ViewAsked:
    """Ask for the view, unless its digest is the one given (then the answer is empty)."""

    request: int
    digest: bytes
