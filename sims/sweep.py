"""Sweeps: many seeds, over all cores, and one line to reproduce each failure."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import attrs

from sims.play import Outcome, play
from sims.swarm import with_large_batches

KEPT_SEEDS = Path(__file__).parent / "seeds.txt"
"""Seeds that once failed, one per line, each followed by the reason."""

SEED_BITS = 40

SOURCES = (Path(__file__).parent, Path(__file__).parent.parent / "src/peercache")
"""The sources of a run: the simulation, and the code that it simulates."""


@attrs.define
class Tally:
    """The result of a sweep."""

    runs: int = 0
    messages: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    healed_s_max: float = 0.0
    hits: int = 0
    misses: int = 0
    seeds: list[int] = attrs.field(factory=list)
    has_large_batches: bool = False
    failures: list[Outcome] = attrs.field(factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one run."""
        self.runs += 1
        self.messages += outcome.messages
        self.virtual_s += outcome.virtual_s
        self.healed_s_max = max(self.healed_s_max, outcome.healed_s)
        gets = {name: pages for name, pages in outcome.counts.items() if name.startswith("get:")}
        self.hits += gets.pop("get:done", 0)
        self.misses += sum(gets.values())
        self.seeds.append(outcome.seed)
        if not outcome.ok:
            self.failures.append(outcome)

    def summary(self) -> str:
        """Return one readable line."""
        wall_s = max(self.wall_s, 1e-9)
        return (
            f"{self.runs} seeds, {len(self.failures)} failed; {self.messages} messages "
            f"({self.messages / wall_s:.0f}/s), {self.hits} hits checked, "
            f"{self.virtual_s:.0f} s of virtual time in {self.wall_s:.0f} s; "
            f"healed within {self.healed_s_max:.1f} s"
        )

    def as_json(self) -> str:
        """Return the same for programs."""
        return json.dumps(
            {
                "runs": self.runs,
                "messages": self.messages,
                "messages_per_s": round(self.messages / max(self.wall_s, 1e-9)),
                "hits": self.hits,
                "virtual_s": round(self.virtual_s),
                "wall_s": round(self.wall_s, 1),
                "healed_s_max": round(self.healed_s_max, 1),
                "failures": [
                    {"seed": f.seed, "checker": f.checker, "detail": f.detail}
                    for f in self.failures
                ],
            }
        )


def reproduce_line(seed: int, *, has_large_batches: bool = False) -> str:
    """Return the line that runs a seed again."""
    flag = " --large-batches" if has_large_batches else ""
    return f"reproduce: python -m sims run --seed {seed}{flag} (commit {commit()})"


def commit() -> str:
    """Return the commit that is checked out."""
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],  # noqa: S607 - whichever git there is
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or "unknown"


def kept_seeds() -> list[int]:
    """Return the seeds that once failed."""
    lines = [line.partition("#")[0].strip() for line in KEPT_SEEDS.read_text().splitlines()]
    return [int(line) for line in lines if line]


def fresh_seeds() -> Iterator[int]:
    """Yield fresh random seeds."""
    return itertools.count(int.from_bytes(os.urandom(SEED_BITS // 8), "little"))


def derived_seeds(sources: Iterable[Path] = SOURCES) -> Iterator[int]:
    """Yield seeds that follow from the code: the same for the same sources, else others.

    So a run of CI can be repeated, and a red one does not turn green by itself, while each change
    of the code is tested with seeds of its own.
    """
    return itertools.count(int.from_bytes(digest_of_sources(sources)[: SEED_BITS // 8], "little"))


def digest_of_sources(sources: Iterable[Path] = SOURCES) -> bytes:
    """Return the digest of all that determines a run, but for its seed."""
    digest = hashlib.sha256()
    for folder in sources:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()


def sweep(
    seeds: Iterable[int],
    *,
    minutes: float | None = None,
    jobs: int | None = None,
    has_large_batches: bool = False,
    report: Callable[[Outcome], None],
) -> Tally:
    """Run seeds until there are no more, or the time is up; call `report` with each outcome."""
    tally = Tally(has_large_batches=has_large_batches)
    run = partial(play, change=with_large_batches if has_large_batches else None)
    started = time.monotonic()
    until = started + 60.0 * minutes if minutes is not None else float("inf")
    context = multiprocessing.get_context("spawn")
    jobs = jobs or os.cpu_count() or 1
    # A pool queues everything at once, and the fresh seeds never end.
    room = threading.Semaphore(2 * jobs)
    # A worker is replaced from time to time, so that leftovers of runs do not accumulate.
    with context.Pool(jobs, maxtasksperchild=50) as pool:
        for outcome in pool.imap_unordered(run, _until(seeds, until, room)):
            room.release()
            tally.add(outcome)
            report(outcome)
    tally.wall_s = time.monotonic() - started
    return tally


def _until(seeds: Iterable[int], until: float, room: threading.Semaphore) -> Iterator[int]:
    for seed in seeds:
        room.acquire()
        if time.monotonic() >= until:
            return
        yield seed
