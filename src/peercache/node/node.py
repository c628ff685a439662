"""The node: creates, connects and closes actors, memory, sockets and servers.

Where to look: a page's bytes are in `memory.published`, its record in the directory shards
(`actors.directory`) of its owners; `actors.pool` decides about slots, `switchboard` routes the
messages.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import final

import attrs
import trio

from peercache.actors.effects import (
    Effect,
    LocalEffect,
    NotifyDisk,
    NotifyPlacement,
    Pull,
    StoreWords,
)
from peercache.actors.mailboxes import AddressesFound, DiskMessage, PoolGrew, PullDone
from peercache.actors.origin import Origin
from peercache.actors.ports import RdmaAbsent, RdmaEffect
from peercache.actors.runtime import SELF
from peercache.config.entries import heads_of, sources_of
from peercache.config.quantities import format_address
from peercache.config.settings import Config
from peercache.discovery.finder import Finder, source_of
from peercache.fabric.tcp.admission import DataAdmission
from peercache.fabric.tcp.server import serve_pages
from peercache.http.pages import Health
from peercache.manager.gpu_blocks import GpuBlocks, IndexParts
from peercache.memory.client_lock import SECRET_BYTES, LockProbe, remove_dead_locks, remove_folder
from peercache.memory.kernel import serving_at
from peercache.memory.layout import boot_id
from peercache.memory.published import PublishedSegment, TableFile
from peercache.model.ids import incarnation_of, name_of, new_nonce
from peercache.model.member import ALIVE, Member
from peercache.model.process import DescriptorShares, descriptors_max
from peercache.model.status import encoded
from peercache.model.view import is_live
from peercache.net.peers import ControlTls, Gate
from peercache.net.sockets import Listener
from peercache.node import addresses
from peercache.node.actors import NodeActors
from peercache.node.addresses import RESOLVE_S, Advertising, Reach, resolved
from peercache.node.admission import Admission
from peercache.node.disk import EMBEDDED_S, DiskTroubles, NodeDisk, disk_settings_unused, flush_disk
from peercache.node.drain import Drainer, Puller
from peercache.node.hints import NodeHints
from peercache.node.housekeeping import Housekeeping, OwnersWatch, keep
from peercache.node.memory import populate, publish, table_file
from peercache.node.questions import Gathering, MemberBroker, Overlaps, Scans
from peercache.node.revocations import RevocationSpread, message_of
from peercache.node.status import NodeStatus
from peercache.node.switchboard import Envelopes, Inbound, Links, Switchboard, links_that_fit
from peercache.node.web import serve_web
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics, absorb
from peercache.rdma.serving import DeviceQueuePairs
from peercache.trust.contexts import EtcdFiles
from peercache.trust.files import LOOK_S, LiveTls, with_cluster
from peercache.trust.rights import spaces_of
from peercache.trust.sharing import Sharing
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import RequestKeys, RequestOverlap
from peercache.wire.messages.membership import (
    CancelDrain,
    DrainNode,
    ReportDrainState,
    ReportStatus,
    RequestCluster,
    RequestDrainState,
    RequestStatus,
)
from peercache.wire.messages.pool import Demote, Promote, Retain
from peercache.wire.messages.session import Counted, ReportRevocations, ReportStats, RequestStats


@attrs.frozen
class Ready:
    """The addresses of a serving node. home: ipc:// or inproc://; http: HOST:PORT, "" if off."""

    incarnation: int
    control: str
    data: str
    home: str
    http: str
    local_secret: bytes = attrs.field(repr=False)

    def line(self) -> dict[str, str | None]:
        """Return the ready line, as the node prints it."""
        return {
            "event": "node.ready",
            "node": name_of(self.incarnation),
            "control": self.control,
            "data": self.data,
            "home": self.home,
            "http": self.http or None,
        }

    def sockets(self) -> list[int | str]:
        """Return the local addresses of the node's sockets: tcp ports, and a path."""
        ports = [
            int(each.rpartition(":")[2]) for each in (self.control, self.data, self.http) if each
        ]
        return [*ports, self.home.removeprefix("ipc://")]


GOODBYE_S = 0.5
"""How long a graceful stop may take to notify the others."""


@final
class Node:
    """One node of a cluster. `run` it on a trio loop; it serves until cancelled or stopped."""

    def __init__(
        self,
        config: Config,
        *,
        metrics: Metrics | None = None,
        in_process: bool,
        before: Ready | None = None,
    ) -> None:
        """Serve `config`; with `in_process` only clients of this process.

        before: the `Ready` of the node that this one replaces, for the clients of this process.
        """
        self.tls = LiveTls.open(config, is_node=True, log=get_logger())
        files = None if self.tls is None else self.tls.files
        self.config = config = with_cluster(config, files)
        self.metrics = metrics or Metrics()
        self._in_process, self._before = in_process, before
        self._local_secret = before.local_secret if before else secrets.token_bytes(SECRET_BYTES)
        self._rng = random.SystemRandom()
        self._nonce = new_nonce(self._rng)
        self._name = "" if files is None else files.identity.name
        self.incarnation = incarnation_of(config.cluster, self._name, self._nonce)
        self._control_tls = None if files is None else ControlTls(files)
        self.sharing = Sharing.of_config(config)
        self.log = get_logger(node=name_of(self.incarnation))
        self._stopping = trio.Event()
        self._cut_short = trio.Event()
        self.stopped = trio.Event()
        self._admission: Admission | None = None
        self._home = ""
        self._disk: NodeDisk | None = None
        self._table_file: TableFile | None = None
        self._puller: Puller | None = None
        self._queue_pairs: DeviceQueuePairs | None = None
        self._revocations: RevocationSpread | None = None
        self._authorities_dropped = 0

    def stop(self) -> None:
        """Begin a graceful leave: `run` notifies the others and returns. Call on the node's loop.

        A second call ends the wait for the disk.
        """
        if self._stopping.is_set():
            self._cut_short.set()
        self._stopping.set()

    async def run(self, *, task_status: trio.TaskStatus[Ready] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until stopped or cancelled; pass `Ready` to `task_status.started`."""
        token = trio.lowlevel.current_trio_token()

        def pipe_ended(pipe: int) -> None:
            try:
                token.run_sync_soon(self._pipe_ended, pipe)
            except trio.RunFinishedError:
                return  # The node is gone, and its sessions with it.

        self.metrics.insecure.set(self.config.insecure)
        if self.config.insecure:
            self.log.warning("node.started_insecure", cluster=self.config.cluster)
        if idle := disk_settings_unused(self.config):
            self.log.warning("disk.not_enabled", settings=idle, remedy="disk_enabled = true")
        segment = await trio.to_thread.run_sync(
            publish, self.config, self.incarnation, self.sharing
        )
        listener = Listener(on_removed=pipe_ended, tls=self._control_tls)
        try:
            self._table_file = await trio.to_thread.run_sync(
                table_file, self.config, self.incarnation, self.sharing, self.log
            )
            async with trio.open_nursery() as nursery:
                ready = await self._start(nursery, segment, listener)
                with serving_at(ready.sockets()):
                    task_status.started(ready)
                    await self._stopping.wait()
                    await self._leave()
                nursery.cancel_scope.cancel()
        finally:
            listener.close()
            if self._admission is not None:
                self._admission.close()
            if self._home:
                remove_folder(self._home)
            if self._disk is not None:
                self._disk.close()
            if self._puller is not None:
                self._puller.close()
            segment.close()
            if self._table_file is not None:
                self._table_file.close()
            self.log.info("node.stopped")
            self.stopped.set()

    def _descriptors(self) -> float:
        """Return how many files this node may open: in an engine's process half of the limit."""
        return descriptors_max() / (2 if self._in_process else 1)

    def _shares(self) -> DescriptorShares:
        return DescriptorShares.of(self._descriptors())

    def _looks(self, crew: NodeActors) -> tuple[Callable[[], None], ...]:
        """Return the checks of this node's directory owners, of its own shard, and of its disk."""
        owners = OwnersWatch(
            crew.publisher, crew.directory.authority, crew.membership.member, self.metrics, self.log
        )
        path = self.config.disk_path
        self._disk_troubles = DiskTroubles(lambda: crew.disk.trouble, path=path, log=self.log)
        return owners.look, self._disk_troubles.look, self._follow_read_nodes

    async def _start(
        self, nursery: trio.Nursery, segment: PublishedSegment, listener: Listener
    ) -> Ready:
        """Bind every address, start every part, and return once pages can be stored."""
        config = self.config
        bound_host, control_port = addresses.listen_control(listener, config)
        home = self._listen_home(listener)
        local_secret, gate = self._local_secret, Gate(self.sharing, self.tls)
        self._admission = admission = self._admit_at(home, local_secret, gate)
        known = await resolved(addresses.names_to_resolve(config, control_port), RESOLVE_S)
        host = addresses.advertised_host(config, bound_host, known)
        data_port = await self._serve_pages(nursery, segment, bound_host)
        control = format_address(host, control_port)
        rank = addresses.head_rank(config, control, known)
        me = self._member(segment, control, rank, format_address(host, data_port))
        self._crew = crew = self._make_crew(segment, me)
        reach = Reach(heads_of(config.discovery_addr), clock=trio.current_time)
        self._segment = segment
        self._open_disk()
        self._open_puller()
        self._open_queue_pairs()
        self._connect(nursery, listener, me, gate, reach)
        housekeeping = Housekeeping(
            config,
            own_address=lambda: crew.membership.me.control,
            admission=admission,
            listener=listener,
            links=self._links,
            notify=self._switchboard.deliver,
            members=self._members,
            dialled=crew.membership.dialled,
            looks=self._looks(crew),
            shares=self._shares,
            metrics=self.metrics,
            log=self.log,
        )
        self._draining = self._drainer(crew, nursery)
        self._watch(crew, housekeeping, reach, admission, nursery)
        nursery.start_soon(self._inbound.run)
        crew.start(nursery, self._switchboard.perform, self.log)
        await self._serve_rdma(nursery)
        http = await self._serve_http(nursery)
        await nursery.start(populate, segment, self._pool_grew, self.log)
        self._look_after(nursery, housekeeping, self._advertising(reach, bound_host, known))
        nursery.start_soon(self._finder(reach).run)
        if self._in_process:
            # A command prints its ready line, which most collectors put into the same log.
            self.log.info("node.ready", control=me.control, data=me.data, home=home, http=http)
        return Ready(
            incarnation=self.incarnation, control=me.control, data=me.data, home=home,
            http=http, local_secret=local_secret,
        )  # fmt: skip

    def _connect(
        self, nursery: trio.Nursery, listener: Listener, me: Member, gate: Gate, reach: Reach
    ) -> None:
        """Create the transport of control messages: connections from others, links to others."""
        config, crew = self.config, self._crew
        assert self._admission is not None, "it is made before"
        self.broker = MemberBroker(self._perform)
        envelopes = Envelopes(
            incarnation=self.incarnation, cluster=config.cluster, metrics=self.metrics, log=self.log
        )
        self._inbound = Inbound(
            envelopes=envelopes,
            listener=listener,
            admission=self._admission,
            mailboxes=crew.mailboxes,
            member_of=crew.membership.member,
            answer=self._answer,
            reach=reach,
            segment_bytes=self._segment.layout.total_bytes,
            has_tls=self.tls is not None,
            revocations=lambda: None if self.tls is None else message_of(self.tls),
            names_writers=bool(config.quotas),
        )
        self._links = Links(
            envelopes=envelopes,
            mailboxes=crew.mailboxes,
            nursery=nursery,
            me=me,
            granule=config.granule,
            gate=gate,
            reach=reach,
            on_answer=self.broker.take,
            tls=self._control_tls,
            links_max=links_that_fit(self._descriptors()),
        )
        self._switchboard = Switchboard(
            envelopes=envelopes,
            mailboxes=crew.mailboxes,
            inbound=self._inbound,
            links=self._links,
            nursery=nursery,
            gate=gate,
            member_of=crew.membership.member,
            perform_local=self._perform_local,
            take_answer=self._take_answer,
        )

    def _look_after(
        self, nursery: trio.Nursery, housekeeping: Housekeeping, advertising: Advertising
    ) -> None:
        """Start the periodic tasks of a serving node."""
        nursery.start_soon(keep, "housekeeping", housekeeping.run, self.log)
        nursery.start_soon(keep, "connections", housekeeping.bound_connections, self.log)
        nursery.start_soon(keep, "advertising", advertising.run, self.log)
        self._spread_revocations(nursery)

    def _watch(
        self,
        crew: NodeActors,
        housekeeping: Housekeeping,
        reach: Reach,
        admission: Admission,
        nursery: trio.Nursery,
    ) -> None:
        """Start to answer requests about the status of nodes, and about held pages."""
        self._status = NodeStatus(
            self.incarnation, crew, self._disk, housekeeping, reach=reach,
            disk_trouble=self._disk_troubles.current, config=self.config, tls=self.tls,
            is_leaving=self._stopping.is_set, admission=admission, metrics=self.metrics,
            draining=self._draining.status,
        )  # fmt: skip
        self.gathering = Gathering(
            own=self.incarnation,
            status=self._status.status,
            members=self._members,
            broker=self.broker,
            refusal=lambda member: "" if self.tls is None else self.tls.refusal(member.name),
        )
        self.overlaps = Overlaps(
            shard=crew.directory,
            ring=lambda: crew.ring.current,
            member_of=crew.membership.member,
            broker=self.broker,
        )
        self.scans = Scans(
            own=self.incarnation,
            pages=crew.pool.pages,
            disk=lambda: crew.disk.index,
            broker=self.broker,
        )
        self.hints = NodeHints(
            self._ask_actor, self.overlaps.overlap, self.incarnation, self.metrics
        )
        nursery.start_soon(keep, "broker", self.broker.run, self.log)

    def _make_crew(self, segment: PublishedSegment, me: Member) -> NodeActors:
        crew = NodeActors(
            self.config,
            me,
            page_bytes=segment.layout.page_bytes,
            rng=self._rng,
            metrics=self.metrics,
            table_file=-1 if self._table_file is None else self._table_file.file,
            spaces=lambda: spaces_of(None if self.tls is None else self.tls.files.identity),
        )
        if not crew.directory.table.is_shared:
            self.log.warning("node.table_private", shm_dir=self.config.shm_dir)
        return crew

    def _advertising(
        self, reach: Reach, bound_host: str, known: dict[str, set[str]]
    ) -> Advertising:
        return Advertising(
            config=self.config,
            membership=self._crew.membership,
            reach=reach,
            is_fixed=addresses.is_host_fixed(self.config, bound_host),
            perform=self._switchboard.perform,
            greet=self._links.greet_again,
            log=self.log,
            known=known,
            tls=self.tls,
        )

    def _finder(self, reach: Reach) -> Finder:
        """Return the finder of the sources of addresses; raise ConfigError for a wrong one."""

        def on_addresses(addresses: tuple[str, ...]) -> None:
            reach.follow(addresses)
            self._crew.mailboxes.membership.put(SELF, AddressesFound(addresses))

        sources = [
            source_of(
                address,
                name=name_of(self.incarnation),
                own_address=lambda: self._crew.membership.me.control,
                rng=self._rng,
                etcd_tls=EtcdFiles(self.config).context,
            )
            for address in sources_of(self.config.discovery_addr)
        ]
        return Finder(
            sources, on_addresses=on_addresses, rng=self._rng, metrics=self.metrics, log=self.log
        )

    def _admit_at(self, home: str, local_secret: bytes, gate: Gate) -> Admission:
        return Admission(
            cluster=self.config.cluster,
            granule=self.config.granule,
            home=home,
            local_secret=local_secret,
            gate=gate,
            probe=lambda home, name: LockProbe(home, name, self.sharing),
            connections_max=self._shares().control,
        )

    async def _follow_certificates(self, tls: LiveTls) -> None:
        """Use new certificate files, and close connections of revoked and expired certificates."""
        while True:
            await trio.sleep(LOOK_S)
            # A network file system may hang forever; nothing else of the node must hang with it.
            tls.use(await trio.to_thread.run_sync(tls.read, abandon_on_cancel=True))
            self._switchboard.end_expired()

    def _renew_certificates(self, tls: LiveTls) -> None:
        assert self._control_tls is not None, "there are certificates"
        self._control_tls.renew(tls.files)
        self._switchboard.renew_tls()
        if tls.authorities_dropped != self._authorities_dropped:
            self._authorities_dropped = tls.authorities_dropped
            self._switchboard.connect_again()

    def _open_disk(self) -> None:
        """Start to open the disk tier, if configured."""
        if not self.config.disk_enabled:
            return

        def notify(fact: DiskMessage) -> None:
            self._switchboard.deliver(NotifyDisk(fact))

        self._disk = NodeDisk(self.config, self._segment, notify, self.log)

    def _drainer(self, crew: NodeActors, nursery: trio.Nursery) -> Drainer:
        """Return the component that drains this node on an operator's request."""
        return Drainer(
            crew.placement.giving,
            notify=lambda fact: crew.mailboxes.placement.put(SELF, fact),
            others=lambda: sum(m.state == ALIVE for m in self._members()) - 1,
            within_s=self.config.drain_s,
            leave=self.stop,
            nursery=nursery,
            log=self.log,
        )

    def _follow_read_nodes(self) -> None:
        if self._puller is not None:
            self._puller.follow({m.incarnation for m in self._members() if is_live(m)})

    def _open_puller(self) -> None:
        """Create the reader of pages that other nodes offer."""

        def notify(done: PullDone) -> None:
            self._switchboard.deliver(NotifyPlacement(done))

        self._puller = Puller(
            self.config,
            self._segment,
            tls=self.tls,
            sharing=self.sharing,
            notify=notify,
            log=self.log,
        )

    def _open_queue_pairs(self) -> None:
        """Create the adapter for the effects of the rdma actor, if the node serves rdma."""
        if not self.config.may_use_rdma:
            return
        self._queue_pairs = DeviceQueuePairs(
            self.config,
            self._segment,
            is_required=self.config.fabric == "rdma",
            notify=lambda fact: self._crew.mailboxes.rdma.put(SELF, fact),
            rng=self._rng,
            metrics=self.metrics,
            log=self.log,
        )

    def _perform_local(self, effect: LocalEffect) -> None:
        """Perform effects on the memory, the disk and the devices of this node."""
        if isinstance(effect, StoreWords):
            self._segment.store_words(effect.indices, effect.values, effect.seals)
        elif isinstance(effect, Pull):
            assert self._puller is not None, "a node that reads from no other takes no pages"
            self._puller.perform(effect)
        elif isinstance(effect, RdmaEffect):
            assert self._queue_pairs is not None, "the rdma actor of a node without devices"
            self._queue_pairs.perform(effect)
        else:
            assert self._disk is not None, "a disk tier that was never opened reports nothing"
            self._disk.perform(effect)

    def _member(self, segment: PublishedSegment, control: str, rank: int, data: str) -> Member:
        return Member(
            incarnation=self.incarnation,
            counter=1,
            state=ALIVE,
            head_rank=rank,
            host_name=self.config.host(),
            control=control,
            data=data,
            boot_id=boot_id(),
            segment=str(segment.path),
            name=self._name,
            nonce=self._nonce,
        )

    def _listen_home(self, listener: Listener) -> str:
        """Listen for the local clients; return the address."""
        if self._in_process:
            inproc = f"inproc://peercache-{name_of(self.incarnation)}"
            home = self._before.home if self._before else inproc
            listener.listen_local(home)
            return home
        home = addresses.listen_home(listener, self.config, self.sharing)
        self._home = home
        remove_dead_locks(home, self.sharing)
        return home

    async def _serve_pages(
        self, nursery: trio.Nursery, segment: PublishedSegment, host: str
    ) -> int:
        """Start the tcp fabric's server; return its port."""
        config, shares = self.config, self._shares()
        listeners = await addresses.listen_data(host, config, self.log)
        admission = DataAdmission(
            cluster=config.cluster,
            granule=config.granule,
            incarnation=self.incarnation,
            tls=self.tls,
            sharing=self.sharing,
        )
        await nursery.start(
            lambda task_status: serve_pages(
                listeners,
                segment,
                admission=admission,
                metrics=self.metrics,
                connections_max=shares.data,
                newcomers_max=shares.newcomers,
                threads=config.tcp_serving_threads,
                task_status=task_status,
            )
        )
        return int(listeners[0].socket.getsockname()[1])

    def _spread_revocations(self, nursery: trio.Nursery) -> None:
        """Start to watch certificate files, and to notify other nodes of revocations."""
        if self.tls is None:
            return
        self._revocations = RevocationSpread(
            self.tls,
            own=self.incarnation,
            members=self._members,
            perform=self._switchboard.perform,
            notify_clients=self._inbound.notify_clients,
            rng=self._rng,
            metrics=self.metrics,
        )
        nursery.start_soon(keep, "revocations", self._revocations.run, self.log)
        self.tls.on_change(self._renew_certificates)
        follow = partial(self._follow_certificates, self.tls)
        nursery.start_soon(keep, "certificates", follow, self.log)

    async def _serve_rdma(self, nursery: trio.Nursery) -> None:
        """Start to look for RDMA devices; with `fabric = rdma`, wait for the result."""
        if self._queue_pairs is None:
            why = f"this node has fabric = {self.config.fabric}"
            if self.config.fabric == "auto":
                why = "this node has TLS, and not rdma_clear_text = true"
            self._crew.mailboxes.rdma.put(SELF, RdmaAbsent(why))
        elif self.config.fabric == "rdma":
            await nursery.start(self._queue_pairs.run)
        else:
            nursery.start_soon(self._queue_pairs.run)

    async def _serve_http(self, nursery: trio.Nursery) -> str:
        address = self.config.http_address(in_process=self._in_process)
        if address is None:
            return ""
        return await serve_web(
            self.config,
            nursery,
            address,
            self._shares().http,
            sharing=self.sharing,
            tls=self.tls,
            metrics=self.metrics,
            log=self.log,
            health=self.health,
            own=lambda: self._crew.membership.me.control,
            gathering=self.gathering,
            index=IndexParts(
                self.overlaps.overlap,
                self._named,
                GpuBlocks(engine.name for engine in self.config.engine_events),
                self.hints.hint,
            ),
        )

    def _members(self) -> tuple[Member, ...]:
        return self._crew.membership.view.members()

    def _named(self, incarnation: int) -> str:
        member = self._crew.membership.member(incarnation)
        return "" if member is None else member.control

    def _take_answer(self, answer: Message) -> None:
        self.hints.take(answer)

    def _ask_actor(self, sender: Origin, question: Retain | Demote | Promote) -> None:
        """Have an actor of this node answer the node itself."""
        boxes = self._crew.mailboxes
        if isinstance(question, Promote):
            boxes.promote.put(sender, question)
        else:
            boxes.removal.put(sender, question)

    def _pool_grew(self, usable_bytes: int) -> None:
        self._crew.mailboxes.pool.put(SELF, PoolGrew(usable_bytes))
        self._crew.mailboxes.rdma.put(SELF, PoolGrew(usable_bytes))

    def _pipe_ended(self, pipe: int) -> None:
        if self._admission is not None:
            self._admission.end(pipe)

    async def _leave(self) -> None:
        self.log.info("node.leave_started")
        await self._flush()
        for effect in self._crew.membership.leave(trio.current_time()):
            self._switchboard.perform(effect)
        await self._links.flush(GOODBYE_S)

    async def _flush(self) -> None:
        """Write pages that are only in memory to disk, while others still read from this node."""
        within_s = self.config.disk_flush_s
        if self._in_process:
            within_s = min(within_s, EMBEDDED_S)
        if self._disk is None or not within_s:
            return
        await flush_disk(
            self._disk,
            self._crew.disk,
            lambda wanted: self._crew.mailboxes.disk.put(SELF, wanted),
            within_s=within_s,
            cut_short=self._cut_short,
            log=self.log,
        )

    def _perform(self, effect: Effect) -> None:
        self._switchboard.perform(effect)

    def health(self) -> Health:
        """Return whether this node serves."""
        return self._status.health()

    def figures(self) -> dict[str, int | float | str]:
        """Return named figures about this node."""
        return self._status.figures()

    def _answer(self, sender: Origin, message: Message) -> Message | None:
        """Answer a message for the node itself."""
        if isinstance(message, RequestStats):
            return ReportStats(message.request, self.figures())
        if isinstance(message, RequestStatus):
            return ReportStatus(
                message.request, encoded(self._status.status(detail=message.detail))
            )
        if isinstance(message, RequestCluster):
            return self.gathering.ask(sender, message)
        if isinstance(message, RequestOverlap):
            return self.overlaps.ask(sender, message)
        if isinstance(message, RequestKeys):
            return self.scans.ask(sender, message)
        if isinstance(message, (DrainNode, CancelDrain, RequestDrainState)):
            return ReportDrainState(message.request, self._draining.answer(message))
        if isinstance(message, ReportRevocations) and self._revocations is not None:
            self._revocations.take(message)
        if isinstance(message, Counted):
            self._status.workers.note(sender.identity, message, time.monotonic())
            ignored = absorb(self.metrics, message, name_of(sender.identity))
            self.metrics.messages_dropped.labels("malformed").inc(ignored)
        return None
