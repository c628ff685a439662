"""Follow what nodes hold: one node's changes, an index of many nodes, and a whole cluster.

`NodeFollower` is the follower's end of `wire.messages.directory`, without I/O. What it returns is
applied in its order: after a gap, a restart or too long a pause the node tells everything again.

`ClusterFollower` has a thread a node, and one iterator over what all of them tell. A reader that is
slow lets the threads wait, and so the nodes are asked later: nothing piles up beyond `BATCHES_MAX`.
A node that was asked too late begins again. One that does not answer any more, or is no member, is
gone, and so is all that it told.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, Protocol, TypeVar, final

import attrs
import numpy as np

from peercache.errors import PeerCacheError, RemoteProtocolError
from peercache.model.keys import PageKeys
from peercache.model.records import CHANGE, GONE, Changes, changes_from_bytes
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import ALL_ROWS, ReportChanges, RequestChanges

PAGES_MAX: Final = 50_000_000
"""Pages of an index, over all nodes: some ten gigabytes. Those beyond are left out: an index that
lacks a page costs a router one better choice."""


@attrs.frozen(eq=False, kw_only=True)
class NodeChanges:
    """What a follower has received from one node.

    node:     the control address of the node.
    again:     all that was told of this node before is void; first of all where its store is lost.
    is_gone:  the node does not answer any more: it holds nothing that can be read.
    is_whole: all that was there when the follower began has been told by now.
    changes:  (n,) `model.records.CHANGE`, in their order.
    """

    node: str
    again: bool
    is_gone: bool
    is_whole: bool
    changes: Changes


@final
@attrs.define
class NodeFollower:
    """What is known of one node: the number of its last change, and how far its table was read."""

    node: str
    _incarnation: int = 0
    _after: int = 0
    _row: int = 0
    _failures: int = 0
    _has_told: bool = False

    def question(self, timeout_s: float) -> RequestChanges:
        """Return what to ask the node next. timeout_s: how long it may wait for a change."""
        return RequestChanges(0, self._incarnation, self._after, self._row, timeout_s)

    def take(self, told: ReportChanges) -> NodeChanges | None:
        """Take an answer; None if it tells nothing. Raises RemoteProtocolError for a wrong one."""
        self._failures = 0
        changes, held = changes_from_bytes(told.changes), changes_from_bytes(told.held)
        if not told.again:
            missed = told.after - self._after - len(changes)
            if told.incarnation != self._incarnation or missed or told.row < self._row:
                self.forget()
                raise RemoteProtocolError(
                    f"{self.node} told changes up to {told.after} that do not follow what it told"
                )
        is_whole, was_whole = told.row >= ALL_ROWS, self._row >= ALL_ROWS and not told.again
        self._incarnation, self._after, self._row = told.incarnation, told.after, told.row
        if not told.again and not len(changes) and not len(held) and is_whole == was_whole:
            return None
        self._has_told = True
        both = np.concatenate([changes, held]) if len(held) else changes
        return NodeChanges(
            node=self.node, again=told.again, is_gone=False, is_whole=is_whole, changes=both
        )

    def failed(self) -> NodeChanges | None:
        """Note a question without an answer; return that the node is gone if it was the second.

        A connection that broke is made again, and nothing is lost; a node that cannot be asked
        twice holds nothing that can be read.
        """
        self._failures += 1
        return self.gone() if self._failures > 1 else None

    @property
    def is_silent(self) -> bool:
        """Whether the node counts as gone since it was asked last."""
        return self._failures > 1

    def gone(self) -> NodeChanges | None:
        """Return that the node is gone, None if nothing was told of it; it begins again then."""
        # By itself: a node that has told something wrong begins again, and what it told stays.
        has_told, self._has_told = self._has_told, False
        self.forget()
        if not has_told:
            return None
        nothing = np.empty(0, CHANGE)
        return NodeChanges(
            node=self.node, again=True, is_gone=True, is_whole=False, changes=nothing
        )

    def forget(self) -> None:
        """Begin again with the next question."""
        self._incarnation = self._after = self._row = 0


@final
class Index:
    """Which node holds which pages, and where: what a router keeps. Not thread-safe."""

    def __init__(self, *, pages_max: int = PAGES_MAX) -> None:
        """Start empty. pages_max: over all nodes."""
        self._nodes: dict[str, dict[bytes, int]] = {}
        self._pages_max = pages_max
        self._count = 0
        self.left_out = 0
        """Pages that were told and had no room."""

    def __len__(self) -> int:
        """Return the pages of all nodes; one that two nodes hold counts twice."""
        return self._count

    def apply(self, batch: NodeChanges) -> None:
        """Apply what was told of a node."""
        if batch.again:
            self._count -= len(self._nodes.pop(batch.node, ()))
        if batch.is_gone:
            return
        pages = self._nodes.setdefault(batch.node, {})
        before = len(pages)
        room = self._pages_max - self._count + before
        keys: list[bytes] = batch.changes["key"].tolist()
        for key, tier in zip(keys, batch.changes["tier"].tolist(), strict=True):
            if tier == GONE:
                pages.pop(key, None)
            elif key in pages or len(pages) < room:
                pages[key] = tier
            else:
                self.left_out += 1
        self._count += len(pages) - before

    def nodes(self) -> list[str]:
        """Return the nodes that are followed and answer."""
        return list(self._nodes)

    def pages(self, node: str) -> dict[bytes, int]:
        """Return the tier of each page of a node, by its key of 16 bytes: a copy."""
        return dict(self._nodes.get(node, ()))

    def holders(self, key: bytes | np.void) -> dict[str, int]:
        """Return the tier of a page at each node that holds it."""
        key = key.tobytes() if isinstance(key, np.void) else key
        return {node: pages[key] for node, pages in self._nodes.items() if key in pages}

    def prefix(self, node: str, keys: Sequence[bytes] | PageKeys) -> int:
        """Return how many of the first of these pages a node holds without a gap."""
        pages = self._nodes.get(node, {})
        wanted: Sequence[bytes] = keys.tolist() if isinstance(keys, np.ndarray) else keys
        return next((at for at, key in enumerate(wanted) if key not in pages), len(wanted))


TIMEOUT_S: Final = 1.0
"""How long a node may wait for a change before it answers that there is none; so long takes a
close, too."""

ANSWER_S: Final = 5.0
"""How long behind that a node counts as one that answers."""

RETRY_S: Final = 1.0
"""Pause before a node is tried again."""

LOOK_S: Final = 5.0
"""How often it is asked who the members are."""

BATCHES_MAX: Final = 64
"""Answers that wait for the reader: of the largest, 12 MiB."""

NODES_MAX: Final = 1024
"""Members that are followed; each has a thread and a connection."""

TURN_S: Final = 0.2
"""How soon a thread that waits for the reader sees that it should end."""

Told = TypeVar("Told")


class AskedNode(Protocol):
    """A node that can be asked, over a connection of its own."""

    def ask(self, question: Message, kind: type[Told], *, within_s: float | None = None) -> Told:
        """Return the answer of this kind, or raise a PeerCacheError."""

    def close(self) -> None:
        """Close it."""


@final
class ClusterFollower:
    """An iterator over the changes of all nodes of a cluster; a context manager."""

    def __init__(
        self,
        connect: Callable[[str], AskedNode],
        members: Callable[[], Collection[str]],
        *,
        timeout_s: float = TIMEOUT_S,
        retry_s: float = RETRY_S,
        look_s: float = LOOK_S,
        failed: Callable[[str, Exception], None] = lambda *_: None,
    ) -> None:
        """Begin to follow.

        connect: opens a connection to a control address; called on the thread of that node.
        members: returns the control addresses of the members to follow; called on one thread.
        failed:  hears, on those threads, of each PeerCacheError or OSError that they raise, and of
                 which node, "" for `members`; it is tried again.
        """
        self._connect, self._members = connect, members
        self._timeout_s, self._retry_s, self._look_s = timeout_s, retry_s, look_s
        self._told: queue.Queue[NodeChanges] = queue.Queue(BATCHES_MAX)
        self._is_closing = threading.Event()
        self._ends: dict[str, threading.Event] = {}
        """By node that is followed: set where it is a member no longer."""
        self._threads: list[threading.Thread] = []
        self._failed = failed
        self._start(self._look, "members")

    def __enter__(self) -> ClusterFollower:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __iter__(self) -> Iterator[NodeChanges]:
        """Yield what nodes tell, until `close`."""
        while not self._is_closing.is_set():
            batch = self.next(TURN_S)
            if batch is not None:
                yield batch

    def next(self, timeout_s: float) -> NodeChanges | None:
        """Return what a node told next; None if nothing comes within `timeout_s`."""
        try:
            return self._told.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """End all threads; waits for answers that are on the way, at most `ANSWER_S`."""
        self._is_closing.set()
        for end in list(self._ends.values()):
            end.set()
        for thread in list(self._threads):
            thread.join(self._timeout_s + ANSWER_S)

    # --- threads ----------------------------------------------------------------------------------

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=_thread_of(name), daemon=True)
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def _look(self) -> None:
        """Follow those that are members, and end the others."""
        while not self._is_closing.is_set():
            try:
                members = set(self._members())
            except (PeerCacheError, OSError) as error:
                self._failed("", error)
            else:
                for gone in self._ends.keys() - members:
                    self._ends.pop(gone).set()
                # One that is back waits for its old thread, which tells last that it left.
                ending = {thread.name for thread in self._threads if thread.is_alive()}
                for node in sorted(members - self._ends.keys()):
                    if len(self._ends) < NODES_MAX and _thread_of(node) not in ending:
                        end = self._ends[node] = threading.Event()
                        self._start(lambda node=node, end=end: self._follow(node, end), node)  # type: ignore[misc]
            self._is_closing.wait(self._look_s)

    def _follow(self, node: str, end: threading.Event) -> None:
        follower = NodeFollower(node)
        while not end.is_set():
            connection = None
            try:
                connection = self._connect(node)
                while not end.is_set():
                    question = follower.question(self._timeout_s)
                    within_s = self._timeout_s + ANSWER_S
                    told = connection.ask(question, ReportChanges, within_s=within_s)
                    self._tell(follower.take(told), end)
            except (PeerCacheError, OSError) as error:
                self._failed(node, error)
                self._tell(follower.failed(), end)
                if follower.is_silent:
                    end.wait(self._retry_s)
            finally:
                if connection is not None:
                    connection.close()
        if not self._is_closing.is_set():
            self._tell(follower.gone(), self._is_closing)

    def _tell(self, batch: NodeChanges | None, end: threading.Event) -> None:
        """Hand something to the reader; wait for it while `end` is not set."""
        if batch is None:
            return
        while not self._is_closing.is_set() and not self._put(batch):
            # Of a node that is no member any more, only that it is gone is of interest.
            if end.is_set():
                return

    def _put(self, batch: NodeChanges) -> bool:
        try:
            self._told.put(batch, timeout=TURN_S)
        except queue.Full:
            return False
        return True


def _thread_of(name: str) -> str:
    return f"peercache-follow-{name}"
