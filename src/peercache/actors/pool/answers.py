"""What the pool says to whoever asked it: a client, or the disk tier of its own node."""

from __future__ import annotations

from typing import Final

import numpy as np

from peercache.actors.effects import Effect, Send, TellDisk, TellPublisher
from peercache.actors.mailboxes import DISK_TIER, PagesCommitted, ReserveAhead
from peercache.actors.origin import Origin
from peercache.actors.pool.reservations import Reservation
from peercache.model.records import RECORD, Records
from peercache.wire.messages.pool import Commit, Committed, Granted, Reserve
from peercache.wire.messages.session import Refused

AHEAD_MAX: Final = 4
"""Reservations that one Commit may ask for ahead."""

NO_RECORDS: Final = np.frombuffer(b"", RECORD)


def refused(origin: Origin, request: int, reason: str, detail: str) -> list[Effect]:
    """Say that this will not be served, and why."""
    return [Send(origin, Refused(request, reason, detail))]


def granted(origin: Origin, reserve: Reserve, states: bytes, offsets: bytes) -> Send | TellDisk:
    """Answer a Reserve."""
    answer = Granted(reserve.request, reserve.sequence, states, offsets)
    return TellDisk(answer) if origin == DISK_TIER else Send(origin, answer)


def committed(
    origin: Origin,
    commit: Commit,
    states: bytes,
    records: Records,
    here: Records,
    ahead: tuple[int, bytes] = (0, b""),
    then: tuple[ReserveAhead, ...] = (),
) -> TellDisk | TellPublisher:
    """Answer a Commit, by way of the publisher where others are to be told of it first.

    ahead: the sequence and the offsets of a reservation made ahead, told with the answer.
    """
    request, sequence = commit.request, commit.sequence
    if origin == DISK_TIER:
        told = records.tobytes() + here.tobytes()
        return TellDisk(Committed(request, sequence, states, told, 0))
    patience_s = commit.patience_s
    return TellPublisher(
        PagesCommitted(origin, request, sequence, states, records, here, patience_s, *ahead, then),
    )


def asked_beside(
    origin: Origin, commit: Commit, reservation: Reservation
) -> tuple[ReserveAhead, ...]:
    """Return what a Commit asks for beside: as many slots as it had, once it is answered."""
    return tuple(
        ReserveAhead(origin, Reserve(0, sequence, reservation.namespace, b"", reservation.lengths))
        for sequence in commit.ahead[:AHEAD_MAX]
    )
