"""Messages of those who follow what a node holds: the questions, and the changes told.

A follower asks again and again, and the node keeps nothing about it between two questions: it names
the last change that it knows, and how far it has read what was there before. So a follower that is
slow, was stopped or has lost its connection costs the node nothing, and sees in the next answer
whether it has missed something.
"""

from __future__ import annotations

from typing import ClassVar, Final

import attrs

from peercache.wire.messages.declared import (
    CLIENTS_AND_OPERATORS,
    NO_ROLE,
    Declared,
    Receiver,
    Rule,
)

CHANGES_A_MESSAGE_MAX: Final = 4096
"""Changes of one ChangesTold, and as many rows of what is held: 192 KiB of the 256 accepted."""

ALL_ROWS: Final = 2**32
"""The row of a follower that has read everything that was there when it began."""


@attrs.frozen
class ChangesAsked:
    """Ask a node for the changes of what it holds, behind those that the follower knows.

    incarnation: of the node that numbered `after`; any other one begins anew.
    after:       the number of the last change known; 0: none, begin anew.
    row:         as in the last answer: how far what is held has been told.
    patience_s:  how long the node may wait for a change where there is nothing to tell.
    """

    # Every page of a node, of all namespaces: not for a client that is restricted to some.
    declared: ClassVar = Declared(
        58, Receiver.PUBLISHER, CLIENTS_AND_OPERATORS, rules=(Rule.ALL_NAMESPACES,)
    )

    request: int
    incarnation: int
    after: int
    row: int
    patience_s: float


@attrs.frozen
class ChangesTold:
    """Answer a ChangesAsked: apply `changes` in their order, then `held`.

    anew:    what this follower has been told before is void: it knows nothing but this answer.
    after:   the number of the last of these changes.
    changes: n × CHANGE (`model.changes`).
    held:    n × CHANGE: pages that are there as of change `after`, in no order.
    row:     what to ask with next; ALL_ROWS: everything that was there has been told.
    """

    declared: ClassVar = Declared(59, Receiver.ASKER, NO_ROLE)

    request: int
    incarnation: int
    anew: bool
    after: int
    changes: bytes
    held: bytes
    row: int
