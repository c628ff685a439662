"""The parts of a client: how they are created, connected and closed.

A client with a certificate that is limited to namespaces uses the shm fabric only for its home
node. Mapped memory can be read as a whole, so this client reads other nodes over tcp, which serves
only pages of its namespaces. It writes its home node's memory, so that is mapped anyway.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import final

from peercache.client.bridge import Bridge, Tables
from peercache.client.home import Home
from peercache.config.home import nearest_home
from peercache.config.settings import Config
from peercache.errors import ConfigError, Rejected
from peercache.fabric.port import Fabric, RegistersMemory
from peercache.fabric.shm import ShmFabric
from peercache.fabric.tcp.client import TcpFabric
from peercache.memory.client_lock import ClientLock, remove_folder
from peercache.memory.kernel import hugetlbfs_folders
from peercache.memory.layout import boot_id
from peercache.model.ids import name_of, new_client_id
from peercache.model.keys import Namespace
from peercache.model.member import Member
from peercache.model.reads import Fetched, PeerRead
from peercache.net.breaker import Breakers
from peercache.net.peers import ControlTls, Gate
from peercache.net.requests import Asker
from peercache.net.sockets import local_path
from peercache.node.runner import EmbeddedNode
from peercache.observability.log import WarnOnce, get_logger
from peercache.observability.metrics import ClientReport, Metrics
from peercache.paths.costs import ReadCosts
from peercache.paths.lookup import LocationCache, Locator
from peercache.paths.mirror import OFF, PREFETCH, Mirrorer
from peercache.paths.read import Reader
from peercache.paths.write import Writer
from peercache.rdma.fabric import RdmaFabric
from peercache.rdma.rail import Rail, open_rails
from peercache.trust.files import LiveTls, with_cluster
from peercache.trust.rights import spaces_of
from peercache.trust.sharing import Sharing
from peercache.wire.envelope import WIRE_VERSION, WIRE_VERSION_OLDEST
from peercache.wire.messages.declared import Message
from peercache.wire.messages.session import Hello, Refused, ReportRevocations


@final
class HomeOnly:
    """Reads through a fabric from the home node only. Implements `Fabric`."""

    def __init__(self, fabric: Fabric, is_home: Callable[[int], bool]) -> None:
        """Use `fabric` only for incarnations for which `is_home` is true."""
        self.name = fabric.name
        self._fabric = fabric
        self._is_home = is_home

    def reaches(self, member: Member) -> bool:
        """Return whether the member is the home node, and can be read."""
        return self._is_home(member.incarnation) and self._fabric.reaches(member)

    def read(self, read: PeerRead, deadline: float) -> Fetched:
        """Read pages of the home node."""
        return self._fabric.read(read, deadline)

    def close(self) -> None:
        """Close the fabric."""
        self._fabric.close()


@final
class ClientParts:
    """The parts of one client: home node, bridge, paths and fabrics."""

    def __init__(self, config: Config, namespace: Namespace) -> None:
        """Create every part; a node, too, with `config.embedded`."""
        self.tls = LiveTls.open(config, is_node=config.embedded, log=get_logger())
        files = None if self.tls is None else self.tls.files
        self._control_tls = None if files is None else ControlTls(files)
        self._is_restricted = files is not None and spaces_of(files.identity) is not None
        self._config = config = with_cluster(config, files)
        self._namespace = namespace
        self.metrics = Metrics()
        self.clock = time.monotonic
        self.identity = new_client_id(random.SystemRandom())
        self.log = get_logger(client=name_of(self.identity))
        self._warn_once = WarnOnce(self.log)
        self._alive: set[int] = set()
        self._revoked_received: bytes = b""
        # This is first, because it may fail with an error about the configuration.
        rails = self._open_rails()
        self._node: EmbeddedNode | None = None
        self._lock: ClientLock | None = None
        self._sharing = Sharing.of_config(config)
        if config.embedded:
            self._node = EmbeddedNode(config, metrics=self.metrics)
            self._url = self._node.ready.home
            self._lock_name, self._secret = "", self._node.ready.local_secret
        else:
            self._url = config.home or nearest_home()
            self._check_home()
            self._lock = ClientLock(self._url, self.identity, self._sharing)
            self._lock_name, self._secret = self._lock.name, self._lock.secret
        self.breakers = Breakers(op_timeout_s=config.op_timeout_s)
        self.cache = LocationCache(entries_max=config.location_cache_entries)
        self.costs = ReadCosts(salt=self.identity, clock=self.clock)
        self._segment_folders = _segment_folders(config)
        self._tables = self._make_tables()
        self.reader = self._make_reader()
        self.prefetcher = self._mirrorer(PREFETCH)
        self.writer = Writer(
            cache=self.cache,
            breakers=self.breakers,
            verify=config.verify,
            namespace_tag=namespace.tag(),
            clock=self.clock,
        )
        self.asker = self._make_asker()
        self._shm = ShmFabric(
            boot_id=boot_id(), sharing=self._sharing, folders=self._segment_folders
        )
        self._tcp = TcpFabric(
            cluster=config.cluster,
            granule=config.granule,
            tls=self.tls,
            sharing=self._sharing,
            max_channels_per_peer=config.max_channels_per_peer,
            stall_s=self.breakers.stall_s,
        )
        self._rdma = self._rdma_over(rails) if rails else None
        self.bridge = Bridge(
            asker=self.asker,
            fabrics=self._fabrics(),
            breakers=self.breakers,
            clock=self.clock,
            log=self.log,
            tables=self._tables,
        )
        self.report = ClientReport(self.metrics, self._fabric_of_peers, name_of(self.identity))
        self._logged_opened = 0
        self.home = self._home_at(self._url)
        self.bridge.renew = self.home.renew

    def close(self, *, is_quiet: bool) -> None:
        """Close every part. is_quiet: no call is in flight any more."""
        self.home.stop()
        self.home.detach()
        self.bridge.close()
        self._tables.close()
        self.asker.close()
        self._shm.close()
        if self._rdma is not None:
            self._rdma.close()
        self._tcp.close()
        self.cache.close()
        if self._lock is not None and is_quiet:
            # While a copy is in progress the lock must stay: it reserves the slots for this client.
            self._lock.release()
        if self.home.has_no_node:
            # A node of another user, which may start later, must make this folder.
            remove_folder(self._url)
        if self._node is not None:
            self._node.close()
        if self.home.was_opened:
            self.log.info("client.closed")

    def log_opened(self) -> None:
        """Log what a client found that has reached its home node: others are opened again soon."""
        if self._config.may_use_rdma:
            self.log.info(
                "rdma.rails_opened", rails=self._rail_names, problems=list(self._rail_problems)
            )

    def register_memory(self, address: int, length: int, owner: object) -> Callable[[], None]:
        """Register memory with the fabrics that need it; return a function that ends that."""
        ends = ExitStack()
        for fabric in self._fabrics():
            if isinstance(fabric, RegistersMemory):
                ends.callback(fabric.register("engine", address, length, owner))
        return ends.close

    def _mirrorer(self, pulls: str) -> Mirrorer:
        return Mirrorer(
            pulls=pulls,
            cache=self.cache,
            breakers=self.breakers,
            namespace_tag=self._namespace.tag(),
            clock=self.clock,
        )

    def _make_tables(self) -> Tables:
        return Tables(
            boot_id=boot_id(),
            shm_dir=self._config.shm_dir,
            folders=self._segment_folders,
            sharing=self._sharing,
            asker=self.identity,
            clock=self.clock,
            metrics=self.metrics,
            log=self.log,
        )

    def _make_reader(self) -> Reader:
        pulls = self._config.mirror_pulls
        locator = Locator(
            cache=self.cache,
            breakers=self.breakers,
            clock=self.clock,
            cost_of=self.costs.cost_of,
            tables=self._tables.nodes,
            removals=self._tables.removals,
        )
        return Reader(
            locator=locator, cache=self.cache, verify=self._config.verify,
            space=self._namespace.space_tag(), clock=self.clock, costs=self.costs,
            mirrorer=None if pulls == OFF else self._mirrorer(pulls),
        )  # fmt: skip

    def _make_asker(self) -> Asker:
        return Asker(
            identity=self.identity,
            cluster=self._config.cluster,
            hello_for=self._hello,
            url_of=self._url_of,
            breakers=self.breakers,
            clock=self.clock,
            on_refused=self._refused,
            on_unasked=self._take_unasked,
            gate=Gate(self._sharing, self.tls),
            name_of_peer=self._name_of,
            tls=self._control_tls,
        )

    def _check_home(self) -> None:
        """Raise ConfigError if the home address is of another uid."""
        path = Path(local_path(self._url))
        try:
            self._sharing.check_listener(str(path))
            if not self._config.home:
                # The default may be in /tmp, where every user may create a folder or a link.
                with suppress(FileNotFoundError):
                    os.close(self._sharing.open_folder(path.parent, follow=False))
        except OSError as error:
            raise ConfigError("home", f"cannot use {path}: {error.strerror}") from error
        except Rejected as refusal:
            raise ConfigError("home", refusal.detail) from refusal

    def _home_at(self, url: str) -> Home:
        return Home(
            url=url,
            config=self._config,
            bridge=self.bridge,
            breakers=self.breakers,
            touches=self.reader.touches,
            # An embedded node uses the same metrics.
            report=self.report if self._node is None else None,
            on_view=self._view_changed,
            renew_lock=self.renew_lock,
            on_beat=self._on_beat,
            tls=self._control_tls,
            sharing=self._sharing,
            on_segment=lambda path: self._segment_folders.add(str(Path(path).parent)),
            metrics=self.metrics,
            log=self.log,
        )

    def _fabrics(self) -> tuple[Fabric, ...]:
        """Return the fabrics that may be used, the best one first."""
        rdma = (self._rdma,) if self._rdma is not None else ()
        shm: Fabric = self._shm
        if self._is_restricted:
            # One memory key, or one mapping, gives access to the pages of every namespace.
            shm, rdma = HomeOnly(shm, self._is_home), ()
        by_choice: dict[str, tuple[Fabric, ...]] = {
            "shm": (shm,),
            "tcp": (self._tcp,),
            "rdma": rdma,
            "auto": (shm, *rdma, self._tcp),
        }
        return by_choice[self._config.fabric]

    def _is_home(self, peer: int) -> bool:
        return self.home.tie.is_home(peer)

    def _open_rails(self) -> tuple[Rail, ...]:
        """Open the rdma rails; raise ConfigError if rdma is required and not available."""
        if not self._config.may_use_rdma:
            return ()
        rails, problems = open_rails(self._config)
        if not rails and self._config.fabric == "rdma":
            what = "; ".join(problems)
            raise ConfigError("fabric", f"rdma is required, but not available: {what}")
        self._rail_names, self._rail_problems = [rail.name for rail in rails], problems
        return rails

    def _rdma_over(self, rails: tuple[Rail, ...]) -> RdmaFabric:
        return RdmaFabric(
            rails=rails,
            exchange=self._exchange,
            max_channels_per_peer=self._config.max_channels_per_peer,
            rng=random.SystemRandom(),
            metrics=self.metrics,
            fallback=self._tcp if self._config.fabric == "auto" else None,
        )

    def _fabric_of_peers(self) -> dict[str, str]:
        """Return the fabric by which each peer is read, by the peer's name."""
        return {name_of(peer): name for peer, name in self.bridge.fabric_of_peers().items()}

    # --- callbacks between the parts --------------------------------------------------------------

    def _exchange(self, peer: int, message: Message, until: float) -> Message | None:
        return self.asker.ask(((peer, message),), until)[0]

    def _on_beat(self) -> None:
        """Do the periodic work, once a second, in the thread of the home tie."""
        opened = self.breakers.opened_count
        self.metrics.breakers_opened.inc(opened - self._logged_opened)
        self._logged_opened = opened
        if self._node is not None:
            self.report.settle()
        if self.tls is not None and (self.tls.look() | self._take_revoked(self.tls)):
            assert self._control_tls is not None, "there are certificates"
            self._control_tls.renew(self.tls.files)
            # New connections present the new certificate, and are verified again.
            self.asker.forget(set())
            for peer in sorted(self._alive):
                self._forget_channels(peer)
        self._list_channels()

    def _take_revoked(self, tls: LiveTls) -> bool:
        """Adopt a node's revocation lists, if they are newer; return whether they are."""
        received, self._revoked_received = self._revoked_received, b""
        if not received:
            return False
        try:
            # The home node keeps the list, and sends it to a client that restarts.
            return tls.take_list(received.decode("ascii"), keeps=False)
        except (Rejected, UnicodeDecodeError) as error:
            self._warn_once("client.revocations_rejected", "", problem=str(error))
            return False

    def _forget_channels(self, peer: int) -> None:
        self._tcp.forget(peer)
        if self._rdma is not None:
            self._rdma.forget(peer)

    def _list_channels(self) -> None:
        if self._rdma is not None:
            self.asker.post(self._rdma.held())

    def renew_lock(self) -> None:
        """Lock a new file; raise ConfigError if that fails; it may be called again."""
        if self._config.embedded:
            return
        # The old lock is dropped before anything can fail: releasing it twice would close a
        # descriptor that belongs to another object by then.
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()
        self._lock = ClientLock(self._url, self.identity, self._sharing)
        self._secret = self._lock.secret

    def _url_of(self, peer: int) -> str | None:
        return self.home.url_of(peer)

    def _name_of(self, peer: int) -> str | None:
        """Return the name in the certificate of a member; None for any node."""
        member = self.home.tie.cluster.members.get(peer)
        return None if member is None else member.name

    def _hello(self, url: str) -> Hello:
        # The client writes to the node at the home address only, and proves there that it may.
        is_home = url == self.home.url
        return Hello(
            request=0,
            wire_oldest=WIRE_VERSION_OLDEST,
            wire_newest=WIRE_VERSION,
            cluster=self._config.cluster,
            is_node=False,
            granule=self._config.granule,
            name="",
            nonce=b"",
            namespace=self._namespace.name,
            geometry=self._namespace.geometry,
            lock=self._lock_name if is_home else "",
            secret=self._secret if is_home else b"",
        )

    def _take_unasked(self, peer: int, message: Message) -> None:
        if isinstance(message, ReportRevocations):
            # It is verified at the next beat: an engine's call must not wait for that.
            self._revoked_received = message.lists
            return
        self.home.tie.take_unasked(peer, message)

    def _refused(self, peer: int, refusal: Refused) -> None:
        self._warn_once(
            "client.refused",
            (peer, refusal.reason),
            peer=name_of(peer),
            at=self.home.url_of(peer) or "",
            reason=refusal.reason,
            detail=refusal.detail,
        )

    def _view_changed(self, alive: set[int]) -> None:
        self.breakers.forget(alive)
        self.asker.forget(alive)
        self.bridge.forget(alive)
        for gone in sorted(self._alive - alive):
            self._shm.forget(gone)
            self._forget_channels(gone)
        self._alive = alive
        if not self._is_restricted:
            # A table shows the pages of every namespace.
            self._tables.follow(self.home.tie.cluster.members.values())


def _segment_folders(config: Config) -> set[str]:
    """Return the folders in which nodes of this host keep their segments."""
    named = [folder for folder in (config.shm_dir, config.hugepages_dir) if folder]
    return {str(Path(folder)) for folder in (*hugetlbfs_folders(), *named)}
