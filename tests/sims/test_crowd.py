"""A crowd of hosts reads one prompt: with mirrors the load of its producer falls.

`python -m sims crowd` prints the table for 50 readers. Every byte of every hit is checked.
"""

from __future__ import annotations

import pytest

from sims.__main__ import main
from sims.crowd import Crowd, Report

# One worker plays what the others are compared with.
pytestmark = pytest.mark.xdist_group("crowd")

PROMPT_BYTES = 32 * 2**20


@pytest.fixture(scope="module")
def without() -> Report:
    """Six hosts read a prompt four times each, and keep nothing."""
    return Crowd(readers=6).play()


def test_without_mirrors_one_holder_serves_every_read(without: Report) -> None:
    """Which is what the others are compared with."""
    assert without.missed == 0
    assert without.sent == (6 * 4 * PROMPT_BYTES,)
    assert without.mirrored == 0


def test_with_all_pages_mirrored_the_busiest_holder_sends_a_fifth(without: Report) -> None:
    """Each host reads once from another one, and the later ones from several."""
    report = Crowd(readers=6, pulls="all").play()

    assert report.missed == 0
    assert report.served == without.served
    assert sum(report.sent) == 6 * PROMPT_BYTES
    assert report.sent[0] * 5 <= without.sent[0]
    assert len(report.sent) > 1
    assert report.waited_s * 1.5 < without.waited_s


def test_with_hot_pages_mirrored_each_host_reads_from_others_twice(without: Report) -> None:
    """The third read and the fourth come from its own memory."""
    report = Crowd(readers=6, pulls="hot").play()

    assert report.missed == 0
    assert report.sent[0] * 2 <= without.sent[0]
    assert report.mirrored == 6 * 32


@pytest.mark.slow
def test_fifty_readers_and_the_table_of_the_documentation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command prints one line for each setting, and fails where pages were missed."""
    assert main(["crowd"]) == 0
    lines = capsys.readouterr().out.splitlines()

    assert [line.split("`")[1] for line in lines[2:]] == ["off", "hot", "all"]
    parts = [float(line.split("(")[1].split(" %")[0]) for line in lines[2:]]
    assert parts[0] == 100
    assert parts[2] < 30
