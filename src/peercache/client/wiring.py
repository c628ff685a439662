"""The wiring of a client: which parts it has, how they know each other, how they end."""

from __future__ import annotations

import random
import time
from typing import final

from peercache.client.driver import Driver
from peercache.client.home import Home
from peercache.config import Config
from peercache.fabric.shm import ShmFabric
from peercache.fabric.tcp import TcpFabric
from peercache.ids import name_of, new_client_id
from peercache.keys import Namespace
from peercache.messages import WIRE_VERSION, WIRE_VERSION_OLDEST, Hello, Refused
from peercache.net.asking import Asker
from peercache.node.embedded import EmbeddedNode
from peercache.observe import Metrics, get_logger
from peercache.ports import Fabric
from peercache.reporting import Report
from peercache.segment.client_lock import ClientLock
from peercache.segment.layout import boot_id
from peercache.transfer.breaker import Breakers
from peercache.transfer.cache import LocationCache
from peercache.transfer.locating import Locator
from peercache.transfer.reading import Reader
from peercache.transfer.writing import Writer

REFUSALS_LOGGED_MAX = 1024
"""Refusals are logged once a peer and reason; so many are remembered."""


@final
class Wiring:
    """The parts of one client, from the home node to the fabrics."""

    def __init__(self, config: Config, namespace: Namespace) -> None:
        """Make every part; embed a node where `config.home` is empty."""
        self._config = config
        self._namespace = namespace
        self.metrics = Metrics()
        self.clock = time.monotonic
        self.identity = new_client_id(random.SystemRandom())
        self.log = get_logger(client=name_of(self.identity))
        self._refusals_logged: set[tuple[int, str]] = set()
        self._alive: set[int] = set()
        self._node: EmbeddedNode | None = None
        self._lock: ClientLock | None = None
        if config.home:
            url = config.home
            self._lock = ClientLock(url, self.identity)
            self._lock_name = self._lock.name
        else:
            self._node = EmbeddedNode(config, metrics=self.metrics)
            url = self._node.ready.home
            self._lock_name = self._node.ready.local_token
        self.breakers = Breakers()
        self.cache = LocationCache(entries_max=config.location_cache_entries)
        locator = Locator(cache=self.cache, breakers=self.breakers, clock=self.clock)
        self.reader = Reader(
            locator=locator, cache=self.cache, verify=config.verify, clock=self.clock
        )
        self.writer = Writer(
            cache=self.cache,
            breakers=self.breakers,
            verify=config.verify,
            namespace_tag=namespace.tag(),
            clock=self.clock,
        )
        self.asker = Asker(
            identity=self.identity,
            cluster=config.cluster,
            hello_for=self._hello,
            url_of=self._url_of,
            breakers=self.breakers,
            clock=self.clock,
            on_refused=self._refused,
        )
        self._shm = ShmFabric(boot_id=boot_id())
        self._tcp = TcpFabric(
            cluster=config.cluster,
            credentials=config.credentials,
            granule=config.granule,
            max_channels_per_peer=config.max_channels_per_peer,
        )
        self.driver = Driver(
            asker=self.asker,
            fabrics=self._fabrics(),
            breakers=self.breakers,
            clock=self.clock,
            log=self.log,
        )
        self.report = Report(self.metrics)
        self.home = Home(
            url=url,
            config=config,
            asker=self.asker,
            touches=self.reader.touches,
            # An embedded node has the very same metrics.
            report=self.report if self._node is None else None,
            on_view=self._view_changed,
            renew_lock=self._renew_lock,
            metrics=self.metrics,
            log=self.log,
        )

    def close(self, *, is_quiet: bool) -> None:
        """End every part. is_quiet: no call is in flight any more."""
        self.home.stop()
        self.home.detach()
        self.driver.close()
        self.asker.close()
        self._shm.close()
        self._tcp.close()
        if self._lock is not None and is_quiet:
            # With a copy still under way the lock must stay: it is what keeps the slots ours.
            self._lock.release()
        if self._node is not None:
            self._node.close()
        self.log.info("client.closed")

    def control_address(self) -> str:
        """Return HOST:PORT of the embedded node's control port, "" where there is none."""
        return self._node.ready.control if self._node is not None else ""

    def _fabrics(self) -> tuple[Fabric, ...]:
        """Return the fabrics that may be used, the best one first."""
        if self._config.fabric == "shm":
            return (self._shm,)
        return (self._tcp,) if self._config.fabric == "tcp" else (self._shm, self._tcp)

    # --- what the parts ask each other ------------------------------------------------------------

    def _renew_lock(self) -> None:
        """Lock a new file; raise ConfigError where that cannot be, and try again when asked to."""
        if not self._config.home:
            return
        # Forgotten before anything can fail: a lock that is released twice would close a
        # descriptor that is somebody else's by then.
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()
        self._lock = ClientLock(self._config.home, self.identity)

    def _url_of(self, peer: int) -> str | None:
        return self.home.url_of(peer)

    def _hello(self, peer: int) -> Hello:
        attached = self.home.attached
        # 0 is whoever listens at the home address: only there do we write.
        is_home = peer == 0 or (attached is not None and attached.incarnation == peer)
        return Hello(
            request=0,
            wire_oldest=WIRE_VERSION_OLDEST,
            wire_newest=WIRE_VERSION,
            cluster=self._config.cluster,
            is_node=False,
            granule=self._config.granule,
            credentials=self._config.credentials,
            namespace=self._namespace.name,
            geometry=self._namespace.geometry,
            lock=self._lock_name if is_home else "",
        )

    def _refused(self, peer: int, refusal: Refused) -> None:
        key = (peer, refusal.reason)
        if key not in self._refusals_logged and len(self._refusals_logged) < REFUSALS_LOGGED_MAX:
            self._refusals_logged.add(key)
            self.log.warning(
                "client.refused", peer=name_of(peer), reason=refusal.reason, detail=refusal.detail
            )

    def _view_changed(self, alive: set[int]) -> None:
        self.breakers.forget(alive)
        self.asker.forget(alive)
        self.driver.forget(alive)
        for gone in sorted(self._alive - alive):
            self._shm.forget(gone)
            self._tcp.forget(gone)
        self._alive = alive
