"""The SGLang connectors: PeerCache as the L3 storage backend of HiCache, or in its place.

    --hicache-storage-backend peercache --hicache-storage-backend-extra-config
    '{"pool_size": "64GiB"}'

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend peercache
    --unified-cache-external-linker-config '{"pool_size": "64GiB"}'

This package is the only place that imports SGLang. Its classes are imported on use: SGLang loads
`plugin` in all its processes, and only the scheduler needs more.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peercache.sglang.linker import PeerCacheLinker
    from peercache.sglang.store import PeerCacheStore

__all__ = ["PeerCacheLinker", "PeerCacheStore"]

_MODULES = {"PeerCacheLinker": "linker", "PeerCacheStore": "store"}
_SINCE = {"PeerCacheLinker": "0.5.23", "PeerCacheStore": "0.5.12"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in {"sglang", "torch"}:
            raise
        raise ImportError(
            f"{__name__}.{name} works inside an SGLang server: install sglang {_SINCE[name]} or "
            f"later in this Python, next to peercache ({error})",
            name=error.name,
        ) from error
