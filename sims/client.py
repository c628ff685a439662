"""A client of a run: the production read and write paths, driven by simulated tasks.

What `client.driver` and `client.home` do with threads and sockets is done here with tasks: the
same steps in the same order, with time between.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import attrs
import numpy as np
import trio
import xxhash

from peercache.client.home import BEAT_S, LOST_BEAT_S
from peercache.config import Config
from peercache.ids import new_client_id
from peercache.keys import Namespace
from peercache.messages import (
    WIRE_VERSION,
    WIRE_VERSION_OLDEST,
    Granted,
    Hello,
    Message,
    Refused,
    Touched,
    ViewAsked,
    ViewShared,
    Welcome,
)
from peercache.observe import PEER_UNREACHABLE
from peercache.ports import ODD, Ask, Checksum, Fetch, Fetched, Hear, PeerRead, Post, Step
from peercache.ports import Place as PlaceStep
from peercache.runs import U64, PageRuns
from peercache.segment.client_lock import lock_name
from peercache.transfer.breaker import Breakers, data_port
from peercache.transfer.cache import LocationCache
from peercache.transfer.cluster import Cluster
from peercache.transfer.locating import Locator
from peercache.transfer.reading import Reader
from peercache.transfer.reserving import Reservations
from peercache.transfer.writing import Writer
from peercache.view import View
from sims.asking import SimAsker
from sims.fabric import Fabrics, chunks
from sims.memory import Buffers, NodeMemory
from sims.network import Network
from sims.places import Place
from sims.planted import READS_SOURCE_LATE, planted
from sims.trace import SimLog, Trace, Violation

COPY_STOPPED_MAX_S = 6.0
"""Longest that a process stops between two steps of a copy: far beyond every deadline."""

Result = TypeVar("Result")


@attrs.frozen(eq=False)
class Attached:
    """One home incarnation that we write to."""

    incarnation: int
    memory: NodeMemory
    reservations: Reservations


class SimClient:
    """One engine process with its client."""

    def __init__(
        self,
        *,
        place: Place,
        home: str,
        config: Config,
        rng: random.Random,
        network: Network,
        buffers: Buffers,
        fabrics: Fabrics,
        linked: Callable[[int], NodeMemory | None],
        trace: Trace,
    ) -> None:
        """Write through the node that listens at `home`."""
        self.place = place
        self.home = home
        self.config = config
        self.identity = new_client_id(rng)
        self.lock = lock_name(self.identity)
        self.fabrics = fabrics
        self.attached: Attached | None = None
        self.breakers = Breakers()
        self.namespace = Namespace(name="sims")
        self.cache = LocationCache(entries_max=config.location_cache_entries)
        locator = Locator(cache=self.cache, breakers=self.breakers, clock=place.now)
        self.reader = Reader(
            locator=locator, cache=self.cache, verify=config.verify, clock=place.now
        )
        self.writer = Writer(
            cache=self.cache,
            breakers=self.breakers,
            verify=config.verify,
            namespace_tag=self.namespace.tag(),
            clock=place.now,
        )
        self.asker = SimAsker(
            identity=self.identity,
            place=place,
            network=network,
            hello_for=self._hello,
            url_of=self._address_of,
            breakers=self.breakers,
            on_refused=self._refused,
            on_late=self._heard_late,
            nursery=self.nursery,
        )
        self.cluster = self._cluster_of(0, 0.0)
        self.scope = trio.CancelScope()
        self._buffers = buffers
        self._network = network
        self._rng = rng
        self._linked = linked
        self._log = SimLog(trace, place.name)
        self._view = View.of()
        self._look = trio.Event()
        self._nursery: trio.Nursery | None = None

    # --- life -------------------------------------------------------------------------------------

    async def run(self, work: Callable[[SimClient], Any]) -> None:
        """Look after the home node, and do `work`, until the process ends."""
        with self.scope:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._look_after_home)
                nursery.start_soon(work, self)

    def nursery(self) -> trio.Nursery:
        """Return where this process's own tasks run."""
        assert self._nursery is not None
        return self._nursery

    def look_now(self) -> None:
        """Do not wait for the next beat: a call has found the home node gone."""
        self._look.set()

    # --- the driver -------------------------------------------------------------------------------

    async def drive(self, path: Generator[Step, Any, Result], home: NodeMemory | None) -> Result:
        """Run a path to its end; `home` is where its pages are placed."""
        answer: Any = None
        try:
            while True:
                await self.place.awake()
                try:
                    step = path.send(answer)
                except StopIteration as end:
                    result: Result = end.value
                    return result
                answer = await self._do(step, home)
        finally:
            path.close()

    async def _do(self, step: Step, home: NodeMemory | None) -> Any:
        if isinstance(step, Ask):
            return await self.asker.ask(step.questions, step.until, step.enough)
        if isinstance(step, Post):
            return self.asker.post(step.messages)
        if isinstance(step, Hear):
            return self.asker.hear(step.peer)
        if isinstance(step, Fetch):
            return await self._fetch(step)
        if isinstance(step, PlaceStep):
            return await self._place(step, home)
        assert isinstance(step, Checksum), step
        return checksums_of(step.runs, self._buffers)

    async def _fetch(self, step: Fetch) -> list[Fetched]:
        answers: list[Fetched] = [Fetched(np.full(len(r.offsets), ODD), "") for r in step.reads]

        async def read_one(place: int, read: PeerRead) -> None:
            answers[place] = await self._read(read, step.until)

        async with trio.open_nursery() as nursery:
            for place, read in enumerate(step.reads):
                nursery.start_soon(read_one, place, read)
        return answers

    async def _read(self, read: PeerRead, until: float) -> Fetched:
        breaker = data_port(read.member.incarnation)
        if not self.breakers.available(breaker, self.place.now()):
            return Fetched(np.full(len(read.offsets), ODD), PEER_UNREACHABLE)
        fetched = await self.fabrics.read(read, self.place.world(until))
        if fetched.failure == PEER_UNREACHABLE:
            self.breakers.failed(breaker, self.place.now())
        elif not fetched.failure:
            self.breakers.answered(breaker)
        return fetched

    async def _place(self, step: PlaceStep, home: NodeMemory | None) -> int:
        if home is None:
            return 0
        lengths = step.runs.lengths()
        for page in range(len(step.runs)):
            offset = int(step.offsets[page])
            for begin, end in chunks(int(lengths[page]), self.fabrics.options.steps_a_page):
                if self.place.now() >= step.until:
                    if READS_SOURCE_LATE in planted:
                        self.nursery().start_soon(self._copy, step, page, begin, end, home)
                    return page
                await self._copy(step, page, begin, end, home)
            self._log.debug("page.placed", offset=offset)
        return len(step.runs)

    async def _copy(
        self, step: PlaceStep, page: int, begin: int, end: int, home: NodeMemory
    ) -> None:
        """Copy one part of a page into its slot; the process may be stopped before it does."""
        await trio.sleep(self.fabrics.step_s(self.place.world(step.until)))
        if self._rng.random() < self.fabrics.options.stop_in_copy and self._network.faults_on:
            self._log.info("copy.stopped")
            self.place.pause(trio.current_time(), self._rng.uniform(0.2, COPY_STOPPED_MAX_S))
        await self.place.awake()
        offset = int(step.offsets[page])
        at = 0
        for run in range(int(step.runs.starts[page]), int(step.runs.starts[page + 1])):
            size = int(step.runs.sizes[run])
            lower, upper = max(at, begin), min(at + size, end)
            if lower < upper:
                address = int(step.runs.addresses[run]) + lower - at
                data = self._buffers.read(address, upper - lower)
                home.write(offset + lower, offset, data, self.identity)
            at += size

    # --- the home node ----------------------------------------------------------------------------

    async def _look_after_home(self) -> None:
        while True:
            is_well = await self._beat()
            with trio.move_on_after((BEAT_S if is_well else LOST_BEAT_S) / self.place.rate):
                await self._look.wait()
            self._look = trio.Event()
            await self.place.awake()

    async def _beat(self) -> bool:
        is_well = await self._ask_view()
        if not is_well:
            await self._attach(self.place.now() + BEAT_S)
            is_well = await self._ask_view()
        attached = self.attached
        if attached is not None and is_well:
            self.asker.post(
                ((attached.incarnation, attached.reservations.report(self.place.now())),)
            )
        for holder, drops in self.reader.touches.take().items():
            if holder in self.cluster.members and not self.breakers.is_open(holder):
                self.asker.post(((holder, Touched(drops)),))
        return is_well

    async def _attach(self, until: float) -> bool:
        answer = await self.asker.greet(self.home, until)
        if isinstance(answer, Refused):
            # Nothing in a run is configured wrongly.
            raise Violation("refused", f"{self.place.name}: {answer.reason}: {answer.detail}")
        if not isinstance(answer, Welcome):
            return False
        member, old = answer.member, self.attached
        self.breakers.answered(member.incarnation)
        if old is not None and old.incarnation == member.incarnation:
            return True
        memory = self._linked(member.incarnation)
        if memory is None:
            return False
        self.attached = Attached(member.incarnation, memory, Reservations())
        self.cluster = self._cluster_of(member.incarnation, self.cluster.handover_until)
        self._log.info("home.attached", node=f"{member.incarnation:016x}")
        return True

    async def _ask_view(self) -> bool:
        attached = self.attached
        now = self.place.now()
        asked = ViewAsked(0, self._view.digest())
        if attached is not None:
            question = ((attached.incarnation, asked),)
            answer = (await self.asker.ask(question, now + LOST_BEAT_S))[0]
            if isinstance(answer, ViewShared):
                self._take(answer)
                return True
        for peer in self.cluster.members:
            if attached is not None and peer == attached.incarnation:
                continue
            if self.breakers.available(peer, now):
                other = (await self.asker.ask(((peer, asked),), now + LOST_BEAT_S))[0]
                if isinstance(other, ViewShared):
                    self._take(other)
                    break
        return False

    def _take(self, shared: ViewShared) -> None:
        if not shared.view:
            return
        self._view = View.of(shared.view)
        before, known = self.cluster.ring.version, self.cluster.members
        home = self.attached.incarnation if self.attached is not None else 0
        cluster = self._cluster_of(home, self.cluster.handover_until)
        if cluster.ring.version != before:
            until = self.place.now() + self.config.handover_s
            cluster = attrs.evolve(cluster, handover_until=until)
        self.cluster = cluster
        alive = set(cluster.members)
        self.breakers.forget(alive)
        self.asker.forget(alive)
        for gone in known:
            if gone not in alive:
                self.fabrics.forget(gone)

    def _cluster_of(self, home: int, handover_until: float) -> Cluster:
        view = getattr(self, "_view", View.of())
        return Cluster.of(
            {member.incarnation: member for member in view.members()},
            home=home,
            boot_id=self.place.host,
            replicas=self.config.directory_replicas,
            virtual_nodes=self.config.virtual_nodes,
            handover_until=handover_until,
        )

    def _heard_late(self, peer: int, message: Message) -> None:
        attached = self.attached
        if isinstance(message, Granted) and attached is not None and attached.incarnation == peer:
            attached.reservations.granted(message)

    def _refused(self, peer: int, refused: Refused) -> None:
        if refused.reason == "protocol":
            raise Violation("refused", f"{self.place.name}: {refused.detail}")
        self._log.warning("client.refused", peer=f"{peer:016x}", reason=refused.reason)

    def _address_of(self, peer: int) -> str | None:
        if self.attached is not None and self.attached.incarnation == peer:
            return self.home
        member = self.cluster.members.get(peer)
        return member.control if member is not None else None

    def _hello(self, peer: int) -> Hello:
        is_home = peer == 0 or (self.attached is not None and self.attached.incarnation == peer)
        return Hello(
            request=0,
            wire_oldest=WIRE_VERSION_OLDEST,
            wire_newest=WIRE_VERSION,
            cluster=self.config.cluster,
            is_node=False,
            granule=self.config.granule,
            credentials="",
            namespace=self.namespace.name,
            geometry=self.namespace.geometry,
            lock=self.lock if is_home else "",
        )


def checksums_of(runs: PageRuns, buffers: Buffers) -> U64:
    """Return what `client.driver.checksums_of` does, of made-up addresses."""
    digests = np.empty(len(runs), np.uint64)
    for page in range(len(runs)):
        digest = xxhash.xxh3_64()
        for run in range(int(runs.starts[page]), int(runs.starts[page + 1])):
            digest.update(buffers.read(int(runs.addresses[run]), int(runs.sizes[run])).tobytes())
        digests[page] = digest.intdigest() or 1
    return digests
