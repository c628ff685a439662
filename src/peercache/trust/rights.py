"""Rights: whether a sender may send a message, decided from its role and identity, in one place.

Each message class states the roles that may send it, and which parts must belong to the sender
(`wire.messages.declared`).

Three ports use this module. Control: `Session` and `refusal`, for every message of the wire. Data:
`reads_pages` and `spaces_of`, before a byte is served. HTTP: `reads_state` and `may_read`.

The basis of rights:

* A node is trusted only about itself: records and streams of its own incarnation, its own entry of
  a view. Its entries of other members are only addresses to try; the membership actor, which knows
  the masters, makes the exception for them.
* A writer is a process on this node's own host, which has read the secret in a lock file that only
  users who share the host can read. A connection over tcp never belongs to a writer, so no
  certificate makes one.
* An operator has an operator's certificate. On the node's own host the node's user, or root, is
  enough; without TLS any client of the cluster may claim to be one: nothing is proven there.
* A page key is a hash: it does not show its namespace. So a Lookup is answered for every key, and a
  client with a certificate that names namespaces is restricted when it reads bytes: tcp serves only
  pages of its spaces, queue pairs are refused, because one key of a memory region opens all of it,
  and the client maps only its home node's memory. It can read memory of its own host that its user
  may open without PeerCache; a tenant that is not trusted with that must run as another user.
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
"""Refusal: a node sends another one's records, or another one's entry."""

NAMESPACE = "namespace"
"""Refusal: the message concerns a namespace that is not the sender's."""

INVENTED = "invented"
"""Refusal: the incarnation of a member does not match its certificate's name and nonce."""


@attrs.frozen
class Session:
    """An admitted connection.

    namespace, geometry: those of a client's pages, from its Hello.
    reads:   the space tags that it may read; None: all of the cluster.
    changes: the space tags that it may write or remove; None: all of the cluster.
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
    """Return why a sender may not send this message, or "" if it may."""
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
    Rule.OWN_RECORDS: (lambda session, sent: are_of(sent.records, session.identity), NOT_ITS_OWN),
    Rule.OWN_ENTRY: (lambda session, sent: _owns_entry(session, sent.member), NOT_ITS_OWN),
    Rule.OWN_NAMESPACE: (
        lambda session, sent: is_among(sent.namespace, session.changes),
        NAMESPACE,
    ),
    Rule.READABLE_NAMESPACE: (
        lambda session, sent: is_among(sent.namespace, session.reads),
        NAMESPACE,
    ),
    Rule.ALL_NAMESPACES: (lambda session, _: session.reads is None, NAMESPACE),
}
"""By rule: whether a message obeys it, and the reason of the refusal if not."""
assert _RULES.keys() == set(Rule)


def is_invented(cluster: str, member: Member) -> bool:
    """Return whether a member's incarnation does not match its name.

    Without TLS every name is "", so this only finds mistakes: nothing is proven.
    """
    return incarnation_of(cluster, member.name, member.nonce) != member.incarnation


def spaces_of(identity: Identity | None) -> frozenset[int] | None:
    """Return the space tags that a certificate names; None if it names none: every space.

    They limit what its owner reads, and what a node hands over, removes and clears.
    """
    if identity is None or not identity.namespaces:
        return None
    return frozenset(Namespace(name).space_tag() for name in identity.namespaces)


def is_among(tag: int, spaces: frozenset[int] | None) -> bool:
    """Return whether a namespace's tag is in one of these spaces; None: all spaces."""
    return spaces is None or space_of(tag) in spaces


def reads_pages(identity: Identity) -> bool:
    """Return whether the data port serves this certificate's owner, within its spaces.

    A node's certificate may read, too: engines with an embedded node have no other.
    """
    return identity.role in (CertificateRole.NODE, CertificateRole.CLIENT)


def reads_state(identity: Identity) -> bool:
    """Return whether HTTP shows this owner the state of node and cluster: not to clients."""
    return identity.role in (CertificateRole.NODE, CertificateRole.OPERATOR)


class Watcher(Enum):
    """What a client of the HTTP port has proved."""

    OPERATOR = "operator"
    """It has the certificate of an operator or a node."""
    TOKEN = "token"  # noqa: S105 - a name
    """It knows the bearer token."""
    SHARER = "sharer"
    """It is a process of this host, of a uid that shares the node."""
    TRIAL = "trial"
    """It has proved nothing: the cluster is a trial without certificates."""


ALL_PAGES = frozenset(Watcher)
"""Watchers that may read every page: each may read the state of the cluster elsewhere, too."""

OPEN_PAGES = frozenset({"/healthz", "/metrics"})
"""Pages that `http_open` shows to every client: they name no host, no address and no namespace."""


CHANGING_PAGES = frozenset({"/api/v1/hints/tokens", "/api/v1/hints/hashes"})
"""Pages that change which pages are evicted, of any namespace."""

CHANGERS = frozenset({Watcher.SHARER, Watcher.TRIAL})
"""Watchers that may do so: each may be an operator of the node without a certificate. A token is
for reading, and a certificate may be limited to namespaces."""


def may_read(path: str, watchers: frozenset[Watcher], *, is_open: bool) -> bool:
    """Return whether a client that has proved this may ask for a page."""
    if path in CHANGING_PAGES:
        return bool(watchers & CHANGERS)
    return bool(watchers & ALL_PAGES) or (is_open and path in OPEN_PAGES)


def watcher_of(identity: Identity) -> Watcher:
    """Return what a certificate proves; raise Rejected if it gives access to no page."""
    if reads_state(identity):
        return Watcher.OPERATOR
    raise Rejected("role", f"a {identity.role.value}'s certificate opens no page")
