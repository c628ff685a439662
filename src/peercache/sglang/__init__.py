"""The SGLang connector: PeerCache as the L3 storage backend of HiCache.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "peercache", "module_path": "peercache.sglang",
      "class_name": "PeerCacheStore", "interface_v1": 1, "pool_size": "64GiB"}'

This package is the only place that imports SGLang.
"""

try:
    from peercache.sglang.store import PeerCacheStore
except ImportError as error:
    if (error.name or "").partition(".")[0] not in {"sglang", "torch"}:
        raise
    raise ImportError(
        "peercache.sglang works inside an SGLang server: install sglang 0.5.12 or later "
        f"in this Python, next to peercache ({error})",
        name=error.name,
    ) from error

__all__ = ["PeerCacheStore"]
