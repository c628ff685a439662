"""The pool's answers to a client, or to the promote actor of its own node."""

from __future__ import annotations

from typing import Final

from peercache.actors.effects import Effect, Send, TellHandover, TellPromote, TellPublisher
from peercache.actors.mailboxes import PROMOTER, TAKER, PagesCommitted, ReserveAhead
from peercache.actors.origin import Origin
from peercache.actors.pool.reservations import Reservation
from peercache.model.records import Records
from peercache.wire.messages.pool import Commit, Committed, Granted, Reserve
from peercache.wire.messages.session import Refused

AHEAD_MAX: Final = 4
"""Reservations that one Commit may ask for ahead."""


def refused(origin: Origin, request: int, reason: str, detail: str) -> list[Effect]:
    """Refuse a message, with the reason."""
    return [Send(origin, Refused(request, reason, detail))]


def granted(
    origin: Origin, reserve: Reserve, states: bytes, offsets: bytes
) -> Send | TellPromote | TellHandover:
    """Answer a Reserve."""
    answer = Granted(reserve.request, reserve.sequence, states, offsets)
    if origin == TAKER:
        return TellHandover(answer)
    return TellPromote(answer) if origin == PROMOTER else Send(origin, answer)


def committed(
    origin: Origin,
    commit: Commit,
    states: bytes,
    records: Records,
    here: Records,
    ahead: tuple[int, bytes] = (0, b""),
    then: tuple[ReserveAhead, ...] = (),
) -> TellPromote | TellHandover | TellPublisher:
    """Answer a Commit: the publisher does, once directory owners have the records.

    ahead: the sequence and the offsets of a reservation made ahead, told with the answer.
    """
    request, sequence = commit.request, commit.sequence
    if origin in (PROMOTER, TAKER):
        told = records.tobytes() + here.tobytes()
        answer = Committed(request, sequence, states, told, 0)
        return TellPromote(answer) if origin == PROMOTER else TellHandover(answer)
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
