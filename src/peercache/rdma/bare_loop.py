"""The bare loop that our fabric is measured against: chained READs over one queue pair, and a wait
for the last of them; no generation words, no deadline, no failure but an exception.

It waits for the completion's event as we do: a loop that spins keeps the processor from a software
device that needs it, and would be the slower one there.
"""

from __future__ import annotations

import random
import select
from collections.abc import Callable
from typing import Any, final

from peercache.rdma.completions import SUCCESS, Completion, Completions
from peercache.rdma.key_table import KeyTable
from peercache.rdma.queue_pair import PSN_MAX, QueuePair, Sizes
from peercache.rdma.rail import Rail


@final
class BareLoop:
    """Reads pages of one registered range into another, a batch with one doorbell."""

    def __init__(
        self, near: Rail, far: Rail, *, batch: int, source: tuple[int, KeyTable],
        target: tuple[int, KeyTable], page_bytes: int,
    ) -> None:  # fmt: skip
        """Connect `near` to `far`. source, target: where pages lie, and what opens that."""
        self._batch = batch
        self._page_bytes = page_bytes
        self._source, self._target = source, target
        verbs = near.verbs
        self._queues = [Completions(verbs, rail.context, batch + 1) for rail in (near, far)]
        self._pairs = [
            rail.queue_pair(completions.queue, Sizes(work=batch, pieces=1))
            for rail, completions in zip((near, far), self._queues, strict=True)
        ]
        self._entry: Any = verbs.SGE(0, 0, 0)
        self._signaled = int(verbs.enums.IBV_SEND_SIGNALED)
        _connect((near, self._pairs[0]), (far, self._pairs[1]))

    def prepare(self, first: int) -> Callable[[], None]:
        """Return what reads one batch from page `first` on; it raises if a READ fails."""
        pages = [(first + number) * self._page_bytes for number in range(self._batch)]
        work = [
            (self._source[0] + page, _key(self._source, page), self._target[0] + page,
             _key(self._target, page))
            for page in pages
        ]  # fmt: skip
        pair, entry = self._pairs[0].posting, self._entry
        last = len(work) - 1

        def read() -> None:
            pair.wr_start()
            pair.wr_flags = 0
            for number, (remote, key, local, local_key) in enumerate(work):
                if number == last:
                    pair.wr_flags = self._signaled
                pair.wr_id = number
                pair.wr_rdma_read(key, remote)
                entry.addr, entry.length, entry.lkey = local, self._page_bytes, local_key
                pair.wr_set_sge(entry)
            pair.wr_complete()
            done = self._wait()
            if done.status != SUCCESS or done.number != last:
                raise RuntimeError(f"READ {done.number} ended with status {done.status}")

        return read

    def _wait(self) -> Completion:
        completions = self._queues[0]
        event = select.poll()
        event.register(completions.descriptor, select.POLLIN)
        while not (found := completions.take()):
            completions.arm()
            # What completed before the queue was armed makes no event.
            if found := completions.take():
                break
            if event.poll():
                completions.acknowledge()
        return found[0]

    def close(self) -> None:
        """Destroy both ends."""
        for pair in self._pairs:
            pair.destroy()
        queues, self._queues = self._queues, []
        for queue in queues:
            queue.close()
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.close()


def _key(side: tuple[int, KeyTable], page: int) -> int:
    address, table = side
    return int(table.keys[table.begins.searchsorted(address + page, side="right") - 1])


def _connect(one: tuple[Rail, QueuePair], other: tuple[Rail, QueuePair]) -> None:
    numbers = random.SystemRandom()
    psns = [numbers.randrange(PSN_MAX + 1) for _ in range(2)]
    ends = [rail.end(pair, psn) for (rail, pair), psn in zip((one, other), psns, strict=True)]
    reads = min(one[0].reads_started, other[0].reads_served(one[0].reads_started))
    mtu = min(one[0].abilities.mtu, other[0].abilities.mtu)
    for (rail, pair), psn, end in zip((one, other), psns, reversed(ends), strict=True):
        pair.connect(rail.path(mtu=mtu, reads_at_once=reads), end, psn=psn)
