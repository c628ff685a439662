"""Following a node and a cluster: gaps, restarts, death, slow readers, and the index."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from peercache.errors import DeadlineExceeded, PeerUnreachable, RemoteProtocolError
from peercache.events import following as cluster_module
from peercache.events.following import ClusterFollower, Index, NodeChanges, NodeFollower
from peercache.model.keys import KEY
from peercache.model.records import CHANGE, GONE, IN_FILES, IN_MEMORY
from peercache.wire.messages.directory import ALL_ROWS, ReportChanges, RequestChanges
from tests.pace import TIMEOUT_S, wait_until

NODE, OTHER = "h1:7400", "h2:7400"
LIFE = 7


def key(name: int) -> bytes:
    return bytes([name + 1]) * 16


def changes(*pages: tuple[int, int]) -> bytes:
    made = np.zeros(len(pages), CHANGE)
    for row, (name, tier) in zip(made, pages, strict=True):
        row["key"], row["tier"], row["length"] = key(name), tier, 100 if tier else 0
    return made.tobytes()


def begun(*names: int, node: str = NODE) -> tuple[NodeFollower, Index]:
    """Return a follower that has received everything, and its index."""
    follower, index = NodeFollower(node), Index()
    held = changes(*((name, IN_MEMORY) for name in names))
    batch = follower.take(ReportChanges(1, LIFE, True, 5, b"", held, ALL_ROWS))
    assert batch is not None
    assert batch.again
    assert batch.is_whole
    index.apply(batch)
    return follower, index


def test_what_is_reported_next_follows_what_was_reported() -> None:
    """The question names the last change; changes are applied in their order."""
    follower, index = begun(1, 2)
    question = follower.question(3.0)
    assert (question.incarnation, question.after, question.row) == (LIFE, 5, ALL_ROWS)

    sent = changes((3, IN_MEMORY), (1, GONE), (3, IN_FILES))
    batch = follower.take(ReportChanges(2, LIFE, False, 8, sent, b"", ALL_ROWS))

    assert batch is not None
    index.apply(batch)
    assert index.pages(NODE) == {key(2): IN_MEMORY, key(3): IN_FILES}
    assert follower.take(ReportChanges(3, LIFE, False, 8, b"", b"", ALL_ROWS)) is None
    assert follower.question(1.0).after == 8


@pytest.mark.parametrize(
    ("incarnation", "after", "row"),
    [(LIFE, 7, ALL_ROWS), (LIFE, 5, ALL_ROWS), (LIFE + 1, 6, ALL_ROWS), (LIFE, 6, 0)],
)
def test_an_answer_that_does_not_follow_is_refused(incarnation: int, after: int, row: int) -> None:
    """A gap, a change sent twice, another life, rows sent again: the follower begins again."""
    follower, _ = begun(1)
    report = ReportChanges(2, incarnation, False, after, changes((3, IN_MEMORY)), b"", row)

    with pytest.raises(RemoteProtocolError, match="do not follow"):
        follower.take(report)

    assert follower.question(1.0).after == 0


def test_a_node_that_begins_again_replaces_what_it_reported() -> None:
    """Nothing of before stays, and pages of other nodes do."""
    follower, index = begun(1, 2)
    _, other = begun(9, node=OTHER)
    for_other = NodeFollower(OTHER).take(
        ReportChanges(1, 3, True, 1, b"", changes((9, IN_MEMORY)), ALL_ROWS)
    )
    assert for_other is not None
    index.apply(for_other)

    batch = follower.take(ReportChanges(2, 8, True, 1, b"", changes((4, IN_FILES)), 4096))

    assert batch is not None
    assert not batch.is_whole
    index.apply(batch)
    assert index.pages(NODE) == {key(4): IN_FILES}
    assert index.pages(OTHER) == other.pages(OTHER) == {key(9): IN_MEMORY}
    assert len(index) == 2


def test_the_pages_of_a_node_that_is_gone_vanish() -> None:
    """It is reported once; a node that never reported anything goes without a report."""
    follower, index = begun(1, 2)

    batch = follower.gone()

    assert batch is not None
    index.apply(batch)
    assert (len(index), index.nodes(), index.holders(key(1))) == (0, [], {})
    assert follower.gone() is None
    assert follower.question(1.0).after == 0


def test_a_node_that_reports_wrong_and_then_dies_leaves_nothing() -> None:
    """What it reported stays while it begins again, and goes with the second silence."""
    follower, index = begun(1, 2)
    with pytest.raises(RemoteProtocolError):
        follower.take(ReportChanges(2, LIFE, False, 99, b"", b"", ALL_ROWS))

    batches = [follower.failed(), follower.failed()]

    assert batches[0] is None
    assert batches[1] is not None
    index.apply(batches[1])
    assert follower.is_silent
    assert (len(index), index.nodes()) == (0, [])
    assert follower.failed() is None


def test_a_prefix_ends_at_the_first_page_that_is_missing() -> None:
    """Whatever comes behind the gap."""
    _, index = begun(1, 2, 4)

    assert index.prefix(NODE, [key(1), key(2), key(3), key(4)]) == 2
    assert index.prefix(NODE, [key(1), key(2)]) == 2
    assert index.prefix(OTHER, [key(1)]) == 0
    array = np.frombuffer(key(1) + key(2) + key(3), KEY)
    assert index.prefix(NODE, array) == 2
    assert index.holders(array[0]) == index.holders(key(1)) == {NODE: IN_MEMORY}


def test_an_index_has_a_bound_over_all_nodes() -> None:
    """Pages beyond it are left out and counted; a page that goes makes room."""
    index = Index(pages_max=3)

    def report(node: str, *pages: tuple[int, int], again: bool = False) -> None:
        rows = np.frombuffer(changes(*pages), CHANGE)
        index.apply(NodeChanges(node=node, again=again, is_gone=False, is_whole=True, changes=rows))

    report(NODE, (1, IN_MEMORY), (2, IN_MEMORY))
    report(OTHER, (3, IN_MEMORY), (4, IN_MEMORY))
    assert (len(index), index.left_out) == (3, 1)
    report(NODE, (1, GONE), (2, IN_FILES))
    report(OTHER, (5, IN_MEMORY), (6, IN_MEMORY))
    assert (len(index), index.left_out) == (3, 2)
    assert index.holders(key(5)) == {OTHER: IN_MEMORY}


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

    def ask(
        self, question: RequestChanges, kind: type[Any], *, within_s: float | None = None
    ) -> Any:
        assert kind is ReportChanges
        assert within_s is not None
        with self.changed:
            again = question.incarnation != self.life
            known = 0 if again else question.after - 1
            if not again and known == len(self.keys) and self.fault is None:
                self.changed.wait(question.timeout_s)
            if self.fault is not None:
                raise self.fault
            rows = np.zeros(len(self.keys) - known, CHANGE)
            rows["tier"] = IN_MEMORY
            for row, key in zip(rows, self.keys[known:], strict=True):
                row["key"] = key
            after, sent = len(self.keys) + 1, rows.tobytes()
            changes, held = (b"", sent) if again else (sent, b"")
            return ReportChanges(1, self.life, again, after, changes, held, ALL_ROWS)

    def close(self) -> None:
        return


def following(nodes: dict[str, MadeUpNode], members: set[str]) -> ClusterFollower:
    return ClusterFollower(
        lambda node: nodes[node].connect(),
        lambda: members,
        timeout_s=0.05,
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


def test_a_node_that_is_back_before_it_was_reported_gone_is_followed() -> None:
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
        lambda node: nodes[node].connect(), look, timeout_s=0.05, retry_s=0.01, look_s=0.01
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
    """A connection that broke is made again, and goes on behind the last change."""
    nodes, lost = {A: MadeUpNode(5)}, threading.Event()
    nodes[A].store(1)
    ask = nodes[A].ask

    def lose_one(*arguments: Any, **named: Any) -> Any:
        answer = ask(*arguments, **named)
        if answer.after == 3 and not lost.is_set():
            lost.set()
            raise DeadlineExceeded("an answer", 1.0)
        return answer

    nodes[A].ask = lose_one  # type: ignore[method-assign]
    with following(nodes, {A}) as follower:
        batches = iter(follower)
        assert next(batches).again
        nodes[A].store(2)
        batch = next(batches)

    assert lost.is_set()
    assert not batch.again
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
        answer = ask(*arguments, **named)
        asked.append(answer.after)
        if len(asked) < 60:
            nodes[A].store(len(asked))  # There is always something to report.
        if len(asked) > 3:
            ran_away.set()
        return answer

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
    before = set(threading.enumerate())
    with followed(nodes, {A}) as (holds, _):
        holds({A: 0})
        begun = set(threading.enumerate()) - before
        assert begun
    wait_until(lambda: not any(thread.is_alive() for thread in begun))
