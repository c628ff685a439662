"""The slowest calls: what a client reports of them, and what its home node keeps."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from peercache.observability.latency import PAGE, PLACES, SERIES
from peercache.observability.metrics import ClientReport, Metrics, absorb
from peercache.observability.reasons import ABSENT, DEADLINE, MISS_REASONS
from peercache.observability.slow import (
    KEPT_MAX,
    KEPT_S,
    REPORTED_MAX,
    SLOW_CALL,
    CallNote,
    SlowestCalls,
    SlowLog,
)
from peercache.wire.messages.session import Counted

GET = PLACES["get", "tcp", "some"]


def note(seconds: float, number: int = 1) -> CallNote:
    return CallNote(GET, seconds, 32, number)


def test_a_report_has_the_slowest_calls_since_the_last_one() -> None:
    """The floor rises with them, so that other calls cost a comparison."""
    slowest = SlowestCalls()
    for number in range(100):
        seconds = ((number * 37) % 100) / 1000
        if seconds > slowest.floor:
            slowest.add(note(seconds, number))

    assert sorted(each.seconds for each in slowest.take()) == [
        (100 - REPORTED_MAX + place) / 1000 for place in range(REPORTED_MAX)
    ]
    assert slowest.take() == []
    assert slowest.floor < 0


def test_a_call_reaches_the_home_node_with_its_reasons() -> None:
    """What the label of the histogram states, the pages, and the reasons of this call only."""
    client, node = Metrics(), Metrics()
    report = ClientReport(client)
    report.slowest.add(CallNote.of(GET, 0.25, 32, 7, {"": 27, ABSENT: 4, DEADLINE: 1}))
    report.slowest.add(CallNote.of(PLACES["exists", "", ""], 0.5, 2, 8, ["", ABSENT]))
    counted = report.take()

    assert counted is not None
    assert absorb(node, counted, "c1") == 0
    exists, get = node.slow.listed(0.0)
    assert (get.operation, get.tier, get.outcome, get.seconds) == ("get", "tcp", "some", 0.25)
    assert (get.pages, get.call, get.client, get.missed) == (
        32,
        7,
        "c1",
        {"absent": 4, "deadline": 1},
    )
    assert (exists.operation, exists.tier, exists.missed) == ("exists", "", {"absent": 1})
    assert report.take() is None


def test_a_client_with_its_node_in_its_process_keeps_its_own() -> None:
    metrics = Metrics()
    report = ClientReport(metrics, name="me")
    report.slowest.add(note(0.3))

    report.settle()

    assert [call.client for call in metrics.slow.listed(0.0)] == ["me"]


def test_the_log_keeps_the_slowest_of_an_hour() -> None:
    """A burst of fast calls does not displace slow ones, and old ones go."""
    log = SlowLog()
    log.add("a", note(9.0), now=0.0)
    for number in range(3 * KEPT_MAX):
        log.add("b", note(0.001 * number), now=10.0)

    listed = log.listed(20.0)
    assert len(listed) == KEPT_MAX
    assert [(listed[0].client, listed[0].age_s), listed[1].age_s] == [("a", 20.0), 10.0]
    assert listed[-1].seconds == pytest.approx(0.001 * (2 * KEPT_MAX + 1))
    assert {call.client for call in log.listed(KEPT_S + 5)} == {"b"}
    assert log.listed(2 * KEPT_S) == ()


@example(series=0, seconds=1e6, pages=0, number=0, missed={})
@given(
    series=st.sampled_from([p for p, labels in enumerate(SERIES) if labels[0] != PAGE]),
    seconds=st.floats(0, 1e6),
    pages=st.integers(0, 10**9),
    number=st.integers(0, 2**40),
    missed=st.dictionaries(st.sampled_from(MISS_REASONS), st.integers(1, 10**9), max_size=18),
)
def test_a_note_is_read_as_it_was_written(
    series: int, seconds: float, pages: int, number: int, missed: dict[str, int]
) -> None:
    written = CallNote.of(series, seconds, pages, number, missed)

    read = CallNote.read(str(written))

    assert read is not None
    assert (read.series, read.pages, read.number) == (series, pages, number)
    assert dict(read.missed) == missed
    assert read.seconds == pytest.approx(seconds, rel=1e-5)


@pytest.mark.parametrize(
    "text",
    [
        5, "", "x", "1 2 3", f"{len(SERIES)} 1 1 1", f"{PLACES[PAGE, 'tcp', '']} 1 1 1",
        "1 1e9 1 1", "1 1.2.3 1 1", "1 1-1 1 1", "1 1 1 1 pigeon=1", "1 1 1 1 absent=-1",
        "1 1 99999999999 1", "1 nan 1 1", "1 inf 1 1", "1 1 1 1\n", "1 1 1 1 absent=1 " * 9,
    ],
)  # fmt: skip
def test_what_no_correct_client_notes_is_ignored_and_counted(text: str | int) -> None:
    metrics = Metrics()

    assert absorb(metrics, Counted({f"{SLOW_CALL}/0": text}, b"")) == 1
    assert metrics.slow.listed(0.0) == ()


def test_notes_of_one_report_are_bounded() -> None:
    metrics = Metrics()
    many = {f"{SLOW_CALL}/{place}": str(note(1.0)) for place in range(100)}

    assert absorb(metrics, Counted({**many}, b"")) == 100 - REPORTED_MAX
    assert len(metrics.slow.listed(0.0)) == REPORTED_MAX
