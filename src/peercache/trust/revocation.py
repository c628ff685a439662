"""Revocation: which certificates are refused before they expire.

An authority signs a list (an X.509 CRL) with a rising number. Nodes read it from a file and tell it
to each other; each one checks the signature itself, so nothing but the authority can revoke.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import final

import attrs
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from peercache.errors import Rejected
from peercache.trust.certificates import certificates_in, digest_of

UNKNOWN_AUTHORITY = "revocation_authority"
"""Reason of a Rejected whose lists are whole, and of authorities that are not trusted."""

LISTS_BYTES_MAX = 128 * 1024
"""Longest text of all lists: some 2,000 certificates. `peercache certs` drops expired ones."""

_LIST = re.compile(r"-----BEGIN X509 CRL-----[^-]+-----END X509 CRL-----\n?")


@attrs.frozen
class RevocationList:
    """One authority's list. pem: as it was signed; made_at: when, in seconds since 1970."""

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
        """Trust the authorities of a PEM text, and know no list.

        before: what the process knew with other authorities. Their lists go on as far as they are
        of an authority that is trusted still. What was revoked stays so: the connection on which a
        certificate of an old authority was verified may be open still.
        """
        self._authorities = {digest_of(each): each for each in certificates_in(ca_pem)}
        self._lists: dict[str, RevocationList] = {}
        self._serials: frozenset[int] = frozenset() if before is None else before.serials
        if before is not None and before.pem:
            # The list of an authority that is not trusted any more says nothing.
            with suppress(Rejected):
                self.take(before.pem)

    @property
    def serials(self) -> frozenset[int]:
        """The numbers of all revoked certificates."""
        return self._serials

    @property
    def texts(self) -> tuple[str, ...]:
        """Each authority's list."""
        return tuple(self._lists[each].pem for each in sorted(self._lists))

    @property
    def pem(self) -> str:
        """All lists, to be kept in a file and told to other nodes; "" for none."""
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
        """Take lists that are newer; return whether there was one.

        While one authority replaces another, a text may hold lists of both, and this process may
        trust one of them only: the other list is passed over.
        Raises Rejected where the text is no list, or no trusted authority has signed any of it.
        """
        if len(pem) > LISTS_BYTES_MAX:
            raise _refusal(f"{len(pem)} bytes; at most {LISTS_BYTES_MAX} are read")
        signed = [(self._signer_of(each), each) for each in lists_in(pem)]
        trusted = [(signer, each) for signer, each in signed if signer]
        if not trusted:
            raise _refusal("no authority of tls_ca has signed it", UNKNOWN_AUTHORITY)
        is_newer = [self._take(signer, each) for signer, each in trusted]
        # A newer list omits certificates only that have expired.
        self._serials = self._serials.union(*(each.serials for each in self._lists.values()))
        return any(is_newer)

    def _signer_of(self, told: RevocationList) -> str:
        """Return the digest of the trusted authority that signed a list, "" for none."""
        signers = (
            name for name, each in self._authorities.items() if _is_signed_by(told.signed, each)
        )
        return next(signers, "")

    def _take(self, signer: str, told: RevocationList) -> bool:
        held = self._lists.get(signer)
        if held is not None and held.number >= told.number:
            return False
        self._lists[signer] = told
        return True


def lists_in(pem: str) -> list[RevocationList]:
    """Return the lists of a PEM text, unverified; raise Rejected for none or a damaged one."""
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
        # The library types no key, as an authority may have one that cannot sign lists.
        return signed.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    except (TypeError, ValueError, InvalidSignature):
        return False


def _refusal(problem: str, reason: str = "revocation_list") -> Rejected:
    return Rejected(reason, f"the list of revoked certificates: {problem}")
