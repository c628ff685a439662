"""Identities: the owner that a certificate names.

A certificate names its owner in a URI among its alternative names:

    peercache://CLUSTER/node/NAME
    peercache://CLUSTER/client/NAME?namespace=A&namespace=B
    peercache://CLUSTER/operator/NAME

Each part is percent-encoded. An identity has only one spelling: different texts are different
peers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from urllib.parse import quote, unquote

import attrs

from peercache.errors import Rejected

SCHEME = "peercache://"

UNTIL = "peercache-until:"
"""Start of a URI that repeats the expiry of a certificate, in seconds since 1970: nng returns a
peer's names, but not its dates."""

SHARED_NAME = "peercache"
"""A DNS name in every certificate: nng and OpenSSL require a server name to verify."""

TEXT_CHARACTERS_MAX = 255
"""Longest name of a cluster, a peer or a namespace."""

NAMESPACES_MAX = 64
"""Most namespaces that one certificate names."""

URI_CHARACTERS_MAX = 16 * 1024
"""Longest URI that is parsed."""

_URI = re.compile(r"peercache://([^/?#]+)/(node|client|operator)/([^/?#]+)(?:\?([^#]+))?")


class CertificateRole(Enum):
    """The role of a certificate's owner."""

    NODE = "node"
    CLIENT = "client"
    OPERATOR = "operator"


@attrs.frozen
class Identity:
    """The owner of a certificate.

    namespaces: those that the owner may read (a node: also hand over, remove and clear); () means
                all of the cluster.
    """

    cluster: str
    role: CertificateRole
    name: str
    namespaces: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        """Raise Rejected for a text that no certificate may contain."""
        for text in (self.cluster, self.name, *self.namespaces):
            if not text.isprintable() or not 0 < len(text) <= TEXT_CHARACTERS_MAX:
                raise _refusal(
                    f"{text!r} must have 1 to {TEXT_CHARACTERS_MAX} printable characters"
                )
        if len(self.namespaces) > NAMESPACES_MAX:
            raise _refusal(f"it names more than {NAMESPACES_MAX} namespaces")
        if self.namespaces and self.role is CertificateRole.OPERATOR:
            raise _refusal("an operator's certificate names no namespace")

    def allows(self, namespace: str) -> bool:
        """Return whether the owner may use a namespace, by its name."""
        return not self.namespaces or namespace in self.namespaces

    def uri(self) -> str:
        """Return the URI in a certificate of this owner."""
        path = f"{SCHEME}{_quoted(self.cluster)}/{self.role.value}/{_quoted(self.name)}"
        query = "&".join(f"namespace={_quoted(each)}" for each in self.namespaces)
        return f"{path}?{query}" if query else path


def parse_identity(uri: str) -> Identity:
    """Parse a URI of `Identity.uri`; raise Rejected for every other text."""
    match = _URI.fullmatch(uri) if len(uri) <= URI_CHARACTERS_MAX else None
    if match is None:
        raise _refusal(f"{uri[:200]!r} is no identity of PeerCache")
    namespaces = []
    for part in match[4].split("&") if match[4] else ():
        name, _, value = part.partition("=")
        if name != "namespace":
            raise _refusal(f"{uri[:200]!r} has the unknown part {name!r}")
        namespaces.append(_unquoted(value))
    identity = Identity(
        _unquoted(match[1]), CertificateRole(match[2]), _unquoted(match[3]), tuple(namespaces)
    )
    if identity.uri() != uri:
        # Two spellings of one peer would be counted, revoked and limited as two.
        raise _refusal(f"{uri[:200]!r} is not how PeerCache writes this identity")
    return identity


def identity_among(alternative_names: Iterable[str]) -> Identity:
    """Return the one identity among a certificate's alternative names; raise Rejected otherwise."""
    found = [name for name in alternative_names if name.startswith(SCHEME)]
    if len(found) != 1:
        raise _refusal(f"it names {len(found)} identities of PeerCache instead of one")
    return parse_identity(found[0])


def until_uri(not_after: float) -> str:
    """Return the URI with which a certificate repeats its expiry."""
    return f"{UNTIL}{int(not_after)}"


def until_among(alternative_names: Iterable[str]) -> float | None:
    """Return when a certificate expires, from its names; None if they do not contain it."""
    found = [name.removeprefix(UNTIL) for name in alternative_names if name.startswith(UNTIL)]
    # Of several the earliest, so that no connection lasts too long.
    return min((float(each) for each in found if each.isdecimal()), default=None)


def _quoted(text: str) -> str:
    return quote(text, safe="")


def _unquoted(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError as error:
        raise _refusal(f"{text[:200]!r} is no UTF-8") from error


def _refusal(problem: str) -> Rejected:
    return Rejected("certificate", f"the certificate's identity: {problem}")
