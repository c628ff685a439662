"""Publishes a segment, then obeys lines: store I VALUE, fill OFFSET SIZE BYTE, spin N, close."""

from __future__ import annotations

import sys

import numpy as np

from peercache.memory.published import PublishedSegment
from peercache.model.ids import Incarnation


def main() -> None:
    """Run until the standard input ends."""
    shm_dir, incarnation, page_bytes, granule = sys.argv[1:]
    segment = PublishedSegment.create(
        shm_dir,
        incarnation=Incarnation(int(incarnation)),
        page_bytes=int(page_bytes),
        granule=int(granule),
    )
    segment.populate(int(page_bytes))
    print(segment.path, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["store", index, value]:
                segment.store_words(np.array([int(index)]), np.array([int(value)], np.uint64))
            case ["fill", offset, size, byte]:
                segment.pages[int(offset) : int(offset) + int(size)] = int(byte)
            case ["spin", rounds]:
                print("done", flush=True)
                spin(segment, int(rounds))
                continue
            case ["close"]:
                segment.close()
        print("done", flush=True)


def spin(segment: PublishedSegment, rounds: int) -> None:
    """Store words whose halves are equal, as fast as we can."""
    halves = np.arange(1, 9, dtype=np.uint64) * np.uint64(0x1111_1111)
    values = (halves << np.uint64(32)) | halves
    # Each batch ends with another value, which then stays for a while.
    batches = [np.roll(values, shift) for shift in range(len(values))]
    indices = np.zeros(len(values), np.int64)
    for number in range(rounds):
        segment.store_words(indices, batches[number % len(batches)])


main()
