"""The named pages of a home node: what is reported, what is forgotten, and limits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from peercache.errors import PeerUnreachable
from peercache.events.held import HeldPages
from peercache.model.records import CHANGE, GONE, IN_FILES, IN_MEMORY
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import ALL_ROWS, ReportChanges, RequestChanges
from tests.pace import wait_until


def key(name: str | bytes) -> bytes:
    return (name if isinstance(name, bytes) else name.encode()).ljust(16)


class Node:
    """A home node that reports what a test gives it, and is asked again for the next change."""

    def __init__(self) -> None:
        self.answers: list[ReportChanges] = []
        self.asked = 0
        self.after = 0
        self.problem: Exception | None = None
        self._changed = threading.Condition()

    def report(self, *pages: tuple[str | bytes, int], again: bool = False) -> None:
        rows = np.zeros(len(pages), CHANGE)
        for row, (name, tier) in zip(rows, pages, strict=True):
            row["key"], row["tier"], row["length"] = key(name), tier, 100 if tier else 0
        with self._changed:
            self.after = 0 if again else self.after + len(pages)
            changes, held = (b"", rows.tobytes()) if again else (rows.tobytes(), b"")
            number = len(self.answers) + 1
            self.answers.append(
                ReportChanges(number, 7, again, self.after, changes, held, ALL_ROWS)
            )
            self._changed.notify_all()

    def ask(self, question: Message, kind: type[Any], *, within_s: float | None = None) -> Any:
        assert isinstance(question, RequestChanges)
        if self.problem is not None:
            raise self.problem
        with self._changed:
            if self._changed.wait_for(lambda: self.asked < len(self.answers), 0.05):
                self.asked += 1
                return self.answers[self.asked - 1]
        return ReportChanges(0, 7, False, question.after, b"", b"", ALL_ROWS)

    def close(self) -> None:
        """Nothing is open."""


class Rig:
    """Held pages at a node, and what a reader has by the reports so far."""

    def __init__(self, node: Node, **limits: Any) -> None:
        self.known: list[str] = []
        self.problems: list[str] = []
        given: dict[str, Any] = {"names_max": 100, "held_max": 100, **limits}
        self.pages: HeldPages[str] = HeldPages(
            lambda: node, self._changed, failed=self._failed, thread="test", **given
        )
        self.pages.start()

    def name(self, names: str) -> None:
        self.pages.name([key(name) for name in names], names)

    def _changed(self, stored: Any, removed: Any) -> None:
        for name in stored:
            assert name not in self.known, "it was reported before"
            self.known.append(name)
        for name in removed:
            self.known.remove(name)

    def _failed(self, problem: Exception) -> None:
        self.problems.append(str(problem))


@pytest.fixture
def node() -> Node:
    node = Node()
    node.report(("a", IN_MEMORY), ("b", IN_FILES), ("x", IN_MEMORY), again=True)
    return node


@pytest.fixture
def rig(node: Node) -> Iterator[Rig]:
    rig = Rig(node)
    with closing(rig.pages):
        rig.name("abc")
        wait_until(lambda: sorted(rig.known) == ["a", "b"])
        yield rig


def test_a_page_is_reported_while_it_is_named_and_held(node: Node, rig: Rig) -> None:
    """Whichever of both comes first; a page that nothing names is not reported."""
    node.report(("c", IN_MEMORY), ("a", GONE), ("d", IN_MEMORY))
    wait_until(lambda: sorted(rig.known) == ["b", "c"])
    rig.name("dd")
    assert sorted(rig.known) == ["b", "c", "d"]
    assert sorted(rig.pages.present()) == ["b", "c", "d"]
    assert len(rig.pages) == 3
    node.report(("b", IN_MEMORY), ("c", GONE), ("c", IN_FILES), ("d", IN_MEMORY), ("d", GONE))
    wait_until(lambda: sorted(rig.known) == ["b", "c"])


def test_a_restart_of_the_node_voids_what_it_reported(node: Node, rig: Rig) -> None:
    """What it still holds is reported again, after the removal."""
    node.report(("b", IN_FILES), ("c", IN_MEMORY), again=True)
    wait_until(lambda: sorted(rig.known) == ["b", "c"])


def test_names_that_no_longer_count_are_removed(rig: Rig) -> None:
    """Until they are named again."""
    rig.pages.forget()
    assert rig.known == []
    assert rig.pages.present() == []
    rig.name("a")
    assert rig.known == ["a"]


def test_above_the_limit_the_page_used_longest_ago_is_removed(node: Node) -> None:
    """It is reported again when it is used, instead of another one."""
    rig = Rig(node, held_max=2)
    with closing(rig.pages):
        rig.name("ab")
        wait_until(lambda: sorted(rig.known) == ["a", "b"])
        rig.name("x")
        assert rig.known == ["b", "x"]
        rig.name("b")
        rig.name("a")
        assert rig.known == ["b", "a"]
        assert rig.pages.left_out == 2
        rig.name("axb")
        assert len(rig.known) == 2


def test_a_name_above_the_limit_is_forgotten(node: Node) -> None:
    """A name that comes and goes within one call is not reported at all."""
    rig = Rig(node, names_max=2)
    with closing(rig.pages):
        rig.name("ab")
        wait_until(lambda: sorted(rig.known) == ["a", "b"])
        rig.name("x")
        assert rig.known == ["b", "x"]
        rig.name("abx")
        assert rig.known == ["b", "x"]


def test_a_reader_that_resyncs_is_notified_and_finds_all_pages(node: Node) -> None:
    """A restart of the node, and names that no longer count, are no changes for it."""
    times: list[int] = []
    pages: HeldPages[str] = HeldPages(
        lambda: node, lambda *_: None, names_max=9, held_max=1, thread="test",
        restarted=lambda: times.append(1),
    )  # fmt: skip
    pages.name([key("a"), key("b")], "ab")
    pages.start()
    with closing(pages):
        wait_until(lambda: len(times) == 1)
        assert pages.present() in (["a"], ["b"])
        pages.forget()
        assert len(times) == 2


def test_the_pages_of_a_node_that_does_not_answer_are_removed(node: Node, rig: Rig) -> None:
    """It may be back, and reports everything again."""
    node.problem = PeerUnreachable("home")
    wait_until(lambda: rig.known == [])
    assert set(rig.problems) == {"no answer from home"}
    node.problem = None
    node.report(("a", IN_MEMORY), again=True)
    wait_until(lambda: rig.known == ["a"])


def test_after_a_close_names_are_ignored(rig: Rig) -> None:
    """A call of the engine may come late."""
    rig.pages.close()
    rig.name("x")
    rig.pages.forget()
    assert sorted(rig.known) == ["a", "b"]
