"""Follow the pages of nodes: one node's changes, an index of many nodes, and a whole cluster.

`NodeFollower` is the follower's end of `wire.messages.directory`, without I/O. Its results must be
applied in order: after a gap, a restart or too long a pause the node sends everything again.

`ClusterFollower` has a thread for each node, and one iterator over the changes of all nodes. If the
reader is slow, the threads wait, and so the nodes are asked later: at most `BATCHES_MAX` answers
are queued. A node that is asked too late sends everything again. A node that no longer answers, or
is no longer a member, is gone, with all that it reported.
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
"""Pages of an index, over all nodes: some ten gigabytes. Further ones are left out: a page that is
missing in the index costs a router one better choice."""


@attrs.frozen(eq=False, kw_only=True)
class NodeChanges:
    """Changes that a follower has received from one node.

    node:     HOST:PORT of the node.
    again:    all that was reported of this node before is void, for example because its store is
              lost.
    is_gone:  the node no longer answers: none of its pages can be read.
    is_whole: all pages from before the start of the follower have been reported by now.
    changes:  (n,) structured array, in their order: `key` (V16, a page key), `length` (bytes of the
              page) and `tier` from now on: 0 the node no longer holds it, 1 in its memory, 2 only
              on its disk.
    """

    node: str
    again: bool
    is_gone: bool
    is_whole: bool
    changes: Changes


@final
@attrs.define
class NodeFollower:
    """The state of following one node: the number of its last change, the position in its table."""

    node: str
    _incarnation: int = 0
    _after: int = 0
    _row: int = 0
    _failures: int = 0
    _has_reported: bool = False

    def question(self, timeout_s: float) -> RequestChanges:
        """Return the next request to the node. timeout_s: how long it may wait for a change."""
        return RequestChanges(0, self._incarnation, self._after, self._row, timeout_s)

    def take(self, reply: ReportChanges) -> NodeChanges | None:
        """Apply an answer; None if it has no change. Raises RemoteProtocolError for a wrong one."""
        self._failures = 0
        changes, held = changes_from_bytes(reply.changes), changes_from_bytes(reply.held)
        if not reply.again:
            missed = reply.after - self._after - len(changes)
            if reply.incarnation != self._incarnation or missed or reply.row < self._row:
                self.forget()
                raise RemoteProtocolError(
                    f"{self.node} reported changes up to {reply.after} that do not follow its last"
                )
        is_whole, was_whole = reply.row >= ALL_ROWS, self._row >= ALL_ROWS and not reply.again
        self._incarnation, self._after, self._row = reply.incarnation, reply.after, reply.row
        if not reply.again and not len(changes) and not len(held) and is_whole == was_whole:
            return None
        self._has_reported = True
        both = np.concatenate([changes, held]) if len(held) else changes
        return NodeChanges(
            node=self.node, again=reply.again, is_gone=False, is_whole=is_whole, changes=both
        )

    def failed(self) -> NodeChanges | None:
        """Note a request without an answer; after the second one, return that the node is gone.

        A broken connection is replaced, and nothing is lost; after two failed requests the node's
        pages cannot be read.
        """
        self._failures += 1
        return self.gone() if self._failures > 1 else None

    @property
    def is_silent(self) -> bool:
        """Whether the node counts as gone since the last request."""
        return self._failures > 1

    def gone(self) -> NodeChanges | None:
        """Return that the node is gone, None if it had no pages; then it must start again."""
        # Separate from `forget`: a node that sent something wrong starts again, but its pages stay.
        has_reported, self._has_reported = self._has_reported, False
        self.forget()
        if not has_reported:
            return None
        nothing = np.empty(0, CHANGE)
        return NodeChanges(
            node=self.node, again=True, is_gone=True, is_whole=False, changes=nothing
        )

    def forget(self) -> None:
        """Start again with the next request."""
        self._incarnation = self._after = self._row = 0


@final
class Index:
    """Which node holds which pages, and on which tier: the index of a router. Not thread-safe.

    A node is named by its HOST:PORT. A tier is 1 for memory, 2 for disk only. A page costs some
    200 bytes for each node that holds it.
    """

    def __init__(self, *, pages_max: int = PAGES_MAX) -> None:
        """Start empty.

        pages_max: pages of all nodes together; further ones are counted in `left_out`.
        """
        self._nodes: dict[str, dict[bytes, int]] = {}
        self._pages_max = pages_max
        self._count = 0
        self.left_out = 0
        """Reported pages for which there was no room."""

    def __len__(self) -> int:
        """Return the pages of all nodes; a page that two nodes hold counts twice."""
        return self._count

    def apply(self, batch: NodeChanges) -> None:
        """Apply the changes of a node, in the order in which the follower returned them."""
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
        """Return the followed nodes that answer."""
        return list(self._nodes)

    def pages(self, node: str) -> dict[bytes, int]:
        """Return the tier of each page of a node, by its key of 16 bytes: a copy."""
        return dict(self._nodes.get(node, ()))

    def holders(self, key: bytes | np.void) -> dict[str, int]:
        """Return the tier of a page at each node that holds it.

        key: 16 bytes, or an item of an array of page keys.
        """
        key = key.tobytes() if isinstance(key, np.void) else key
        return {node: pages[key] for node, pages in self._nodes.items() if key in pages}

    def prefix(self, node: str, keys: Sequence[bytes] | PageKeys) -> int:
        """Return how many of the first of these pages a node holds without a gap, on any tier."""
        pages = self._nodes.get(node, {})
        wanted: Sequence[bytes] = keys.tolist() if isinstance(keys, np.ndarray) else keys
        return next((at for at, key in enumerate(wanted) if key not in pages), len(wanted))


TIMEOUT_S: Final = 1.0
"""How long a node may wait for a change before it answers without one; a close may take as long."""

ANSWER_S: Final = 5.0
"""How long after that a node still counts as answering."""

RETRY_S: Final = 1.0
"""Pause before a node is tried again."""

LOOK_S: Final = 5.0
"""How often the list of members is requested."""

BATCHES_MAX: Final = 64
"""Answers that wait for the reader: 12 MiB if all have the largest size."""

NODES_MAX: Final = 1024
"""Members that are followed; each has a thread and a connection."""

TURN_S: Final = 0.2
"""How soon a thread that waits for the reader notices that it should end."""

Answer = TypeVar("Answer")


class AskedNode(Protocol):
    """A node with a connection of its own for requests."""

    def ask(
        self, question: Message, kind: type[Answer], *, within_s: float | None = None
    ) -> Answer:
        """Return the answer of this kind, or raise a PeerCacheError."""

    def close(self) -> None:
        """Close it."""


@final
class ClusterFollower:
    """An iterator over the changes of all nodes of a cluster; a context manager.

    The iterator waits for changes, and ends with `close`. `follow_cluster` makes one. Of each node
    the first batch has `again`, and the pages that it held at the start follow. For one reader: a
    slow one delays the requests to the nodes, and after 131,072 missed changes a node sends
    everything again.
    """

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
        """Start to follow.

        connect: opens a connection to a control address; called on the thread of that node.
        members: returns the control addresses of the members to follow; called on one thread.
        failed: called, on those threads, with the node ("" for `members`) and each PeerCacheError
                or OSError that they raise; the call is retried.
        """
        self._connect, self._members = connect, members
        self._timeout_s, self._retry_s, self._look_s = timeout_s, retry_s, look_s
        self._queue: queue.Queue[NodeChanges] = queue.Queue(BATCHES_MAX)
        self._is_closing = threading.Event()
        self._ends: dict[str, threading.Event] = {}
        """By followed node: an event that is set when it is no longer a member."""
        self._threads: list[threading.Thread] = []
        self._failed = failed
        self._start(self._look, "members")

    def __enter__(self) -> ClusterFollower:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __iter__(self) -> Iterator[NodeChanges]:
        """Yield the changes of nodes, until `close`."""
        while not self._is_closing.is_set():
            batch = self.next(TURN_S)
            if batch is not None:
                yield batch

    def next(self, timeout_s: float) -> NodeChanges | None:
        """Return the next changes of a node; None if there are none within `timeout_s` seconds."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """End all threads; wait for outstanding answers, some seconds at most; may be repeated."""
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
        """Follow the members, and stop following other nodes."""
        while not self._is_closing.is_set():
            try:
                members = set(self._members())
            except (PeerCacheError, OSError) as error:
                self._failed("", error)
            else:
                for gone in self._ends.keys() - members:
                    self._ends.pop(gone).set()
                # A node that is back waits for its old thread, which finally reports that it left.
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
                    reply = connection.ask(question, ReportChanges, within_s=within_s)
                    self._pass_on(follower.take(reply), end)
            except (PeerCacheError, OSError) as error:
                self._failed(node, error)
                self._pass_on(follower.failed(), end)
                if follower.is_silent:
                    end.wait(self._retry_s)
            finally:
                if connection is not None:
                    connection.close()
        if not self._is_closing.is_set():
            self._pass_on(follower.gone(), self._is_closing)

    def _pass_on(self, batch: NodeChanges | None, end: threading.Event) -> None:
        """Pass something to the reader; wait for room while `end` is not set."""
        if batch is None:
            return
        while not self._is_closing.is_set() and not self._put(batch):
            # For a node that is no longer a member, only the fact that it is gone matters.
            if end.is_set():
                return

    def _put(self, batch: NodeChanges) -> bool:
        try:
            self._queue.put(batch, timeout=TURN_S)
        except queue.Full:
            return False
        return True


def _thread_of(name: str) -> str:
    return f"peercache-follow-{name}"
