# SPDX-License-Identifier: Apache-2.0
"""PeerCache as an L3 storage backend of HiCache; see the README in this folder."""

try:
    from peercache.sglang import PeerCacheStore
except ImportError as error:
    raise ImportError(
        "The storage backend 'peercache' needs the package peercache-kv in this "
        f"Python: pip install peercache-kv ({error})"
    ) from error

__all__ = ["PeerCacheStore"]
