"""The log: warnings that are written once, and the number of a call in lines and questions."""

from __future__ import annotations

import io
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from peercache.observability import log
from peercache.observability.log import (
    REQUEST_BITS,
    WARNED_FORGET_S,
    WarnOnce,
    call_of,
    current,
    get_logger,
    request_of,
)


@contextmanager
def no_loggers() -> Iterator[logging.Logger]:
    """Yield our logger as it is in an engine that has none yet, nor a handler of the root."""
    ours, root = logging.getLogger(log.LOGGER), logging.root
    before = ours.handlers, ours.level, ours.propagate
    with pytest.MonkeyPatch.context() as patch:
        # Within the test: pytest gives the root its handlers as each phase begins.
        patch.setattr(root, "handlers", [])
        patch.setattr(root.manager, "loggerDict", {log.LOGGER: ours})
        ours.handlers, ours.level, ours.propagate = [], logging.NOTSET, True
        try:
            yield ours
        finally:
            ours.handlers, ours.propagate = before[0], before[2]
            ours.setLevel(before[1])


def engine_logger(level: int) -> io.StringIO:
    """Give an engine a logger that writes with time and level; return what it writes."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setLevel(level)
    handler.setFormatter(logging.Formatter("ENGINE %(levelname)s %(message)s"))
    theirs = logging.getLogger("engine.worker")
    theirs.addHandler(handler)
    theirs.setLevel(level)
    theirs.propagate = False
    return written


@pytest.mark.parametrize(
    ("theirs", "asked", "shown"),
    [
        (logging.INFO, "", ["INFO event=info", "WARNING event=warning"]),
        (logging.WARNING, "", ["WARNING event=warning"]),
        (logging.INFO, "error", []),
        (logging.WARNING, "debug", ["DEBUG event=debug", "INFO event=info", "WARNING event=warn"]),
    ],
)
def test_an_engine_shows_our_log_as_its_own(theirs: int, asked: str, shown: list[str]) -> None:
    """With its own form and level, or that of `log_level`, and each line once."""
    with no_loggers():
        written = engine_logger(theirs)
        log.log_into("engine", level=asked)
        log.log_into("engine", level=asked)
        ours = log.get_logger()
        for level in ("debug", "info", "warning"):
            getattr(ours, level)(level)
    lines = written.getvalue().splitlines()
    assert len(lines) == len(shown)
    for line, start in zip(lines, shown, strict=True):
        assert line.startswith("ENGINE " + start)


@pytest.mark.parametrize("is_silenced", [False, True])
def test_without_loggers_of_the_engine_lines_have_time_and_level(
    capsys: pytest.CaptureFixture[str], is_silenced: bool
) -> None:
    """And info is shown: Python's last resort is warnings alone.

    is_silenced: one logger of the engine writes nothing, as SGLang's of its kernels does.
    """
    with no_loggers() as ours:
        if is_silenced:
            kernels = logging.getLogger("engine.kernels")
            kernels.addHandler(logging.NullHandler())
            kernels.setLevel(logging.CRITICAL + 1)
        log.log_into("engine")
        log.get_logger().info("engines.opened")
        assert len(ours.handlers) == 1
    said = capsys.readouterr().err
    assert re.match(r"\d{4}-\d\d-\d\d [\d:,]+ INFO peercache: event=engines.opened", said)


class Written:
    """A log that keeps its lines."""

    def __init__(self) -> None:
        """Start empty."""
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def warning(self, event: str, **facts: Any) -> None:
        """Keep a line."""
        self.lines.append((event, facts))


def test_warning_is_written_once_for_each_event_and_key() -> None:
    """A second peer, or another fault of the same peer, has a line of its own."""
    written = Written()
    warn_once = WarnOnce(written)

    for peer in (1, 2, 1):
        warn_once("rdma.fell_back", peer, peer=peer)
    warn_once("rdma.connect_failed", 1, peer=1)

    assert written.lines == [
        ("rdma.fell_back", {"peer": 1}),
        ("rdma.fell_back", {"peer": 2}),
        ("rdma.connect_failed", {"peer": 1}),
    ]


def test_keys_that_a_peer_invents_fill_neither_memory_nor_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full memory writes nothing new, until it is forgotten as a whole."""
    monkeypatch.setattr(log, "WARNED_KEYS_MAX", 3)
    written, now = Written(), [100.0]
    warn_once = WarnOnce(written, clock=lambda: now[0])

    for key in range(10):
        warn_once("node.peer_refused", key)
    before = len(written.lines)
    now[0] += WARNED_FORGET_S
    warn_once("node.peer_refused", 11)
    warn_once("node.peer_refused", 0)

    assert before == 3
    assert len(written.lines) == 5


@pytest.fixture
def in_call() -> Iterator[int]:
    """Be in call 17; leave it afterwards."""
    current.number = 17
    yield 17
    current.number = 0


def test_a_question_names_its_call(in_call: int) -> None:
    """And stays apart from the client's other questions, also of the same call."""
    first, second = request_of(5), request_of(6)

    assert call_of(first) == call_of(second) == in_call
    assert first != second
    assert call_of(request_of(2**REQUEST_BITS + 5)) == in_call


def test_a_question_of_no_call_names_none() -> None:
    """The tie to the home node asks on a thread of its own."""
    assert request_of(5) == 5
    assert call_of(5) == 0


@pytest.mark.usefixtures("in_call")
def test_other_threads_are_in_no_call() -> None:
    """Calls run side by side."""
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(current.number))
    thread.start()
    thread.join()

    assert seen == [0]


def test_a_log_line_names_the_call_that_it_is_written_in(
    in_call: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a line of code where it is written; and no line outside of a call does."""
    caplog.set_level(logging.INFO, logger="peercache")
    get_logger(client="c").warning("client.call_refused", operation="get")
    current.number = 0
    get_logger(client="c").warning("client.call_refused", operation="get")

    assert f"call={in_call}" in caplog.messages[0]
    assert "call=" not in caplog.messages[1]
