"""Seeds that found something, as stories with names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sims.canaries import CANARIES, hunt
from sims.copying import copy
from sims.doubting import doubt
from sims.expiring import expire
from sims.following import follow
from sims.outliving import outlive
from sims.parting import part
from sims.play import play
from sims.queueing import queue
from sims.racing import race, race_copies, race_drains, race_spills
from sims.rewriting import rewrite
from sims.spilling import CASES, SEEDS_OF_ALL, cases, spill
from sims.swarm import smaller, with_tables
from sims.turning import turn

DOCS = Path(__file__).parents[2] / "docs/explanation/simulation.md"


@pytest.mark.slow  # test_sweep.py plays the same seed with each change
def test_a_page_set_again_with_another_length_is_found_by_every_client() -> None:
    """Seed 21: a record that does not fit is not remembered forever.

    1. A client sets a page with another length than the others do, and c4 remembers its record.
    2. The page is evicted, and set again with the usual length, at another node.
    3. c4 reads it: its own record states another length, so it was a miss, without a question to
       any node. The record was neither dropped nor tried again: a miss for as long as c4 lived.
    """
    outcome = play(21, change=smaller)

    assert outcome.ok, f"{outcome.checker}: {outcome.detail}"


@pytest.mark.parametrize(
    "story",
    [
        turn,
        doubt,
        queue,
        part,
        pytest.param(outlive, marks=pytest.mark.slow),
        pytest.param(race, marks=pytest.mark.slow),
        pytest.param(race_drains, marks=pytest.mark.slow),
        pytest.param(race_spills, marks=pytest.mark.slow),
        pytest.param(race_copies, marks=pytest.mark.slow),
        pytest.param(copy, marks=pytest.mark.slow),
        pytest.param(expire, marks=pytest.mark.slow),
        pytest.param(spill, marks=pytest.mark.slow),
        pytest.param(rewrite, marks=pytest.mark.slow),
        pytest.param(follow, marks=pytest.mark.slow),
    ],
)
def test_a_story_without_a_bug_is_simulated_to_its_end(story: Callable[[int], str]) -> None:
    """What each brings about is no trouble for production code."""
    assert story(1) == ""


@pytest.mark.parametrize(
    ("canary", "checkers"),
    [
        pytest.param("removed-comes-back", {"came-back"}, marks=pytest.mark.slow),
        pytest.param("dead-not-named", {"removed-found"}, marks=pytest.mark.slow),
        pytest.param("handed-over-though-removed", {"came-back"}, marks=pytest.mark.slow),
        pytest.param("spilled-though-removed", {"came-back"}, marks=pytest.mark.slow),
        pytest.param("copied-though-removed", {"came-back"}, marks=pytest.mark.slow),
        pytest.param("copies-of-the-dead", {"liveness-copies"}, marks=pytest.mark.slow),
        pytest.param("copies-never-reported", {"liveness-copies"}, marks=pytest.mark.slow),
        pytest.param("copies-reported-once", {"liveness-copies"}, marks=pytest.mark.slow),
        ("suspicion-forgotten", {"missed-removal"}),
        pytest.param("never-expires", {"expired"}, marks=pytest.mark.slow),
        pytest.param("never-expires-on-disk", {"expired"}, marks=pytest.mark.slow),
        pytest.param("expires-in-use", {"expired-in-use"}, marks=pytest.mark.slow),
        ("spilled-by-both", {"spilled-lost"}),
        ("spilled-before-published", {"spilled-lost"}),
        pytest.param("spilled-though-unknown", {"spilled-lost"}, marks=pytest.mark.slow),
        pytest.param("spilled-though-revoked", {"revoked-served"}, marks=pytest.mark.slow),
        ("entry-reused-in-an-epoch", {"table-record"}),
        ("epoch-not-checked", {"table-record", "table-lost"}),
        ("gap-not-sent", {"followed"}),
        ("uncounted-not-sent", {"followed"}),
        ("drops-not-sent", {"followed"}),
        ("dead-node-stays", {"followed-dead"}),
        ("missing-page-remembered", {"absent-on-trust"}),
        ("missing-page-kept", {"run-not-found"}),
        ("gap-not-doubted", {"stored-found"}),
        ("own-stall-unnoticed", {"stored-found"}),
        ("summary-of-before-counts", {"stored-found"}),
        ("another-rings-word-believed", {"stored-found"}),
        pytest.param("old-tick-believed", {"stored-found"}, marks=pytest.mark.slow),
        pytest.param("incarnation-inherits-in-sync", {"stored-found"}, marks=pytest.mark.slow),
        pytest.param("summary-counts-as-hand-over", {"stored-found"}, marks=pytest.mark.slow),
        pytest.param("incomplete-hand-over", {"stored-found"}, marks=pytest.mark.slow),
        pytest.param("no-first-look", {"wrong-bytes"}, marks=pytest.mark.slow),
        pytest.param("future-generation-accepted", {"wrong-bytes"}, marks=pytest.mark.slow),
        pytest.param("word-before-bytes", {"wrong-bytes"}, marks=pytest.mark.slow),
    ],
)
def test_a_bug_planted_into_a_story_is_found(canary: str, checkers: set[str]) -> None:
    """Each in few seeds: what a run meets by chance, a story meets again and again."""
    assert hunt(canary).checker in checkers


def test_consecutive_seeds_of_a_spill_have_every_fault_at_every_step() -> None:
    """Whichever comes first."""
    for first in (0, 7):
        seeds = range(first, first + SEEDS_OF_ALL)
        assert {case for seed in seeds for case in cases(seed)} == set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [100, 101])
def test_a_cluster_that_is_asked_by_tables_calls_absent_only_what_is(seed: int) -> None:
    """Nodes are stopped and killed, messages lost; clients look at every moment."""
    outcome = play(seed, change=with_tables)

    assert outcome.ok, f"{outcome.checker}: {outcome.detail}"


def test_every_planted_bug_is_documented_and_no_other() -> None:
    """With the most seeds that it may take."""
    table = DOCS.read_text().partition("| planted bug |")[2].partition("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]

    reported = {row[0].strip("| `"): int(row[4].strip(" |")) for row in rows}

    assert reported == {canary.name: canary.seeds_max for canary in CANARIES}
