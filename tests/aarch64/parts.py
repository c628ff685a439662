"""Unit tests in parts, one emulator for each, and a table of what became of them.

The memory of an emulator ends with it, and one that is killed costs the rest of its part only.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

UNIT = "tests/unit"
LEFT_OUT = "tests/aarch64/left_out.txt"
"""In the syntax of tests/real_time.txt: what the emulator cannot do, each with its reason."""
FLAGS = (
    "-q", "-m", "not slow and not rdma", "--hypothesis-profile=fast",
    "-o", "faulthandler_timeout=3600", "-p", "tests.aarch64.plugin", "-p", "no:randomly",
)  # fmt: skip
COLUMNS = ("passed", "failed", "skipped", "left out", "not run")

Begin = Callable[[Sequence[str], Path], int]
"""Start pytest with arguments, its output in a file; return the process."""


@dataclass
class Part:
    """A folder of unit tests, and what became of them."""

    name: str
    seconds: float = 0.0
    memory_bytes: int = 0
    ended: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether every test ran and none failed."""
        return not self.ended and not self.counts["failed"] and not self.counts["not run"]

    def read(self, results: Path, status: int) -> None:
        """Count the results, and note how the process ended."""
        lines = results.read_text().splitlines() if results.exists() else []
        collected = 0
        for line in map(json.loads, lines):
            if "collected" in line:
                collected = line["collected"]
                self.counts["left out"] = len(line["left_out"])
            else:
                self.counts[line["outcome"]] += 1
                if line["outcome"] == "failed":
                    self.failed.append(line["test"])
        ran = sum(self.counts[each] for each in ("passed", "failed", "skipped"))
        self.counts["not run"] = collected - ran
        if not collected or status not in (0, 1):
            self.ended = f"ended with {status}"


def names(unit: Path) -> list[str]:
    """Return the folders that have tests, those with most files first."""
    files = Counter(each.relative_to(unit).parts[0] for each in unit.rglob("test_*.py"))
    return [name for name, _ in files.most_common()]


def table(parts: Sequence[Part]) -> Iterator[str]:
    """Yield the lines of the summary: one a part, the total, and each test that failed."""
    total = Part("all", memory_bytes=max((each.memory_bytes for each in parts), default=0))
    yield " ".join([f"{'part':14}", *(f"{each:>9}" for each in COLUMNS), "   seconds    MiB"])
    for part in [*parts, total]:
        figures = " ".join(f"{part.counts[each]:9}" for each in COLUMNS)
        memory = part.memory_bytes // 2**20
        yield f"{part.name:14} {figures} {part.seconds:9.0f} {memory:6} {part.ended}".rstrip()
        total.counts.update(part.counts if part is not total else {})
        total.seconds += part.seconds if part is not total else 0
    for part in parts:
        yield from (f"FAILED {each}" for each in part.failed)


def run(begin: Begin, checkout: Path, kept: Path, at_once: int) -> int:
    """Run all parts, `at_once` at a time, print the table, and return the exit status.

    kept: the folder for the output of each part.
    """
    waiting = [Part(name) for name in names(checkout / UNIT)]
    running: dict[int, tuple[Part, float]] = {}
    done: list[Part] = []
    kept.mkdir(parents=True, exist_ok=True)
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                part = waiting.pop(0)
                files = (f"--left-out={LEFT_OUT}", f"--results=results-{part.name}.jsonl")
                command = (*FLAGS, *files, f"{UNIT}/{part.name}")
                process = begin(command, kept / f"{part.name}.log")
                running[process] = part, time.monotonic()
            process, status, used = os.wait4(-1, 0)
            if process not in running:
                continue
            part, began = running.pop(process)
            part.seconds, part.memory_bytes = time.monotonic() - began, used.ru_maxrss * 1024
            results = checkout / f"results-{part.name}.jsonl"
            part.read(results, os.waitstatus_to_exitcode(status))
            done.append(part)
            print(f"{part.name}: {dict(part.counts)} {part.ended}", flush=True)
    finally:
        print("\n".join(table(done)))
        rest = [each.name for each in waiting] + [each.name for each, _ in running.values()]
        if rest:
            print(f"not ended: {', '.join(rest)}")
        print(f"the output of each part: {kept}", flush=True)
    return 0 if all(each.is_whole for each in done) else 1
