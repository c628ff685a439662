"""`python -m benchmarks.directory`: the cost of a directory shard, in memory and in time.

A shard receives the messages of holders of a million records each, like in a node. For each number
of entries a separate process prints

    bytes_per_entry   total growth of the process's resident memory, divided by entries lookup128_us
    a Lookup of 128 known keys, median absent128_us of 128 keys that no holder has report_1m_ms all
    Puts of one more holder, of 4,096 records each report_process_ms the same, of all threads: one
    loads the table's memory ahead longest_put_ms the longest of those, growth of the table included
    drop_holder_ms from a view with this holder dead until its records are no longer served
    longest_tick_ms the longest part of the sweep after it

Other times are those of the owner's thread. All are processor time, which depends less on other
work of the machine. The table is in a file of /dev/shm, as in a node; with `--private` it is in
private memory, as in a node without such a file.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.mailboxes import ViewChanged
from peercache.actors.origin import Origin
from peercache.model.keys import PageKeys
from peercache.model.member import ALIVE, DEAD, Member
from peercache.model.records import (
    HAS_CHECKSUM,
    RECORD,
    RECORDS_A_MESSAGE_MAX,
    RESIDENT,
)
from peercache.wire.messages.directory import Lookup, Put

OWNER = 1
HOLDER_RECORDS = 10**6
ENTRIES = (1_000_000, 3_000_000, 10_000_000)
BATCH = 128
LOOKUPS = 2000
PAGE_BYTES = 2**20
SHARED_FOLDER = "/dev/shm"  # noqa: S108 - the folder of a node's own files.


def main() -> None:
    """Measure each number of entries in a process of its own, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.directory", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--entries", type=int, nargs="+", default=list(ENTRIES))
    parser.add_argument("--private", action="store_true", help="measure a table without a file")
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.alone is not None:
        if chosen.private:
            print(json.dumps(measured(chosen.alone, -1)))
            return
        with tempfile.TemporaryFile(dir=SHARED_FOLDER) as file:
            print(json.dumps(measured(chosen.alone, file.fileno())))
        return
    rows: dict[str, dict[str, float]] = {}
    for entries in chosen.entries:
        command = [sys.executable, "-m", "benchmarks.directory", "--alone", str(entries)]
        command += ["--private"] * chosen.private
        rows[str(entries)] = json.loads(subprocess.check_output(command))  # noqa: S603
    if chosen.json:
        print(json.dumps(rows))
        return
    names = list(next(iter(rows.values())))
    print(f"{'entries':>12}" + "".join(f"{name:>18}" for name in names))
    for entries, row in rows.items():
        print(f"{int(entries):>12,}" + "".join(f"{row[name]:>18,.2f}" for name in names))


def measured(entries: int, file: int) -> dict[str, float]:
    """Return the figures of a shard with this many entries. file: that of its table; -1: none."""
    rng = np.random.default_rng(entries)
    sizes = [HOLDER_RECORDS] * (entries // HOLDER_RECORDS)
    if entries % HOLDER_RECORDS:
        sizes.append(entries % HOLDER_RECORDS)
    holders = list(range(OWNER + 1, OWNER + 1 + len(sizes)))
    last = holders[-1] + 1
    shard = DirectoryShard(
        incarnation=OWNER,
        records_max=4 * (entries + HOLDER_RECORDS),
        seed=rng.bytes(16),
        table_file=file,
    )
    shard.on_message(Origin(OWNER), view([OWNER, *holders, last]), 0.0)
    known = np.zeros((len(sizes), BATCH * 64), "V16")
    gc.collect()
    before = resident_bytes()
    for index, (holder, size) in enumerate(zip(holders, sizes, strict=True)):
        for at, message in enumerate(puts(rng, holder, size)):
            shard.on_message(Origin(holder), message, 0.0)
            if at == 0:
                first = np.frombuffer(message.records, RECORD)["key"]
                known[index] = np.resize(first, BATCH * 64)
    settle(shard)
    gc.collect()
    size_bytes = resident_bytes() - before
    report = list(puts(rng, last, HOLDER_RECORDS))
    began = time.process_time_ns()
    puts_s = [
        seconds(lambda message=put: shard.on_message(Origin(last), message, 0.0))  # type: ignore[misc]
        for put in report
    ]
    process_s = (time.process_time_ns() - began) / 1e9
    settle(shard)
    lookup_s = lookups(shard, rng, known.reshape(-1))
    absent = np.frombuffer(rng.bytes(16 * BATCH * 64), "V16")
    absent_s = lookups(shard, rng, absent)
    dead = view([OWNER, *holders], dead=[last])
    drop_s = seconds(lambda: shard.on_message(Origin(OWNER), dead, 0.0))
    return {
        "bytes_per_entry": size_bytes / entries,
        "lookup128_us": lookup_s * 1e6,
        "absent128_us": absent_s * 1e6,
        "report_1m_ms": sum(puts_s) * 1e3,
        "report_process_ms": process_s * 1e3,
        "longest_put_ms": max(puts_s) * 1e3,
        "drop_holder_ms": drop_s * 1e3,
        "longest_tick_ms": settle(shard) * 1e3,
    }


def puts(rng: np.random.Generator, holder: int, count: int) -> Iterator[Put]:
    """Yield the messages with which a holder reports this many records."""
    for number, begin in enumerate(range(0, count, RECORDS_A_MESSAGE_MAX), start=1):
        made = np.zeros(min(RECORDS_A_MESSAGE_MAX, count - begin), RECORD)
        made["key"] = np.frombuffer(rng.bytes(16 * len(made)), "V16")
        made["holder"] = holder
        made["offset"] = np.arange(begin, begin + len(made)) * PAGE_BYTES
        made["generation"] = 2 * np.arange(begin + 1, begin + 1 + len(made))
        made["length"] = PAGE_BYTES
        made["flags"] = RESIDENT | HAS_CHECKSUM
        made["checksum"] = rng.integers(0, 2**63, len(made), np.uint64)
        yield Put(number, made.tobytes())


def view(living: list[int], dead: tuple[int, ...] | list[int] = ()) -> ViewChanged:
    """Return a view of these members."""
    return ViewChanged(
        tuple(
            Member(number, 0, state, 255, "host", "h:1", "h:2", "boot", "/segment")
            for numbers, state in ((living, ALIVE), (dead, DEAD))
            for number in numbers
        )
    )


def lookups(shard: DirectoryShard, rng: np.random.Generator, keys: PageKeys) -> float:
    """Return the median time of a Lookup of BATCH of these keys, in seconds."""
    asked = [Lookup(1, rng.choice(keys, BATCH).tobytes()) for _ in range(LOOKUPS)]
    took = [
        seconds(lambda message=lookup: shard.on_message(Origin(99), message, 0.0))  # type: ignore[misc]
        for lookup in asked
    ]
    return float(np.median(took))


def settle(shard: DirectoryShard) -> float:
    """Tick until nothing is left to do; return the longest tick, in seconds."""
    longest = 0.0
    while shard.deadline() < float("inf"):
        due = shard.deadline()
        longest = max(longest, seconds(lambda due=due: shard.on_tick(due)))  # type: ignore[misc]
    return longest


def seconds(step: Callable[[], object]) -> float:
    """Return the thread's processor time of a step."""
    began = time.thread_time_ns()
    step()
    return (time.thread_time_ns() - began) / 1e9


def resident_bytes() -> int:
    """Return the memory that this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


if __name__ == "__main__":
    main()
