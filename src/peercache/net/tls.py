"""TLS of the control plane: what nng is told, from the certificates that a process uses now.

TLS 1.3 only, and both ends show a certificate of the cluster's authority. Every certificate carries
one name that all share, because nng wants to be told one; whose certificate it is, says its
identity, which `net.peers.Gate` judges on each new connection.
"""

from __future__ import annotations

from typing import Any, Protocol, final

import pynng
from pynng._nng import lib

from peercache.trust.identity import SHARED_NAME


class Pem(Protocol):
    """The certificates of this process, as text (`trust.files.TlsFiles`)."""

    @property
    def ca_pem(self) -> str:
        """The authorities whose certificates are trusted."""

    @property
    def cert_pem(self) -> str:
        """The own certificate, and those up to an authority's."""

    @property
    def key_pem(self) -> str:
        """The key of the own certificate."""


@final
class ControlTls:
    """nng's settings for one process; `renew` follows new files."""

    def __init__(self, files: Pem) -> None:
        """Use these certificates."""
        self.renew(files)

    def renew(self, files: Pem) -> None:
        """Use these certificates, for connections made from now on."""
        self.server = self._settings(files, pynng.TLSConfig.MODE_SERVER)
        self.client = self._settings(files, pynng.TLSConfig.MODE_CLIENT)

    def _settings(self, files: Pem, mode: int) -> Any:
        settings = pynng.TLSConfig(
            mode,
            server_name=SHARED_NAME if mode == pynng.TLSConfig.MODE_CLIENT else None,
            ca_string=files.ca_pem,
            own_cert_string=files.cert_pem,
            own_key_string=files.key_pem,
            auth_mode=pynng.TLSConfig.AUTH_MODE_REQUIRED,
        )
        pynng.check_err(
            lib.nng_tls_config_version(
                settings._tls_config,  # noqa: SLF001 - pynng has no name for this call
                lib.NNG_TLS_1_3,
                lib.NNG_TLS_1_3,
            )
        )
        return settings


def control_url(address: str, tls: ControlTls | None) -> str:
    """Return what to dial for the control port at HOST:PORT."""
    return f"tcp://{address}" if tls is None else f"tls+tcp://{address}"
