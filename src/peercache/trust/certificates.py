"""Certificates, read by `cryptography`: their contents, and whether one has signed another.

Only commands and processes with TLS import this file: the library takes 60 ms to load.

An authority signs a list of revoked certificates (an X.509 CRL) with an increasing number. Nodes
read it from a file and send it to each other; each one checks the signature itself, so only the
authority can revoke.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from typing import final

import attrs
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from peercache.errors import Rejected
from peercache.trust.identity import Identity, identity_among

CHAIN_MAX = 8
"""The most certificates between a peer's and an authority's."""


@attrs.frozen
class CertificateFacts:
    """The contents of a certificate.

    identity: None for an authority, and for a certificate that is not for PeerCache.
    names:    host names and addresses for which it is valid.
    not_before, not_after: seconds since 1970.
    """

    identity: Identity | None
    subject: str
    issuer: str
    serial: int
    names: tuple[str, ...]
    is_authority: bool
    not_before: float
    not_after: float

    @property
    def days_left(self) -> float:
        """Days until it expires; negative once it has."""
        return (self.not_after - time.time()) / 86_400


def certificates_in(pem: str) -> list[x509.Certificate]:
    """Return the certificates of a PEM text; raise ValueError if none is there or one is
    damaged.
    """
    return x509.load_pem_x509_certificates(pem.encode())


def facts_of(certificate: x509.Certificate) -> CertificateFacts:
    """Return the contents of a certificate; raise Rejected for an identity that cannot be read."""
    uris, names = _alternative_names(certificate)
    is_authority = _is_authority(certificate)
    has_identity = not is_authority and any(uri.startswith("peercache://") for uri in uris)
    return CertificateFacts(
        identity=identity_among(uris) if has_identity else None,
        subject=certificate.subject.rfc4514_string(),
        issuer=certificate.issuer.rfc4514_string(),
        serial=certificate.serial_number,
        names=names,
        is_authority=is_authority,
        not_before=certificate.not_valid_before_utc.timestamp(),
        not_after=certificate.not_valid_after_utc.timestamp(),
    )


def identity_of(certificate: x509.Certificate) -> Identity:
    """Return the identity in a certificate; raise Rejected if there is none."""
    return identity_among(_alternative_names(certificate)[0])


def verify_chain(
    authorities: list[x509.Certificate], chain: list[x509.Certificate], now: float
) -> x509.Certificate:
    """Return the authority that signed a chain, own certificate first; or raise Rejected."""
    current, between = chain[0], chain[1:]
    for _ in range(CHAIN_MAX):
        _check_time(current, now)
        for authority in authorities:
            if _signed(current, authority):
                _check_time(authority, now)
                return authority
        issuers = [each for each in between if _is_authority(each) and _signed(current, each)]
        if not issuers:
            break
        current = issuers[0]
        between.remove(current)
    raise Rejected("certificate", "no authority of tls_ca has signed it")


def fits(certificate: x509.Certificate, key_pem: str) -> bool:
    """Return whether a private key fits a certificate; raise ValueError for an unusable key."""
    try:
        key = serialization.load_pem_private_key(key_pem.encode(), password=None)
    except TypeError as error:
        raise ValueError("has a passphrase; PeerCache needs the key without one") from error
    except ValueError as error:
        # The library's error may quote the key.
        raise ValueError("is no private key in PEM") from error
    if not isinstance(key, (ec.EllipticCurvePrivateKey, rsa.RSAPrivateKey)):
        kind = "an Ed25519 key" if isinstance(key, ed25519.Ed25519PrivateKey) else "of that kind"
        raise ValueError(f"is {kind}, and PeerCache needs an EC or RSA key")
    return _public(key.public_key()) == _public(certificate.public_key())


def digest_of(certificate: x509.Certificate) -> str:
    """Return the SHA-256 of a certificate, as tools print it, in hex."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def is_any_dropped(before: str, after: str) -> bool:
    """Return whether a certificate of one PEM text is missing in another."""
    return not set(map(digest_of, certificates_in(before))) <= set(
        map(digest_of, certificates_in(after))
    )


def _public(key: object) -> bytes:
    encoding, layout = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    encoded: bytes = key.public_bytes(encoding, layout)  # type: ignore[attr-defined]
    return encoded


def _signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_time(certificate: x509.Certificate, now: float) -> None:
    begin = certificate.not_valid_before_utc
    end = certificate.not_valid_after_utc
    if now < begin.timestamp():
        raise Rejected("certificate", f"it is not valid before {begin:%Y-%m-%d %H:%M} UTC")
    if now >= end.timestamp():
        raise Rejected("certificate", f"it expired on {end:%Y-%m-%d %H:%M} UTC")


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        found = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except x509.ExtensionNotFound:
        return False
    return found.value.ca


def _alternative_names(certificate: x509.Certificate) -> tuple[list[str], tuple[str, ...]]:
    """Return the URIs, and the host names and addresses."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return [], ()
    uris = found.get_values_for_type(x509.UniformResourceIdentifier)
    hosts = [*found.get_values_for_type(x509.DNSName)]
    hosts += map(str, found.get_values_for_type(x509.IPAddress))
    return uris, tuple(hosts)


UNKNOWN_AUTHORITY = "revocation_authority"
"""Reason of a Rejected for valid lists of authorities that are not trusted."""

LISTS_BYTES_MAX = 128 * 1024
"""Longest text of all lists: some 2,000 certificates. `peercache certs` drops expired ones."""

_LIST = re.compile(r"-----BEGIN X509 CRL-----[^-]+-----END X509 CRL-----\n?")


@attrs.frozen
class RevocationList:
    """One authority's list. pem: the signed text; made_at: when, in seconds since 1970."""

    issuer: str
    number: int
    made_at: float
    serials: frozenset[int]
    pem: str
    signed: x509.CertificateRevocationList = attrs.field(repr=False, eq=False)


@final
class Revocations:
    """The newest list of each authority that a process trusts."""

    def __init__(self, ca_pem: str, before: Revocations | None = None) -> None:
        """Trust the authorities of a PEM text, and start without lists.

        before: the process's revocations with earlier authorities. Lists of authorities that are
                still trusted are kept. Revoked certificates stay revoked: a connection that was
                verified with a certificate of an old authority may still be open.
        """
        self._authorities = {digest_of(each): each for each in certificates_in(ca_pem)}
        self._lists: dict[str, RevocationList] = {}
        self._serials: frozenset[int] = frozenset() if before is None else before.serials
        if before is not None and before.pem:
            # The list of an authority that is no longer trusted is invalid.
            with suppress(Rejected):
                self.take(before.pem)

    @property
    def serials(self) -> frozenset[int]:
        """The numbers of all revoked certificates."""
        return self._serials

    @property
    def texts(self) -> tuple[str, ...]:
        """The list of each authority."""
        return tuple(self._lists[each].pem for each in sorted(self._lists))

    @property
    def pem(self) -> str:
        """All lists, to store in a file and send to other nodes; "" for none."""
        return "".join(self.texts)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number of each authority's list."""
        return tuple(self._lists[each].number for each in sorted(self._lists))

    def __len__(self) -> int:
        """Return how many certificates are revoked."""
        return len(self._serials)

    def revokes(self, serial: int) -> bool:
        """Return whether the certificate with this serial number is revoked."""
        return serial in self._serials

    def take(self, pem: str) -> bool:
        """Adopt lists that are newer; return whether there was one.

        While one authority replaces another, a text may contain lists of both, and this process may
        trust only one of them: the other list is ignored. Raises Rejected if the text is not a
        list, or no trusted authority has signed any list in it.
        """
        if len(pem) > LISTS_BYTES_MAX:
            raise _refusal(f"{len(pem)} bytes; at most {LISTS_BYTES_MAX} are read")
        signed = [(self._signer_of(each), each) for each in lists_in(pem)]
        trusted = [(signer, each) for signer, each in signed if signer]
        if not trusted:
            raise _refusal("no authority of tls_ca has signed it", UNKNOWN_AUTHORITY)
        is_newer = [self._take(signer, each) for signer, each in trusted]
        # A newer list only omits expired certificates.
        self._serials = self._serials.union(*(each.serials for each in self._lists.values()))
        return any(is_newer)

    def _signer_of(self, revoked: RevocationList) -> str:
        """Return the digest of the trusted authority that signed a list, "" for none."""
        signers = (
            name for name, each in self._authorities.items() if _is_signed_by(revoked.signed, each)
        )
        return next(signers, "")

    def _take(self, signer: str, revoked: RevocationList) -> bool:
        held = self._lists.get(signer)
        if held is not None and held.number >= revoked.number:
            return False
        self._lists[signer] = revoked
        return True


def lists_in(pem: str) -> list[RevocationList]:
    """Return the lists of a PEM text, unverified; raise Rejected if there is none or one is
    damaged.
    """
    texts = _LIST.findall(pem)
    if not texts:
        raise _refusal("the text holds no list in PEM")
    return [_read(text) for text in texts]


def _read(text: str) -> RevocationList:
    try:
        signed = x509.load_pem_x509_crl(text.encode())
        number = signed.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        return RevocationList(
            issuer=signed.issuer.rfc4514_string(),
            number=number,
            made_at=signed.last_update_utc.timestamp(),
            serials=frozenset(entry.serial_number for entry in signed),
            pem=text.rstrip("\n") + "\n",
            signed=signed,
        )
    except (ValueError, x509.ExtensionNotFound) as error:
        raise _refusal("a list is damaged, or has no number") from error


def _is_signed_by(signed: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    if signed.issuer != authority.subject:
        return False
    try:
        # The library has no type for the key, because some keys of authorities cannot sign lists.
        return signed.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    except (TypeError, ValueError, InvalidSignature):
        return False


def _refusal(problem: str, reason: str = "revocation_list") -> Rejected:
    return Rejected(reason, f"the list of revoked certificates: {problem}")
