"""What a client takes from its home node beside answers."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from peercache.client.home import Attached, Home
from peercache.config import Config
from peercache.messages import RESERVED, Granted
from peercache.observe import Metrics
from peercache.transfer.reading import Touches
from peercache.transfer.reserving import Reservations

HOME, PREDECESSOR = 7, 6


def home_with(reservations: Reservations) -> Home:
    """Return a home node that is attached, and asks nobody anything."""
    unused = cast("Any", None)
    home = Home(
        url="ipc:///nowhere",
        config=Config(),
        asker=unused,
        touches=Touches(),
        report=None,
        on_view=unused,
        renew_lock=unused,
        metrics=Metrics(),
        log=unused,
    )
    home.attached = Attached(HOME, unused, reservations)
    return home


def test_slots_ahead_are_taken_from_the_node_that_pages_are_written_to() -> None:
    """What its predecessor granted under the same number lies in memory that is gone."""
    reservations = Reservations()
    home = home_with(reservations)
    lengths = np.array([4096], np.uint64)
    reservations.ask_ahead(lengths, 0.0)
    (number, _) = reservations.ask_ahead(lengths, 0.1)
    granted = Granted(0, number, bytes((RESERVED,)), np.array([8192], np.uint64).tobytes())

    home.heard_late(PREDECESSOR, granted)
    before = reservations.awaits_grant()
    home.heard_late(HOME, granted)

    assert before
    assert not reservations.awaits_grant()
