"""The disk of a run: the simulated store, with time between its steps, and faults.

It outlives its node: a crash loses what was not safe, or the folder is wiped. Reads and writes take
time, fail or are late, and a stuck disk ends the tier; pages rot.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any

import attrs
import numpy as np
import trio

from peercache.actors.ports import (
    DISK_DONE,
    DISK_FAILED,
    DISK_FULL,
    DISK_LATE,
    DISK_UNTRIED,
    DiskEffect,
    DiskEnded,
    DiskFact,
    DiskOpened,
    Forget,
    ForgetDone,
    LateEnded,
    Load,
    LoadDone,
    Write,
    WriteDone,
)
from sims.network import Network
from sims.places import Place
from sims.store import Image, Store
from sims.swarm import Options
from sims.trace import Trace

SLAB_BYTES = 64 * 1024
"""Seven pages of up to 4 KiB: a few slabs make a disk that is soon full."""

OPEN_S = 0.3
SYNC_S = 0.5
"""How long a row may be unsafe."""

LATE_S = 2.0
"""Mean time that a stuck call takes beyond its deadline."""

STUCK_CHANCE = 0.1
"""Chance that a late call means the end of the disk."""

QUICK_STEP_S = 0.0005
"""A step once the faults are over: a slow disk is one of them."""


class SimDisk:
    """The page store of one incarnation, on an existing image."""

    def __init__(
        self,
        *,
        image: Image,
        store: Store,
        place: Place,
        options: Options,
        rng: random.Random,
        network: Network,
        trace: Trace,
        notify: Callable[[DiskFact], None],
    ) -> None:
        """Open `image` after a while; `notify` is called with the results."""
        self.has_ended = False
        self._image = image
        self._store = store
        self._place = place
        self._options = options
        self._rng = rng
        self._network = network
        self._trace = trace
        self._notify = notify
        self._nursery: trio.Nursery | None = None
        self._asked: list[int] = []

    async def run(self) -> None:
        """Open, and do jobs until cancelled."""
        await self._pass(self._rng.uniform(0.0, OPEN_S))
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            entries = self._image.entries()
            self._store.unix_s = int(trio.current_time())
            self._trace.line("disk", self._place.name, "opened", len(entries))
            slabs = self._options.disk_slabs
            self._notify(DiskOpened(slabs * SLAB_BYTES, SLAB_BYTES, entries, self._store.unix_s))
            while True:
                await self._pass(SYNC_S)
                self._image.sync()
                for job in self._asked:
                    self._notify(ForgetDone(job))
                self._asked.clear()

    def perform(self, effect: DiskEffect) -> None:
        """Start an effect of the disk actor."""
        assert self._nursery is not None, "the actor says nothing before the disk is open"
        if isinstance(effect, (Write, Load)):
            self._nursery.start_soon(self._work, effect)
        elif isinstance(effect, Forget):
            self._store.forget(effect.places.tolist())
            if effect.job:
                self._asked.append(effect.job)

    async def _work(self, effect: Write | Load) -> None:
        """Do a job page by page; answer it, and report late pages afterwards."""
        outcomes: list[tuple[int, int]] = []
        late: list[tuple[int, Generator[None, None, Any]]] = []
        for at in range(len(effect.places)):
            if self.has_ended:
                outcomes.append((DISK_UNTRIED, 0))
                continue
            page = self._page(effect, at)
            if self._happens(self._options.disk_late):
                outcomes.append((DISK_LATE, 0))
                late.append((at, page))
                continue
            outcomes.append(await self._finish(page))
        self._answer(effect, outcomes)
        if late:
            if self._happens(STUCK_CHANCE) and not self.has_ended:
                self.has_ended = True
                self._trace.line("disk", self._place.name, "stuck")
                self._notify(DiskEnded("stuck"))
            await self._come_late(effect, late)

    async def _come_late(
        self, effect: Write | Load, late: list[tuple[int, Generator[None, None, Any]]]
    ) -> None:
        """Finish a late job: it must harm no page, and its result is ignored."""
        for _, page in late:
            await self._pass(self._rng.expovariate(1 / LATE_S))
            await self._finish(page)
        self._notify(LateEnded(effect.job, tuple(at for at, _ in late)))

    def _page(self, effect: Write | Load, at: int) -> Generator[None, None, Any]:
        failed = DISK_FAILED if self._happens(self._options.disk_failure) else DISK_DONE
        if isinstance(effect, Load):
            return self._store.load(effect, at, failed)
        full = self._happens(self._options.disk_full)
        return self._store.write(effect, at, DISK_FULL if full else failed)

    async def _finish(self, page: Generator[None, None, Any]) -> tuple[int, int]:
        """Perform a page's steps; return its outcome and checksum."""
        while True:
            step_s = self._options.disk_step_s if self._network.faults_on else QUICK_STEP_S
            await self._pass(self._rng.expovariate(1 / step_s))
            try:
                next(page)
            except StopIteration as end:
                found: tuple[int, int] = end.value
                return found

    def _answer(self, effect: Write | Load, outcomes: list[tuple[int, int]]) -> None:
        states = bytes(outcome for outcome, _ in outcomes)
        checksums = np.array([checksum for _, checksum in outcomes], np.uint64)
        done = WriteDone if isinstance(effect, Write) else LoadDone
        self._notify(done(effect.job, states, checksums))

    def _happens(self, chance: float) -> bool:
        return bool(chance) and self._network.faults_on and self._rng.random() < chance

    async def _pass(self, span_s: float) -> None:
        await trio.sleep(span_s)
        await self._place.awake()


@attrs.define(eq=False)
class Disks:
    """The images of all nodes, running or not."""

    options: Options
    rng: random.Random
    trace: Trace
    images: dict[str, Image] = attrs.field(factory=dict)

    def image_of(self, name: str) -> Image:
        """Return a node's disk image at its start: kept, or wiped."""
        image = self.images.setdefault(name, Image())
        image.crash()
        if image.slots and self.rng.random() < self.options.disk_wipe:
            self.trace.line("fault", "wiped", name)
            image = self.images[name] = Image()
        return image

    def rot(self) -> None:
        """Flip a bit of a random page, whether its node is running or not."""
        lying = [(name, place) for name, image in self.images.items() for place in image.slots]
        if not lying:
            return
        name, place = self.rng.choice(lying)
        data = self.images[name].slots[place].data
        self.trace.line("fault", "rotten", name, place)
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
