"""The short sweep: some clusters of every kind, the same ones each time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import attrs
import pytest

from peercache.actors.membership.actor import Membership
from sims import canaries
from sims.__main__ import main
from sims.canaries import planted_canary
from sims.canary import Canary
from sims.play import play
from sims.swarm import Options, smaller, with_large_batches, with_late_ticks
from sims.sweep import derived_seeds, kept_seeds, reproduce_line

SEEDS = range(100, 108)
OFTEN = 4
"""Seeds that each change plays; `make slow` plays the others, `make sims` more."""

LARGE_SEEDS = range(720, 730)
"""Seeds of large batches that are played until one finds a planted bug."""


@pytest.mark.parametrize(
    "seed",
    [*SEEDS[:OFTEN], *[pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[OFTEN:]]],
)
def test_a_cluster_under_faults_keeps_its_promises_and_heals(seed: int) -> None:
    """No checker finds anything, and everything is whole again in time."""
    outcome = play(seed, change=smaller)

    assert outcome.ok, f"{outcome.checker}: {outcome.detail}; {reproduce_line(seed)}"
    assert outcome.messages > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", kept_seeds())
def test_what_failed_once_fails_no_more(seed: int) -> None:
    """Seeds that found something; `make sims` plays them first, at their full size."""
    outcome = play(seed, change=smaller)

    assert outcome.ok, f"{outcome.checker}: {outcome.detail}; {reproduce_line(seed)}"


@pytest.mark.parametrize(
    ("canary", "checkers"),
    [
        ("generation-check-skipped", {"stale-hit", "wrong-bytes"}),
        ("evict-without-odd", {"write-under-even-word", "write-under-committed"}),
        ("publish-before-commit", {"torn-commit"}),
    ],
)
def test_a_planted_bug_is_found(canary: str, checkers: set[str]) -> None:
    """Some of the canaries that sing at once; CI hunts all of them."""
    with planted_canary(canary):
        found = (play(seed, change=smaller).checker for seed in SEEDS)
        first = next(checker for checker in found if checker)

    assert first in checkers


def test_derived_seeds_follow_from_the_code_and_nothing_else(tmp_path: Path) -> None:
    """The same code runs the same seeds, wherever it is; each change runs others."""
    folders = []
    for place in ("here", "there"):
        folder = tmp_path / place / "code"
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "one.py").write_text("ONE = 1\n")
        folders.append(folder)

    def ten(folder: Path) -> list[int]:
        return list(itertools.islice(derived_seeds([folder]), 10))

    here, there = map(ten, folders)
    (folders[1] / "inner" / "one.py").write_text("ONE = 2\n")
    changed = ten(folders[1])
    (folders[0] / "inner" / "one.py").rename(folders[0] / "inner" / "two.py")
    renamed = ten(folders[0])

    assert here == there
    assert len({*here, *changed, *renamed}) == 30


def test_a_canary_that_fails_by_itself_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted code that no longer fits ends every run, and shows nothing."""

    def misfit(_: Any) -> Any:
        def on_tick(self: Any, now: float) -> Any:
            return self.renamed_meanwhile(now)

        return on_tick

    misfits = Canary("misfit", "", 3, patches=((Membership, "on_tick", misfit),))
    monkeypatch.setattr(canaries, "CANARIES", (misfits,))

    assert canaries.hunt("misfit").checker == ""


@pytest.mark.slow
def test_an_outbox_without_a_bound_is_found() -> None:
    """Few messages wait for a peer in a short run, so bounds and partitions are those that show."""

    def tight(options: Options) -> Options:
        rate = max(0.2, options.partition_rate)
        return attrs.evolve(
            smaller(options), outbox_messages=8, outbox_bytes=4096, partition_rate=rate
        )

    with planted_canary("outbox-without-bound"):
        found = (play(seed, change=tight) for seed in SEEDS)
        first = next(outcome for outcome in found if not outcome.ok)
    clean = play(first.seed, change=tight)

    assert first.checker == "outbox-bound", first.detail
    assert clean.ok, f"{clean.checker}: {clean.detail}"


def test_a_client_with_a_clock_of_its_own_finds_who_waits_by_another() -> None:
    """Planted: an answer is waited for by another clock. Where all clocks agree nothing shows."""

    def skewed(options: Options) -> Options:
        return attrs.evolve(smaller(options), skew=0.05, loss=0.05)

    def agreeing(options: Options) -> Options:
        return attrs.evolve(skewed(options), skew=0.0)

    with planted_canary("waits-by-another-clock"):
        found = play(SEEDS[0], change=skewed)
        missed = play(SEEDS[0], change=agreeing)

    assert found.checker == "deadline", found.detail
    assert missed.ok, f"{missed.checker}: {missed.detail}"


def test_late_ticks_find_an_actor_that_counts_from_its_last_message() -> None:
    """Planted: the report of what a tick evicts. Without the bug late ticks do no harm."""
    found = canaries.hunt("counts-from-the-last-message")
    clean = play(canaries.FIRST_SEED, change=with_late_ticks)

    assert found.checker == "error-log"
    assert clean.ok, f"{clean.checker}: {clean.detail}"


@pytest.mark.parametrize(
    ("canary", "checker"),
    [
        ("generation-check-skipped", "wrong-bytes"),
        ("returns-while-writing", "write-after-return"),
        ("reads-source-late", "read-after-return"),
    ],
)
def test_large_batches_find_planted_bugs(canary: str, checker: str) -> None:
    """Although most of their pages are copied in no time; another checker may find some first."""
    with planted_canary(canary):
        found = (play(seed, change=with_large_batches).checker for seed in LARGE_SEEDS)

        assert checker in found


@pytest.mark.slow
def test_the_largest_cluster_runs() -> None:
    """Fifty nodes hold equal views and rings within the time that is allowed."""

    def fifty(options: Options) -> Options:
        return attrs.evolve(
            options, nodes=50, hosts=25, safety_s=3.0, virtual_nodes=4, clients=2, think_s=0.5
        )

    outcome = play(1, change=fifty)

    assert outcome.ok, f"{outcome.checker}: {outcome.detail}"


@pytest.mark.parametrize(
    "words",
    [["run", "--seed", "1", "--canary", "no-such-bug"], ["canaries", "--only", "no-such-bug"]],
)
def test_unknown_bug_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt one must not pass for one that was found."""
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
    assert "'no-such-bug'" in capsys.readouterr().err
