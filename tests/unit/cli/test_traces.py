"""Traces are read as they are published, and a cache of a size is asked in their order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peercache.cli.traces import LRU, Prompt, TraceError, hit_rate, requests_of


def test_requests_come_in_the_order_of_their_times_from_zero(tmp_path: Path) -> None:
    """A block that a line names twice is one block."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 3000, "hash_ids": [1, 2, 2, 3]},
        {"timestamp": 1000, "input_length": 512, "hash_ids": [1]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert requests_of(path) == [Prompt(0.0, [1]), Prompt(2.0, [1, 2, 3])]
    assert requests_of(path, 1) == [Prompt(0.0, [1])]


@pytest.mark.parametrize(
    "line", ["{", "3", "{}", '{"timestamp": 1}', '{"timestamp": "x", "hash_ids": []}',
             '{"timestamp": 1, "hash_ids": [null]}'],
)  # fmt: skip
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    """With the file, the number of the line and what a request has."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 2: .*timestamp.*hash_ids"):
        requests_of(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """So a wrong path is distinguished from a wrong line."""
    with pytest.raises(TraceError, match=r"none\.jsonl cannot be read"):
        requests_of(tmp_path / "none.jsonl")


def test_a_hit_is_the_leading_run() -> None:
    """What comes after the first miss does not count, as no engine could use it."""
    requests = [Prompt(0, [1, 2, 3]), Prompt(1, [1, 9, 3]), Prompt(2, [1, 2, 3])]
    assert hit_rate(requests, LRU(10)) == pytest.approx((0 + 1 + 3) / 9)
    assert hit_rate(requests, LRU(1)) == 0.0
    assert hit_rate([], LRU(1)) == 0.0


def test_deepest_first_keeps_the_head_of_a_prompt() -> None:
    """A prompt that is longer than the cache keeps a run that can be used."""
    requests = [Prompt(0, [1, 2, 3]), Prompt(1, [1, 2, 3])]
    assert hit_rate(requests, LRU(2)) == 0.0
    assert hit_rate(requests, LRU(2, is_deepest_first=True)) == pytest.approx(2 / 6)
