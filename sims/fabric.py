"""The fabrics: bytes are transferred in steps with time between, so that torn reads occur.

Same host: a copy by the caller, then the words. Other hosts: an independent transfer, either in
order and answered by the owner (like tcp), or of several pages at a time without the holder (like
rdma). Each reads a page's word after that page's bytes. A read stops its transfer before it
returns.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import trio

from peercache.model.member import Member
from peercache.model.reads import Fetched, PeerRead
from peercache.model.runs import U64
from peercache.model.seal import ODD, still_committed, unread_seals
from peercache.net.breaker import STALL_S
from peercache.observability.reasons import DEADLINE, PEER_UNREACHABLE, REFUSED
from sims.content import Page
from sims.memory import Buffers, NodeMemory
from sims.network import Network
from sims.node import SimNode
from sims.places import Place
from sims.planted import (
    FUTURE_ACCEPTED,
    NO_FIRST_LOOK,
    RETURNS_WHILE_WRITING,
    WORD_BEFORE_BYTES,
    planted,
)
from sims.swarm import Options

PAGES_AT_ONCE = 4
"""READs that an rdma channel has in flight."""

LATE_STEP_S = 0.001
"""The longest that a copy continues after its deadline: callers reserve 5 ms for three."""


class Gone(Exception):
    """The holder no longer serves, or refuses."""


def chunks(length: int, steps: int) -> list[tuple[int, int]]:
    """Cut a page into the (begin, end) of its steps."""
    cuts = sorted({length * step // steps for step in range(steps + 1)})
    return list(pairwise(cuts))


def scatter(buffers: Buffers, read: PeerRead, page: int, at: int, data: Page) -> None:
    """Store bytes that belong at `at` of a page into its runs."""
    for address, begin, end in runs_of(read, page):
        lower, upper = max(begin, at), min(end, at + len(data))
        if lower < upper:
            buffers.write(address + lower - begin, data[lower - at : upper - at])


def runs_of(read: PeerRead, page: int) -> Iterator[tuple[int, int, int]]:
    """Yield (address, begin, end) of each run of a page, begin and end within the page."""
    begin = 0
    for run in range(int(read.runs.starts[page]), int(read.runs.starts[page + 1])):
        end = begin + int(read.runs.sizes[run])
        yield int(read.runs.addresses[run]), begin, end
        begin = end


def first_look(words: U64, generations: U64) -> npt.NDArray[np.bool_]:
    """Return which slots have the word of their record, before a byte of them is read."""
    if NO_FIRST_LOOK in planted:
        return np.ones(words.shape, np.bool_)
    if FUTURE_ACCEPTED in planted:
        return np.asarray(words <= generations)
    return still_committed(words, generations)


class Fabrics:
    """The fabrics of one client."""

    def __init__(
        self,
        *,
        place: Place,
        options: Options,
        rng: random.Random,
        network: Network,
        buffers: Buffers,
        serving: Callable[[str], SimNode | None],
        linked: Callable[[int], NodeMemory | None],
        nursery: Callable[[], trio.Nursery],
        wires: dict[tuple[str, str], float] | None = None,
    ) -> None:
        """serving: returns the node at an address; linked: the segment of an incarnation, by name.

        wires: by host and direction, the time until which its network is busy; shared by all
               readers.
        """
        self.place = place
        self.options = options
        self.rng = rng
        self.network = network
        self.buffers = buffers
        self.serving = serving
        self._linked = linked
        self._nursery = nursery
        self._mapped: dict[int, NodeMemory] = {}
        self._wires = {} if wires is None else wires

    def is_shared(self, member: Member) -> bool:
        """Return whether the member's memory is mapped here, or can be."""
        if member.boot_id != self.place.host:
            return False
        if member.incarnation not in self._mapped:
            memory = self._linked(member.incarnation)
            if memory is None:
                return False
            self._mapped[member.incarnation] = memory
        return True

    def forget(self, incarnation: int) -> None:
        """Unmap the segment of a dead member."""
        self._mapped.pop(incarnation, None)

    async def read(self, read: PeerRead, until: float) -> Fetched:
        """Fill the destinations by `until`; afterwards nothing writes to them."""
        if self.is_shared(read.member):
            return await self._copy(read, self._mapped[read.member.incarnation], until)
        return await self._transfer(read, until)

    def step_s(self, until: float = math.inf) -> float:
        """Return how long the next step of a copy or transfer takes: short beyond `until`."""
        left_s = max(0.0, until - trio.current_time()) + LATE_STEP_S
        return min(self.rng.expovariate(1 / self.options.step_s), left_s)

    def takes_time(self) -> bool:
        """Return whether the copy of the next page has steps with time between them."""
        return self.options.paced == 1.0 or self.rng.random() < self.options.paced

    async def carried(self, holder: str, size: int) -> None:
        """Wait until the shared networks of both hosts have carried `size` bytes."""
        if not self.options.bandwidth:
            return
        took_s, begin = size / self.options.bandwidth, trio.current_time()
        for wire in ((holder, "out"), (self.place.host, "in")):
            begin = max(begin, self._wires.get(wire, 0.0))
            self._wires[wire] = begin + took_s
        await trio.sleep_until(begin + took_s)

    # --- same host --------------------------------------------------------------------------------

    async def _copy(self, read: PeerRead, memory: NodeMemory, until: float) -> Fetched:
        seals = unread_seals(len(read.offsets))
        granule = np.uint64(memory.granule)
        seen = memory.seals[read.offsets // granule]
        is_there = first_look(seen["word"], read.generations)
        done = 0
        for page in range(len(read.offsets)):
            offset = int(read.offsets[page])
            if not is_there[page]:
                # The state at the first check: by now the word may be that of the record.
                seals[page] = seen[page]
                done += 1
                continue
            takes_time = self.takes_time()
            for begin, end in chunks(int(read.lengths[page]), self.options.steps_a_page):
                if trio.current_time() >= until:
                    break
                if takes_time:
                    await trio.sleep(self.step_s(until))
                    await self.place.awake()
                scatter(self.buffers, read, page, begin, memory.read(offset + begin, end - begin))
            else:
                done += 1
                continue
            break
        await trio.sleep(self.step_s(until))
        await self.place.awake()
        copied = np.flatnonzero(is_there[:done])
        seals[copied] = memory.seals[read.offsets[copied] // granule]
        return Fetched(seals, "" if done == len(seals) else DEADLINE, "shm")

    # --- other hosts ------------------------------------------------------------------------------

    async def _transfer(self, read: PeerRead, until: float) -> Fetched:
        transfer = Transfer(self, read)
        self._nursery().start_soon(transfer.run)
        while not transfer.is_done:
            limit = min(until, transfer.progress_at + STALL_S)
            with trio.move_on_at(limit):
                await transfer.changed.wait()
            transfer.changed = trio.Event()
            now = trio.current_time()
            if now >= until:
                transfer.failure = transfer.failure or DEADLINE
                break
            if now >= transfer.progress_at + STALL_S:
                transfer.failure = transfer.failure or PEER_UNREACHABLE
                break
        if RETURNS_WHILE_WRITING not in planted:
            transfer.stop()
        seals = transfer.seals.copy()
        if not self.options.rdma:
            missing = np.flatnonzero(seals["word"] == ODD)
            seals["word"][missing[0] if len(missing) else len(seals) :] = ODD
        await self.place.awake()
        failure = transfer.failure if (seals["word"] == ODD).any() else ""
        return Fetched(seals, failure, "rdma" if self.options.rdma else "tcp")


class Transfer:
    """One read from another host, which runs concurrently with its caller."""

    def __init__(self, fabrics: Fabrics, read: PeerRead) -> None:
        """Start with nothing read."""
        self._fabrics = fabrics
        self._read = read
        self.seals = unread_seals(len(read.offsets))
        self.failure = ""
        self.is_done = False
        self.changed = trio.Event()
        self.progress_at = trio.current_time()
        self._scope = trio.CancelScope()
        self._memory: NodeMemory | None = None
        self._next = 0

    def stop(self) -> None:
        """Stop writing from now on."""
        self._scope.cancel()

    async def run(self) -> None:
        """Read every page."""
        with self._scope:
            try:
                await self._open()
            except Gone as gone:
                self.failure = str(gone)
            else:
                async with trio.open_nursery() as nursery:
                    for _ in range(PAGES_AT_ONCE if self._fabrics.options.rdma else 1):
                        nursery.start_soon(self._work, nursery.cancel_scope)
        self.is_done = True
        self.changed.set()

    async def _open(self) -> None:
        fabrics, member = self._fabrics, self._read.member
        await trio.sleep(fabrics.step_s())
        node = fabrics.serving(member.data)
        if node is None:
            raise Gone(PEER_UNREACHABLE)
        await self._reachable()
        if not fabrics.options.rdma:
            await node.place.awake()
        if node.incarnation != member.incarnation:
            raise Gone(REFUSED)
        self._memory = node.memory

    async def _work(self, scope: trio.CancelScope) -> None:
        try:
            while self._next < len(self.seals):
                page = self._next
                self._next += 1
                await self._page(page)
        except Gone as gone:
            # The channel has failed, with all its transfers.
            self.failure = str(gone)
            scope.cancel()

    async def _page(self, page: int) -> None:
        fabrics, read, memory = self._fabrics, self._read, self._memory
        assert memory is not None
        fails = fabrics.rng.random() < fabrics.options.transfer_failure
        if fails and fabrics.network.faults_on:
            raise Gone(PEER_UNREACHABLE)
        offset = int(read.offsets[page])
        seal = memory.seals[offset // memory.granule].copy()
        if not first_look(seal["word"], read.generations[page]).all():
            self.seals[page] = seal
            self._went_on()
            return
        arriving: tuple[int, Page] | None = None
        takes_time = fabrics.takes_time()
        for begin, end in chunks(int(read.lengths[page]), fabrics.options.steps_a_page):
            if takes_time:
                await self._step()
            if arriving is not None:
                scatter(fabrics.buffers, read, page, *arriving)
            arriving = (begin, memory.read(offset + begin, end - begin))
            memory.sent_bytes += end - begin
            await fabrics.carried(read.member.boot_id, end - begin)
            self._went_on()
        if takes_time:
            await self._step()
        if WORD_BEFORE_BYTES not in planted:
            seal = memory.seals[offset // memory.granule].copy()
        if takes_time:
            await self._step()
        assert arriving is not None
        scatter(fabrics.buffers, read, page, *arriving)
        self.seals[page] = seal
        self._went_on()

    async def _step(self) -> None:
        """Wait for the time of a step; raise Gone if the holder is gone by then."""
        fabrics, member = self._fabrics, self._read.member
        slowness = fabrics.options.wire_slowness if fabrics.network.faults_on else 1.0
        await trio.sleep(min(slowness * fabrics.step_s(), STALL_S / 2))
        await self._reachable()
        node = fabrics.serving(member.data)
        if node is None or node.incarnation != member.incarnation:
            raise Gone(PEER_UNREACHABLE)
        if not fabrics.options.rdma and node.place.is_paused(trio.current_time()):
            await node.place.awake()

    async def _reachable(self) -> None:
        """Wait while the holder's host cannot be reached, which may be forever."""
        fabrics, host = self._fabrics, self._read.member.boot_id
        here = fabrics.place.host
        while fabrics.network.is_cut(here, host) or fabrics.network.is_cut(host, here):
            await trio.sleep(STALL_S / 2)

    def _went_on(self) -> None:
        self.progress_at = trio.current_time()
        self.changed.set()
