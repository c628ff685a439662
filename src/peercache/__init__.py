"""PeerCache: peer-to-peer L3 storage for SGLang's HiCache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peercache.client.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    # Late, so that the command line and a node do not load what only a client needs.
    if name == "Client":
        from peercache.client.client import Client  # noqa: PLC0415 - see above

        return Client
    raise AttributeError(f"module 'peercache' has no attribute {name!r}")
