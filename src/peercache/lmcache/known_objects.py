"""The objects of one LMCache server: their keys, layouts and sizes.

PeerCache knows an object by a hash of its key, and cannot return the keys that it holds. So an
adapter remembers the objects that it has stored or loaded.

Owns    these objects, in the order in which they came, and their bytes by cache salt.
Takes   stored, loaded and deleted objects, on threads of the adapter.
Keeps   an object is here once, whatever its layout.
Limits  OBJECTS_MAX: the object that came first is forgotten for another.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, final

import attrs

OBJECTS_MAX: Final = 200_000
"""With chunks of 16 MiB these are 3 TiB; some 150 MB of memory."""

ROUND: Final = 60
"""All objects are checked within so many parts."""

CHECKED_MIN: Final = 1024
"""Objects of a part that are checked at least, if there are so many."""


@attrs.frozen(eq=False)
class KnownObject:
    """One object. number: of the order in which they came. key: LMCache's, an ObjectKey."""

    number: int
    key: Any
    layout: str
    size: int


@final
class KnownObjects:
    """The objects that an adapter has stored or loaded. Thread-safe."""

    def __init__(self, objects_max: int = OBJECTS_MAX) -> None:
        """Start empty."""
        self._objects_max = objects_max
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._objects: dict[Any, KnownObject] = {}
        self._bytes: Counter[str] = Counter()
        self._checked = 0
        """The number of the last object that was checked."""

    def __len__(self) -> int:
        """Return how many objects are known."""
        return len(self._objects)

    def add(self, keys: Sequence[Any], layouts: Sequence[str], sizes: Sequence[int]) -> list[bool]:
        """Remember objects that are held; return for each whether it is new."""
        new = []
        with self._lock:
            for key, layout, size in zip(keys, layouts, sizes, strict=True):
                before = self._objects.get(key)
                new.append(before is None)
                number = next(self._numbers) if before is None else before.number
                if before is not None:
                    self._take(before)
                self._bytes[key.cache_salt] += size
                self._objects[key] = KnownObject(number, key, layout, size)
            over = len(self._objects) - self._objects_max
            if over > 0:
                for each in list(itertools.islice(self._objects.values(), over)):
                    del self._objects[each.key]
                    self._take(each)
        return new

    def drop(self, objects: Iterable[KnownObject]) -> list[KnownObject]:
        """Forget objects that are gone, unless they were added again; return those forgotten."""
        with self._lock:
            dropped = [each for each in objects if self._objects.get(each.key) is each]
            for each in dropped:
                del self._objects[each.key]
                self._take(each)
        return dropped

    def of(self, keys: Iterable[Any]) -> list[KnownObject]:
        """Return those of these objects that are known."""
        with self._lock:
            return [self._objects[key] for key in keys if key in self._objects]

    def bytes_by_salt(self) -> dict[str, int]:
        """Return the bytes of the objects of each cache salt."""
        with self._lock:
            return {salt: count for salt, count in self._bytes.items() if count > 0}

    def after(self, number: int, count: int, model: str | None = None) -> list[KnownObject]:
        """Return the next objects after one, by their numbers. model: of this model only."""
        with self._lock:
            found = self._from(number)
            wanted = (each for each in found if model is None or each.key.model_name == model)
            return list(itertools.islice(wanted, count))

    def next_to_check(self) -> list[KnownObject]:
        """Return the next part of all objects, from the first one again after the last."""
        with self._lock:
            count = max(CHECKED_MIN, len(self._objects) // ROUND)
            part = list(itertools.islice(self._from(self._checked), count))
            self._checked = part[-1].number if len(part) == count else 0
        return part

    def _from(self, number: int) -> Iterator[KnownObject]:
        return itertools.dropwhile(lambda each: each.number <= number, self._objects.values())

    def _take(self, known: KnownObject) -> None:
        salt = known.key.cache_salt
        self._bytes[salt] -= known.size
        if self._bytes[salt] <= 0:
            del self._bytes[salt]
