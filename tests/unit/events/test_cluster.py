"""Following a cluster: gaps, restarts, death and slow readers, with nodes that are made up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from peercache.errors import DeadlineExceeded, PeerUnreachable
from peercache.events import cluster as cluster_module
from peercache.events.cluster import ClusterFollower
from peercache.events.following import Index
from peercache.model.changes import CHANGE, IN_MEMORY
from peercache.wire.messages.following import ALL_ROWS, ChangesAsked, ChangesTold
from tests.pace import TIMEOUT_S, wait_until

A, B = "a:1", "b:1"


class MadeUpNode:
    """A node that stores one page with each `store`, and answers questions; faults on demand."""

    def __init__(self, life: int) -> None:
        self.life = life
        self.keys: list[bytes] = []
        self.fault: Exception | None = None
        self.connects = 0
        self.is_connected = threading.Event()
        self.changed = threading.Condition()

    def store(self, *names: int) -> None:
        with self.changed:
            self.keys += [bytes([name]) * 16 for name in names]
            self.changed.notify_all()

    def fail(self, fault: Exception | None) -> None:
        with self.changed:
            self.fault = fault
            self.changed.notify_all()

    def connect(self) -> MadeUpNode:
        self.connects += 1
        if isinstance(self.fault, PeerUnreachable):
            raise self.fault
        return self

    def ask(self, question: ChangesAsked, kind: type[Any], *, within_s: float | None = None) -> Any:
        assert kind is ChangesTold
        assert within_s is not None
        with self.changed:
            anew = question.incarnation != self.life
            known = 0 if anew else question.after - 1
            if not anew and known == len(self.keys) and self.fault is None:
                self.changed.wait(question.patience_s)
            if self.fault is not None:
                raise self.fault
            rows = np.zeros(len(self.keys) - known, CHANGE)
            rows["tier"] = IN_MEMORY
            for row, key in zip(rows, self.keys[known:], strict=True):
                row["key"] = key
            after, told = len(self.keys) + 1, rows.tobytes()
            changes, held = (b"", told) if anew else (told, b"")
            return ChangesTold(1, self.life, anew, after, changes, held, ALL_ROWS)

    def close(self) -> None:
        return


def following(nodes: dict[str, MadeUpNode], members: set[str]) -> ClusterFollower:
    return ClusterFollower(
        lambda node: nodes[node].connect(),
        lambda: members,
        patience_s=0.05,
        retry_s=0.01,
        look_s=0.01,
    )


@contextmanager
def followed(nodes: dict[str, MadeUpNode], members: set[str]) -> Iterator[tuple[Any, Index]]:
    """Follow, and yield what reads until something holds, and the index."""
    index = Index()
    with following(nodes, members) as follower:

        def holds(wanted: dict[str, int]) -> None:
            def reads() -> bool:
                batch = follower.next(0.01)
                if batch is not None:
                    index.apply(batch)
                return {node: len(index.pages(node)) for node in index.nodes()} == wanted

            wait_until(reads)

        yield holds, index


def test_an_index_follows_all_members_and_those_that_come() -> None:
    """Each node's pages, as they come; a node that is a member no longer takes its pages along."""
    nodes, members = {A: MadeUpNode(5), B: MadeUpNode(6)}, {A}
    nodes[A].store(1, 2)
    with followed(nodes, members) as (holds, _):
        holds({A: 2})
        nodes[A].store(3)
        nodes[B].store(1)
        members.add(B)
        holds({A: 3, B: 1})
        members.remove(A)
        holds({B: 1})


def test_the_pages_of_a_node_that_ended_vanish_and_come_back_with_it() -> None:
    """Its process is not there: nothing of it can be read. Its successor begins anew."""
    nodes = {A: MadeUpNode(5)}
    nodes[A].store(1, 2)
    with followed(nodes, {A}) as (holds, _):
        holds({A: 2})
        nodes[A].fail(PeerUnreachable("a:1: nothing listens there"))
        holds({})
        nodes[A].keys, nodes[A].life = [], 9
        nodes[A].store(7)
        nodes[A].fail(None)
        holds({A: 1})


def test_a_node_that_is_back_before_it_was_told_gone_is_followed() -> None:
    """Its old question is still under way: what that ends with comes before all that is new."""
    nodes, members = {A: MadeUpNode(5)}, {A}
    nodes[A].store(1)
    ask, held, goes_on = nodes[A].ask, threading.Event(), threading.Event()
    looks, index, old = [0], Index(), list[threading.Thread]()

    def hold(*arguments: Any, **named: Any) -> Any:
        if threading.current_thread() in old:
            held.set()
            goes_on.wait(TIMEOUT_S)
        return ask(*arguments, **named)

    def look() -> set[str]:
        looks[0] += 1
        return set(members)

    def looked() -> None:
        until = looks[0] + 10
        wait_until(lambda: looks[0] >= until)

    def applied(pages: int) -> None:
        def reads() -> bool:
            batch = follower.next(0.01)
            if batch is not None:
                index.apply(batch)
            return len(index.pages(A)) == pages

        wait_until(reads)

    with ClusterFollower(
        lambda node: nodes[node].connect(), look, patience_s=0.05, retry_s=0.01, look_s=0.01
    ) as follower:
        applied(1)
        nodes[A].ask = hold  # type: ignore[method-assign]
        old += [each for each in threading.enumerate() if each.name == f"peercache-follow-{A}"]
        wait_until(held.is_set)
        members.remove(A)
        looked()
        members.add(A)
        looked()
        goes_on.set()
        wait_until(lambda: not old[0].is_alive())
        nodes[A].store(2)
        applied(2)
        looked()
        assert follower.next(0.1) is None
        assert len(index.pages(A)) == 2


def test_one_silence_loses_nothing() -> None:
    """A connection that broke is made anew, and goes on behind the last change."""
    nodes, lost = {A: MadeUpNode(5)}, threading.Event()
    nodes[A].store(1)
    ask = nodes[A].ask

    def lose_one(*arguments: Any, **named: Any) -> Any:
        told = ask(*arguments, **named)
        if told.after == 3 and not lost.is_set():
            lost.set()
            raise DeadlineExceeded("an answer", 1.0)
        return told

    nodes[A].ask = lose_one  # type: ignore[method-assign]
    with following(nodes, {A}) as follower:
        told = iter(follower)
        assert next(told).anew
        nodes[A].store(2)
        batch = next(told)

    assert lost.is_set()
    assert not batch.anew
    assert batch.changes["key"].tolist() == [bytes([2]) * 16]
    assert nodes[A].connects == 2


def test_two_silences_are_a_death() -> None:
    """A node that is stopped, or cannot be reached, holds nothing that can be read."""
    nodes = {A: MadeUpNode(5)}
    nodes[A].store(1)
    with followed(nodes, {A}) as (holds, _):
        holds({A: 1})
        nodes[A].fail(DeadlineExceeded("an answer", 1.0))
        holds({})
        nodes[A].fail(None)
        holds({A: 1})


def test_a_reader_that_does_not_read_lets_nodes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers wait for it and one more in the thread; then the node is asked no more."""
    monkeypatch.setattr(cluster_module, "BATCHES_MAX", 2)
    nodes, asked, ran_away = {A: MadeUpNode(5)}, list[int](), threading.Event()
    ask = nodes[A].ask

    def ask_and_store(*arguments: Any, **named: Any) -> Any:
        told = ask(*arguments, **named)
        asked.append(told.after)
        if len(asked) < 60:
            nodes[A].store(len(asked))  # There is always something to tell.
        if len(asked) > 3:
            ran_away.set()
        return told

    nodes[A].ask = ask_and_store  # type: ignore[method-assign]
    with following(nodes, {A}) as follower:
        wait_until(lambda: len(asked) >= 3)
        assert not ran_away.wait(0.3)
        index = Index()

        def has_all() -> bool:
            batch = follower.next(0.01)
            if batch is not None:
                index.apply(batch)
            return len(index) == 59

        wait_until(has_all)


def test_close_ends_the_threads() -> None:
    """Nothing runs on, also while a node keeps a question."""
    nodes = {A: MadeUpNode(5)}
    before = threading.active_count()
    with followed(nodes, {A}) as (holds, _):
        holds({A: 0})
        assert threading.active_count() > before
    wait_until(lambda: threading.active_count() <= before)
