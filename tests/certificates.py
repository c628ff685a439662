"""Certificates for tests: an authority in a folder, and the settings of each peer it knows."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import final

from peercache.trust.authority import CA_CERTIFICATE, Authority
from peercache.trust.certificates import certificates_in
from peercache.trust.files import REVOKED_NAME
from peercache.trust.identity import CertificateRole, Identity

LIFETIME = dt.timedelta(days=30)

ALIKE = "team-6618", "team-35280"
"""Names whose hashes (BLAKE2b of four bytes) are one: 32 bits do not separate tenants."""


@final
class Certificates:
    """An authority, made as `peercache certs` makes it."""

    def __init__(self, folder: Path, cluster: str = "tests") -> None:
        """Make the authority of a cluster in a new folder."""
        self.authority = Authority.create(folder, cluster, dt.timedelta(days=60))
        self.folder = folder

    def node(self, name: str, **more: dt.timedelta) -> dict[str, str]:
        """Issue a node's certificate; return its settings."""
        return self.issue(CertificateRole.NODE, name, **more)

    def client(
        self, name: str, *namespaces: str, lifetime: dt.timedelta = LIFETIME
    ) -> dict[str, str]:
        """Issue a client's certificate; return its settings."""
        return self.issue(CertificateRole.CLIENT, name, *namespaces, lifetime=lifetime)

    def operator(self, name: str) -> dict[str, str]:
        """Issue an operator's certificate; return its files as settings."""
        return self.issue(CertificateRole.OPERATOR, name)

    def revoked(self) -> str:
        """Return the signed list of revoked certificates."""
        return (self.folder / REVOKED_NAME).read_text()

    def serial_of(self, settings: dict[str, str]) -> int:
        """Return the serial number of an issued certificate."""
        return certificates_in(Path(settings["tls_cert"]).read_text())[0].serial_number

    def issue(
        self,
        role: CertificateRole,
        name: str,
        *namespaces: str,
        lifetime: dt.timedelta = LIFETIME,
        is_renewal: bool = False,
    ) -> dict[str, str]:
        """Issue any certificate; return its files as settings."""
        identity = Identity(self.authority.cluster, role, name, namespaces)
        path = self.authority.issue(
            identity, hosts=["127.0.0.1", "::1"], lifetime=lifetime, is_renewal=is_renewal
        )
        return {
            "tls_ca": str(self.folder / CA_CERTIFICATE),
            "tls_cert": str(path),
            "tls_key": str(path.with_suffix(".key")),
        }
