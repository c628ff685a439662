"""Idle connections: how many of a client's connections are kept between two questions, how long.

A client dials a node when it has a question for it, and keeps the connection for the next one. It
would come to have one to every node of the cluster, and each takes DESCRIPTORS of the engine's.
"""

from __future__ import annotations

import resource

IDLE_S = 60.0
"""How long a connection without a question is kept. To dial again costs a fifth of a millisecond of
this processor's time, and several with TLS."""

OF_ONE_MAX = 8
"""Connections kept to one peer: an engine has four storage threads."""

DESCRIPTORS = 3
"""Open files of one connection: the socket, and the pipe by which nng tells that it is readable."""

DESCRIPTORS_PART = 4
"""A client uses a quarter of its process's open files for idle connections: the rest is the
engine's, and of the questions under way."""

KEPT_MIN = 16
KEPT_MAX = 1024
"""A client of the largest clusters asks a thousand owners again and again."""


def most_kept() -> int:
    """Return how many idle connections this process keeps, by its limit of open files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return KEPT_MAX
    return min(KEPT_MAX, max(KEPT_MIN, limit // (DESCRIPTORS * DESCRIPTORS_PART)))
