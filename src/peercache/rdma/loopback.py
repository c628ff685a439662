"""Both ends of a read in one process: READs from one device of this host to another, or to itself.

`peercache doctor` tries a `Loopback`; `peercache bench rdma` measures it beside a `BareLoop`.
"""

from __future__ import annotations

import random
import select
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, final

import numpy as np
import numpy.typing as npt

from peercache.errors import PeerCacheError
from peercache.memory.published import PublishedSegment
from peercache.model.ids import Incarnation
from peercache.model.member import ALIVE, Member
from peercache.model.reads import Fetched, PeerRead
from peercache.model.runs import PageRuns
from peercache.model.seal import NEVER_COMMITTED
from peercache.observability.metrics import Metrics
from peercache.rdma.channels import published_by
from peercache.rdma.fabric import RdmaFabric
from peercache.rdma.key_table import MemoryKeys
from peercache.rdma.plan import Published
from peercache.rdma.queue_pair import PSN_MAX, SUCCESS, Completion, Completions, QueuePair, Sizes
from peercache.rdma.rail import Rail, Settings, open_rails
from peercache.rdma.serving import ChannelServer
from peercache.wire.messages.declared import Message
from peercache.wire.messages.session import ChannelOpened, OpenChannel

READ_S = 30.0
"""Longest wait for a batch: only a link that loses packets needs so long."""

REGISTER_S = 60.0

_NODE = 1
_CLIENT = 2


class LoopbackFailed(PeerCacheError):
    """READs do not work on this host; the message says why."""


@final
class Loopback:
    """A published segment full of pages, and a fabric that reads them.

    memory: (pages × page_bytes,) uint8, their registered destination.
    """

    def __init__(
        self, *, near: Settings, far: Settings, shm_dir: str, granule: int, page_bytes: int,
        pages: int,
    ) -> None:  # fmt: skip
        """Open the reading device `near` and the serving device `far`; raise LoopbackFailed."""
        assert page_bytes % granule == 0, (page_bytes, granule)
        self.page_bytes, self.pages = page_bytes, pages
        self.metrics = Metrics()
        rng = random.SystemRandom()
        self._published: Published | None = None
        self._near = _opened(near)
        try:
            self._far = _opened(far)
        except BaseException:
            for rail in self._near:
                rail.close()
            raise
        self._segment = PublishedSegment.create(
            shm_dir,
            incarnation=Incarnation(rng.getrandbits(63) | 1),
            page_bytes=page_bytes * pages,
            granule=granule,
        )
        self._server = ChannelServer(self._far, self._segment, rng=rng)
        self.fabric = RdmaFabric(
            rails=self._near,
            exchange=self._exchange,
            max_channels_per_peer=1,
            rng=rng,
            metrics=self.metrics,
        )
        self.memory: npt.NDArray[np.uint8] = np.zeros(page_bytes * pages, np.uint8)
        self._address = int(self.memory.ctypes.data)
        try:
            self._fill()
            self._register()
        except BaseException:
            self.close()
            raise

    def read(self, first: int, count: int) -> Fetched:
        """Read pages into their places in `memory`."""
        numbers = np.arange(first, first + count, dtype=np.uint64)
        offsets = numbers * np.uint64(self.page_bytes)
        lengths = np.full(count, self.page_bytes, np.uint64)
        runs = PageRuns.regular(offsets + np.uint64(self._address), lengths, count)
        member = Member(
            incarnation=_NODE, counter=1, state=ALIVE, head_rank=0, host_name="loopback",
            control="127.0.0.1:1", data="127.0.0.1:1", boot_id="", segment="",
        )  # fmt: skip
        generations = np.full(count, NEVER_COMMITTED)
        wanted = PeerRead(member, offsets, lengths, runs, generations)
        return self.fabric.read(wanted, time.monotonic() + READ_S)

    @property
    def rails(self) -> tuple[Rail, Rail]:
        """Return the first reading rail and the first serving one."""
        return self._near[0], self._far[0]

    @property
    def source(self) -> tuple[int, MemoryKeys]:
        """Return the address of the pages and their keys; valid after the first read."""
        assert self._published is not None, "nothing was read yet"
        return self._published.pages_address, self._published.keys

    @property
    def target(self) -> tuple[int, MemoryKeys]:
        """Return the address of the destination and its keys."""
        return self._address, self._near[0].regions.table

    def arrived(self, first: int, count: int, fetched: Fetched) -> bool:
        """Return whether every seal and every byte of these pages arrived.

        The seals say "never committed", for no node committed the slots; a missing word is ODD.
        """
        span = slice(first * self.page_bytes, (first + count) * self.page_bytes)
        return bool(
            (fetched.seals["word"] == NEVER_COMMITTED).all()
            and np.array_equal(self.memory[span], self._segment.pages[span])
        )

    def clear(self) -> None:
        """Make every destination byte differ from the byte that will arrive."""
        np.bitwise_not(self._segment.pages, out=self.memory)

    def close(self) -> None:
        """Close both ends."""
        self.fabric.close()
        self._server.close_all()
        self._segment.close()

    def __enter__(self) -> Loopback:
        """Return the loopback."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _exchange(self, peer: int, message: Message, until: float) -> Message | None:  # noqa: ARG002 - the shape of an Exchange
        if not isinstance(message, OpenChannel):
            return None
        answer = self._server.open(_CLIENT, message)
        if isinstance(answer, ChannelOpened):
            self._published = published_by(answer)
        return answer

    def _fill(self) -> None:
        self._segment.populate(self.page_bytes * self.pages)
        words = np.arange(self.page_bytes * self.pages // 8, dtype=np.uint64)
        self._segment.pages[:] = (words * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)

    def _register(self) -> None:
        self._server.grew(self._segment.usable_bytes)
        self.fabric.register("loopback", self._address, self.memory.nbytes, self.memory)
        until = time.monotonic() + REGISTER_S
        wanted = len(self.memory)
        for rail in self._near:
            while not rail.regions.find(self._address, wanted):
                _expect_no_failure(rail)
                if time.monotonic() > until:
                    raise LoopbackFailed(f"{rail.name} registered no memory in {REGISTER_S:.0f} s")
                time.sleep(0.01)
        while self._server.registered_bytes() < wanted:
            for rail in self._far:
                _expect_no_failure(rail)
            if time.monotonic() > until:
                raise LoopbackFailed(f"no memory was registered in {REGISTER_S:.0f} s")
            time.sleep(0.01)


def _opened(settings: Settings) -> tuple[Rail, ...]:
    rails, problems = open_rails(settings)
    if not rails:
        raise LoopbackFailed("; ".join(problems) or "this host has no RDMA device")
    return rails


def _expect_no_failure(rail: Rail) -> None:
    if rail.regions.failure:
        raise LoopbackFailed(f"{rail.name}: {rail.regions.failure}")


@final
class BareLoop:
    """The loop that PeerCache is measured against: chained READs, and a wait for the last of them.

    It posts a batch with one doorbell, over one queue pair. It reads no seals, knows no
    deadline, and raises on a failure. It waits for the event of the completion, as the fabric
    does: a spinning loop would take the processor that a software device needs, and be slower.
    """

    def __init__(
        self, near: Rail, far: Rail, *, batch: int, source: tuple[int, MemoryKeys],
        target: tuple[int, MemoryKeys], page_bytes: int,
    ) -> None:  # fmt: skip
        """Connect `near` to `far`. source, target: address and keys of the pages."""
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
        """Return a function that reads a batch from page `first` on; it raises on a failure."""
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
            # A completion before the queue was armed makes no event.
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


def _key(side: tuple[int, MemoryKeys], page: int) -> int:
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
