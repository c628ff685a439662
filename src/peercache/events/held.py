"""Follows one home node: which of the pages that an engine has named does it hold?

A node reports page keys, and engines publish pages by names of their own.

Owns    the names of pages in the engine's calls, and which of them were reported as stored.
Takes   names, on threads of the engine; changes of the home node, on a thread of its own.
Keeps   a page is reported as stored only if the home node holds it, in memory or on disk, and as
        removed once it leaves the node. Reports are made one after the other.
Limits  names_max names, the latest ones used. Of the pages that the node holds, held_max are
        reported, the latest ones used: the oldest one is reported as removed for another.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, TypeVar, final

from peercache.events.following import AskedNode, ClusterFollower, Index, NodeChanges
from peercache.model.records import GONE

HOME: Final = "home"

Name = TypeVar("Name")


@final
class HeldPages(Generic[Name]):
    """The named pages that a home node holds. Thread-safe."""

    def __init__(
        self,
        connect: Callable[[], AskedNode],
        changed: Callable[[Sequence[Name], Sequence[Name]], None],
        *,
        names_max: int,
        held_max: int,
        restarted: Callable[[], None] | None = None,
        failed: Callable[[Exception], None] = lambda _: None,
        thread: str,
    ) -> None:
        """Start empty; `start` begins to follow.

        connect:   opens a connection to the home node.
        changed:   called with pages that are stored, then with pages that are removed; it must not
                   call back.
        restarted: called instead of `changed` if all that was reported before is void; None: those
                   pages are reported as removed.
        failed:    called with each exception of the connection, which is tried again.
        thread:    the name of the thread.
        """
        self._changed, self._restarted = changed, restarted
        self._names_max, self._held_max = names_max, held_max
        self._lock = threading.Lock()
        self._names: OrderedDict[bytes, Name] = OrderedDict()
        self._held: OrderedDict[bytes, None] = OrderedDict()
        """The keys of pages that were reported as stored. Both are in the order of their use."""
        self._index = Index()
        self._is_closed = False
        self.left_out = 0
        """Pages that the home node held, and that were reported as removed because of held_max."""
        self._connect, self._failed = connect, failed
        self._follower: ClusterFollower | None = None
        self._thread = threading.Thread(target=self._run, name=thread, daemon=True)

    def start(self) -> None:
        """Begin to follow; from now on the functions are called."""
        self._follower = ClusterFollower(
            lambda _: self._connect(), lambda: (HOME,), failed=lambda _, error: self._failed(error)
        )
        self._thread.start()

    def __len__(self) -> int:
        """Return how many pages are reported as stored."""
        return len(self._held)

    def name(self, keys: Sequence[bytes], names: Iterable[Name]) -> None:
        """Record the names of pages that the engine uses now. Ignored after `close`."""
        stored: dict[bytes, Name] = {}
        removed: list[Name] = []
        with self._lock:
            if self._is_closed:
                return
            for key, name in zip(keys, names, strict=True):
                self._names[key] = name
                self._names.move_to_end(key)
                if key in self._held:
                    self._held.move_to_end(key)
                elif self._index.holders(key):
                    self._held[key] = None
                    stored[key] = name
            while len(self._names) > self._names_max:
                key, name = self._names.popitem(last=False)
                if self._drop(key) and stored.pop(key, None) is None:
                    removed.append(name)
            self._report(stored, removed)

    def forget(self) -> None:
        """Drop all names, as when the pages of another namespace count from now on."""
        with self._lock:
            if self._is_closed:
                return
            void = self._void()
            self._names.clear()
            if self._restarted is not None:
                self._restarted()
            elif void:
                self._changed((), void)

    def present(self) -> list[Name]:
        """Return the pages that are reported as stored."""
        with self._lock:
            return [self._names[key] for key in self._held]

    def close(self) -> None:
        """End the threads; bounded, may be repeated."""
        with self._lock:
            self._is_closed = True
        if self._follower is not None:
            self._follower.close()
            self._thread.join()

    def _run(self) -> None:
        assert self._follower is not None
        for batch in self._follower:
            with self._lock:
                self._take(batch)

    def _take(self, batch: NodeChanges) -> None:
        self._index.apply(batch)
        stored: dict[bytes, Name] = {}
        removed = self._void() if batch.again else []
        # Only the last change of a page counts.
        tiers = batch.changes["tier"].tolist()
        for key, tier in dict(zip(batch.changes["key"].tolist(), tiers, strict=True)).items():
            if key not in self._names:
                continue
            if tier == GONE:
                if self._drop(key):
                    removed.append(self._names[key])
            elif key not in self._held:
                self._held[key] = None
                stored[key] = self._names[key]
        if batch.again and self._restarted is not None:
            self._limit()
            self._restarted()
        else:
            # What was void is not: a page that is both is reported as removed first.
            if batch.again and removed:
                self._changed((), removed)
                removed = []
            self._report(stored, removed)

    def _void(self) -> list[Name]:
        """Forget what was reported as stored, and return it."""
        void = [self._names[key] for key in self._held]
        self._held.clear()
        return void

    def _drop(self, key: bytes) -> bool:
        """Forget a page; return whether it was reported as stored."""
        if key not in self._held:
            return False
        del self._held[key]
        return True

    def _limit(self) -> list[bytes]:
        """Forget the pages above the limit, those that were used longest ago, and return them."""
        over = []
        while len(self._held) > self._held_max:
            over.append(self._held.popitem(last=False)[0])
        self.left_out += len(over)
        return over

    def _report(self, stored: dict[bytes, Name], removed: list[Name]) -> None:
        removed += [self._names[key] for key in self._limit() if stored.pop(key, None) is None]
        if stored or removed:
            self._changed(list(stored.values()), removed)
