"""Two minutes of `make evictions`, and what it reports where memory is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pace import PROMPT_S, wait_until
from tests.system.endurance.evictions import PAGE_BYTES, Evictions, late_calls, run
from tests.system.nodes import LocalCluster

MINUTES = 2.0


@pytest.mark.slow
def test_pages_that_are_read_while_they_are_evicted_have_the_right_bytes() -> None:
    """Every reader has hits, pages are evicted under all of them, and no call is late."""
    summary = run(10**9, MINUTES, seed=1)

    assert min(summary["hits"].values()) > 10_000, summary
    assert min(summary["misses"], summary["evicted_while_read"], summary["stored"]) > 1000, summary
    assert min(summary["killed"], summary["paused"]) > 0, summary
    assert not late_calls(summary)


@pytest.mark.slow
def test_a_flipped_bit_in_each_page_is_found(tmp_path: Path) -> None:
    """A run that cannot fail proves nothing."""
    with LocalCluster() as cluster:
        evictions = Evictions(cluster, tmp_path, seed=1)
        try:
            wait_until(lambda: evictions.hits > 1000)
            cluster.nodes[0].flip(slice(8, None, PAGE_BYTES))
            with pytest.raises(AssertionError, match="reader"):
                evictions.run(10**9, PROMPT_S)
        finally:
            evictions.end()
