"""The number of a call: in the log lines of its thread, and in the questions that it asks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from peercache.observability.calls import REQUEST_BITS, call_of, current, request_of
from peercache.observability.log import get_logger


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
