"""The seams: what actors and paths ask of the world, as protocols and plain values.

State actors return *effects*, values that say what to do, in the order in which it must be done.
Whoever performs them (the node in production, the simulated world in `sims/`) keeps that order.
The read and write paths (`transfer/`) yield *steps* and are driven by the caller's thread.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from peercache.actors.storage_port import DiskEffect
from peercache.model.runs import U64
from peercache.wire.envelope import Message


@attrs.frozen
class Origin:
    """Who sent a message, and the way back.

    identity: incarnation of a node, or id of a client.
    pipe:     the connection that the answer goes back on; 0 for a member, which is answered over
              our own link to it.
    """

    identity: int
    pipe: int = 0


@attrs.frozen
class Send:
    """Send to a member (an incarnation), or back along an Origin. May be lost."""

    to: int | Origin
    message: Message


@attrs.frozen
class SendTo:
    """Send to whoever listens at an address (HOST:PORT), as target 0. May be lost."""

    address: str
    message: Message


@attrs.frozen(eq=False)
class StoreWords:
    """Store generation words: `values[i]` at word `indices[i]`, each one aligned 8-byte store."""

    indices: npt.NDArray[np.int64]
    values: U64


@attrs.frozen
class Tell:
    """Hand a fact to another actor of this node; never lost, never encoded."""

    actor: str
    fact: object


Effect: TypeAlias = Send | SendTo | StoreWords | Tell | DiskEffect


class StateActor(Protocol):
    """A state machine that never awaits. `now` is monotonic seconds, handed in."""

    def on_message(self, sender: Origin, message: object, now: float) -> list[Effect]:
        """Take one message and return what must be done."""

    def on_tick(self, now: float) -> list[Effect]:
        """Do what has come due at `now`; afterwards `deadline()` is later than `now`."""

    def deadline(self) -> float:
        """Return when the next tick is due; inf for never."""

    def check(self) -> None:
        """Assert the invariants, in time that does not grow with the state."""
