"""Run a soak, and judge its samples: exit status 1 where something leaks or breaks a promise.

python -m tests.system.endurance --minutes 60 --keep FOLDER

The folder has the samples of every process (samples.jsonl) and all logs. `--check FOLDER` judges an
earlier run again; `--summary FILE` writes what the documentation shows of one.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from pathlib import Path

from tests.system.endurance.gates import Summary, findings, summary_of
from tests.system.endurance.samples import SAMPLES, rows_of
from tests.system.endurance.soak import Soak
from tests.system.nodes import LocalCluster


def main() -> int:
    """Run, judge, and print; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.endurance", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--keep", type=Path, help="a new folder for samples and logs")
    parser.add_argument("--check", type=Path, help="the folder of an earlier run")
    parser.add_argument("--summary", type=Path, help="a file for the figures of the run")
    asked = parser.parse_args()
    folder = asked.check or run(asked.minutes, asked.seed, asked.keep)
    summary = summary_of(rows_of(folder / SAMPLES), asked.minutes * 60)
    if asked.summary:
        asked.summary.write_text(json.dumps(summary, separators=(",", ":")) + "\n")
    return report(summary)


def run(minutes: float, seed: int, kept: Path | None) -> Path:
    """Make one run; return the folder with its samples."""
    folder = kept or Path(tempfile.mkdtemp(prefix="peercache-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, samples and logs in {folder}", flush=True)
    shm = tempfile.TemporaryDirectory(prefix="peercache-soak-", dir="/dev/shm")
    with shm as memory, LocalCluster() as cluster:
        soak = Soak(cluster, folder, Path(memory), seed)
        try:
            soak.run(minutes * 60)
            soak.heal()
        finally:
            soak.end()
    return folder


def report(summary: Summary) -> int:
    """Print every gate; return the exit status."""
    found = findings(summary)
    print(*found, sep="\n")
    failed = sum(not finding.is_passed for finding in found)
    end, events = summary["end"], summary["events"]
    print(f"{summary['seconds'] / 60:g} minutes: {end['calls']} calls, {end['hits']} hits checked, "
          f"{end['visits']} clients opened and closed, {events}")  # fmt: skip
    print(f"{len(found)} gates, {failed} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
