"""Writes a directory table at full speed, in a process of its own, until it is asked to end.

Arguments: folder, incarnation, seed, and the user to become ("" for none). Prints "ready", and
at the end, when its input is closed, how many epochs there were. What a record holds follows from
its key and generation (`reported_of`), so that a mixture of two is noticed.
"""

from __future__ import annotations

import os
import random
import sys
import threading

import numpy as np
import numpy.typing as npt

from peercache.actors.directory.table import DirectoryTable
from peercache.memory.published import TableFile
from peercache.model.ids import Incarnation
from peercache.model.records import DROP, RECORD, Records

ALWAYS = range(1000)
"""Pages that are there from the beginning to the end."""
SOMETIMES = range(10_000, 40_000)
NEVER = range(90_000, 91_000)
STEADY, CHANGING = 11, 1000
"""The holder of what is always there, and the first of those that come and go."""


def keys_of(numbers: npt.ArrayLike) -> npt.NDArray[np.void]:
    """Return the keys of pages by their numbers."""
    halves = np.zeros((len(np.atleast_1d(numbers)), 2), np.uint64)
    halves[:, 0] = np.atleast_1d(numbers).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    halves[:, 1] = np.atleast_1d(numbers)
    keys: npt.NDArray[np.void] = halves.view("V16")[:, 0]
    return keys


def reported_of(numbers: npt.ArrayLike, holder: int, generation: npt.ArrayLike) -> Records:
    """Return the records of pages: each field follows from number, holder and generation."""
    made = np.zeros(len(np.atleast_1d(numbers)), RECORD)
    made["key"], made["holder"], made["generation"] = keys_of(numbers), holder, generation
    mixed = made["generation"] * np.uint64(0xD6E8FEB86659FD93) ^ np.atleast_1d(numbers).astype(
        "<u8"
    )
    made["offset"], made["checksum"] = mixed, ~mixed ^ made["holder"]
    made["length"], made["flags"] = mixed & np.uint64(0xFFFFFFFF), mixed >> np.uint64(32)
    return made


def main() -> None:
    """Write until asked to end."""
    folder, incarnation, seed, user = sys.argv[1:5]
    if user:
        os.setgid(int(user))
        os.setuid(int(user))
    file = TableFile.create(folder, Incarnation(int(incarnation)), None)
    table = DirectoryTable(
        bytes(range(16)), answer_max=4096, rows_max=200_000, slots_min=512, file=file.file,
        incarnation=int(incarnation),
    )  # fmt: skip
    steady = begun(table, STEADY)
    table.put(steady, reported_of(list(ALWAYS), STEADY, 10).tobytes())
    table.grant((77).to_bytes(8, "little"))
    end = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), end.set()), daemon=True).start()
    print("ready", flush=True)
    change(table, steady, random.Random(int(seed)), end)
    file.close()
    print(table.figures().epoch, flush=True)


def begun(table: DirectoryTable, holder: int) -> int:
    """Return the entry of a new holder."""
    entry = table.begin(holder, is_served=True)
    assert entry is not None
    return entry


def change(table: DirectoryTable, steady: int, rng: random.Random, end: threading.Event) -> None:
    """Put, remove, grow, sweep."""
    holder, generation = CHANGING, 10
    entry = begun(table, holder)
    while not end.is_set():
        generation += 2
        begin = rng.randrange(SOMETIMES.start, SOMETIMES.stop - 600)
        numbers = list(range(begin, begin + rng.choice([3, 30, 600])))
        table.put(entry, reported_of(numbers, holder, generation).tobytes())
        table.tick(1000.0)
        # What is always there is reported again, and never under a lower generation.
        some = rng.sample(ALWAYS, 20)
        table.put(steady, reported_of(some, STEADY, generation).tobytes())
        if rng.random() < 0.5:
            drops = np.zeros(len(numbers), DROP)
            drops["key"], drops["generation"] = keys_of(numbers), generation
            table.drop(entry, drops.tobytes())
        if rng.random() < 0.02:
            table.serve(entry, is_served=False)
            while table.sweep(entry, 500) == 500:
                pass
            holder += 1
            entry = begun(table, holder)
        if table.is_growing:
            table.tend(rng.choice([64, 4096, 2**17]))


if __name__ == "__main__":
    main()
