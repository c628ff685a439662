"""The configuration of the L2 adapter, as LMCache's plug-ins have it.

LMCache finds PeerCacheL2AdapterConfig by its name, next to the adapter, and builds it from
`adapter_params` before the adapter.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, final
from urllib.parse import urlsplit

from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

from peercache.config.settings import Config
from peercache.engines.late_client import engine_config
from peercache.errors import ConfigError

COORDINATOR: Final = "coordinator_url"

HELP: Final = f"""PeerCache L2 adapter, in adapter_params:
- home (str): the address of the host's node, if it is not the default one
- embedded (bool): run a node in the server, instead of using the host's
- namespace (str): separates weights under one model name (default "lmcache")
- insecure (bool), or tls_ca, tls_cert and tls_key (str): how the cluster is protected
- op_timeout_s (float): the timeout of a load (default 0.8)
- {COORDINATOR} (str): the base URL of LMCache's coordinator, such as http://coordinator:9300:
  chunks that are pinned there are retained in PeerCache
- any other setting of PeerCache: `peercache config` lists them
"""


@final
class PeerCacheL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc]  # LMCache has no stubs
    """Checked settings of PeerCacheL2Adapter."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Check the settings; raise a ConfigError that names a wrong one."""
        rest = dict(settings)
        self.coordinator_url = _checked_url(rest.pop(COORDINATOR, ""))
        self.settings = rest
        self.checked: Config = engine_config(rest, os.environ)

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> PeerCacheL2AdapterConfig:
        """Return the configuration; raise ValueError, as LMCache expects, for a wrong setting."""
        try:
            return cls(d)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @classmethod
    def help(cls) -> str:
        """Return a text about the settings."""
        return HELP


def _checked_url(url: object) -> str:
    if not isinstance(url, str):
        raise ConfigError(COORDINATOR, f"must be a URL, not {url!r:.80}")
    parts = urlsplit(url)
    if url and (parts.scheme not in {"http", "https"} or not parts.netloc):
        raise ConfigError(
            COORDINATOR, f"must be http://HOST:PORT or https://HOST:PORT, not {url!r:.80}"
        )
    return url.rstrip("/")
