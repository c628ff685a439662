"""Rights: whether a sender may send a message, decided from its role and identity, in one place.

Each message states the roles that may send it, and what of it must be the sender's own
(`wire.messages.declared`).

Three doors ask here. Control: `Session` and `refusal`, for every message of the wire. Data:
`reads_pages` and `spaces_of`, before a byte is served. HTTP: `reads_state` and `may_read`.

What a right rests on:

* A node is believed about itself only: records and streams of its own incarnation, its own entry of
  a view. What it tells of other members gives addresses to try; masters are distinguished by the
  membership actor, which knows them.
* A writer is a process on this node's own host, which has read the secret in a lock file that only
  users who share the host can read. No connection over tcp is ever a writer's, so no certificate
  makes one.
* An operator has an operator's certificate. On the node's own host its user is enough, and root;
  without TLS it is whichever client of the cluster says so: nothing is proven there.
* A page key is a hash: it does not tell its namespace. So a Lookup is answered for every key, and a
  client whose certificate names namespaces is restricted where bytes are: tcp serves pages of its
  spaces only, queue pairs are refused, because one key of a memory region opens all of it, and its
  client maps no memory but its home node's. Memory of its own host that it may open as a user it
  can read without PeerCache; a tenant that is not trusted with that runs as another user.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import attrs

from peercache.errors import Rejected
from peercache.model.ids import incarnation_of
from peercache.model.keys import Namespace, space_of
from peercache.model.member import Member
from peercache.model.records import are_of
from peercache.trust.identity import CertificateRole, Identity
from peercache.wire.messages.declared import Message, Role, Rule

ROLE = "role"
"""Refusal: no sender of this role may send the message."""

NOT_ITS_OWN = "not_its_own"
"""Refusal: a node speaks of another one's records, or of another one's entry."""

NAMESPACE = "namespace"
"""Refusal: the message concerns a namespace that is not the sender's."""

INVENTED = "invented"
"""Refusal: the incarnation of a member does not follow from its certificate's name and nonce."""


@attrs.frozen
class Session:
    """An admitted connection.

    namespace, geometry: of a client: what it has said about its pages.
    reads:   the space tags of which it may read pages; None for all of the cluster.
    changes: the space tags of which it may write or remove pages; None for all of the cluster.
    name:    the name in the certificate of a node; "" without TLS.
    """

    identity: int
    role: Role
    namespace: str = ""
    geometry: str = ""
    reads: frozenset[int] | None = None
    changes: frozenset[int] | None = frozenset()
    name: str = ""


def refusal(session: Session, message: Message) -> str:
    """Return why a sender may not send this very message, or "" if it may."""
    declared = message.declared
    if session.role not in declared.senders:
        return ROLE
    for rule in declared.rules:
        keeps, reason = _RULES[rule]
        if not keeps(session, message):
            return reason
    return ""


def _owns_entry(session: Session, member: Member) -> bool:
    return member.incarnation == session.identity and member.name == session.name


_RULES: dict[Rule, tuple[Callable[[Session, Any], bool], str]] = {
    Rule.OWN_RECORDS: (lambda session, told: are_of(told.records, session.identity), NOT_ITS_OWN),
    Rule.OWN_ENTRY: (lambda session, told: _owns_entry(session, told.member), NOT_ITS_OWN),
    Rule.OWN_NAMESPACE: (
        lambda session, told: is_among(told.namespace, session.changes),
        NAMESPACE,
    ),
    Rule.ALL_NAMESPACES: (lambda session, _: session.reads is None, NAMESPACE),
}
"""By rule: whether a message keeps it, and the reason of the refusal if not."""
assert _RULES.keys() == set(Rule)


def is_invented(cluster: str, member: Member) -> bool:
    """Return whether a member's incarnation cannot be that of the name that it states.

    Only where names come from certificates: without TLS every name is "" and nothing is proven.
    """
    return incarnation_of(cluster, member.name, member.nonce) != member.incarnation


def spaces_of(identity: Identity | None) -> frozenset[int] | None:
    """Return the space tags that a certificate names; None where it names none: every space.

    They bound what its owner reads, and, of a node, what it hands over, removes and clears.
    """
    if identity is None or not identity.namespaces:
        return None
    return frozenset(Namespace(name).space_tag() for name in identity.namespaces)


def is_among(tag: int, spaces: frozenset[int] | None) -> bool:
    """Return whether a namespace's tag is of one of these spaces; None: of every one."""
    return spaces is None or space_of(tag) in spaces


def reads_pages(identity: Identity) -> bool:
    """Return whether the data port serves this certificate's owner; its spaces restrict it then.

    A node's certificate is read with as well: engines with an embedded node have no other.
    """
    return identity.role in (CertificateRole.NODE, CertificateRole.CLIENT)


def reads_state(identity: Identity) -> bool:
    """Return whether HTTP shows the state of the node and of the cluster: not to clients."""
    return identity.role in (CertificateRole.NODE, CertificateRole.OPERATOR)


class Watcher(Enum):
    """What a client of the HTTP port has proved to be."""

    OPERATOR = "operator"
    """It has the certificate of an operator or a node."""
    TOKEN = "token"  # noqa: S105 - a name
    """It knows the bearer token."""
    SHARER = "sharer"
    """It is a process of this host, of a uid that shares the node."""
    TRIAL = "trial"
    """Nothing: the cluster is a trial without certificates."""


ALL_PAGES = frozenset(Watcher)
"""Watchers that read every page: each of them may read the state of the cluster elsewhere too."""

OPEN_PAGES = frozenset({"/healthz", "/metrics"})
"""Pages that `http_open` shows to every client: they name no host, no address and no namespace."""


def may_read(path: str, watchers: frozenset[Watcher], *, is_open: bool) -> bool:
    """Return whether a client that has proved to be these watchers may read a page."""
    return bool(watchers & ALL_PAGES) or (is_open and path in OPEN_PAGES)


def watcher_of(identity: Identity) -> Watcher:
    """Return what a certificate proves; raise Rejected for one that opens no page."""
    if reads_state(identity):
        return Watcher.OPERATOR
    raise Rejected("role", f"a {identity.role.value}'s certificate opens no page")
