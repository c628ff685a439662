"""Completions: one completion queue with its channel, waited for without ever blocking in pyverbs.

pyverbs holds the interpreter's lock in every call, so a blocking `get_cq_event` would stop the
whole engine for ever. Here the queue is polled, and between two looks the thread sleeps in
`poll(2)` on the channel's descriptor, without the lock. The wait is cut into slices, so that
neither a lost event nor a lost link can hold a read beyond its deadline.

Keeps   every event that is taken is acknowledged at once: else destroying the queue would wait for
        it, with the lock held.
        The queue is as large as the send queue: an overrun is silent on some devices, and an error
        completes every request, signaled or not.
"""

from __future__ import annotations

import errno
import os
from typing import Any, final

import attrs

from peercache.rdma.verbs import Verbs, completion_channel, outlives_fork

SUCCESS = 0
REMOTE_ACCESS_ERROR = 10
RETRY_EXCEEDED = 12
FLUSHED = 5
"""Numbers of enum ibv_wc_status, compared by value: newer pyverbs has an enum, older plain ints."""

BURST = 16
"""Completions taken at a time: an object each, though mostly there is one."""


@attrs.frozen
class Completion:
    """One finished work request. number: the wr_id it was posted with; status: see above."""

    number: int
    status: int


@final
class Completions:
    """One completion queue; used by one thread at a time."""

    def __init__(self, verbs: Verbs, context: Any, entries: int) -> None:
        """Make a queue for so many entries. Raises verbs.Error."""
        self._error = verbs.Error
        self._channel, self.descriptor = completion_channel(verbs, context)
        # Else taking an event that is not there would wait for it.
        os.set_blocking(self.descriptor, False)
        try:
            self._queue: Any = outlives_fork(verbs.CQ(context, entries, None, self._channel, 0))
        except BaseException:
            self._channel.close()
            raise

    @property
    def queue(self) -> Any:
        """Return the queue for a queue pair to complete into; only until `close`."""
        return self._queue

    def take(self) -> list[Completion]:
        """Return what has completed since the last look; never waits."""
        _, found = self._queue.poll(BURST)
        return [Completion(int(each.wr_id), int(each.status)) for each in found]

    def arm(self) -> None:
        """Have the descriptor become readable with the next completion.

        Look once more with `take` after it: what came before it makes no event.
        """
        self._queue.req_notify()

    def acknowledge(self) -> None:
        """Take every event that waits, after the descriptor was found readable."""
        while True:
            try:
                self._channel.get_cq_event(self._queue)
            except self._error as error:
                if abs(getattr(error, "error_code", 0)) == errno.EAGAIN:
                    return
                raise
            self._queue.ack_events(1)

    def close(self) -> None:
        """Destroy the queue and its channel; every queue pair of it is destroyed already."""
        queue, self._queue = self._queue, None
        channel, self._channel = self._channel, None
        if queue is not None:
            queue.close()
        if channel is not None:
            channel.close()
