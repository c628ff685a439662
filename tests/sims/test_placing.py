"""What placement costs a node does not grow with the cluster."""

from __future__ import annotations

import pytest

from sims.__main__ import main


@pytest.mark.slow
def test_a_node_sends_no_more_in_a_larger_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    """It asks two members and offers to one, however many there are."""
    assert main(["placement", "--nodes", "4", "12"]) == 0

    lines = capsys.readouterr().out.splitlines()[2:]
    rows = [[cell.strip(" |").split(" ")[0] for cell in line.split(" | ")] for line in lines]
    assert [row[:2] for row in rows] == [["4", "half"], ["4", "all"], ["12", "half"], ["12", "all"]]
    for small, large in zip(rows[:2], rows[2:], strict=True):
        for smaller, larger in zip(small[2:5], large[2:5], strict=True):
            assert 0 < float(larger) < 1.25 * float(smaller)
    assert [float(row[5]) > 0 for row in rows] == [True, False, True, False]
