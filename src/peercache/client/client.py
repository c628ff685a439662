"""The blocking client, for any engine.

    with Client.open(home="ipc:///run/peercache/node.ipc") as cache:
        stored = cache.batch_set(["prompt-1"], [page])
        found = cache.batch_get(["prompt-1"], [buffer])

Batch calls never raise, never outlive their deadline, and answer one boolean a key; what is not a
hit is a miss with a counted reason. All of them may be called from several threads at once.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from threading import Condition
from types import TracebackType
from typing import Any, TypeVar, final

import numpy as np

from peercache import observe
from peercache.client.buffers import UnusableBuffers, runs_of_buffers
from peercache.client.driver import Driver
from peercache.client.home import Home
from peercache.config import Config
from peercache.errors import PeerCacheError
from peercache.fabric.shm import ShmFabric
from peercache.fabric.tcp import TcpFabric
from peercache.ids import name_of, new_client_id
from peercache.keys import Key, Namespace, PageKeys, page_keys
from peercache.messages import (
    WIRE_VERSION,
    WIRE_VERSION_OLDEST,
    Clear,
    Hello,
    Message,
    Refused,
    Remove,
    Removed,
    Stats,
    StatsAsked,
)
from peercache.net.asking import Asker
from peercache.node.embedded import EmbeddedNode
from peercache.observe import Metrics, get_logger
from peercache.ports import Fabric
from peercache.runs import PageRuns
from peercache.segment.client_lock import ClientLock
from peercache.segment.layout import boot_id
from peercache.transfer.breaker import Breakers
from peercache.transfer.cache import LocationCache
from peercache.transfer.locating import Locator
from peercache.transfer.reading import Reader
from peercache.transfer.writing import Writer

RETURN_MARGIN_S = 0.01
"""Kept back from every deadline, for what happens between the last wait and the return."""

CLOSE_S = 5.0
"""How long `close` waits for calls in flight; their own deadlines are usually shorter."""

Result = TypeVar("Result")


@final
class Client:
    """A cache client: reads from every node of the cluster, writes through its home node."""

    def __init__(self, config: Config, namespace: Namespace) -> None:
        """Use `Client.open`."""
        self.config = config
        self.namespace = namespace
        self.metrics = Metrics()
        self._pid = os.getpid()
        self._calls = Condition()
        self._calls_in_flight = 0
        self._is_closed = False
        self._clock = time.monotonic
        self._id = new_client_id(random.SystemRandom())
        self._log = get_logger(client=name_of(self._id))
        self._digest = namespace.digest()
        self._refusals_logged: set[tuple[int, str]] = set()
        self._alive: set[int] = set()
        self._node: EmbeddedNode | None = None
        self._lock: ClientLock | None = None
        if config.home:
            url = config.home
            self._lock = ClientLock(url, self._id)
            self._lock_name = self._lock.name
        else:
            self._node = EmbeddedNode(config, metrics=self.metrics)
            url = self._node.ready.home
            self._lock_name = self._node.ready.local_token
        self._wire(url)

    def _wire(self, url: str) -> None:
        config = self.config
        self._breakers = Breakers()
        self._cache = LocationCache(entries_max=config.location_cache_entries)
        locator = Locator(cache=self._cache, breakers=self._breakers, clock=self._clock)
        self._reader = Reader(
            locator=locator, cache=self._cache, verify=config.verify, clock=self._clock
        )
        self._writer = Writer(
            cache=self._cache,
            breakers=self._breakers,
            verify=config.verify,
            namespace_tag=self.namespace.tag(),
            clock=self._clock,
        )
        self._asker = Asker(
            identity=self._id,
            cluster=config.cluster,
            hello_for=self._hello,
            url_of=self._url_of,
            breakers=self._breakers,
            clock=self._clock,
            on_refused=self._refused,
        )
        self._shm = ShmFabric(boot_id=boot_id())
        self._tcp = TcpFabric(
            cluster=config.cluster,
            credentials=config.credentials,
            granule=config.granule,
            max_channels_per_peer=config.max_channels_per_peer,
        )
        fabrics: dict[str, tuple[Fabric, ...]] = {
            "auto": (self._shm, self._tcp),
            "shm": (self._shm,),
            "tcp": (self._tcp,),
        }
        self._driver = Driver(
            asker=self._asker,
            fabrics=fabrics[config.fabric],
            breakers=self._breakers,
            clock=self._clock,
            log=self._log,
        )
        self._home = Home(
            url=url,
            config=config,
            asker=self._asker,
            touches=self._reader.touches,
            on_view=self._view_changed,
            metrics=self.metrics,
            log=self._log,
        )

    @classmethod
    def open(
        cls,
        config: Config | None = None,
        *,
        namespace: Namespace | None = None,
        **settings: Any,
    ) -> Client:
        """Attach to the home node, or embed one; return a client that serves.

        settings: names of `Config`, such as discovery_addr, home, pool_size, fabric, op_timeout_s.
        With `home` (the address in a node's ready line) the client writes into that node's pool;
        without it a node runs in this process.
        Raises ConfigError, AddressTaken, PoolTooLarge, Rejected or PeerUnreachable.
        """
        if config is None:
            config = Config.load(settings, environment=os.environ)
        elif settings:
            raise TypeError("give a config, or settings, not both")
        client = cls(config, namespace or Namespace())
        try:
            client._home.open()
        except BaseException:
            client.close()
            raise
        return client

    # --- pages ------------------------------------------------------------------------------------

    def batch_set(self, keys: Sequence[Key], buffers: Sequence[Any]) -> list[bool]:
        """Store one page a key; return for each whether it is held at home now.

        buffers: objects with the buffer protocol, C-contiguous, one a key. True means committed in
        the home pool by this call or before it; the buffer is not read after the return.
        """
        return self._with_buffers(keys, buffers, self.batch_set_from, writable=False)

    def batch_get(self, keys: Sequence[Key], buffers: Sequence[Any]) -> list[bool]:
        """Fill one buffer a key; return for each whether it now holds exactly that page.

        buffers: writable objects with the buffer protocol, C-contiguous, one a key. A buffer of
        another size than the page is a miss that leaves it untouched; after any other miss its
        content is undefined. Nothing writes to a buffer after the return.
        """
        return self._with_buffers(keys, buffers, self.batch_get_into, writable=True)

    def batch_set_from(
        self, keys: Sequence[Key], segments: Sequence[Sequence[tuple[int, int]]] | PageRuns
    ) -> list[bool]:
        """Store one page a key, gathered from (address, bytes) segments, in their order."""
        return self._call(
            "set", len(keys), [False] * len(keys), lambda until: self._set(keys, segments, until)
        )

    def batch_get_into(
        self, keys: Sequence[Key], segments: Sequence[Sequence[tuple[int, int]]] | PageRuns
    ) -> list[bool]:
        """Scatter one page a key into (address, bytes) segments, in their order."""
        return self._call(
            "get", len(keys), [False] * len(keys), lambda until: self._get(keys, segments, until)
        )

    def batch_exists(self, keys: Sequence[Key]) -> int:
        """Return the length of the leading run of keys that somebody holds: a hint.

        Has the short deadline `exists_timeout_s`.
        """
        found = self.contains(keys)
        return found.index(False) if False in found else len(found)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Return for each key whether somebody holds it: a hint, as `batch_exists`."""
        return self._call(
            "exists",
            len(keys),
            [False] * len(keys),
            lambda until: self._contains(keys, until),
            timeout_s=self.config.exists_timeout_s,
        )

    def remove(self, keys: Sequence[Key]) -> int:
        """Drop these pages at every live holder; return how many pages went."""
        page_names = page_keys(keys, self._digest)
        self._cache.forget(page_names.tolist())
        return self._tell_all("remove", Remove(0, page_names.tobytes()))

    def clear(self) -> int:
        """Drop every page of this namespace on every live node; return how many went."""
        self._cache.clear()
        return self._tell_all("clear", Clear(0, self.namespace.tag()))

    def stats(self) -> dict[str, int | float | str]:
        """Return figures of this client and of its home node, for people and tests."""
        figures = self._own_figures()
        home = self._call("stats", 0, None, self._home_figures)
        figures.update({f"home_{name}": value for name, value in (home or {}).items()})
        return figures

    # --- life -------------------------------------------------------------------------------------

    def close(self) -> None:
        """End calls, connections and mappings, and leave the cluster; bounded, may be repeated."""
        if os.getpid() != self._pid:
            return
        with self._calls:
            if self._is_closed:
                return
            self._is_closed = True
            is_quiet = self._calls.wait_for(lambda: self._calls_in_flight == 0, CLOSE_S)
        self._home.stop()
        self._home.detach()
        self._driver.close()
        self._asker.close()
        self._shm.close()
        self._tcp.close()
        if self._lock is not None and is_quiet:
            # With a copy still under way the lock must stay: it is what keeps the slots ours.
            self._lock.release()
        if self._node is not None:
            self._node.close()
        self._log.info("client.closed")

    def __enter__(self) -> Client:
        """Return the client itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    # --- the calls, between the guard and the paths -----------------------------------------------

    def _set(self, keys: Sequence[Key], segments: Any, until: float) -> list[bool]:
        names, runs = self._batch(keys, segments)
        attached = self._home.attached
        if attached is None:
            self._count_refused(observe.NO_HOME, len(keys))
            return [False] * len(keys)
        outcome = self._driver.run(
            self._writer.set(
                names,
                runs,
                home=attached.incarnation,
                reservations=attached.reservations,
                until=until,
            ),
            attached.segment,
        )
        metrics = self.metrics
        metrics.pages_set.labels("copied").inc(outcome.copied)
        metrics.pages_set.labels("here").inc(outcome.here)
        metrics.bytes_written.inc(outcome.copied_bytes)
        metrics.pages_unpublished.inc(outcome.unpublished)
        for reason in outcome.reasons:
            if reason:
                self._count_refused(reason, 1)
        if observe.NO_HOME in outcome.reasons:
            self._home.look_now()
        stored: list[bool] = outcome.stored.tolist()
        return stored

    def _get(self, keys: Sequence[Key], segments: Any, until: float) -> list[bool]:
        names, runs = self._batch(keys, segments)
        outcome = self._driver.run(self._reader.get(names, runs, self._home.cluster, until))
        for fabric, pages in outcome.pages_by_fabric.items():
            self.metrics.pages_hit.labels(fabric).inc(pages)
            self.metrics.bytes_read.labels(fabric).inc(outcome.bytes_by_fabric[fabric])
        self._count_missed(outcome.reasons)
        hits: list[bool] = outcome.hits.tolist()
        return hits

    def _contains(self, keys: Sequence[Key], until: float) -> list[bool]:
        names = page_keys(keys, self._digest)
        known, _ = self._driver.run(self._reader.exists(names, self._home.cluster, until))
        self.metrics.exists_asked.inc(len(keys))
        self.metrics.exists_found.inc(int(np.argmin(known)) if not known.all() else len(known))
        found: list[bool] = known.tolist()
        return found

    def _batch(self, keys: Sequence[Key], segments: Any) -> tuple[PageKeys, PageRuns]:
        runs = segments if isinstance(segments, PageRuns) else PageRuns.of(segments)
        if len(runs) != len(keys):
            raise UnusableBuffers(f"{len(keys)} keys, but segments for {len(runs)} pages")
        return page_keys(keys, self._digest), runs

    def _with_buffers(
        self,
        keys: Sequence[Key],
        buffers: Sequence[Any],
        call: Callable[[Sequence[Key], PageRuns], list[bool]],
        *,
        writable: bool,
    ) -> list[bool]:
        try:
            held, runs = runs_of_buffers(buffers, writable=writable)
        except UnusableBuffers as error:
            return self._unusable("get" if writable else "set", [False] * len(keys), error)
        answers = call(keys, runs)
        # The exported buffers must not move or go away before the call is over.
        del held
        return answers

    def _tell_all(self, operation: str, message: Message) -> int:
        def ask(until: float) -> int:
            members = self._home.cluster.members
            now = self._clock()
            peers = [peer for peer in members if self._breakers.available(peer, now)]
            answers = self._asker.ask([(peer, message) for peer in peers], until)
            return sum(answer.count for answer in answers if isinstance(answer, Removed))

        return self._call(operation, 0, 0, ask)

    def _home_figures(self, until: float) -> dict[str, int | float | str] | None:
        attached = self._home.attached
        if attached is None:
            return None
        patience = min(until, self._clock() + self.config.exists_timeout_s)
        answer = self._asker.ask([(attached.incarnation, StatsAsked(0))], patience)[0]
        return answer.figures if isinstance(answer, Stats) else None

    # --- the guard: deadline, closing, and nothing raised -----------------------------------------

    def _call(
        self,
        operation: str,
        pages: int,
        miss: Result,
        call: Callable[[float], Result],
        timeout_s: float | None = None,
    ) -> Result:
        """Run one call; whatever goes wrong, the answer is `miss`, counted."""
        if os.getpid() != self._pid:
            return miss
        started = self._clock()
        timeout_s = self.config.op_timeout_s if timeout_s is None else timeout_s
        with self._calls:
            if self._is_closed:
                self._count(operation, observe.CLOSED, pages)
                return miss
            self._calls_in_flight += 1
        try:
            return call(started + timeout_s - min(RETURN_MARGIN_S, timeout_s / 10))
        except UnusableBuffers as error:
            return self._unusable(operation, miss, error)
        except Exception:
            # A bug of ours must not become the engine's: a miss is always a right answer.
            self._log.error("call.failed", operation=operation, pages=pages, exc_info=True)
            self._count(operation, observe.INTERNAL, pages)
            return miss
        finally:
            with self._calls:
                self._calls_in_flight -= 1
                self._calls.notify_all()
            took_s = self._clock() - started
            self.metrics.latency_s.labels(operation).observe(took_s)
            if took_s > timeout_s:
                self.metrics.deadlines_overrun.inc()

    def _unusable(self, operation: str, miss: Result, error: UnusableBuffers) -> Result:
        self._log.warning("call.unusable", operation=operation, problem=str(error))
        self._count(operation, observe.WRONG_SIZE, len(miss) if isinstance(miss, list) else 0)
        return miss

    def _count(self, operation: str, reason: str, pages: int) -> None:
        if operation == "set":
            self._count_refused(reason, pages)
        elif operation == "get":
            self.metrics.pages_missed.labels(reason).inc(pages)

    def _count_refused(self, reason: str, pages: int) -> None:
        self.metrics.sets_refused.labels(reason).inc(pages)

    def _count_missed(self, reasons: Sequence[str]) -> None:
        for reason in reasons:
            if reason:
                self.metrics.pages_missed.labels(reason).inc()

    # --- what the parts below ask -----------------------------------------------------------------

    def _url_of(self, peer: int) -> str | None:
        return self._home.url_of(peer)

    def _hello(self, peer: int) -> Hello:
        attached = self._home.attached
        # 0 is whoever listens at the home address: only there do we write.
        is_home = peer == 0 or (attached is not None and attached.incarnation == peer)
        return Hello(
            request=0,
            wire_oldest=WIRE_VERSION_OLDEST,
            wire_newest=WIRE_VERSION,
            cluster=self.config.cluster,
            is_node=False,
            granule=self.config.granule,
            credentials=self.config.credentials,
            namespace=self.namespace.name,
            geometry=self.namespace.geometry,
            lock=self._lock_name if is_home else "",
        )

    def _refused(self, peer: int, refusal: Refused) -> None:
        key = (peer, refusal.reason)
        if key not in self._refusals_logged and len(self._refusals_logged) < 1024:
            self._refusals_logged.add(key)
            self._log.warning(
                "client.refused", peer=name_of(peer), reason=refusal.reason, detail=refusal.detail
            )

    def _view_changed(self, alive: set[int]) -> None:
        self._breakers.forget(alive)
        self._asker.forget(alive)
        self._driver.forget(alive)
        for gone in sorted(self._alive - alive):
            self._shm.forget(gone)
            self._tcp.forget(gone)
        self._alive = alive

    def _own_figures(self) -> dict[str, int | float | str]:
        figures: dict[str, int | float | str] = {
            "client": name_of(self._id),
            "home_attached": int(self._home.attached is not None),
            "members": len(self._home.cluster.members),
            "location_cache_entries": len(self._cache),
            "breakers_opened": self._breakers.opened_count,
        }
        for metric in self.metrics.registry.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total") and sample.value:
                    labels = "".join(f"_{value}" for value in sample.labels.values())
                    name = sample.name.removeprefix("peercache_").removesuffix("_total")
                    figures[name + labels] = sample.value
        return figures


__all__ = ["Client", "PeerCacheError"]
