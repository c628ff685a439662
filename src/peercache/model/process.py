"""The process: the guard of what a forked child must not use, and the shares of its descriptors.

Anything that can connect to a node takes a descriptor. The shares grow with the process's limit
(RLIMIT_NOFILE). Together with the links that a node dials (a quarter, `node.switchboard`) they are
less than the whole, so that files always find one, and so does an engine in the same process.
"""

from __future__ import annotations

import math
import os
import resource
from typing import final

import attrs


@final
class ForkGuard:
    """Remembers the process that made an object.

    A forked child gets a copy of the object, but not its threads, and a lock in it may be held
    forever. Devices, files and connections still belong to the parent.
    """

    def __init__(self) -> None:
        """Take the current process as the owner; `owner` is its pid."""
        self.owner = os.getpid()

    @property
    def is_child(self) -> bool:
        """Return whether this process is a fork of the owner."""
        return os.getpid() != self.owner


DATA_MAX = 4096
"""Admitted connections of the data port: 16 channels of 256 engine ranks. Each costs a task, too
(about 10 KiB), so a flood of idle ones costs tens of megabytes, not the node."""

NEWCOMERS_MAX = 256
"""Connections of the data port that are not admitted yet: each is there for some round trips."""

HALVES_MAX = 1024
"""Connections of the control plane that are in their handshake: 36 KB each. More than a thousand
nodes that start at once never are, as they dial with jitter."""

HTTP_MAX = 64
"""Connections of the HTTP port: scrapers and probes are a handful."""

OF_ONE_CERTIFICATE = 4
"""One certificate has at most so many times less than all admitted connections together: a host
that was broken into leaves three quarters to all others."""


@final
@attrs.frozen
class DescriptorShares:
    """The shares of one node.

    data, newcomers: of the data port, admitted and not admitted yet.
    control:         of the control port after the handshake; three quarters of it admitted.
    halves:          of the control port, in the handshake.
    http:            of the HTTP port.
    """

    data: int
    newcomers: int
    control: float
    halves: int
    http: int

    @classmethod
    def of(cls, descriptors: float) -> DescriptorShares:
        """Share out what a process may open: 11 of 16 parts."""
        part = max(1.0, descriptors / 16)
        return cls(
            data=int(min(DATA_MAX, 4 * part)),
            newcomers=int(min(NEWCOMERS_MAX, part)),
            control=4 * part,
            halves=int(min(HALVES_MAX, part)),
            http=int(min(HTTP_MAX, part)),
        )


def descriptors_max() -> float:
    """Return how many files this process may open now; infinity without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return math.inf if limit == resource.RLIM_INFINITY else limit
