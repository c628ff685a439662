"""Keys to row numbers, a whole batch at a time, in 24 to 28 bytes a key.

A dictionary of a million 16-byte keys takes 150 MB; this takes 24. It is a chained hash table in
three arrays: heads of chains, the next row of each row, and the keys. Row numbers are the caller's.
"""

from __future__ import annotations

from typing import Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from peercache.model.runs import I64

Halves: TypeAlias = npt.NDArray[np.uint64]
"""(n, 2) uint64: keys as two words each."""

NO_ROW: Final = -1

HEADS_MIN: Final = 1024

_FACTOR: Final = 0x9E37_79B9_7F4A_7C15
"""2**64 over the golden ratio: spreads neighbours over the heads (Knuth, 6.4)."""

_MULTIPLIER: Final = np.uint64(_FACTOR)
_WORD: Final = 2**64 - 1

FEW_KEYS: Final = 16
"""Up to this many keys are found one by one: a microsecond each, while numpy takes 30 to start."""


def halves_of(keys: bytes) -> Halves:
    """Return packed keys as two words each."""
    return np.frombuffer(keys, "<u8").reshape(-1, 2)


@final
class KeyTable:
    """Which row a key has. A key occurs at most once, and a row has at most one key."""

    def __init__(self) -> None:
        """Start empty."""
        self._heads = np.full(HEADS_MIN, NO_ROW, np.int32)
        self._next: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._keys: Halves = np.empty((0, 2), np.uint64)
        self._count = 0

    def __len__(self) -> int:
        """Return the number of keys."""
        return self._count

    def reserve(self, rows: int) -> None:
        """Make room for row numbers below `rows`."""
        if rows > len(self._next):
            self._next = np.resize(self._next, rows) if len(self._next) else _none(rows)
            grown = np.empty((rows, 2), np.uint64)
            grown[: len(self._keys)] = self._keys
            self._keys = grown

    def keys_of(self, rows: I64) -> bytes:
        """Return the packed keys of rows; a row keeps its key until it is given another."""
        return self._keys[rows].tobytes()

    def find(self, keys: Halves) -> I64:
        """Return the row of each key, NO_ROW if it has none."""
        if len(keys) <= FEW_KEYS:
            return np.array([self._find_one(*halves) for halves in keys.tolist()], np.int64)
        rows = self._heads[self._chains(keys)]
        found = np.full(len(keys), NO_ROW, np.int64)
        wanted = np.flatnonzero(rows >= 0)
        rows = rows[wanted]
        while len(wanted):
            match = (self._keys[rows] == keys[wanted]).all(axis=1)
            found[wanted[match]] = rows[match]
            following = self._next[rows]
            onward = ~match & (following >= 0)
            wanted, rows = wanted[onward], following[onward]
        return found

    def add(self, rows: I64, keys: Halves) -> None:
        """Give each row its key; no key or row may be in the table already, or be named twice."""
        self._keys[rows] = keys
        self._count += len(rows)
        if self._count > len(self._heads):
            self._widen(rows)
        else:
            self._link(rows, keys)

    def remove(self, rows: I64) -> None:
        """Remove rows, all of which must be in the table."""
        self._count -= len(rows)
        chains = self._chains(self._keys[rows])
        while len(rows):
            # One row of each chain at a time, so that no two rows of a round are neighbours in a
            # chain.
            _, first = np.unique(chains, return_index=True)
            self._unlink(rows[first], chains[first])
            keep = np.ones(len(rows), np.bool_)
            keep[first] = False
            rows, chains = rows[keep], chains[keep]

    def _find_one(self, first: int, second: int) -> int:
        """Return the row of the key of these halves: the same as `find`, in plain integers."""
        mixed = (first ^ (second * _FACTOR & _WORD)) * _FACTOR & _WORD
        row = self._heads.item(mixed >> (65 - len(self._heads).bit_length()))
        while row >= 0 and self._keys[row].tolist() != [first, second]:
            row = self._next.item(row)
        return row

    def _chains(self, keys: Halves) -> I64:
        mixed = (keys[:, 0] ^ (keys[:, 1] * _MULTIPLIER)) * _MULTIPLIER
        shift = np.uint64(65 - len(self._heads).bit_length())
        chains: I64 = (mixed >> shift).astype(np.int64)
        return chains

    def _link(self, rows: I64, keys: Halves) -> None:
        """Insert rows at the heads of their chains, those of one chain one after another."""
        if not len(rows):
            return
        chains = self._chains(keys)
        order = chains.argsort(kind="stable")
        rows, chains = rows[order], chains[order]
        last = np.empty(len(rows), np.bool_)
        np.not_equal(chains[1:], chains[:-1], out=last[:-1])
        last[-1] = True
        following = np.empty(len(rows), np.int32)
        following[:-1] = rows[1:]
        following[last] = self._heads[chains[last]]
        self._next[rows] = following
        first = np.empty(len(rows), np.bool_)
        first[0] = True
        first[1:] = last[:-1]
        self._heads[chains[first]] = rows[first]

    def _unlink(self, rows: I64, chains: I64) -> None:
        """Take one row out of each of these chains."""
        at_head = self._heads[chains] == rows
        self._heads[chains[at_head]] = self._next[rows[at_head]]
        rows, before = rows[~at_head], self._heads[chains[~at_head]].astype(np.int64)
        while len(rows):
            assert (before >= 0).all(), "a row is not in its chain"
            following = self._next[before]
            found = following == rows
            self._next[before[found]] = self._next[rows[found]]
            rows, before = rows[~found], following[~found].astype(np.int64)

    def _widen(self, added: I64) -> None:
        """Double the heads until there are at most as many keys, and link everything again."""
        linked = [added]
        rows = self._heads[self._heads >= 0].astype(np.int64)
        while len(rows):
            linked.append(rows)
            rows = self._next[rows].astype(np.int64)
            rows = rows[rows >= 0]
        heads = len(self._heads)
        while heads < self._count:
            heads *= 2
        self._heads = np.full(heads, NO_ROW, np.int32)
        every = np.concatenate(linked)
        self._link(every, self._keys[every])


def _none(rows: int) -> npt.NDArray[np.int32]:
    return np.full(rows, NO_ROW, np.int32)
