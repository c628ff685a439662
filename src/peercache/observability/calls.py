"""The batch call that a thread is in: its number, for the log here and at nodes, and its series.

A call runs in its caller's thread from begin to end. Its number costs one attribute: log lines of
the client read it when they are written, and questions to nodes carry it in the number that they
have anyway. So a line of a node at debug and a line of the engine have it in common.
"""

from __future__ import annotations

import threading

REQUEST_BITS = 24
"""Low bits of a question's number that tell the questions of one client apart."""


class _Current(threading.local):
    number: int = 0
    series: int = 0


current = _Current()
"""number: of the client's call that this thread is in, 0 outside of one.
series: what the call is counted as (`observability.latency`)."""


def request_of(count: int) -> int:
    """Return the number of a question: the `count`-th of its client, asked by the current call."""
    number = current.number
    return number << REQUEST_BITS | count & (1 << REQUEST_BITS) - 1 if number else count


def call_of(request: int) -> int:
    """Return the number of the call that asked a question, 0 for a question of no call."""
    return request >> REQUEST_BITS
