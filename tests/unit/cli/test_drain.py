"""What `peercache drain` prints of a node that answers its questions one by one."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from click.testing import CliRunner

from peercache.cli.operate import drain
from peercache.errors import PeerUnreachable


@attrs.frozen
class Told:
    """An answer."""

    figures: dict[str, int | float | str]


def told(state: str, given: int) -> Told:
    """Return the answer of a node that has handed over so many pages of two."""
    figures = {"given": given, "given_bytes": given, "there": 0, "left": 2 - given, "lost": 0}
    return Told({"state": state, "problem": "", **figures})


def test_progress_is_printed_when_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each change, and none for an answer that says the same."""
    answers = [told("handing_over", 0), told("handing_over", 0), told("handing_over", 1)]
    answers += 3 * [told("leaving", 2)]

    class Node:
        def __init__(self, *_: Any) -> None:
            """Answer any question."""

        def __enter__(self) -> Node:
            return self

        def __exit__(self, *_: object) -> None:
            """Keep nothing."""

        def ask(self, *_: Any) -> Told:
            if not answers:
                raise PeerUnreachable("a:1")
            return answers.pop(0)

    monkeypatch.setattr(drain, "Operator", Node)
    monkeypatch.setattr(drain, "LOOK_S", 0.0)

    done = CliRunner().invoke(drain.drain, ["a:1"], standalone_mode=False)

    assert done.exception is None, done.exception
    assert [line.partition(":")[0] for line in done.output.splitlines()] == [
        "handing over", "handing over", "leaving", "left",
    ]  # fmt: skip
    assert "0 pages" in done.output
    assert done.return_value == 0
