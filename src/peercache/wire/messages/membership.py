"""Messages between members: joining, heartbeats, views."""

from __future__ import annotations

from typing import ClassVar

import attrs

from peercache.model.member import Member
from peercache.wire.messages.declared import EVERYONE, NO_ROLE, NODES, Declared, Receiver, Rule


@attrs.frozen
class Join:
    """Ask the node at a discovery address to add the sender to its view."""

    declared: ClassVar = Declared(4, Receiver.MEMBERSHIP, NODES, rules=(Rule.OWN_ENTRY,))

    member: Member


@attrs.frozen
class Heartbeat:
    """Tell a master that the sender lives. view: the digest of the sender's view."""

    declared: ClassVar = Declared(5, Receiver.MEMBERSHIP, NODES, rules=(Rule.OWN_ENTRY,))

    member: Member
    view: bytes


@attrs.frozen
class HeartbeatSeen:
    """Answer a heartbeat, or a Join. view: the digest of the answerer's view."""

    declared: ClassVar = Declared(6, Receiver.MEMBERSHIP, NODES)

    view: bytes


@attrs.frozen
class ViewShared:
    """Share entries of a view; the receiver merges. request: of the ViewAsked it answers, or 0.

    more: the view has further entries: ask for those after the last one here.
    """

    declared: ClassVar = Declared(7, Receiver.MEMBERSHIP, NODES)

    request: int
    view: tuple[Member, ...]
    more: bool = False


@attrs.frozen
class ViewAsked:
    """Ask for the live members, unless the view's digest is the one given (the answer is empty).

    after: the last incarnation of the part before, for the next part; 0 for the first one.
    """

    declared: ClassVar = Declared(8, Receiver.MEMBERSHIP, EVERYONE)

    request: int
    digest: bytes
    after: int = 0


@attrs.frozen
class ViewCompared:
    """Ask a member for the entries in which its view differs from the sender's.

    buckets: digests of the sender's view, 8 bytes each (`model.view.View.bucket_digests`).
    """

    declared: ClassVar = Declared(39, Receiver.MEMBERSHIP, NODES)

    buckets: bytes


@attrs.frozen
class ViewChangesAsked:
    """Ask for what has changed in the view of live members since it had this digest."""

    declared: ClassVar = Declared(41, Receiver.MEMBERSHIP, EVERYONE)

    request: int
    digest: bytes


@attrs.frozen
class ViewChanges:
    """Answer a ViewChangesAsked: what makes a view with digest `base` one with `digest`.

    view: the live entries that are new or other ones. gone: the incarnations that live no more.
    base: empty if the answerer cannot say: then ask for the whole view.
    """

    declared: ClassVar = Declared(42, Receiver.ASKER, NO_ROLE)

    request: int
    base: bytes
    digest: bytes
    view: tuple[Member, ...]
    gone: tuple[int, ...]
