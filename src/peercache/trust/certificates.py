"""Certificates as `cryptography` reads them: what they say, and whether one vouches for another.

Only commands and processes with TLS import this file: the library takes 60 ms to load.
"""

from __future__ import annotations

import time

import attrs
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from peercache.errors import Rejected
from peercache.trust.identity import Identity, identity_among

CHAIN_MAX = 8
"""Most certificates between a peer's and an authority's."""


@attrs.frozen
class CertificateFacts:
    """What a certificate says.

    identity: None for an authority, and for a certificate that is not for PeerCache.
    names:    host names and addresses that it is valid for.
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
    """Return the certificates of a PEM text; raise ValueError for none or a damaged one."""
    return x509.load_pem_x509_certificates(pem.encode())


def facts_of(certificate: x509.Certificate) -> CertificateFacts:
    """Return what a certificate says; raise Rejected for an identity that cannot be read."""
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
    """Return whose certificate it is; raise Rejected where it does not say so."""
    return identity_among(_alternative_names(certificate)[0])


def vouches(
    authorities: list[x509.Certificate], chain: list[x509.Certificate], now: float
) -> x509.Certificate:
    """Return the authority that signed a chain, own certificate first; raise Rejected for none."""
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
    """Return whether a private key is that of a certificate; raise ValueError for no usable key."""
    try:
        key = serialization.load_pem_private_key(key_pem.encode(), password=None)
    except TypeError as error:
        raise ValueError("has a passphrase; PeerCache needs the key without one") from error
    except ValueError as error:
        # The library's text may quote what it could not read.
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
    """Return the URIs, and the hosts' names and addresses."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return [], ()
    uris = found.get_values_for_type(x509.UniformResourceIdentifier)
    hosts = [*found.get_values_for_type(x509.DNSName)]
    hosts += map(str, found.get_values_for_type(x509.IPAddress))
    return uris, tuple(hosts)
