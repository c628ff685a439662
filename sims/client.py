"""A client of a run: the production read and write paths, driven by simulated tasks.

Tasks replace the threads and sockets of `client.bridge` and `client.home`: they perform each step
of the same paths, with time between the steps.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np
import numpy.typing as npt
import trio
import xxhash

from peercache.config.settings import Config
from peercache.errors import PeerCacheError
from peercache.memory.client_lock import lock_name
from peercache.model.ids import new_client_id
from peercache.model.keys import Namespace, split_keys
from peercache.model.reads import Fetched, Looked, PeerRead
from peercache.model.runs import U64, PageRuns
from peercache.model.seal import unread_seals
from peercache.net.breaker import Breakers
from peercache.observability.reasons import PEER_UNREACHABLE
from peercache.paths.cluster import Cluster
from peercache.paths.costs import ReadCosts
from peercache.paths.home_tie import BEAT_S, LOST_BEAT_S, Attached, Tie
from peercache.paths.lookup import LocationCache, Locator
from peercache.paths.mirror import OFF, Mirrorer, MirrorHome
from peercache.paths.read import Reader
from peercache.paths.steps import (
    Ask,
    Checksum,
    Collect,
    Drain,
    Fetch,
    Greet,
    Post,
    Questions,
    ReadTable,
    Renew,
    Step,
    Submit,
)
from peercache.paths.steps import Place as PlaceStep
from peercache.paths.write import Writer
from peercache.wire.envelope import WIRE_VERSION, WIRE_VERSION_OLDEST
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import Located, Lookup
from peercache.wire.messages.session import Hello, Refused
from sims.asking import SimAsker
from sims.fabric import Fabrics, chunks
from sims.locks import secret_of
from sims.memory import Buffers, NodeMemory, Truth
from sims.network import Network
from sims.places import Place
from sims.planted import READS_SOURCE_LATE, planted
from sims.swarm import TENANTS
from sims.tables import SimTables
from sims.trace import SimLog, Trace, Violation

COPY_STOPPED_MAX_S = 6.0
"""The longest pause of a process between two steps of a copy: far beyond every deadline."""

Result = TypeVar("Result")


@attrs.define(eq=False)
class Answers:
    """What one call learned from directory owners.

    final:  the peers that have answered for each key, and did not report that they are behind.
    behind: those that have answered while they were behind.
    closed: members that the call may have skipped, because their breakers were open.
    """

    members: tuple[int, ...]
    final: dict[bytes, set[int]] = attrs.field(factory=lambda: defaultdict(set))
    behind: dict[bytes, set[int]] = attrs.field(factory=lambda: defaultdict(set))
    closed: set[int] = attrs.field(factory=set)

    def look(self, breakers: Breakers) -> None:
        """Record which breakers are open, just after the path has chosen the peers."""
        self.closed.update(member for member in self.members if breakers.is_open(member))

    def following(self, step: Ask, breakers: Breakers) -> tuple[Ask, list[tuple[int, Message]]]:
        """Return a step like this one, and its requests: a list that grows with further ones."""
        asked = list(step.questions)
        if step.hedge is None:
            return step, asked
        at, right = step.hedge

        def hedge(answers: Sequence[Message | None]) -> tuple[Questions, float]:
            more, again_at = right(answers)
            self.look(breakers)
            asked.extend(more)
            return more, again_at

        return attrs.evolve(step, hedge=(at, hedge)), asked

    def take(self, asked: list[tuple[int, Message]], answers: list[Message | None]) -> None:
        """Record the answers to the requests of one step."""
        for (peer, message), answer in zip(asked, answers, strict=True):
            if not isinstance(message, Lookup):
                continue
            if not isinstance(answer, Located):
                continue
            for key in split_keys(message.keys):
                (self.behind if answer.behind else self.final)[key].add(peer)

    def take_look(self, step: ReadTable, looked: Looked | None) -> None:
        """Record the result of a table: it is its node's answer."""
        if looked is None or not looked.is_final:
            return
        for key in split_keys(step.keys):
            self.final[key].add(step.peer)


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
        truth: Truth,
        trace: Trace,
        tenant: int = 0,
    ) -> None:
        """Write through the node that listens at `home`; tenant: the index of its namespace."""
        self.place = place
        self.home = home
        self.config = config
        self.identity = new_client_id(rng)
        self.lock = lock_name(self.identity)
        self.fabrics = fabrics
        self.breakers = Breakers()
        self.tenant = tenant
        self.namespace = Namespace(name=TENANTS[tenant] if config.quotas else "sims")
        self.cache = LocationCache(entries_max=config.location_cache_entries)
        self.tables = SimTables(
            place,
            linked,
            random.Random(f"look/{self.identity}"),
            self.identity,
            may_stop=lambda: network.faults_on,
            ring=lambda: self.tie.cluster.ring,
            truth=truth,
        )
        costs = ReadCosts(salt=self.identity, clock=place.now)
        locator = Locator(
            cache=self.cache,
            breakers=self.breakers,
            clock=place.now,
            cost_of=costs.cost_of,
            tables=self.tables.nodes,
        )
        self.reader = Reader(
            locator=locator,
            cache=self.cache,
            verify=config.verify,
            space=self.namespace.space_tag(),
            clock=place.now,
            mirrorer=self._mirrorer() if config.mirror_pulls != OFF else None,
            costs=costs,
        )
        self.writer = Writer(
            cache=self.cache,
            breakers=self.breakers,
            verify=config.verify,
            namespace_tag=self.namespace.tag(),
            clock=place.now,
            portion_bytes=fabrics.options.portion_pages * max(fabrics.options.lengths),
        )
        self.tie: Tie[NodeMemory] = Tie(
            url=home,
            config=config,
            boot_id=place.host,
            breakers=self.breakers,
            touches=self.reader.touches,
            report=None,
            clock=place.now,
            open_memory=lambda member: linked(member.incarnation),
            on_attached=self._came,
            on_rejected=self._rejected,
            on_view=self._view_came,
        )
        self.asker = SimAsker(
            identity=self.identity,
            place=place,
            network=network,
            hello_for=self._hello,
            url_of=self._address_of,
            breakers=self.breakers,
            on_refused=self._refused,
            on_unasked=self.tie.take_unasked,
            nursery=self.nursery,
        )
        self.scope = trio.CancelScope()
        self._buffers = buffers
        self._network = network
        self._rng = rng
        self._log = SimLog(trace, place.name)
        self._look = trio.Event()
        self._began = self._ended = 0
        self._beat_over = trio.Event()
        self._nursery: trio.Nursery | None = None

    @property
    def attached(self) -> Attached[NodeMemory] | None:
        """The home incarnation to which the client writes."""
        return self.tie.attached

    @property
    def cluster(self) -> Cluster:
        """The client's view of the cluster."""
        return self.tie.cluster

    def mirror_home(self) -> MirrorHome | None:
        """Return where pages of other hosts may be mirrored now."""
        attached = self.tie.attached
        if attached is None or self.reader.mirrorer is None:
            return None
        return MirrorHome(attached.incarnation, attached.reservations)

    def _mirrorer(self) -> Mirrorer:
        return Mirrorer(
            pulls=self.config.mirror_pulls,
            cache=self.cache,
            breakers=self.breakers,
            namespace_tag=self.namespace.tag(),
            clock=self.place.now,
        )

    # --- lifetime ---------------------------------------------------------------------------------

    async def run(self, work: Callable[[SimClient], Any]) -> None:
        """Maintain the home tie, and do `work`, until the process ends."""
        with self.scope:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._look_after_home)
                nursery.start_soon(work, self)

    def nursery(self) -> trio.Nursery:
        """Return the nursery of this process's own tasks."""
        assert self._nursery is not None
        return self._nursery

    def look_now(self) -> None:
        """Start a beat now: a call has found that the home node is gone."""
        self._look.set()

    # --- the driver -------------------------------------------------------------------------------

    async def drive(
        self,
        path: Generator[Step, Any, Result],
        home: NodeMemory | None,
        record: Answers | None = None,
    ) -> Result:
        """Run a path to its end; home: the memory in which its pages are placed.

        record: records the Lookups of the path, and their answers.
        """
        answer: Any = None
        talk = self.asker.talk()
        try:
            while True:
                await self.place.awake()
                try:
                    step = path.send(answer)
                except StopIteration as end:
                    if record is not None:
                        record.look(self.breakers)
                    result: Result = end.value
                    return result
                if record is not None:
                    record.look(self.breakers)
                asked: list[tuple[int, Message]] = []
                if record is not None and isinstance(step, Ask):
                    step, asked = record.following(step, self.breakers)
                if isinstance(step, Submit):
                    answer = talk.send(step.peer, step.message)
                elif isinstance(step, Collect):
                    answer = await talk.collect(step.number, step.until)
                else:
                    answer = await self._do(step, home)
                if record is not None and isinstance(step, Ask):
                    record.take(asked, answer)
                if record is not None and isinstance(step, ReadTable):
                    record.take_look(step, answer)
        finally:
            talk.end()
            path.close()

    async def _do(self, step: Step, home: NodeMemory | None) -> Any:
        if isinstance(step, Ask):
            return await self.asker.ask(step.questions, step.until, step.enough, step.hedge)
        if isinstance(step, ReadTable):
            return await self.tables.look(step)
        if isinstance(step, Post):
            return self.asker.post(step.messages)
        if isinstance(step, Drain):
            return self.asker.drain(step.peer)
        if isinstance(step, Fetch):
            return await self._fetch(step)
        if isinstance(step, PlaceStep):
            return await self._place(step, home)
        if isinstance(step, Greet):
            return await self.asker.greet(step.url, step.until)
        if isinstance(step, Renew):
            return await self._renew(step.until)
        assert isinstance(step, Checksum), step
        return checksums_of(step.runs, step.pages, self._buffers)

    async def _renew(self, until: float) -> Cluster:
        """Request the view, like `client.home`."""
        wanted = self._began + 1
        self._look.set()
        with trio.move_on_after(max(0.0, self.place.world(until) - trio.current_time())):
            while self._ended < wanted:
                await self._beat_over.wait()
        await self.place.awake()
        return self.tie.cluster

    async def _fetch(self, step: Fetch) -> list[Fetched]:
        answers: list[Fetched] = [Fetched(unread_seals(len(r.offsets)), "") for r in step.reads]

        async def read_one(place: int, read: PeerRead) -> None:
            answers[place] = await self._read(read, step.until)

        async with trio.open_nursery() as nursery:
            for place, read in enumerate(step.reads):
                nursery.start_soon(read_one, place, read)
        return answers

    async def _read(self, read: PeerRead, until: float) -> Fetched:
        holder = read.member.incarnation
        if not self.breakers.begin_read(holder, self.place.now()):
            return Fetched(unread_seals(len(read.offsets)), PEER_UNREACHABLE)
        fetched = await self.fabrics.read(read, self.place.world(until))
        self.breakers.end_read(holder, fetched.failure, self.place.now())
        return fetched

    async def _place(self, step: PlaceStep, home: NodeMemory | None) -> int:
        if home is None:
            return 0
        lengths = step.runs.lengths
        for page in range(len(step.runs)):
            offset = int(step.offsets[page])
            takes_time = self.fabrics.takes_time()
            for begin, end in chunks(int(lengths[page]), self.fabrics.options.steps_a_page):
                if self.place.now() >= step.until:
                    if READS_SOURCE_LATE in planted:
                        self.nursery().start_soon(self._copy, step, page, begin, end, home)
                    return page
                if takes_time:
                    await self._copy(step, page, begin, end, home)
                else:
                    self._copy_now(step, page, begin, end, home)
            self._log.debug("page.placed", offset=offset)
        return len(step.runs)

    async def _copy(
        self, step: PlaceStep, page: int, begin: int, end: int, home: NodeMemory
    ) -> None:
        """Copy one part of a page into its slot; the process may be paused before."""
        await trio.sleep(self.fabrics.step_s(self.place.world(step.until)))
        if self._rng.random() < self.fabrics.options.stop_in_copy and self._network.faults_on:
            self._log.info("copy.stopped")
            self.place.pause(trio.current_time(), self._rng.uniform(0.2, COPY_STOPPED_MAX_S))
        await self.place.awake()
        self._copy_now(step, page, begin, end, home)

    def _copy_now(self, step: PlaceStep, page: int, begin: int, end: int, home: NodeMemory) -> None:
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
            self._began += 1
            is_well = await self.drive(self.tie.beat(), None)
            self._ended = self._began
            over, self._beat_over = self._beat_over, trio.Event()
            over.set()
            with trio.move_on_after((BEAT_S if is_well else LOST_BEAT_S) / self.place.rate):
                await self._look.wait()
            self._look = trio.Event()
            await self.place.awake()

    def _came(self, attached: Attached[NodeMemory], _: Attached[NodeMemory] | None) -> None:
        self._log.info("home.attached", node=f"{attached.incarnation:016x}")

    def _rejected(self, error: PeerCacheError) -> None:
        # All settings of a run are valid.
        raise Violation("refused", f"{self.place.name}: {error}")

    def _view_came(self, before: Cluster, cluster: Cluster) -> None:
        alive = set(cluster.members)
        self.breakers.forget(alive)
        self.asker.forget(alive)
        for gone in before.members:
            if gone not in alive:
                self.fabrics.forget(gone)
        self.tables.follow(cluster.members.values())

    def _refused(self, peer: int, refused: Refused) -> None:
        if refused.reason == "protocol":
            raise Violation("refused", f"{self.place.name}: {refused.detail}")
        self._log.warning("client.refused", peer=f"{peer:016x}", reason=refused.reason)

    def _address_of(self, peer: int) -> str | None:
        if self.tie.is_home(peer):
            return self.home
        member = self.cluster.members.get(peer)
        return member.control if member is not None else None

    def _hello(self, url: str) -> Hello:
        is_home = url == self.home
        return Hello(
            request=0,
            wire_oldest=WIRE_VERSION_OLDEST,
            wire_newest=WIRE_VERSION,
            cluster=self.config.cluster,
            is_node=False,
            granule=self.config.granule,
            name="",
            nonce=b"",
            namespace=self.namespace.name,
            geometry=self.namespace.geometry,
            lock=self.lock if is_home else "",
            secret=secret_of(self.lock) if is_home else b"",
        )


def checksums_of(runs: PageRuns, pages: npt.NDArray[np.intp], buffers: Buffers) -> U64:
    """Return the same as `client.bridge.checksums_of`, for simulated addresses."""
    digests = np.empty(len(pages), np.uint64)
    for place, page in enumerate(pages.tolist()):
        digest = xxhash.xxh3_64()
        for run in range(int(runs.starts[page]), int(runs.starts[page + 1])):
            digest.update(buffers.read(int(runs.addresses[run]), int(runs.sizes[run])).tobytes())
        digests[place] = digest.intdigest() or 1
    return digests
