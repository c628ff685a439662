"""Follow every node of a cluster: a thread a node, and one iterator over what all of them tell.

A reader that is slow lets the threads wait, and so the nodes are asked later: nothing piles up
beyond `BATCHES_MAX`. A node that was asked too late begins anew. One that does not answer any more,
or is no member, is gone, and so is all that it told.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Final, Protocol, TypeVar, final

from peercache.errors import PeerCacheError
from peercache.events.following import NodeChanges, NodeFollower
from peercache.wire.messages.declared import Message
from peercache.wire.messages.following import ChangesTold

PATIENCE_S: Final = 1.0
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
        patience_s: float = PATIENCE_S,
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
        self._patience_s, self._retry_s, self._look_s = patience_s, retry_s, look_s
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            thread.join(self._patience_s + ANSWER_S)

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
                    question = follower.question(self._patience_s)
                    within_s = self._patience_s + ANSWER_S
                    told = connection.ask(question, ChangesTold, within_s=within_s)
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
