"""Committing: what becomes of each page of an open reservation when its writer says it is done."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from peercache.actors.pool.page_table import PackedPages, PageTable
from peercache.actors.pool.reservations import Reservation
from peercache.actors.pool.size_classes import Slot
from peercache.actors.pool.slots import SlotAllocator
from peercache.model.keys import KEY, split_keys
from peercache.wire.messages.pool import ABORTED, COMMITTED, HERE, REFUSED_SIZE, Commit


def commit_pages(
    slots: SlotAllocator, pages: PageTable, reservation: Reservation, commit: Commit
) -> tuple[bytes, PackedPages | None]:
    """Hold the written pages and enter them; return the state of each page, and those entered.

    It goes from the last page to the first, which so becomes the hottest: a chain loses its tail
    first. What was not written, or is here already, gives its slot back.
    """
    keys = split_keys(reservation.keys)
    lengths: list[int] = np.frombuffer(reservation.lengths, "<u8").tolist()
    checksums: list[int] = np.frombuffer(commit.checksums, "<u8").tolist()
    last_first = [slot for slot in reversed(reservation.slots) if slot is not None]
    is_whole = len(last_first) == len(keys) == commit.written.count(1)
    if is_whole and pages.are_new(keys):
        # What nearly every batch is, in a third of the time.
        slots.hold(last_first)
        pages.add(keys[::-1], last_first, lengths[::-1], reservation.namespace, checksums[::-1])
        return bytes((COMMITTED,)) * len(keys), _batch(reservation, commit.checksums)
    told = (keys, lengths, checksums)
    states = _page_by_page(slots, pages, reservation, commit.written, told)
    made = np.frombuffer(states, np.uint8) == COMMITTED
    return states, _batch(reservation, commit.checksums, made) if made.any() else None


def _page_by_page(
    slots: SlotAllocator,
    pages: PageTable,
    reservation: Reservation,
    written: bytes,
    told: tuple[Sequence[bytes], Sequence[int], Sequence[int]],
) -> bytes:
    keys, lengths, checksums = told
    states = bytearray(reservation.states)
    for index in range(len(keys) - 1, -1, -1):
        slot: Slot | None = reservation.slots[index]
        rival = pages.find(keys[index])
        if slot is None:
            if rival is not None and states[index] == HERE:
                slots.touch(rival.slot)
        elif not written[index]:
            states[index] = ABORTED
            slots.release(slot)
        elif rival is not None:
            # Another client was faster: its commit stays, and this copy is dropped.
            slots.release(slot)
            fits = rival.length == lengths[index]
            states[index] = HERE if fits else REFUSED_SIZE
            if fits:
                slots.touch(rival.slot)
        else:
            states[index] = COMMITTED
            slots.hold([slot])
            one = slice(index, index + 1)
            pages.add(keys[one], [slot], lengths[one], reservation.namespace, checksums[one])
    return bytes(states)


def _batch(
    reservation: Reservation, checksums: bytes, chosen: npt.NDArray[np.bool_] | None = None
) -> PackedPages:
    """Return pages of a reservation, packed: all of them, or those that are chosen."""
    keys, offsets, lengths = reservation.keys, reservation.offsets, reservation.lengths
    if chosen is not None:
        keys = np.frombuffer(keys, KEY)[chosen].tobytes()
        offsets, lengths, checksums = (
            np.frombuffer(packed, "<u8")[chosen].tobytes()
            for packed in (offsets, lengths, checksums)
        )
    return PackedPages(reservation.namespace, keys, offsets, lengths, checksums)
