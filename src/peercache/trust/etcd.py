"""The files by which an etcd and a node prove to each other who they are: etcds:// wants them."""

from __future__ import annotations

import ssl
from typing import final

import attrs

from peercache.config.settings import Config
from peercache.errors import ConfigError
from peercache.trust.files import read_secret


@final
@attrs.frozen
class EtcdFiles:
    """The settings that name them."""

    config: Config

    def context(self) -> ssl.SSLContext:
        """Return what a connection needs, of the files as they are now; raise ConfigError."""
        authorities, certificate, key = (
            self.config.etcd_ca, self.config.etcd_cert, self.config.etcd_key
        )  # fmt: skip
        try:
            context = ssl.create_default_context(cafile=authorities or None)
        except OSError as error:
            raise _unusable("etcd_ca", authorities, error) from error
        if certificate:
            read_secret("etcd_key", key, self.config)
            try:
                context.load_cert_chain(certificate, key)
            except OSError as error:
                raise _unusable("etcd_cert", f"{certificate} with {key}", error) from error
        return context


def _unusable(name: str, path: str, error: OSError) -> ConfigError:
    """Return the error about a file that TLS cannot use; ssl.SSLError is an OSError."""
    why = "it is no PEM, or no pair" if isinstance(error, ssl.SSLError) else error.strerror
    return ConfigError(name, f"{path} cannot be used ({why}): give PEM files that this user reads")
