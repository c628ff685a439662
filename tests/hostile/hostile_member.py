"""A member of a cluster that runs this release, but moves pages as an attacker would.

`python -m tests.hostile.hostile_member KIND …`, before the command of a node.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from peercache.actors.effects import Send
from peercache.actors.placement.offers import Offers
from peercache.actors.placement.takings import Takings
from peercache.actors.pool.actor import Pool
from peercache.cli.node import main
from peercache.model.records import HAS_CHECKSUM, RECORD, RESIDENT
from peercache.wire.messages.membership import PagesTaken, ReportRoom
from peercache.wire.messages.pool import COMMITTED

INVENTED = 64
"""Pages of an offer of which it has none."""

INVENTED_BYTES = 64 * 1024


def claims_room(_: Pool, number: int, now: float) -> ReportRoom:
    """Report more room, and colder pages, than any other node can have."""
    del now
    return ReportRoom(number, 2**40, 1e9)


def answers_nothing(*_: object, **__: object) -> list[Any]:
    """Take no offer, and do not answer."""
    return []


def forgets(_: Takings, origin: Any, message: Any, *__: object, **___: object) -> list[Any]:
    """Answer that all pages were taken, at once; take none."""
    count = len(message.records) // RECORD.itemsize
    return [Send(origin, PagesTaken(message.number, bytes((COMMITTED,)) * count))]


def answers_for_others(
    _: Takings, origin: Any, message: Any, *__: object, **___: object
) -> list[Any]:
    """Answer for offers that were never made, and for more pages than one has."""
    count = len(message.records) // RECORD.itemsize
    others = [message.number + step for step in (-1, 1, 2**32)]
    return [
        Send(origin, PagesTaken(number, bytes((COMMITTED,)) * (count + extra)))
        for number, extra in [*((other, 0) for other in others), (message.number, 1)]
    ]


class Inventor:
    """Offers pages that do not exist, in the places of its pool."""

    def __init__(self) -> None:
        """Take the place of two methods of a node that spills."""
        self.own = 0
        follow, named = Offers.follow, Offers.named

        def follow_as_before(spilling: Offers, members: Any, own: int, now: float) -> None:
            self.own = own
            follow(spilling, members, own, now)

        def name_others(spilling: Offers, cold: Any, now: float) -> list[Any]:
            records = np.zeros(INVENTED, RECORD)
            records["key"] = np.frombuffer(np.random.default_rng().bytes(16 * INVENTED), "V16")
            records["holder"], records["generation"] = self.own, 2
            records["offset"] = np.arange(INVENTED) * INVENTED_BYTES
            records["length"] = INVENTED_BYTES
            records["flags"], records["checksum"] = RESIDENT | HAS_CHECKSUM, 7
            groups = ((1, records, np.full(INVENTED, 1e6)),)
            return named(spilling, type(cold)(groups), now)

        setattr(Offers, "follow", follow_as_before)  # noqa: B010 - mypy forbids an assignment
        setattr(Offers, "named", name_others)  # noqa: B010


TAKERS = {"silent": answers_nothing, "forgets": forgets, "answers-for-others": answers_for_others}

if __name__ == "__main__":
    # The arguments end with those of a node: KIND python -m peercache.node …
    if sys.argv[1] in TAKERS:
        setattr(Pool, "_room", claims_room)  # noqa: B010
        setattr(Takings, "offered", TAKERS[sys.argv[1]])  # noqa: B010
    else:
        Inventor()
    sys.argv[1:] = sys.argv[5:]
    sys.exit(main())
