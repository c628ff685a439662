"""PeerCache: a distributed KV cache for language-model servers.

The names here are stable, with those of `peercache.connector`, `peercache.content` and
`peercache.errors`: programs import them from these four places.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peercache.client.client import Client
    from peercache.client.following import follow_cluster
    from peercache.client.home import HomeState
    from peercache.client.operator import Operator, Target
    from peercache.config.settings import Config
    from peercache.content.chain import Chain
    from peercache.errors import PeerCacheError
    from peercache.events.following import ClusterFollower, Index, NodeChanges
    from peercache.model.keys import Namespace, page_keys
    from peercache.model.prefix import Overlap
    from peercache.model.runs import PageRuns
    from peercache.model.status import MemberStatus, Status

__all__ = [
    "Chain",
    "Client",
    "ClusterFollower",
    "Config",
    "HomeState",
    "Index",
    "MemberStatus",
    "Namespace",
    "NodeChanges",
    "Operator",
    "Overlap",
    "PageRuns",
    "PeerCacheError",
    "Status",
    "Target",
    "follow_cluster",
    "page_keys",
]

_MODULES = {
    "client.client": ("Client",),
    "client.following": ("follow_cluster",),
    "client.home": ("HomeState",),
    "client.operator": ("Operator", "Target"),
    "config.settings": ("Config",),
    "content.chain": ("Chain",),
    "errors": ("PeerCacheError",),
    "events.following": ("ClusterFollower", "Index", "NodeChanges"),
    "model.keys": ("Namespace", "page_keys"),
    "model.prefix": ("Overlap",),
    "model.runs": ("PageRuns",),
    "model.status": ("MemberStatus", "Status"),
}


def __getattr__(name: str) -> Any:
    # Late, so that the command line and a node do not load what only a client needs.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"peercache.{module}"), name)
    raise AttributeError(f"module 'peercache' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
