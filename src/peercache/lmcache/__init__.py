"""The L2 adapter for LMCache's multi-process server: PeerCache behind its CPU memory.

    lmcache server --no-l1-use-lazy --l2-adapter '{"type": "plugin",
      "module_path": "peercache.lmcache", "class_name": "PeerCacheL2Adapter",
      "adapter_params": {}}'

This package is the only place that imports LMCache.
"""

try:
    from peercache.lmcache.adapter import PeerCacheL2Adapter
    from peercache.lmcache.config import PeerCacheL2AdapterConfig
except ImportError as error:
    if (error.name or "").partition(".")[0] not in {"lmcache", "torch"}:
        raise
    raise ImportError(
        "peercache.lmcache works inside an LMCache server: install lmcache 0.5.6 or later "
        f"in this Python, next to peercache ({error})",
        name=error.name,
    ) from error

__all__ = ["PeerCacheL2Adapter", "PeerCacheL2AdapterConfig"]
