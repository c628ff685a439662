"""What a store is attached to: one client, the pool of KV pages, and the side pools of a model.

A hybrid model keeps state beside its KV pages: windows of attention, recurrent states, the keys of
an indexer, a draft model's cache. SGLang calls each of them a pool; a page of one has the same hash
as the KV page that it belongs to. Here every pool has a namespace of its own under the name of the
model, so equal hashes are different pages, one batch may hold pages of several pools, and `clear`
removes them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from peercache.model.keys import Namespace
from peercache.sglang.pages import FlatPages, HostPages

KV_POOL = "kv"


def pool_name(name: Any) -> str:
    """Return the text of a pool's name: a member of SGLang's PoolName, or any other."""
    return str(getattr(name, "value", name))


@attrs.frozen(eq=False)
class SidePool:
    """One side pool that is served.

    end_registration: forgets its memory. digest: tells its page keys from those of other pools.
    """

    pages: HostPages | FlatPages
    namespace: Namespace
    end_registration: Callable[[], None]
    digest: bytes = attrs.field(init=False)

    @digest.default
    def _digest(self) -> bytes:
        return self.namespace.digest()


@attrs.frozen(eq=False)
class Attachment:
    """What batch methods need, swapped as one: no method may see half of a re-registration.

    anchor: the pool that SGLang registered. pages: its pages; None for an anchor that only numbers
    pages and holds no bytes. sides: the side pools that are served, by name.
    """

    client: Any
    anchor: Any
    pages: HostPages | None
    namespace: Namespace
    version: str
    end_registration: Callable[[], None]
    sides: Mapping[str, SidePool]
    digest: bytes = attrs.field(init=False)
    """Of the namespace."""

    @digest.default
    def _digest(self) -> bytes:
        return self.namespace.digest()
