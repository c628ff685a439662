"""The gates of the soak can fail: a leak of each kind is found, and a steady run passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.hostile.strangers import MIB
from tests.system.endurance.gates import BUCKETS, findings, summary_of
from tests.system.endurance.samples import CLIENT, END, EVENT, MACHINE, NODE, Row

MINUTES = 60

Change = Callable[[dict[str, Any], float], None]


def steady(*_: object) -> None:
    """Change nothing."""


def rows(change: Change = steady) -> Iterator[Row]:
    """Yield the samples of a run that `change` spoils: it gets each row, and its minute."""
    for tick in range(MINUTES * 6):
        at = 10.0 * tick
        noise = tick % 5
        made: list[dict[str, Any]] = [
            {"kind": NODE, "name": f"n{number}", "pid": number, "is_steady": number < 2,
             "anonymous_bytes": (60 + noise % 2) * MIB, "descriptors": 70 + noise, "threads": 22,
             "rows": 1000.0 + noise, "pool_pages": 256.0, "disk_pages": 400.0 * (number % 2 == 0),
             **({} if number % 2 else {"disk_bytes": 15 * MIB, "disk_files": 20})}
            for number in range(4)
        ]  # fmt: skip
        made += [
            {"kind": CLIENT, "name": name, "pid": 9, "is_steady": True, "threads": 16,
             "anonymous_bytes": 130 * MIB + noise, "descriptors": 40 + noise, "calls": tick,
             "latency_ms": {"get": [20.0 + noise, 80.0, 90.0], "set": [9.0, 20.0, 30.0],
                            "exists": [2.0, 8.0, 9.0]}}
            for name in ("engine0", "visitor")
        ]  # fmt: skip
        made.append({"kind": MACHINE, "name": "machine", "loop_ms": 4.0, "shm_files": 8,
                     "shm_bytes": 42 * MIB})  # fmt: skip
        made.append({"kind": EVENT, "name": "kill_node", "who": "n3"})
        for row in made:
            row["at"] = at
            change(row, at / 60)
            yield row
    end = {
        "at": 3700.0,
        "kind": END,
        "name": "all",
        "hits": 10**6,
        "shm_files": 8,
        "longest_s": {"get": 0.9, "exists": 0.2},
    }
    change(end, MINUTES)
    yield end


def failed(change: Change = steady) -> set[tuple[str, str]]:
    """Return the gates that such a run does not pass, and whom they name."""
    summary = summary_of(rows(change), MINUTES * 60)
    return {(f.gate, f.who) for f in findings(summary) if not f.is_passed}


def grows(name: str, figure: str, by_minute: float) -> Change:
    """Return a leak: a figure of one process that grows with each minute."""

    def change(row: dict[str, Any], minute: float) -> None:
        if row["name"] == name and figure in row:
            row[figure] += by_minute * minute

    return change


def test_a_steady_run_passes() -> None:
    """And all gates looked at something."""
    summary = summary_of(rows(), MINUTES * 60)
    found = findings(summary)

    assert not [str(finding) for finding in found if not finding.is_passed]
    assert {finding.gate for finding in found} >= {
        "anonymous_bytes", "descriptors", "threads", "rows of a page", "/dev/shm files",
        "/dev/shm bytes", "disk bytes", "disk files", "get p50 ms", "get p95 ms", "hits checked",
    }  # fmt: skip
    assert summary["events"] == {"kill_node": MINUTES * 6}
    assert all(len(each["threads"]) == BUCKETS for each in summary["series"].values()
               if "threads" in each)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "figure", "by_minute", "gate"),
    [
        ("n0", "anonymous_bytes", 0.25 * MIB, "anonymous_bytes"),
        ("engine0", "anonymous_bytes", 0.7 * MIB, "anonymous_bytes"),
        ("n1", "descriptors", 0.5, "descriptors"),
        ("visitor", "descriptors", 0.5, "descriptors"),
        ("n1", "threads", 0.15, "threads"),
        ("engine0", "threads", 0.15, "threads"),
        ("n2", "disk_bytes", 0.1 * MIB, "disk bytes"),
        ("n0", "disk_files", 0.1, "disk files"),
    ],
)
def test_a_leak_of_one_process_is_found(
    name: str, figure: str, by_minute: float, gate: str
) -> None:
    """Small ones: some units in forty minutes."""
    assert failed(grows(name, figure, by_minute)) == {(gate, name)}


@pytest.mark.parametrize(
    ("name", "figure", "by_minute", "gate"),
    [
        ("n3", "rows", 25.0, "rows of a page"),
        ("machine", "shm_files", 0.05, "/dev/shm files"),
        ("machine", "shm_bytes", 0.1 * MIB, "/dev/shm bytes"),
    ],
)
def test_a_leak_of_the_cluster_is_found(
    name: str, figure: str, by_minute: float, gate: str
) -> None:
    """What dead processes leave to those that live."""
    assert failed(grows(name, figure, by_minute)) == {(gate, "all")}


def test_a_file_that_is_left_at_the_end_is_found() -> None:
    """After the last event nothing is in shared memory but what live nodes have."""

    def change(row: dict[str, Any], _: float) -> None:
        if row["kind"] == END:
            row["shm_files"] = 9

    assert failed(change) == {("/dev/shm files at the end", "all")}


@pytest.mark.parametrize(("at", "gate"), [(0, "get p50 ms"), (1, "get p95 ms")])
def test_calls_that_become_slow_are_found(at: int, gate: str) -> None:
    """Unless the machine has become slow alike."""

    def change(row: dict[str, Any], minute: float) -> None:
        if row["name"] == "engine0":
            row["latency_ms"]["get"][at] *= 1 + (minute / 20) ** 2

    def change_all(row: dict[str, Any], minute: float) -> None:
        change(row, minute)
        if row["name"] == "machine":
            row["loop_ms"] *= 1 + (minute / 20) ** 2

    assert failed(change) == {(gate, "engine0")}
    assert failed(change_all) == set()


def test_a_process_that_was_replaced_is_found() -> None:
    """Its successor would begin small again."""

    def change(row: dict[str, Any], minute: float) -> None:
        if row["name"] == "n0" and minute > 30:
            row["pid"] = 77

    assert failed(change) == {("one life", "n0")}


def test_a_call_past_its_deadline_and_a_run_that_checked_little_are_found() -> None:
    """The promises that no single sample shows."""

    def change(row: dict[str, Any], _: float) -> None:
        if row["kind"] == END:
            row["longest_s"]["exists"] = 2.5
            row["hits"] = 1000

    assert failed(change) == {("longest exists s", "all"), ("hits checked", "all")}


def test_a_figure_that_is_not_measured_is_found() -> None:
    """A process that did not answer for ten minutes shows nothing."""

    def change(row: dict[str, Any], minute: float) -> None:
        if row["name"] == "n1" and 10 <= minute < 20:
            del row["threads"]

    assert failed(change) == {("threads", "n1")}
