"""Page keys of LMCache's objects.

A chunk hash says which tokens an object is for. The model, the rank, the object group and the salt
stand beside it in LMCache's key; the layout of the bytes stands nowhere, so it is taken from the
memory that they lie in. All of that is part of the address: what differs in any of it is a miss.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from peercache.model.keys import KEY, Namespace, PageKeys, page_keys

GEOMETRY = {"engine": "lmcache"}
"""Of the client's own namespace: one server holds objects of several models."""

LAYOUTS_MAX = 256
"""Layouts that are remembered for deletions: a server has one a model and object group."""

Space: TypeAlias = tuple[str, str, int, int, str]
"""What one namespace digest is made from: model, layout, rank, group, salt."""


def layout_of(described: Any) -> str:
    """Return the shapes and types of an object's parts as text; "" where LMCache names none.

    described: anything with `shapes` and `dtypes`: a layout, or the metadata of an object.
    """
    shapes = getattr(described, "shapes", None) or ()
    dtypes = getattr(described, "dtypes", None) or ()
    parts = (
        f"{'x'.join(map(str, map(int, shape)))}:{dtype}"
        for shape, dtype in zip(shapes, dtypes, strict=False)
    )
    return " ".join(parts)


class Addresses:
    """The page keys of one namespace's objects."""

    def __init__(self, name: str) -> None:
        """Name objects in the namespaces of this name."""
        self._name = name
        # Tenants have salts, so there may be many; a digest is made again where one was forgotten.
        self._digest = functools.lru_cache(maxsize=4096)(self._digest_of)
        self._layouts: dict[tuple[str, int], dict[str, None]] = {}

    def of(self, keys: Sequence[Any], layouts: Iterable[str]) -> PageKeys:
        """Return the page keys of LMCache's keys, (n,) V16. layouts: one a key, of `layout_of`."""
        places: dict[Space, list[int]] = {}
        for place, (key, layout) in enumerate(zip(keys, layouts, strict=True)):
            space = (key.model_name, layout, key.kv_rank, key.object_group_id, key.cache_salt)
            places.setdefault(space, []).append(place)
        named: PageKeys = np.empty(len(keys), KEY)
        for space, those in places.items():
            self._remember(space)
            # Hashed whole: 16 bytes of a short hash that LMCache pads may say nothing.
            hashes = [b"lmcache:" + keys[place].chunk_hash for place in those]
            named[those] = page_keys(hashes, self._digest(space))
        return named

    def likely(self, key: Any) -> str:
        """Return a layout for a question that names none, as LMCache's own benchmark asks."""
        return next(iter(self._layouts.get((key.model_name, key.object_group_id), ())), "")

    def known(self, keys: Sequence[Any]) -> tuple[PageKeys, list[int]]:
        """Return the page keys of keys without a layout, in every layout that was met.

        Returns (m,) V16 for the keys whose model and group were met, and the places of those keys.
        """
        layouts = [self._layouts.get((key.model_name, key.object_group_id), {}) for key in keys]
        pairs = [(key, layout) for key, met in zip(keys, layouts, strict=True) for layout in met]
        named = self.of([key for key, _ in pairs], [layout for _, layout in pairs])
        return named, [place for place, met in enumerate(layouts) if met]

    def _remember(self, space: Space) -> None:
        model, layout, _, group, _ = space
        if (model, group) in self._layouts or len(self._layouts) < LAYOUTS_MAX:
            met = self._layouts.setdefault((model, group), {})
            if len(met) < LAYOUTS_MAX:
                met.setdefault(layout)

    def _digest_of(self, space: Space) -> bytes:
        model, layout, rank, group, salt = space
        return Namespace.of(
            self._name,
            {**GEOMETRY, "model": model, "layout": layout},
            {"kv_rank": rank, "group": group, "salt": salt},
        ).digest()
