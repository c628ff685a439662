"""Bugs that a client of a run can be given, each of which one of the checkers must find."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

from peercache import Client

VARIABLE = "PEERCACHE_PLANTED"


class _Wrapped:
    """A client with a bug: what a class does not define is the client's own."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class TornPages(_Wrapped):
    """The last half of a page is that of the page before it in the batch."""

    def batch_get(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[bool]:
        hits = self._client.batch_get(keys, buffers)
        for one, other in itertools.pairwise(buffers):
            other[len(other) // 2 :] = one[len(one) // 2 :]
        return hits


class NeverForgets(_Wrapped):
    """Pages that were read once are kept, and are hits after their removal, too."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._kept: dict[str, Any] = {}

    def batch_get(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[bool]:
        hits = self._client.batch_get(keys, buffers)
        for index, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            if hits[index]:
                self._kept[key] = buffer.copy()
            elif key in self._kept:
                buffer[:] = self._kept[key]
                hits[index] = True
        return hits

    def contains(self, keys: Sequence[str]) -> list[bool]:
        found = self._client.contains(keys)
        return [it or key in self._kept for key, it in zip(keys, found, strict=True)]


class StoresNothing(_Wrapped):
    """A set answers "stored" for its last page without storing it."""

    def batch_set(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[bool]:
        return [*self._client.batch_set(keys[:-1], buffers[:-1]), True]


class SeesGhosts(_Wrapped):
    """Its view has a member that never was."""

    def member_addresses(self) -> dict[int, str]:
        return {**self._client.member_addresses(), 1: "nowhere:1"}


class Dawdles(_Wrapped):
    """Its look-ups take longer than their deadline."""

    def contains(self, keys: Sequence[str]) -> list[bool]:
        time.sleep(2)
        return self._client.contains(keys)


BUGS = {bug.__name__: bug for bug in (TornPages, NeverForgets, StoresNothing, SeesGhosts, Dawdles)}


def wrapped(client: Client) -> Any:
    """Return the client, with the bug that the environment names."""
    bug = BUGS.get(os.environ.get(VARIABLE, ""))
    return client if bug is None else bug(client)
