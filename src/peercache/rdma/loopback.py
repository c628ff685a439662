"""Both ends of a read in one process: READs from one device of this host to another, or to itself.

`peercache doctor` tries it, and `python -m benchmarks.rdma` compares it with a bare loop.
"""

from __future__ import annotations

import random
import time
from typing import final

import numpy as np
import numpy.typing as npt

from peercache.config.settings import Config
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
from peercache.rdma.plan import Published
from peercache.rdma.rail import Rail, open_rails
from peercache.rdma.serving import ChannelServer
from peercache.wire.messages.declared import Message
from peercache.wire.messages.session import ChannelOpened, OpenChannel

READ_S = 30.0
"""Longest wait for a batch: only a link that loses packets needs this long."""

REGISTER_S = 60.0

_NODE = 1
_CLIENT = 2


class LoopbackFailed(PeerCacheError):
    """READs do not work on this host; the message says why."""


@final
class Loopback:
    """A published segment full of pages, and a fabric that reads them.

    memory:    (pages × page_bytes,) uint8, their registered destination; address: its address.
    near, far: the rails that read, and those that serve.
    published: the memory that the serving end publishes; None before the first read.
    """

    def __init__(
        self, *, near: Config, far: Config, shm_dir: str, granule: int, page_bytes: int,
        pages: int,
    ) -> None:  # fmt: skip
        """Open the reading device `near` and the serving device `far`; raise LoopbackFailed."""
        assert page_bytes % granule == 0, (page_bytes, granule)
        self.page_bytes, self.pages = page_bytes, pages
        self.metrics = Metrics()
        rng = random.SystemRandom()
        self.published: Published | None = None
        self.near = _opened(near)
        try:
            self.far = _opened(far)
        except BaseException:
            for rail in self.near:
                rail.close()
            raise
        self._segment = PublishedSegment.create(
            shm_dir,
            incarnation=Incarnation(rng.getrandbits(63) | 1),
            page_bytes=page_bytes * pages,
            granule=granule,
        )
        self._server = ChannelServer(self.far, self._segment, rng=rng)
        self.fabric = RdmaFabric(
            rails=self.near,
            exchange=self._exchange,
            max_channels_per_peer=1,
            rng=rng,
            metrics=self.metrics,
        )
        self.memory: npt.NDArray[np.uint8] = np.zeros(page_bytes * pages, np.uint8)
        self.address = int(self.memory.ctypes.data)
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
        runs = PageRuns.regular(offsets + np.uint64(self.address), lengths, count)
        member = Member(
            incarnation=_NODE, counter=1, state=ALIVE, head_rank=0, host_name="loopback",
            control="127.0.0.1:1", data="127.0.0.1:1", boot_id="", segment="",
        )  # fmt: skip
        generations = np.full(count, NEVER_COMMITTED)
        wanted = PeerRead(member, offsets, lengths, runs, generations)
        return self.fabric.read(wanted, time.monotonic() + READ_S)

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

    def _exchange(self, peer: int, message: Message, until: float) -> Message | None:  # noqa: ARG002 - the shape of an Exchange
        if not isinstance(message, OpenChannel):
            return None
        answer = self._server.open(_CLIENT, message)
        if isinstance(answer, ChannelOpened):
            self.published = published_by(answer)
        return answer

    def _fill(self) -> None:
        self._segment.populate(self.page_bytes * self.pages)
        words = np.arange(self.page_bytes * self.pages // 8, dtype=np.uint64)
        self._segment.pages[:] = (words * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)

    def _register(self) -> None:
        self._server.grew(self._segment.usable_bytes)
        self.fabric.register("loopback", self.address, self.memory.nbytes, self.memory)
        until = time.monotonic() + REGISTER_S
        wanted = len(self.memory)
        for rail in self.near:
            while not rail.regions.find(self.address, wanted):
                _expect_no_failure(rail)
                if time.monotonic() > until:
                    raise LoopbackFailed(f"{rail.name} registered no memory in {REGISTER_S:.0f} s")
                time.sleep(0.01)
        while self._server.registered_bytes() < wanted:
            for rail in self.far:
                _expect_no_failure(rail)
            if time.monotonic() > until:
                raise LoopbackFailed(f"no memory was registered in {REGISTER_S:.0f} s")
            time.sleep(0.01)


def _opened(config: Config) -> tuple[Rail, ...]:
    rails, problems = open_rails(config)
    if not rails:
        raise LoopbackFailed("; ".join(problems) or "this host has no RDMA device")
    return rails


def _expect_no_failure(rail: Rail) -> None:
    if rail.regions.failure:
        raise LoopbackFailed(f"{rail.name}: {rail.regions.failure}")
