"""What a store is attached to: one client, the pool of KV pages, and the side pools of a model.

A hybrid model keeps state beside its KV pages: windows of attention, recurrent states, the keys of
an indexer, a draft model's cache. SGLang calls each of them a pool; a page of one has the same hash
as the KV page that it belongs to. Here every pool has a namespace of its own under the name of the
model, so equal hashes are different pages, one batch may hold pages of several pools, and `clear`
removes them together.

What is stored is objects: a page is one, or one for each group of attention heads. A page is there
if all its objects are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from peercache.model.keys import PageKeys, page_keys_of
from peercache.model.runs import I64
from peercache.sglang.namespace import PageSpaces
from peercache.sglang.pages import FlatPages, HostPages

KV_POOL = "kv"


def pool_name(name: Any) -> str:
    """Return the text of a pool's name: a member of SGLang's PoolName, or any other."""
    return str(getattr(name, "value", name))


@attrs.frozen(eq=False)
class SidePool:
    """One side pool that is served.

    spaces: tell its objects' keys from those of other pools. end_registration: forgets its memory.
    """

    pages: HostPages | FlatPages
    spaces: PageSpaces
    end_registration: Callable[[], None]


@attrs.frozen(eq=False)
class Attachment:
    """What batch methods need, swapped as one: no method may see half of a re-registration.

    anchor: the pool that SGLang registered. pages: its pages; None for an anchor that only numbers
    pages and holds no bytes. sides: the side pools that are served, by name.
    """

    client: Any
    anchor: Any
    pages: HostPages | None
    spaces: PageSpaces
    version: str
    end_registration: Callable[[], None]
    sides: Mapping[str, SidePool]


def object_keys(keys: Sequence[str], digests: Sequence[bytes]) -> PageKeys:
    """Return the keys of the objects of pages, (pages * objects,) V16, page by page.

    digests: of the objects' namespaces.
    """
    named: PageKeys = page_keys_of(keys, digests).T.reshape(-1)
    return named


def whole_pages(flags: list[bool], objects: I64) -> list[bool]:
    """Return of each page whether all its objects have their flag, (pages,).

    objects: (pages,) how many objects each page is, at least one.
    """
    if len(flags) == len(objects):
        return flags
    begins = np.cumsum(objects) - objects
    whole: list[bool] = np.logical_and.reduceat(np.array(flags, np.bool_), begins).tolist()
    return whole
