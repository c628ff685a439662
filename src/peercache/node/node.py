"""The node: actors, memory, sockets and servers, put together and taken apart.

Where to look: a page's bytes lie in `segment.published`, its record in `actors.directory` of its
owners; `actors.pool` decides about slots, `switchboard` carries the messages.
"""

from __future__ import annotations

import random
import secrets
import sys
import time
from typing import final

import attrs
import trio

from peercache.actors._actor import SELF, Mailbox, run_actor
from peercache.actors.directory import DirectoryShard
from peercache.actors.membership import Membership
from peercache.actors.pool import Pool
from peercache.actors.publisher import Publisher
from peercache.actors.ring import RingActor
from peercache.config import Config, format_address
from peercache.errors import ConfigError, PoolTooLarge
from peercache.fabric.tcp_server import Admission as DataAdmission
from peercache.fabric.tcp_server import open_listeners, serve_pages
from peercache.http.pages import Health
from peercache.http.server import serve_http
from peercache.ids import Incarnation, name_of, new_incarnation
from peercache.messages import ALIVE, DEAD, LEFT, SUSPECT, Member, Message, Stats, StatsAsked
from peercache.net.sockets import Listener
from peercache.node import addresses
from peercache.node.admission import Admission
from peercache.node.switchboard import Switchboard
from peercache.observe import Metrics, get_logger
from peercache.ports import ClientGone, Origin, PoolGrew, StateActor, StoreWords
from peercache.segment.client_lock import remove_dead_locks
from peercache.segment.layout import boot_id
from peercache.segment.leftovers import remove_leftovers
from peercache.segment.published import PublishedSegment

if sys.version_info < (3, 11):  # pragma: no cover - trio brings it there
    from exceptiongroup import BaseExceptionGroup

POPULATE_STEP_BYTES = 256 * 2**20
"""Memory populated between two looks at cancellation: about a tenth of a second."""

HOUSEKEEPING_S = 1.0
"""How soon the slots of a client that died come back; a probe is one system call a client."""

GOODBYE_S = 0.5
"""How long a graceful stop may take to tell the others."""

LATE_S = 5.0
"""A loop that has not come round for so long is not serving, whatever else is fine."""


@attrs.frozen
class Ready:
    """Where a node serves. home: ipc:// or inproc://; http: HOST:PORT, or "" where it is off."""

    incarnation: int
    control: str
    data: str
    home: str
    http: str
    local_token: str

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


@final
class Node:
    """One node of a cluster. `run` it on a trio loop; it serves until cancelled or stopped."""

    def __init__(self, config: Config, *, metrics: Metrics | None = None, in_process: bool) -> None:
        """Serve `config`; `in_process` clients are those of this very process only."""
        self.config = config
        self.metrics = metrics or Metrics()
        self._in_process = in_process
        self._rng = random.SystemRandom()
        self.incarnation = new_incarnation(self._rng)
        self.log = get_logger(node=name_of(self.incarnation))
        self._stopping = trio.Event()
        self.stopped = trio.Event()
        self._came_round = time.monotonic()

    def stop(self) -> None:
        """Begin a graceful leave: `run` tells the others and returns. Call on the node's loop."""
        self._stopping.set()

    async def run(self, *, task_status: trio.TaskStatus[Ready] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until stopped or cancelled; hand `Ready` to `task_status.started`."""
        config = self.config
        token = trio.lowlevel.current_trio_token()
        admission_box: list[Admission] = []

        def pipe_ended(pipe: int) -> None:
            try:
                token.run_sync_soon(lambda: admission_box[0].end(pipe))
            except trio.RunFinishedError:
                return

        segment = await trio.to_thread.run_sync(_publish, config, self.incarnation)
        listener = Listener(on_removed=pipe_ended)
        try:
            async with trio.open_nursery() as nursery:
                await self._serve(nursery, segment, listener, admission_box, task_status)
        finally:
            listener.close()
            if admission_box:
                admission_box[0].close()
            segment.close()
            self.log.info("node.stopped")
            self.stopped.set()

    async def _serve(
        self,
        nursery: trio.Nursery,
        segment: PublishedSegment,
        listener: Listener,
        admission_box: list[Admission],
        task_status: trio.TaskStatus[Ready],
    ) -> None:
        config = self.config
        bound_host, control_port = addresses.listen_control(listener, config)
        home, local_token = self._listen_home(listener, control_port)
        admission = Admission(
            granule=config.granule,
            credentials=config.credentials,
            home=home,
            local_token=local_token,
        )
        admission_box.append(admission)
        data_listeners = await open_listeners(bound_host, config.data_port)
        data_port: int = data_listeners[0].socket.getsockname()[1]
        host = addresses.advertised_host(config, bound_host)
        control = format_address(host, control_port)
        me = Member(
            incarnation=self.incarnation,
            counter=1,
            state=ALIVE,
            head_rank=addresses.head_rank(config, control),
            host_name=config.host(),
            control=control,
            data=format_address(host, data_port),
            boot_id=boot_id(),
            segment=str(segment.path),
        )
        self._make_actors(me, segment)
        self._switchboard = switchboard = Switchboard(
            me=me,
            cluster=config.cluster,
            admission=admission,
            granule=config.granule,
            credentials=config.credentials,
            segment_bytes=segment.layout.total_bytes,
            listener=listener,
            mailboxes=self._mailboxes,
            store_words=lambda e: _store(segment, e),
            member_of=self.membership.member,
            stats=self._stats,
            metrics=self.metrics,
            log=self.log,
        )
        await nursery.start(
            lambda task_status: serve_pages(
                data_listeners,
                _Source(segment),
                admission=DataAdmission(
                    cluster=config.cluster,
                    credentials=config.credentials,
                    granule=config.granule,
                    incarnation=self.incarnation,
                ),
                metrics=self.metrics,
                task_status=task_status,
            )
        )
        await nursery.start(switchboard.run)
        for name, actor in self._actors.items():
            nursery.start_soon(run_actor, actor, self._mailboxes[name], switchboard.perform)
        for effect in self.membership.start(trio.current_time()):
            switchboard.perform(effect)
        http = await self._serve_http(nursery, bound_host)
        first_byte = trio.Event()
        nursery.start_soon(self._populate, segment, first_byte)
        nursery.start_soon(self._keep_house, admission)
        await first_byte.wait()
        ready = Ready(
            incarnation=self.incarnation,
            control=control,
            data=me.data,
            home=home,
            http=http,
            local_token=local_token,
        )
        self.log.info("node.ready", control=control, data=me.data, home=home, http=http)
        task_status.started(ready)
        await self._stopping.wait()
        await self._leave()
        nursery.cancel_scope.cancel()

    def _listen_home(self, listener: Listener, control_port: int) -> tuple[str, str]:
        """Listen for the local clients; return the address and the token of our own process."""
        if self._in_process:
            home = f"inproc://peercache-{name_of(self.incarnation)}"
            listener.listen_local(home)
            return home, secrets.token_hex(16)
        home = addresses.listen_home(listener, self.config, control_port)
        remove_dead_locks(home)
        # Nobody shows a token here: clients of a standalone node live in other processes.
        return home, secrets.token_hex(16)

    def _make_actors(self, me: Member, segment: PublishedSegment) -> None:
        config, metrics = self.config, self.metrics
        self.membership = Membership(
            me=me,
            discovery_addr=config.discovery_addr,
            max_masters=config.max_masters,
            heartbeat_s=config.heartbeat_s,
            suspect_s=config.suspect_s,
            dead_s=config.dead_s,
            rng=self._rng,
            metrics=metrics,
        )
        self.pool = Pool(
            incarnation=self.incarnation,
            granule=config.granule,
            page_bytes=segment.layout.page_bytes,
            usable_bytes=0,
            client_uncommitted_max=config.client_uncommitted_max,
            rng=self._rng,
            metrics=metrics,
        )
        self.directory = DirectoryShard(incarnation=self.incarnation, metrics=metrics)
        self._actors: dict[str, StateActor] = {
            "membership": self.membership,
            "ring": RingActor(
                virtual_nodes=config.virtual_nodes, replicas=config.directory_replicas
            ),
            "directory": self.directory,
            "publisher": Publisher(
                incarnation=self.incarnation,
                republish_rate=config.republish_rate,
                summary_s=config.summary_s,
                rng=self._rng,
                metrics=metrics,
            ),
            "pool": self.pool,
        }
        self._mailboxes = {name: Mailbox() for name in self._actors}

    async def _serve_http(self, nursery: trio.Nursery, host: str) -> str:
        if self.config.metrics_port == 0 or (self._in_process and self.config.metrics_port == -1):
            return ""
        address: str = await nursery.start(
            lambda task_status: serve_http(
                host,
                self.config.metrics_port,
                registry=self.metrics.registry,
                health=self.health,
                task_status=task_status,
            )
        )
        return address

    async def _populate(self, segment: PublishedSegment, first_byte: trio.Event) -> None:
        """Make the page memory usable, step by step; what is ready serves already."""
        total = segment.layout.page_bytes
        done = 0
        while done < total:
            step = min(total, done + POPULATE_STEP_BYTES)
            try:
                done = await trio.to_thread.run_sync(segment.populate, step)
            except PoolTooLarge as error:
                self.log.error("pool.cut_short", usable_bytes=done, problem=str(error))
                break
            self._mailboxes["pool"].tell(SELF, PoolGrew(done))
            first_byte.set()
            self.log.info("pool.grew", usable_bytes=done, of_bytes=total)
        first_byte.set()

    async def _keep_house(self, admission: Admission) -> None:
        while True:
            for client in admission.exited():
                self.log.info("client.exited", client=name_of(client))
                self._mailboxes["pool"].tell(SELF, ClientGone(client))
            members = self.membership.view.members()
            kept = {m.control for m in members if m.state in (ALIVE, SUSPECT)}
            self._switchboard.keep_links(kept | set(self.config.discovery_addr))
            for state, name in (
                (ALIVE, "alive"),
                (SUSPECT, "suspect"),
                (DEAD, "dead"),
                (LEFT, "left"),
            ):
                self.metrics.members.labels(name).set(sum(m.state == state for m in members))
            self._came_round = time.monotonic()
            await trio.sleep(HOUSEKEEPING_S)

    async def _leave(self) -> None:
        self.log.info("node.leaving")
        for effect in self.membership.leave(trio.current_time()):
            self._switchboard.perform(effect)
        await self._switchboard.flush(GOODBYE_S)

    # --- what others may ask ----------------------------------------------------------------------

    def health(self) -> Health:
        """Return whether this node truly serves."""
        facts = self.figures()
        late_s = time.monotonic() - self._came_round
        if self._stopping.is_set():
            return Health(serving=False, reason="leaving the cluster", facts=facts)
        if late_s > LATE_S:
            return Health(serving=False, reason=f"the loop is {late_s:.0f} s late", facts=facts)
        if not self.pool.figures()["pool_bytes_usable"]:
            return Health(serving=False, reason="no page memory is populated yet", facts=facts)
        return Health(serving=True, reason="", facts=facts)

    def figures(self) -> dict[str, int | float | str]:
        """Return named figures about this node."""
        members = self.membership.view.members()
        return {
            "node": name_of(self.incarnation),
            "members_alive": sum(member.state == ALIVE for member in members),
            "masters": len(self.membership.masters()),
            "directory_records": self.directory.record_count,
            **self.pool.figures(),
        }

    def _stats(self, _origin: Origin, asked: StatsAsked) -> Message:
        return Stats(asked.request, self.figures())


def _publish(config: Config, incarnation: Incarnation) -> PublishedSegment:
    """Create the segment, after what dead nodes have left is out of its way."""
    try:
        remove_leftovers(config.shm_dir)
        return PublishedSegment.create(
            config.shm_dir,
            incarnation=incarnation,
            page_bytes=config.pool_size // config.granule * config.granule,
            granule=config.granule,
        )
    except OSError as error:
        raise ConfigError("shm_dir", f"cannot use {config.shm_dir}: {error.strerror}") from error


def _store(segment: PublishedSegment, effect: StoreWords) -> None:
    segment.store_words(effect.indices, effect.values)


def describe(error: BaseException) -> list[BaseException]:
    """Return the errors that people should read out of nested exception groups."""
    if isinstance(error, BaseExceptionGroup):
        return [inner for group in error.exceptions for inner in describe(group)]
    return [error]


class _Source:
    """The published segment as the tcp server sees it."""

    def __init__(self, segment: PublishedSegment) -> None:
        self._segment = segment
        self.pages = segment.pages
        self.words = segment.words
        self.granule = segment.layout.granule
        self.page_bytes = segment.layout.page_bytes

    @property
    def usable_bytes(self) -> int:
        """Return how much of the page memory is populated."""
        return self._segment.usable_bytes
