"""A node of a run: production actors, switchboard and admission on simulated sockets and memory."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

import attrs
import numpy as np
import trio

from peercache.actors.directory.holdings import SUMMARY_AGE_MAX_S
from peercache.actors.effects import (
    Effect,
    LocalEffect,
    NotifyDirectory,
    NotifyPublisher,
    Pull,
    StoreWords,
)
from peercache.actors.mailboxes import (
    TAKER,
    ClientGone,
    DrainBegan,
    DrainCancelled,
    PagesForgotten,
    PoolGrew,
    PullDone,
    RecordsChanged,
)
from peercache.actors.origin import Origin
from peercache.actors.placement.offers import (
    HANDED_OVER,
)
from peercache.actors.ports import RdmaEffect
from peercache.actors.runtime import SELF, Mailbox, run_actor
from peercache.config.entries import parse_quotas
from peercache.config.settings import Config
from peercache.memory.client_lock import LockProbe
from peercache.model.hash_ring import HashRing
from peercache.model.ids import incarnation_of, new_nonce
from peercache.model.keys import split_keys
from peercache.model.member import ALIVE, SUSPECT, Member
from peercache.model.reads import Fetched, PeerRead
from peercache.model.records import ON_DISK, keys_of
from peercache.net.link import Link
from peercache.net.peers import ControlTls, Gate, Peer
from peercache.net.sockets import Listener
from peercache.node.actors import NodeActors
from peercache.node.addresses import Reach
from peercache.node.admission import Admission
from peercache.node.switchboard import Envelopes, Inbound, Links, Switchboard
from peercache.observability.metrics import Metrics
from peercache.paths.takeover import arrived, reading_of
from peercache.trust.sharing import Sharing
from peercache.wire.messages.declared import Message
from peercache.wire.messages.membership import ReportDrainState, RequestDrainState
from sims.disk import SimDisk
from sims.link import SimLink
from sims.locks import Locks
from sims.memory import Buffers, NodeMemory, Truth
from sims.network import HOME, Network
from sims.places import Place
from sims.store import Image, Store
from sims.swarm import GRANULE, Options
from sims.tables import table_file
from sims.trace import SimLog, Trace, Violation
from sims.watch import LATE_MAX_S, BusyMailbox, WatchedActor

CLUSTER = "sims"

HOUSEKEEPING_S = 1.0
"""As `node.ready`'s."""

POPULATED_S = 0.2
"""When the second half of the memory can be used."""

GOODBYE_S = 0.5

DRAIN_S = 6.0
DRAIN_LOOK_S = 0.1

FORMER_S = SUMMARY_AGE_MAX_S + 2.0
"""Records are withdrawn from former owners in time for the second phase to check it."""


class Reads(Protocol):
    """The reads of a node from others: `sims.fabric.Fabrics`."""

    buffers: Buffers

    async def read(self, read: PeerRead, until: float) -> Fetched:
        """Fill the destinations by `until`."""


class SimNode:
    """One incarnation of a node."""

    def __init__(
        self,
        *,
        place: Place,
        address: str,
        heads: tuple[str, ...],
        options: Options,
        rng: random.Random,
        network: Network,
        truth: Truth,
        locks: Locks,
        trace: Trace,
        image: Image,
        disk_rng: random.Random,
        reads: Reads,
    ) -> None:
        """Create the incarnation; it does nothing before `run`.

        image: the content of its disk; reads: how it reads pages that other nodes hand over.
        """
        self._reads = reads
        self.place = place
        self.address = address
        self.home = f"{HOME}{place.name}"
        self.config = config_of(options, heads)
        nonce = new_nonce(rng)
        self.incarnation = incarnation_of(self.config.cluster, "", nonce)
        self.is_leaving = False
        self.metrics = Metrics()
        self._options = options
        self._truth = truth
        truth.living.add(self.incarnation)
        truth.places[self.incarnation] = place
        self._rng = rng
        self._network = network
        self._trace = trace
        self._scope = trio.CancelScope()
        # A separate stream, as for how long an actor is busy.
        self._late_rng = random.Random(f"late/{self.incarnation}")
        granules = options.pool_granules
        self.memory = NodeMemory(
            self.incarnation, host=place.host, granules=granules, granule=GRANULE, truth=truth
        )
        rank = heads.index(address) if address in heads else 255
        self.me = Member(
            incarnation=self.incarnation,
            counter=1,
            state=ALIVE,
            head_rank=rank,
            host_name=place.host,
            control=address,
            data=address,
            boot_id=place.host,
            segment=f"/{self.incarnation:016x}",
            nonce=nonce,
        )
        file = table_file(place.name)
        self.crew = NodeActors(
            self.config,
            self.me,
            page_bytes=granules * GRANULE,
            rng=rng,
            metrics=self.metrics,
            table_file=file,
        )
        self.crew.pool.mirrors.lately_s = options.mirror_lately_s
        os.close(file)
        self.memory.table = self.crew.directory.table
        # Few ticks are late here, and ticks are most of a quiet run's events.
        self.crew.directory.clock, self.crew.directory.tick_s = trio.current_time, 0.07
        # Longer than a shard trusts a holder from which it receives nothing.
        self.crew.publisher.former_s = FORMER_S
        if options.ring_s:
            self.crew.ring.tokens_at_once_max = 0
        self.memory.may_write = self._has_reserved
        for mailbox in self.crew.mailboxes.named().values():
            mailbox.messages_max = options.mailbox_messages
        self.gate = Gate(Sharing(0, frozenset({0}), insecure=True), None)
        self.admission = Admission(
            cluster=self.config.cluster,
            granule=GRANULE,
            home=self.home,
            local_secret=b"none",  # No client of a run shares a process with a node.
            gate=self.gate,
            probe=cast("Callable[[str, str], LockProbe]", locks.probe),
        )
        self.disk = SimDisk(
            image=image,
            store=Store(image, self.memory, options.steps_a_page),
            place=place,
            options=options,
            rng=disk_rng,
            network=network,
            trace=trace,
            notify=lambda fact: self.crew.mailboxes.disk.put(SELF, fact),
        )
        self.watched = {
            named.name: WatchedActor(
                named.name,
                named.actor,
                named.mailbox,
                place,
                trace,
                truth,
                self._check_sent,
                self._next_late_s,
            )
            for named in self.crew.actors
        }

    async def run(self) -> None:
        """Serve until crashed or left."""
        with self._scope:
            self.listener = self._network.listen(
                self.place, (self.address, self.home), self._pipe_ended
            )
            try:
                async with trio.open_nursery() as nursery:
                    await self._start(nursery)
                    await self._keep_house()
            finally:
                self._ended()

    def crash(self) -> None:
        """Die as by SIGKILL; the segment's file stays."""
        self._trace.line("fault", "crash", self.place.name)
        self._ended()
        self._scope.cancel()

    async def leave(self) -> bool:
        """Stop gracefully; False if it was killed while it sent goodbyes."""
        self._trace.line("fault", "leave", self.place.name)
        self.is_leaving = True
        for effect in self.crew.membership.leave(self.place.local(trio.current_time())):
            self.perform(effect)
        await trio.sleep(GOODBYE_S)
        if not self.place.alive:
            return False
        self.memory.is_linked = False
        self._ended()
        self._scope.cancel()
        return True

    async def drained(self, goes_on: Callable[[], bool]) -> bool:
        """Hand the pages over, as the node's `Draining` does; False if that was cancelled."""
        self._trace.line("fault", "drain", self.place.name)
        giving, mailbox = self.crew.placement.giving, self.crew.mailboxes.placement
        mailbox.put(SELF, DrainBegan(self.place.local(trio.current_time()) + DRAIN_S))
        while self.place.alive and giving.state != HANDED_OVER:
            await trio.sleep(DRAIN_LOOK_S)
            if not goes_on():
                mailbox.put(SELF, DrainCancelled())
                return False
        self._trace.line("drained", self.place.name, *attrs.astuple(giving.progress))
        return self.place.alive

    async def _pull(self, pull: Pull) -> None:
        """Read pages of another node into slots, as the thread of `node.drain` does."""
        buffers, lengths = self._reads.buffers, pull.records["length"].tolist()
        regions = [buffers.take(length, self.place.name) for length in lengths]
        addresses = np.array([region.address for region in regions], np.uint64)
        until = trio.current_time() + pull.within_s
        fetched = await self._reads.read(reading_of(pull.member, pull.records, addresses), until)
        for region, offset in zip(regions, pull.offsets.tolist(), strict=True):
            self.memory.write(offset, offset, region.data, TAKER.identity)
            buffers.close(region)
        done = PullDone(pull.job, arrived(pull.records, pull.namespace, fetched))
        self.crew.mailboxes.placement.put(SELF, done)

    async def _start(self, nursery: trio.Nursery) -> None:
        # A separate stream: how long an actor is busy does not affect other draws.
        rng = random.Random(f"busy/{self.incarnation}")
        self._nursery = nursery
        boxes, member_of = self.crew.mailboxes, self.crew.membership.member
        reach = Reach((), clock=trio.current_time)
        envelopes = Envelopes(
            incarnation=self.incarnation,
            cluster=self.config.cluster,
            metrics=self.metrics,
            log=SimLog(self._trace, self.place.name),
        )
        inbound = Inbound(
            envelopes=envelopes,
            listener=cast("Listener", self.listener),
            admission=self.admission,
            mailboxes=boxes,
            member_of=member_of,
            answer=self._answer,
            reach=reach,
            segment_bytes=self.memory.pages.nbytes,
        )
        self.links = Links(
            envelopes=envelopes,
            mailboxes=boxes,
            nursery=nursery,
            me=self.me,
            granule=GRANULE,
            gate=self.gate,
            reach=reach,
            on_answer=lambda *_: None,
            open_link=self._open_link,
            links_max=self._options.links_max,
        )
        self.switchboard = Switchboard(
            envelopes=envelopes,
            mailboxes=boxes,
            inbound=inbound,
            links=self.links,
            nursery=nursery,
            gate=self.gate,
            member_of=member_of,
            perform_local=self._perform_local,
            in_thread=self._in_thread,
        )
        nursery.start_soon(inbound.run)
        for watched in self.watched.values():
            busy = BusyMailbox(
                watched.mailbox, watched.kept_until, self._options.busy, self._network, rng
            )
            report = partial(self.crew.tick_in_past, envelopes.log, watched.name)
            nursery.start_soon(run_actor, watched, cast("Mailbox[Any]", busy), self.perform, report)
        for effect in self.crew.membership.start(self.place.local(trio.current_time())):
            self.perform(effect)
        nursery.start_soon(self._populate)
        if self.config.disk_enabled:
            nursery.start_soon(self.disk.run)

    def _next_late_s(self) -> float:
        rng = self._late_rng
        if not self._network.faults_on or rng.random() >= self._options.late:
            return 0.0
        return rng.uniform(0.0, LATE_MAX_S)

    def _answer(self, sender: Origin, message: Message) -> Message | None:
        """Answer nodes that ask whether this one drains; no client of a run asks for figures."""
        del sender
        if isinstance(message, RequestDrainState):
            return ReportDrainState(message.request, {"state": self.crew.placement.giving.state})
        return None

    def perform(self, effect: Effect) -> None:
        """Perform an effect of an actor; records that become valid are checked first."""
        match effect:
            case NotifyDirectory(RecordsChanged(published)) if len(published):
                self.memory.published(published, trio.current_time())
        self.switchboard.perform(effect)

    def _check_sent(self, effects: list[Effect]) -> None:
        """After a step of an actor, a page is reported as ON_DISK only if it is, and is not in
        memory.

        A report that the same step withdraws again, as for a page that is evicted at once, does not
        count; nor does a page with a withdrawal in flight from the disk actor to the pool.
        """
        reported: dict[bytes, int] = {}
        for effect in effects:
            fact = effect.fact if isinstance(effect, (NotifyDirectory, NotifyPublisher)) else None
            if isinstance(fact, RecordsChanged):
                on_disk = fact.records[(fact.records["flags"] & ON_DISK) != 0]
                reported.update(zip(keys_of(on_disk), on_disk["generation"].tolist(), strict=True))
                for key, newest in zip(
                    keys_of(fact.drops), fact.drops["generation"].tolist(), strict=True
                ):
                    if reported.get(key, newest + 1) <= newest:
                        del reported[key]
        for key in reported:
            if self.crew.pool.pages.find(key) is not None:
                raise Violation(
                    "two-places", f"{key.hex()} has an ON_DISK record, and is in memory"
                )
            if not self._may_be_on_disk(key):
                raise Violation("not-on-disk", f"{key.hex()} has an ON_DISK record, and is not")

    def _may_be_on_disk(self, key: bytes) -> bool:
        """Return whether a page is on disk, or the pool is about to be notified that it is not."""
        disk = self.crew.disk
        if disk.index is not None and disk.index.find(key)[0] >= 0:
            return True
        forgotten = [
            message.keys
            for _, message, _ in self.crew.mailboxes.pool.waiting
            if isinstance(message, PagesForgotten)
        ]
        if disk.index is None:
            forgotten.append(disk._unreported)
        return any(key in split_keys(keys) for keys in forgotten)

    async def _populate(self) -> None:
        whole = self.memory.pages.nbytes
        for usable in (whole // 2, whole):
            self.crew.mailboxes.pool.put(SELF, PoolGrew(usable))
            await trio.sleep(POPULATED_S)

    async def _keep_house(self) -> None:
        while True:
            await self.place.awake()
            for client in self.admission.exited():
                self._trace.line("exited", self.place.name, f"{client:016x}")
                self.crew.mailboxes.pool.put(SELF, ClientGone(client))
            members = self.crew.membership.view.members()
            kept = {m.control for m in members if m.state in (ALIVE, SUSPECT)}
            dialled = self.crew.membership.dialled()
            always = set(self.config.discovery_addr) | dialled
            self.links.keep(kept | always, always=always)
            await trio.sleep(HOUSEKEEPING_S)

    async def _in_thread(self, job: Callable[[], HashRing]) -> HashRing:
        """Run a job of the node's thread, after a while."""
        made = job()
        await trio.sleep(self._options.ring_s)
        await self.place.awake()
        return made

    def _perform_local(self, effect: LocalEffect) -> None:
        if isinstance(effect, StoreWords):
            self.memory.store_words(effect, trio.current_time())
        elif isinstance(effect, Pull):
            self._nursery.start_soon(self._pull, effect)
        else:
            assert not isinstance(effect, RdmaEffect), "no node of a run has devices"
            self.disk.perform(effect)

    def _has_reserved(self, client: int, index: int) -> bool:
        """Return whether a client may write to a slot; a dead owner allows all."""
        known = self.crew.pool._reservations._clients.get(client)
        batches = () if known is None else reversed(known.open.values())
        is_reserved = any(
            slot is not None and slot.first == index for batch in batches for slot in batch.slots
        )
        return is_reserved or not self.place.alive

    def _pipe_ended(self, pipe: int) -> None:
        self.admission.end(pipe)

    def _open_link(
        self,
        url: str,
        *,
        accepts: Callable[[Peer], bool],  # noqa: ARG002 - no stranger listens in a run
        tls: ControlTls | None,  # noqa: ARG002 - nor does a run encrypt
        **callbacks: Any,
    ) -> Link:
        link = SimLink(
            url,
            **callbacks,
            options=self._options,
            network=self._network,
            place=self.place,
            rng=self._rng,
        )
        return cast("Link", link)

    def _ended(self) -> None:
        self._truth.living.discard(self.incarnation)
        if self.place.alive:
            self.place.alive = False
            self._network.close(self.listener)
            self._network.process_ended(self.place)


def config_of(options: Options, heads: tuple[str, ...]) -> Config:
    """Return the configuration that all nodes and clients of a run share."""
    return Config(
        cluster=CLUSTER,
        discovery_addr=heads,
        granule=GRANULE,
        pool_size=options.pool_granules * GRANULE,
        client_uncommitted_max=options.uncommitted_granules * GRANULE,
        disk_enabled=options.disk_slabs > 0,
        write_policy="on_evict" if options.disk_on_evict else "through",
        disk_queue=options.disk_queue_bytes,
        disk_promote_rate=options.pool_granules * GRANULE,
        max_masters=options.max_masters,
        directory_replicas=options.replicas,
        virtual_nodes=options.virtual_nodes,
        summary_s=options.summary_s,
        handover_s=options.handover_s,
        republish_rate=options.republish_rate,
        verify=options.verify,
        location_cache_entries=options.cache_entries,
        mirror_pulls=options.mirror_pulls,
        mirror_share=options.mirror_share,
        spill=options.spill,
        placement_min_age=options.placement_min_age_s,
        copies=options.copies,
        quotas=parse_quotas(options.quotas),
    )
