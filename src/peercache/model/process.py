"""The process: a guard of objects that a forked child must not use, and shares of its descriptors.

Every connection to a node takes a descriptor. The shares grow with the process's limit
(RLIMIT_NOFILE). Together with the links that a node dials (a quarter, `node.switchboard`) they are
less than the limit, so that descriptors are left for files, and for an engine in the same process.
"""

from __future__ import annotations

import math
import os
import resource
from typing import final

import attrs

FORKED = (
    "this process was forked from one that uses PeerCache: nng, its network library, works in the "
    "parent only. Start this process with spawn, forkserver or exec, or fork before the first "
    "client opens"
)
"""The message for a forked child that opens a client of its own."""


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
"""Admitted connections of the data port: 16 channels of 256 engine ranks. Each also needs a task
(about 10 KiB), so a flood of idle ones costs tens of megabytes, and does not stop the node."""

NEWCOMERS_MAX = 256
"""Connections of the data port that are not admitted yet: each stays for a few round trips."""

HALVES_MAX = 1024
"""Connections of the control plane that are in their handshake: 36 KB each. More than those of a
thousand nodes that start at the same time, because they dial with jitter."""

HTTP_MAX = 64
"""Connections of the HTTP port: there are only a few scrapers and probes."""

OF_ONE_CERTIFICATE = 4
"""Divisor: one certificate may have at most this fraction of all admitted connections: a
compromised host leaves three quarters to the others."""


@final
@attrs.frozen
class DescriptorShares:
    """The shares of one node.

    data, newcomers: connections of the data port, admitted and not admitted yet.
    control:         connections of the control port after the handshake; three quarters of them
                     admitted.
    halves:          connections of the control port, in the handshake.
    http:            connections of the HTTP port.
    """

    data: int
    newcomers: int
    control: float
    halves: int
    http: int

    @classmethod
    def of(cls, descriptors: float) -> DescriptorShares:
        """Divide the descriptors of a process: 11 of 16 parts."""
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
