"""A request trace drives a simulated cluster, with and without faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peercache.cli.bench.replay import EVEN, Plan
from peercache.cli.traces import requests_of
from sims.__main__ import main
from sims.replay import Replay, Report
from sims.swarm import GRANULE

SESSIONS, TURNS, BLOCKS = 4, 6, 6


@pytest.fixture(name="trace")
def _trace(tmp_path: Path) -> Path:
    """Sessions that come in turn, each of which reads what it has and adds six blocks."""
    path = tmp_path / "trace.jsonl"
    lines = []
    for turn in range(TURNS):
        for session in range(SESSIONS):
            blocks = [1000 * session + block for block in range(BLOCKS * (turn + 1))]
            at = 10_000 * (SESSIONS * turn + session)
            lines.append(json.dumps({"timestamp": at, "hash_ids": blocks}))
    path.write_text("\n".join(lines))
    return path


def _replayed(trace: Path, **options: float) -> Report:
    plan = Plan(requests_of(trace), 3, 1, EVEN, GRANULE, 3.0, 1)
    return Replay(plan=plan, blocks=3 * 60, **options).play()  # type: ignore[arg-type]


def test_pages_that_are_spilled_are_hits_later(trace: Path) -> None:
    """The room of the node that gets all requests is less than half of what they store."""
    off, on = _replayed(trace), _replayed(trace, spill=True)

    assert (off.checker, on.checker) == ("", "")
    figures, spilling = off.figures(), on.figures()
    assert figures["distinct_blocks"] == SESSIONS * TURNS * BLOCKS < figures["room_blocks"]
    assert figures["bytes_spilled"] == 0 < spilling["bytes_spilled"]
    assert figures["hit_rate"] < spilling["hit_rate"] <= spilling["lru_hit_rate"]
    assert set(spilling["misses"]) <= {"absent", "evicted"}
    hits = round(spilling["hit_rate"] * spilling["blocks"])
    assert hits + sum(spilling["misses"].values()) == spilling["blocks"]


@pytest.mark.slow
def test_a_replay_with_faults_heals_and_its_seed_decides_it(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every hit is checked, and nodes are killed, paused and partitioned."""
    command = ["replay", "--trace", str(trace), "--nodes", "3", "--blocks", "180", "--json"]
    command += ["--speed", "2", "--requests", "12", "--spill"]
    command += ["--kills", "0.3", "--pauses", "0.3", "--partitions", "0.3"]

    printed = []
    for _ in range(2):
        assert main([*command, "--seed", "1"]) == 0
        printed.append(json.loads(capsys.readouterr().out))

    assert printed[0] == printed[1]
    assert printed[0]["faults"]
    assert printed[0]["healed_s"] > 0
