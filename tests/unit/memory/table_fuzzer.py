"""Reads spoilt directory tables, in a process of its own: a load without memory would end it.

Arguments: folder, first seed, rounds, "mapped" or "pread". Prints how often each reason was met,
and how often a table was read, as JSON. Dies by an assertion where a look said what cannot be.
"""

from __future__ import annotations

import json
import os
import random
import struct
import sys
from collections import Counter

import numpy as np

from peercache.actors.directory.table import DirectoryTable
from peercache.memory.published import TableFile
from peercache.memory.table_reading import REASONS, AttachedTable, Unusable
from peercache.model.ids import Incarnation
from peercache.model.records import RECORD

NODE = Incarnation(0xF022)
RING, NOW_S = 77, 1000.0
WORDS = (
    0,
    1,
    7,
    8,
    2**12,
    2**16,
    2**27,
    2**27 + 2,
    2**31,
    2**32,
    2**46,
    2**63,
    2**64 - 8,
    2**64 - 1,
)
HEADER_WORDS = 40


def main() -> None:
    """Spoil and read."""
    folder, first, rounds, way = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    met: Counter[str] = Counter()
    file = TableFile.create(folder, NODE, None)
    table = DirectoryTable(
        bytes(range(16)), answer_max=64, rows_max=2000, slots_min=512, file=file.file,
        incarnation=NODE,
    )  # fmt: skip
    made = np.zeros(600, RECORD)
    made["key"] = np.frombuffer(random.Random(1).randbytes(16 * len(made)), "V16")
    made["holder"], made["generation"], made["length"] = 11, 2, 100
    entry = table.begin(11, is_served=True)
    assert entry is not None
    table.put(entry, made.tobytes())
    table.grant(RING.to_bytes(8, "little"))
    table.tick(NOW_S)
    del table
    size = os.fstat(file.file).st_size
    areas = data_of(file.file, size)
    for seed in range(first, first + rounds):
        rng = random.Random(seed)
        whole = spoil(file.file, rng, areas, size)
        reader = AttachedTable(os.dup(file.file), NODE, by_kernel=way == "pread")
        if rng.random() < 0.3:
            os.truncate(file.file, rng.choice([0, 1, 4095, 4096, size // 2, size - 1]))
        asked = [made["key"][rng.randrange(600)].tobytes() for _ in range(40)]
        asked += [rng.randbytes(16) for _ in range(24)]
        try:
            looked = reader.look(b"".join(asked), RING, NOW_S, rng.getrandbits(32))
        except Unusable as unusable:
            if unusable.reason not in REASONS.values():
                raise
            met[unusable.reason] += 1
        else:
            met["read"] += 1
            found = np.frombuffer(looked.records, RECORD)
            named = [asked[place] for place in looked.places.tolist()]
            assert [record["key"].tobytes() for record in found] == named, seed
            assert len(found) <= 8 * len(asked), seed
            assert (found["holder"] != 0).all(), seed
        reader.close()
        for at, data in whole:
            os.pwrite(file.file, data, at)
        os.truncate(file.file, size)
        for at, data in areas:
            os.pwrite(file.file, data, at)
    file.close()
    print(json.dumps(met))


def data_of(file: int, size: int) -> list[tuple[int, bytes]]:
    """Return what the file has memory for."""
    areas, at = [], 0
    while at < size:
        try:
            begin = os.lseek(file, at, os.SEEK_DATA)
        except OSError:
            break
        at = os.lseek(file, begin, os.SEEK_HOLE)
        areas.append((begin, os.pread(file, at - begin, begin)))
    return areas


def spoil(
    file: int, rng: random.Random, areas: list[tuple[int, bytes]], size: int
) -> list[tuple[int, bytes]]:
    """Spoil a table in one way; return what was there outside of the areas with data."""
    beyond: list[tuple[int, bytes]] = []

    def write(at: int, data: bytes) -> None:
        beyond.append((at, os.pread(file, len(data), at)))
        os.pwrite(file, data, at)

    kind = rng.randrange(6)
    if kind == 0:  # Bits anywhere that has data, but for a part of the header that all else needs.
        for _ in range(rng.randint(1, 200)):
            begin, data = rng.choice(areas)
            at = rng.randrange(len(data))
            if begin + at >= 8 * 5:
                write(begin + at, bytes([data[at] ^ 1 << rng.randrange(8)]))
    elif kind == 1:  # Words of the header.
        for _ in range(rng.randint(1, 3)):
            write(8 * rng.randrange(HEADER_WORDS), struct.pack("<Q", rng.choice(WORDS)))
    elif kind == 2:  # Random bytes instead of everything after the header.
        for begin, data in areas:
            skipped = 4096 if begin == 0 else 0
            write(begin + skipped, rng.randbytes(len(data) - skipped))
    elif kind == 3:  # Slots that all name a row, or rows that are all being written.
        begin, data = rng.choice(areas[1:] or areas)
        word = struct.pack("<II", rng.choice([0, 1, 5, 2**27, 2**32 - 1]), rng.getrandbits(32))
        write(begin, word * (len(data) // 8))
    elif kind == 4:  # Another table's beginning.
        write(0, rng.randbytes(rng.choice([8, 16, 24, 4096])))
    else:  # Words that look like places, anywhere.
        for _ in range(100):
            begin, data = rng.choice(areas)
            at = 4096 if begin == 0 else 0
            if len(data) > at + 8:
                at = rng.randrange(at, len(data) - 8) & ~7
                write(begin + at, struct.pack("<Q", rng.choice((*WORDS, size, size - 8))))
    return beyond[::-1]


if __name__ == "__main__":
    main()
