"""The authority of a cluster: a folder with its key, to issue and revoke certificates.

    ca.crt, ca.key      the authority; every node and client knows ca.crt
    node-NAME.crt .key  a node's, and client-NAME, operator-NAME likewise
    issued.jsonl        a line for each certificate, so that a name can be revoked
    revoked.crl         the signed list of revoked certificates
    revoked/            certificates and keys that were revoked

No key is ever overwritten.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import final
from urllib.parse import quote, unquote

import attrs
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from peercache.errors import ConfigError
from peercache.model.keys import DEFAULT_NAME, Namespace
from peercache.trust.certificates import LISTS_BYTES_MAX, certificates_in, facts_of
from peercache.trust.files import REVOKED_NAME, common_name_of
from peercache.trust.identity import (
    SCHEME,
    SHARED_NAME,
    CertificateRole,
    Identity,
    parse_identity,
    until_uri,
)

CA_CERTIFICATE = "ca.crt"
CA_KEY = "ca.key"
ISSUED = "issued.jsonl"
REVOKED_FOLDER = "revoked"

CLOCK_DIFFERENCE = dt.timedelta(hours=1)
"""How much earlier a certificate becomes valid: a host with a slow clock must accept it."""

_KEY_MODE, _CERTIFICATE_MODE = 0o600, 0o644


@attrs.frozen
class Issued:
    """A certificate that the authority has signed. stem: its files' name, without .crt and .key."""

    stem: str
    serial: int
    uri: str
    not_after: float


@final
class Authority:
    """Issues and revokes the certificates of one cluster."""

    def __init__(
        self, folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
    ) -> None:
        """Use what `create` made or `open` read."""
        self.folder = folder
        self._certificate = certificate
        self._key = key
        self.cluster = _cluster_of(certificate)

    @classmethod
    def create(cls, folder: Path, cluster: str, lifetime: dt.timedelta) -> Authority:
        """Create an authority; raise ConfigError if the folder has one."""
        Identity(cluster, CertificateRole.NODE, "any")  # Validates the name like every identity.
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"PeerCache {cluster}"[:64])])
        uri = x509.UniformResourceIdentifier(f"{SCHEME}{quote(cluster, safe='')}")
        usage = x509.KeyUsage(
            digital_signature=False, key_cert_sign=True, crl_sign=True, content_commitment=False,
            key_encipherment=False, data_encipherment=False, key_agreement=False,
            encipher_only=False, decipher_only=False,
        )  # fmt: skip
        certificate = (
            _builder(key.public_key(), name, dt.datetime.now(dt.timezone.utc) + lifetime)
            .issuer_name(name)
            .serial_number(x509.random_serial_number())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
            .sign(key, hashes.SHA256())
        )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("certs", f"cannot make {folder}: {error.strerror}") from error
        _write_new(folder / CA_KEY, _key_pem(key), _KEY_MODE)
        _write_new(folder / CA_CERTIFICATE, _pem(certificate), _CERTIFICATE_MODE)
        return cls(folder, certificate, key)

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """Read the authority of a folder; raise ConfigError if there is none."""
        pem = _read(folder / CA_CERTIFICATE, folder)
        key_pem = _read(folder / CA_KEY, folder)
        try:
            certificate = certificates_in(pem)[0]
            key = serialization.load_pem_private_key(key_pem.encode(), password=None)
        except (ValueError, TypeError) as error:
            raise ConfigError("certs", f"{folder} holds a damaged authority") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError("certs", f"{folder / CA_KEY} was not made by `peercache certs init`")
        return cls(folder, certificate, key)

    def issue(
        self,
        identity: Identity,
        *,
        hosts: Sequence[str] = (),
        lifetime: dt.timedelta,
        is_renewal: bool = False,
    ) -> Path:
        """Write a certificate and its key; return the certificate's path.

        is_renewal: keep the existing key, and replace its certificate.
        Raises ConfigError if the files exist already, or, for a renewal, do not exist; and for a
        namespace that nodes could not distinguish from another one.
        """
        self._check_namespaces(identity)
        stem = stem_of(identity)
        path, key_path = self.folder / f"{stem}.crt", self.folder / f"{stem}.key"
        names = [_host(host) for host in hosts]
        if is_renewal:
            key_pem = _read(key_path, self.folder, "without --renew, `issue` makes a new key")
            key = serialization.load_pem_private_key(key_pem.encode(), password=None)
            assert isinstance(key, ec.EllipticCurvePrivateKey), "made below"
        else:
            if path.exists():
                raise _exists(path)
            key = ec.generate_private_key(ec.SECP256R1())
            _write_new(key_path, _key_pem(key), _KEY_MODE)
        certificate = self._signed(identity, key.public_key(), names, lifetime)
        _replace(path, _pem(certificate), _CERTIFICATE_MODE)
        self._note(stem, identity, certificate)
        return path

    def revoke(self, what: str) -> list[Issued]:
        """Revoke every certificate of a name (`node-a`), or the one in a file; return them.

        The signed list is written again, and the files are moved to the folder `revoked`.
        """
        found = self._named(what)
        now = dt.datetime.now(dt.timezone.utc)
        old = self._list()
        known = {} if old is None else {entry.serial_number: entry for entry in old}
        new = [each for each in found if each.serial not in known]
        for each in new:
            known[each.serial] = (
                x509.RevokedCertificateBuilder()
                .serial_number(each.serial)
                .revocation_date(now)
                .build()
            )
        expired = {each.serial for each in self._issued() if each.not_after < now.timestamp()}
        self._write_list(
            [entry for serial, entry in sorted(known.items()) if serial not in expired], old, now
        )
        self._put_away(found)
        return new

    def _check_namespaces(self, identity: Identity) -> None:
        """Raise ConfigError for a namespace with the same space tag as an earlier one.

        Nodes identify the namespace of a page by the 64 bits of the tag: an attacker that chose a
        name with the same tag could read and clear the other's pages. Expired and revoked
        certificates count, too: their pages may still exist.
        """
        taken = {Namespace().space_tag(): DEFAULT_NAME}
        issued = [parse_identity(each.uri) for each in self._issued()]
        for name in (name for each in issued for name in each.namespaces):
            taken.setdefault(Namespace(name).space_tag(), name)
        for name in identity.namespaces:
            other = taken.setdefault(Namespace(name).space_tag(), name)
            if other != name:
                problem = f"{name!r} has the same tag as {other!r}, and nodes could not keep their "
                raise ConfigError("namespace", problem + "pages apart: choose another name")

    def _signed(
        self,
        identity: Identity,
        key: ec.EllipticCurvePublicKey,
        hosts: Sequence[x509.GeneralName],
        lifetime: dt.timedelta,
    ) -> x509.Certificate:
        serial = x509.random_serial_number()
        subject = x509.Name(
            [
                # First the name: nng returns a peer's common name, but not its serial number.
                x509.NameAttribute(NameOID.COMMON_NAME, common_name_of(serial)),
                x509.NameAttribute(
                    NameOID.ORGANIZATIONAL_UNIT_NAME, f"{identity.role.value} {identity.name}"[:64]
                ),
            ]
        )
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if identity.role is CertificateRole.NODE:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        end = min(
            dt.datetime.now(dt.timezone.utc) + lifetime, self._certificate.not_valid_after_utc
        )
        names = [
            x509.UniformResourceIdentifier(identity.uri()),
            x509.UniformResourceIdentifier(until_uri(end.timestamp())),
            x509.DNSName(SHARED_NAME),
            *hosts,
        ]
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            _builder(key, subject, end)
            .issuer_name(self._certificate.subject)
            .serial_number(serial)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(authority, critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _note(self, stem: str, identity: Identity, certificate: x509.Certificate) -> None:
        line = {
            "stem": stem,
            "serial": common_name_of(certificate.serial_number),
            "uri": identity.uri(),
            "not_after": certificate.not_valid_after_utc.timestamp(),
        }
        with (self.folder / ISSUED).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _issued(self) -> list[Issued]:
        path = self.folder / ISSUED
        lines = path.read_text().splitlines() if path.exists() else []
        return [
            Issued(row["stem"], int(row["serial"], 16), row["uri"], row["not_after"])
            for row in map(json.loads, lines)
        ]

    def _named(self, what: str) -> list[Issued]:
        """Return the certificates of a file or a name; raise ConfigError if it is neither."""
        issued = self._issued()
        by_name = [each for each in issued if each.stem == what]
        if by_name:
            return by_name
        path = Path(what)
        if path.is_file():
            try:
                facts = facts_of(certificates_in(path.read_text())[0])
            except ValueError as error:
                raise ConfigError("certs", f"{path} holds no certificate") from error
            if facts.issuer != self._certificate.subject.rfc4514_string():
                raise ConfigError("certs", f"{path} was signed by another authority")
            uri = "" if facts.identity is None else facts.identity.uri()
            stem = "" if facts.identity is None else stem_of(facts.identity)
            return [Issued(stem, facts.serial, uri, facts.not_after)]
        names = ", ".join(sorted({each.stem for each in issued})) or "none"
        raise ConfigError(
            "certs", f"{what!r} is no certificate of {self.folder}; it issued {names}"
        )

    def _list(self) -> x509.CertificateRevocationList | None:
        path = self.folder / REVOKED_NAME
        return x509.load_pem_x509_crl(path.read_bytes()) if path.exists() else None

    def _write_list(
        self,
        entries: Iterable[x509.RevokedCertificate],
        old: x509.CertificateRevocationList | None,
        now: dt.datetime,
    ) -> None:
        number = 1
        if old is not None:
            extension = old.extensions.get_extension_for_class(x509.CRLNumber)
            number = extension.value.crl_number + 1
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._certificate.subject)
            .last_update(now)
            # A list is valid until a newer one arrives.
            .next_update(self._certificate.not_valid_after_utc)
            .add_extension(x509.CRLNumber(number), critical=False)
        )
        for entry in entries:
            builder = builder.add_revoked_certificate(entry)
        pem = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        if len(pem) > LISTS_BYTES_MAX:
            problem = f"the list would have {len(pem)} bytes, and nodes read {LISTS_BYTES_MAX}: "
            raise ConfigError("certs", problem + "make a new authority, and let nodes trust both")
        _replace(self.folder / REVOKED_NAME, pem, _CERTIFICATE_MODE)

    def _put_away(self, revoked: Iterable[Issued]) -> None:
        """Move the files of revoked certificates, so that their name can be issued again."""
        serials = {each.serial for each in revoked}
        away = self.folder / REVOKED_FOLDER
        for stem in sorted({each.stem for each in revoked}):
            path = self.folder / f"{stem}.crt"
            if not path.exists():
                continue
            serial = certificates_in(path.read_text())[0].serial_number
            if serial not in serials:
                continue
            away.mkdir(mode=0o700, exist_ok=True)
            for each in (path, path.with_name(f"{stem}.key")):
                if each.exists():
                    each.rename(away / f"{common_name_of(serial)[:8]}-{each.name}")


def stem_of(identity: Identity) -> str:
    """Return the name of an identity's files, without .crt and .key."""
    return f"{identity.role.value}-{quote(identity.name, safe='')}"


def _cluster_of(certificate: x509.Certificate) -> str:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    for uri in names.get_values_for_type(x509.UniformResourceIdentifier):
        if uri.startswith(SCHEME):
            return unquote(uri.removeprefix(SCHEME))
    raise ConfigError("certs", "the authority names no cluster: was it made by `certs init`?")


def _builder(
    key: ec.EllipticCurvePublicKey, subject: x509.Name, end: dt.datetime
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key)
        .not_valid_before(now - CLOCK_DIFFERENCE)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _host(text: str) -> x509.GeneralName:
    """Return a host's name or address in the form of certificates."""
    try:
        return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        pass
    if not text.isascii() or not text.isprintable() or not text or " " in text:
        raise ConfigError("host", f"{text!r} is no host name and no IP address")
    return x509.DNSName(text)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a file that must not exist yet."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError as error:
        raise ConfigError("certs", f"cannot write {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def _replace(path: Path, data: bytes, mode: int) -> None:
    """Write a file atomically."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    _write_new(part, data, mode)
    part.replace(path)


def _exists(path: Path) -> ConfigError:
    return ConfigError(
        "certs", f"{path} is there already, and nothing is overwritten: move it away"
    )


def _read(path: Path, folder: Path, remedy: str = "") -> str:
    try:
        return path.read_text()
    except OSError as error:
        remedy = remedy or f"`peercache certs init {folder} --cluster NAME` makes an authority"
        raise ConfigError("certs", f"cannot read {path}: {error.strerror}; {remedy}") from error
