"""Processes to be killed while they write: each is forked off, so that a round starts at once."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np

from peercache.actors.ports import Forget, WriteDone
from tests.unit.storage.rig import MIB, Rig, key_of

SIZE_BYTES = 24 * MIB
LENGTHS = (5000, 65_536, 100_000, 300_000)
KEYS = 400
"""Few enough that pages are overwritten and come back all the time."""


def write_until_killed(folder: Path, seed: int) -> None:
    """Write, evict and remove without end, several jobs at a time."""
    rng = random.Random(seed)
    rig = Rig(folder, size_bytes=SIZE_BYTES, threads=3)
    print("writing", flush=True)
    waiting: dict[int, np.ndarray] = {}
    while True:
        numbers = rng.sample(range(KEYS), rng.randrange(1, 20))
        fresh = [n for n in numbers if not rig.index.knows(key_of(n))[0]]
        known = rig.index.find(b"".join(key_of(n) for n in numbers if n not in fresh))
        known = known[known >= 0]
        if len(known) and rng.random() < 0.3:
            rig.perform(Forget(rig.index.remove(known).places))
        if not fresh:
            continue
        job = rig.send_write(fresh, rng.choice(LENGTHS), finish=False)
        waiting[job] = rig.begun.entries
        while len(waiting) > 3:
            done = rig.await_fact(WriteDone)
            entries, outcomes = waiting.pop(done.job), np.frombuffer(done.outcomes, np.uint8)
            rig.index.abandon(entries[outcomes != 0])
            _, places = rig.index.finish(entries[outcomes == 0])
            rig.perform(Forget(places))


def main() -> None:
    """Fork a writer for each line, "FOLDER SEED"; report its process id, and when it writes."""
    for line in sys.stdin:
        folder, seed = line.split()
        child = os.fork()
        if child == 0:
            try:
                write_until_killed(Path(folder), int(seed))
            finally:
                os.abort()
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(f"ended {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main()
