"""The blocking client, for any engine.

    with Client.open() as cache:
        stored = cache.batch_set(["prompt-1"], [page])
        found = cache.batch_get(["prompt-1"], [buffer])

Batch calls never raise, return within their deadline, and return one boolean for each key;
everything except a hit is a miss with a counted reason. All of them may be called from several
threads at once.
"""

from __future__ import annotations

import atexit
import itertools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Condition, RLock
from typing import Any, TypeAlias, TypeVar, final

import numpy as np

from peercache.client import tracing
from peercache.client.assembly import ClientParts
from peercache.client.decline import Decliner
from peercache.client.home import HomeState
from peercache.client.report import add_missed, add_moved
from peercache.client.report import current as current_call
from peercache.config.settings import Config
from peercache.errors import ConfigError
from peercache.model.ids import name_of
from peercache.model.keys import DEFAULT_NAME, KEY_BYTES, Key, Namespace, PageKeys, page_keys
from peercache.model.prefix import Overlap
from peercache.model.process import ForkGuard
from peercache.model.records import RESIDENT
from peercache.model.runs import U64, PageRuns, UnusableBuffers, runs_of_buffers
from peercache.observability import reasons
from peercache.observability.latency import ALL, HOME, NONE, PAGE_OF, PLACES, SOME
from peercache.observability.log import current
from peercache.observability.slow import CallNote
from peercache.paths.cluster import Cluster
from peercache.paths.mirror import FAR, PAGES_MAX, MirrorHome
from peercache.paths.search import Mask, Whereabouts
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import OVERLAP_KEYS_MAX, RequestOverlap, overlap_of
from peercache.wire.messages.pool import (
    NOT_HERE,
    OVER_QUOTA,
    RETAIN_MAX_S,
    RETAINED,
    Clear,
    Demote,
    Remove,
    Removed,
    Retain,
    Retained,
)
from peercache.wire.messages.session import Refused, ReportStats, RequestStats

RETURN_MARGIN_S = 0.01
"""Subtracted from every deadline, for the work between the last wait and the return."""

CLOSE_S = 5.0
"""How long `close` waits for calls in flight; their own deadlines are usually shorter."""

REMOVE_KEYS_MAX = 8192
"""Keys of one Remove: 128 KiB, and a millisecond of a holder's loop."""

HINT_KEYS_MAX = 1024
"""Keys of one Retain or Demote: each costs a holder's loop a few microseconds."""

PREFETCH_PAGES = PAGES_MAX
PREFETCH_BYTES = 32 * 2**20
"""What a prefetch reads from other hosts at once: memory that it takes meanwhile."""

_HINT_STATES = {NOT_HERE: reasons.MISSING, OVER_QUOTA: reasons.FORBIDDEN, RETAINED: reasons.DONE}

HOME_TIMEOUT_FRACTION = 0.8
"""The fraction of the remaining time that the home node may wait for other members."""

Result = TypeVar("Result")

Keys: TypeAlias = Sequence[Key] | PageKeys

ComputeSeconds: TypeAlias = float | Sequence[float] | None

_open_clients: weakref.WeakValueDictionary[int, Client] = weakref.WeakValueDictionary()


@atexit.register
def _close_all() -> None:
    """Leave the cluster and remove segments when an engine exits without closing; bounded."""
    for client in list(_open_clients.values()):
        client.close()


@final
class Client:
    """A cache client: reads from every node of the cluster, writes through its home node.

    Every call may be made from several threads at once, returns within its deadline, and raises no
    exception because of the cluster: a failure is a miss, or 0. After `close`, and in a forked
    child, every call is a miss. The deadline is `op_timeout_s` (2 s), of calls that only look pages
    up `exists_timeout_s` (0.1 s).

    keys: texts or bytes; most calls also take page keys, (n,) V16, which are not hashed again. All
          pages of an array of another type are misses.
    config, namespace: the settings and the namespace of this client.
    metrics: its counters.
    """

    def __init__(self, config: Config, namespace: Namespace) -> None:
        """Use `Client.open`, which also attaches to a node."""
        self.config = config
        self.namespace = namespace
        tracer = tracing.tracer() if config.otel_traces else None
        self._wiring = wiring = ClientParts(config, namespace)
        self.metrics = wiring.metrics
        self._pages_copied = wiring.metrics.pages_set.labels("copied")
        self._bridge = wiring.bridge
        self._home = wiring.home
        self._tie = wiring.home.tie
        self._log = wiring.log
        self._clock = wiring.clock
        self._digest = namespace.digest()
        self._fork = ForkGuard()
        self._numbers = itertools.count(1)
        # A signal handler may close the client within a call.
        self._lock = RLock()
        self._calls = Condition(self._lock)
        self._calls_in_flight = 0
        self._is_closed = False
        self._decliner = self._make_decliner() if config.decline != "off" else None
        if tracer is not None:
            # Of this client alone: without the setting a call has no code for it.
            call = tracing.traced(self._call, tracer, namespace.name, self._log)
            setattr(self, "_call", call)  # noqa: B010 - a method

    @classmethod
    def open(
        cls,
        config: Config | None = None,
        *,
        namespace: Namespace | str | None = None,
        **settings: Any,
    ) -> Client:
        """Attach to the node of this host, or embed one; return a client that serves.

        namespace: of the pages, or its name; None: the one in the settings.
        settings: names of `Config`, such as discovery_addr, home, pool_size, fabric, op_timeout_s.
        The client writes into the pool of the node at `home`, by default the one of this host.
        With `embedded` a node with a pool of its own runs in this process instead.
        Raises ConfigError, AddressTaken, PoolTooLarge, Rejected, PeerUnreachable, DeadlineExceeded;
        InvalidRequest in a process that was forked from one that uses PeerCache.
        """
        if config is None:
            config = Config.load(settings, environment=os.environ)
        elif settings:
            raise TypeError("give a config, or settings, not both")
        if isinstance(namespace, str):
            namespace = Namespace(namespace)
        elif not isinstance(namespace, Namespace | None):
            raise ConfigError("namespace", f"is a name or a Namespace, not {namespace!r:.60}")
        client = cls(config, namespace or Namespace(config.namespace or DEFAULT_NAME))
        _open_clients[client._wiring.identity] = client
        try:
            client._home.open()
        except BaseException:
            client.close()
            raise
        client._wiring.log_opened()
        return client

    # --- pages ------------------------------------------------------------------------------------

    def batch_set(self, keys: Sequence[Key], buffers: Sequence[Any]) -> list[bool]:
        """Store one page for each key; return for each whether the home node holds it now.

        buffers: objects with the buffer protocol, C-contiguous, one for each key.

        True means committed in the home pool, by this call or before it; the buffer is not read
        after the return. All are False if there are not as many buffers as keys, or if one of them
        is not contiguous.
        """
        return self._with_buffers(keys, buffers, self.batch_set_from, writable=False)

    def batch_get(self, keys: Sequence[Key], buffers: Sequence[Any]) -> list[bool]:
        """Fill one buffer for each key; return for each whether it now holds exactly that page.

        buffers: writable objects with the buffer protocol, C-contiguous, one for each key.

        A buffer with another size than the page is a miss, and stays untouched; after any other
        miss its content is undefined. Nothing writes to a buffer after the return. All are False if
        there are not as many buffers as keys, or if one of them is read-only or not contiguous.
        """
        return self._with_buffers(keys, buffers, self.batch_get_into, writable=True)

    def batch_set_from(
        self, keys: Keys, segments: Sequence[Sequence[tuple[int, int]]] | PageRuns
    ) -> list[bool]:
        """Store one page for each key, from memory at addresses; return as `batch_set`.

        keys: names of this namespace, or page keys, (n,) V16: keys of several namespaces with the
              same name may be in one batch, and `clear` removes them together. The same holds for
              all calls below.
        segments: for each key its pieces (address, bytes), which are joined in their order; or
                  `PageRuns`. Nothing checks that they are the caller's memory.
        """
        return self._call(
            "set", len(keys), [False] * len(keys), lambda until: self._set(keys, segments, until)
        )

    def batch_get_into(
        self, keys: Keys, segments: Sequence[Sequence[tuple[int, int]]] | PageRuns
    ) -> list[bool]:
        """Read one page for each key into memory at addresses; return as `batch_get`.

        segments: for each key its pieces (address, bytes), which are filled in their order; or
                  `PageRuns`. Nothing checks that they are the caller's memory.
        """
        return self._call(
            "get", len(keys), [False] * len(keys), lambda until: self._get(keys, segments, until)
        )

    def batch_exists(self, keys: Keys, *, compute_s: ComputeSeconds = None) -> int:
        """Return the length of the leading run of keys that have a holder: a hint.

        compute_s: seconds that the caller takes to compute a page, or for each key the seconds of
                   its page; without it those of `page_compute_ms`. Ignored with `decline` off.

        0 also without an answer. Only a get shows whether a page can be read. With `decline` the
        run ends where reading more of it takes longer than computing it; a get reads those pages
        all the same. Has the short deadline `exists_timeout_s`.
        """
        return self._look_up(keys, 0, partial(self._leading, touch=False, compute_s=compute_s))

    def batch_touch(self, keys: Keys, *, compute_s: ComputeSeconds = None) -> int:
        """Return the same as `batch_exists`, and have the holders evict that run last (`touch`)."""
        return self._look_up(keys, 0, partial(self._leading, touch=True, compute_s=compute_s))

    def contains(self, keys: Keys) -> list[bool]:
        """Return for each key whether it has a holder: a hint, like `batch_exists`.

        False also without an answer. Has the short deadline `exists_timeout_s`.
        """
        return self._look_up(keys, [False] * len(keys), partial(self._contains, touch=False))

    def lengths(self, keys: Keys) -> list[int]:
        """Return the size of each page in bytes, to allocate buffers; 0 if no node holds it.

        A hint: the page may be gone when it is read. Has the short deadline `exists_timeout_s`.
        """

        def ask(keys: Keys, until: float) -> list[int]:
            path = self._wiring.reader.lengths(self._names(keys), self._tie.cluster, until)
            return self._bridge.run(path)

        return self._look_up(keys, [0] * len(keys), ask)

    def touch(self, keys: Keys) -> list[bool]:
        """Return the same as `contains`, and have the holders evict the found pages last.

        For a caller that will read what this returns. It pins nothing: each holder gets one message
        a call, which may be lost, and treats these pages as just read. A batch that was touched
        within the last second is not sent again. Has the short deadline `exists_timeout_s`.
        """
        return self._look_up(keys, [False] * len(keys), partial(self._contains, touch=True))

    def worth_reading(self, keys: Keys, *, compute_s: ComputeSeconds = None) -> int:
        """Return how many leading keys take less time to read than to compute.

        For pages that `contains` or `touch` has just found: those do not shorten what they return.
        Unknown keys after the last of these pages change nothing.
        compute_s: as in `batch_exists`. All keys with `decline` off, or without measurements.
        """

        def ask(until: float) -> int:
            if self._decliner is None:
                return len(keys)
            return self._decliner.worth(self._names(keys), until, compute_s)[0]

        return self._call("stats", 0, len(keys), ask, self.config.exists_timeout_s)

    def remove(self, keys: Keys) -> int:
        """Remove these pages at every live holder; return how many were removed.

        No get finds them afterwards; but if a node is killed while a slow disk still deletes them
        (longer than a tenth of a second), it may have them again after its restart. Members that do
        not answer within `op_timeout_s` keep their pages, and those of members that died or left
        less than 8 s ago may still be read: the log then has `client.removal_incomplete`. A page
        counts once for each holder.
        """

        def ask(until: float) -> int:
            names = self._names(keys)
            tag, timeout_s = self.namespace.tag(), self._timeout_s(until)
            try:
                return self._ask_home(
                    [
                        Remove(0, tag, names[begin : begin + REMOVE_KEYS_MAX].tobytes(), timeout_s)
                        for begin in range(0, len(names), REMOVE_KEYS_MAX)
                    ],
                    until,
                )
            finally:
                # Only now: before the answer, a call of another thread could still find them.
                self._wiring.cache.end(names)

        return self._call("remove", len(keys), 0, ask)

    def clear(self) -> int:
        """Drop every page of this namespace on every live node; return how many were removed.

        Members that do not answer, or have just ended, may keep their pages, as with `remove`.
        """

        def ask(until: float) -> int:
            message = Clear(0, self.namespace.tag(), self._timeout_s(until))
            try:
                return self._ask_home([message], until)
            finally:
                # Only now: before the answer, a call of another thread could still find them.
                self._wiring.cache.end()

        return self._call("clear", 0, 0, ask)

    def retain(self, keys: Keys, seconds: float) -> int:
        """Protect these pages from eviction for a time; return how many at least one holder keeps.

        seconds: from now on; 0 or more, and at most 30 days.

        Pages that are in the memory of a holder stay there, the first ones of the keys first, up to
        the quota of the namespace; namespaces without a quota share a quarter of a node's pool.
        Pages that are only on disk do not count. The longest time applies, of 30 days at most; 0
        seconds, or what is no time, end the protection. `remove` and `clear` remove retained pages,
        and a node that is drained or stopped forgets the time.
        """
        tag = self.namespace.tag()

        def message(part: bytes, timeout_s: float) -> Retain:
            # No number that a caller may give is too large for a message.
            time_s = float(min(seconds, RETAIN_MAX_S)) if seconds > 0 else 0.0
            return Retain(0, tag, part, time_s, timeout_s)

        return self._hint(reasons.RETAIN, keys, message)

    def demote(self, keys: Keys) -> int:
        """Have these pages evicted before others; return how many at least one holder demotes.

        They leave memory when their namespace needs room, the last ones of the keys first; a page
        on a holder's disk is read from there afterwards. A page that is read before that stays like
        any other, and a retained one stays anyway.
        """
        tag = self.namespace.tag()
        return self._hint(
            reasons.DEMOTE, keys, lambda part, timeout_s: Demote(0, tag, part, timeout_s)
        )

    def prefetch(self, keys: Keys) -> int:
        """Bring these pages into the memory of this host; return how many are there now.

        Holders load pages from their disks, and the home node keeps copies of pages of other hosts,
        which take at most its `mirror_share`, and no place of pages that were used recently. The
        call reads what it copies, and ends by its deadline with what there is by then.
        """
        return self._call("stats", 0, 0, lambda until: self._prefetch(self._names(keys), until))

    def share(self, keys: Keys) -> int:
        """Return how many of these pages other hosts can read.

        Nothing is left to do for that: a page that is set is published before the set returns.
        """

        def ask(until: float) -> int:
            names = self._names(keys)
            path = self._wiring.reader.exists(names, self._tie.cluster, until)
            known, whys, _ = self._bridge.run(path)
            found = int(np.count_nonzero(known))
            missing = whys.count(reasons.ABSENT)
            self._count_hint(
                reasons.SHARE,
                {
                    reasons.ALREADY: found,
                    reasons.MISSING: missing,
                    reasons.UNANSWERED: len(names) - found - missing,
                },
            )
            return found

        return self._call("stats", 0, 0, ask)

    def overlap(self, keys: Keys) -> Overlap:
        """Return which members hold these pages, and on which tier, according to the home node.

        A hint, for routers and schedulers: nothing is read or touched. Without an answer it names
        no holder, and `whole` is False. Has the deadline `op_timeout_s`.
        """

        def ask(until: float) -> Overlap:
            attached, names = self._tie.attached, self._names(keys)
            if attached is None:
                return Overlap.unknown(len(keys))
            home, step = attached.incarnation, OVERLAP_KEYS_MAX
            parts = [names[begin : begin + step] for begin in range(0, len(names), step)]
            asked = [(home, RequestOverlap(0, part.tobytes(), shard_only=False)) for part in parts]
            replies = self._wiring.asker.ask(asked, until)
            return Overlap.joined(
                [overlap_of(answer, len(part)) for answer, part in zip(replies, parts, strict=True)]
            )

        return self._call("stats", 0, Overlap.unknown(len(keys)), ask)

    @property
    def home_address(self) -> str:
        """The address at which the home node listens for clients of its host."""
        return self._home.url

    @property
    def home_state(self) -> HomeState:
        """The state of the home node, as of the last second; sends no request."""
        return self._home.state

    def member_addresses(self) -> dict[int, str]:
        """Return HOST:PORT of each live member, by its incarnation (the number of one start of it).

        As of the last second; sends no request. `Overlap.holders` has the same numbers.
        """
        return {number: member.control for number, member in self._tie.cluster.members.items()}

    def register_memory(self, address: int, length: int, owner: Any = None) -> Callable[[], None]:
        """Register memory for reads, in the background; return a function that ends that.

        For long-lived buffers: reads into other memory may need a copy. Does nothing without RDMA.

        address, length: of the memory, in bytes.
        owner: kept alive until the end, because a device would continue to write to freed memory.
        """
        return self._wiring.register_memory(address, length, owner)

    def stats(self) -> dict[str, int | float | str]:
        """Return figures of this client and of its home node, for operators and tests.

        Totals since the start, by the metric's name without `peercache_` and `_total`, with the
        value of its label: `pages_hit_shm`. Names that begin with `home_` are the home node's; they
        are missing if it does not answer within `exists_timeout_s`.
        """
        if self._fork.is_child:
            # In a forked child a lock of the metrics may be held forever.
            return {}
        figures = self._own_figures()
        home = self._call("stats", 0, None, self._home_figures)
        figures.update({f"home_{name}": value for name, value in (home or {}).items()})
        return figures

    # --- lifetime ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End calls, connections and mappings, and leave the cluster; may be repeated.

        Waits for calls of other threads, at most 5 s. An embedded node's pages are gone afterwards.
        """
        if self._fork.is_child:
            return
        with self._calls:
            if self._is_closed:
                return
            self._is_closed = True
            is_quiet = self._calls.wait_for(lambda: self._calls_in_flight == 0, CLOSE_S)
        self._wiring.close(is_quiet=is_quiet)

    def __enter__(self) -> Client:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    # --- the calls, between `_call` and the paths -------------------------------------------------

    def _set(self, keys: Keys, segments: Any, until: float) -> list[bool]:
        names, runs = self._batch(keys, segments)
        attached = self._tie.attached
        if attached is None:
            self._count("set", {reasons.NO_HOME: len(keys)})
            return [False] * len(keys)
        outcome = self._bridge.run(
            self._wiring.writer.set(
                names,
                runs,
                home=attached.incarnation,
                reservations=attached.reservations,
                until=until,
            ),
            attached.memory,
        )
        current.series = series_of("set", HOME, outcome.copied + outcome.here, len(names))
        metrics = self.metrics
        self._pages_copied.inc(outcome.copied)
        metrics.bytes_written.inc(outcome.copied_bytes)
        if outcome.here:
            metrics.pages_set.labels("here").inc(outcome.here)
        if outcome.unpublished:
            metrics.pages_unpublished.inc(outcome.unpublished)
        if current_call.report is not None:
            add_moved(outcome.copied, outcome.copied_bytes)
        if any(outcome.reasons):
            self._count("set", Counter(outcome.reasons))
            if reasons.NO_HOME in outcome.reasons:
                self._home.look_now()
            if reasons.NO_ANSWER in outcome.reasons:
                self._home.was_silent(outcome.reasons.count(reasons.NO_ANSWER))
        stored: list[bool] = outcome.stored.tolist()
        return stored

    def _get(self, keys: Keys, segments: Any, until: float) -> list[bool]:
        names, runs = self._batch(keys, segments)
        reader, cluster = self._wiring.reader, self._tie.cluster
        if reader.mirrorer is not None and (attached := self._tie.attached) is not None:
            home = MirrorHome(attached.incarnation, attached.reservations)
            outcome = self._bridge.run(
                reader.get(names, runs, cluster, until, home), attached.memory
            )
            self.metrics.pages_mirrored.inc(outcome.mirrored)
        else:
            outcome = self._bridge.run(reader.get(names, runs, cluster, until))
        current.series = series_of(
            "get", outcome.tier, sum(outcome.pages_by_fabric.values()), len(names)
        )
        for fabric, pages in outcome.pages_by_fabric.items():
            self.metrics.pages_hit.labels(fabric).inc(pages)
            self.metrics.bytes_read.labels(fabric).inc(outcome.bytes_by_fabric[fabric])
            if current_call.report is not None:
                add_moved(pages, outcome.bytes_by_fabric[fabric], fabric)
        self._count("get", Counter(outcome.reasons))
        if reasons.VERIFY_FAILED in outcome.reasons:
            # Never expected: memory, a device or a bug has changed bytes while the generation word
            # is right.
            wrong = [i for i, why in enumerate(outcome.reasons) if why == reasons.VERIFY_FAILED]
            self._log.error(
                "client.checksum_failed", keys=[names[i].tobytes().hex() for i in wrong[:8]]
            )
        hits: list[bool] = outcome.hits.tolist()
        return hits

    def _look_up(self, keys: Keys, miss: Result, look: Callable[[Keys, float], Result]) -> Result:
        timeout_s = self.config.exists_timeout_s
        return self._call("exists", len(keys), miss, partial(look, keys), timeout_s)

    def _hint(self, hint: str, keys: Keys, message: Callable[[bytes, float], Message]) -> int:
        """Have every holder of these pages do something; return of how many one has done it."""

        def ask(until: float) -> int:
            attached, names = self._tie.attached, self._names(keys)
            if attached is None:
                self._count_hint(hint, {reasons.UNANSWERED: len(names)})
                return 0
            timeout_s, step = self._timeout_s(until), HINT_KEYS_MAX
            asked = [
                message(names[begin : begin + step].tobytes(), timeout_s)
                for begin in range(0, len(names), step)
            ]
            home = attached.incarnation
            replies = self._wiring.asker.ask([(home, one) for one in asked], until)
            states = b"".join([one.states for one in replies if isinstance(one, Retained)])
            named = {outcome: states.count(state) for state, outcome in _HINT_STATES.items()}
            rest = max(len(names) - len(states), 0)
            forbidden = any(isinstance(one, Refused) for one in replies)
            why = reasons.FORBIDDEN if forbidden else reasons.UNANSWERED
            named[why] = named.get(why, 0) + rest
            self._count_hint(hint, named)
            return named[reasons.DONE]

        return self._call("stats", 0, 0, ask)

    def _prefetch(self, names: PageKeys, until: float) -> int:
        loads = self._wiring.reader.load(names, self._tie.cluster, until)
        where, loaded, cluster = self._bridge.run(loads)
        near = _near(where, cluster)
        far = where.known & ~near & ((where.records["flags"] & RESIDENT) != 0)
        unread = self._copy_here(names[far], where.records["length"][far], until)
        # The home node has answered with the records of its copies; owners learn of them later.
        looks = self._wiring.reader.load(names[far], cluster, until, is_cached=True)
        copied, _, cluster = self._bridge.run(looks)
        done = int((near & loaded).sum() + _near(copied, cluster).sum())
        here = int(near.sum() + _near(copied, cluster).sum())
        refused = max(0, int(near.sum() + far.sum()) - here - unread)
        missing = sum(
            where.reasons[at] in {"", reasons.ABSENT} for at in (~where.known).nonzero()[0]
        )
        self._count_hint(
            reasons.PREFETCH,
            {
                reasons.DONE: done,
                reasons.ALREADY: here - done,
                reasons.FORBIDDEN: refused,
                reasons.MISSING: missing,
                reasons.UNANSWERED: len(names) - here - refused - missing,
            },
        )
        return here

    def _copy_here(self, names: PageKeys, lengths: U64, until: float) -> int:
        """Read pages of other hosts, and have the home node keep copies of them.

        Return how many could not be read in time.
        """
        attached, prefetcher = self._tie.attached, self._wiring.prefetcher
        if attached is None:
            return len(names)
        # A record may state any length: a page that the home node has no room for is not read.
        fits = lengths <= attached.memory.page_bytes
        names, lengths = names[fits], lengths[fits]
        begin = unread = 0
        while begin < len(names) and not prefetcher.is_paused:
            if self._clock() >= until:
                return unread + len(names) - begin
            sizes = lengths[begin : begin + PREFETCH_PAGES].astype(np.uint64)
            ends = np.cumsum(sizes)
            sizes = sizes[: max(1, int(np.searchsorted(ends, PREFETCH_BYTES, "right")))]
            begin, part = begin + len(sizes), names[begin : begin + len(sizes)]
            memory = np.empty(int(sizes.sum()), np.uint8)
            first = np.uint64(memory.__array_interface__["data"][0])
            runs = PageRuns.regular(first + ends[: len(sizes)] - sizes, sizes, len(sizes))
            home = MirrorHome(attached.incarnation, attached.reservations)
            path = self._wiring.reader.get(part, runs, self._tie.cluster, until, home, prefetcher)
            outcome = self._bridge.run(path, attached.memory)
            self.metrics.pages_mirrored.inc(outcome.mirrored)
            unread += int(np.count_nonzero(~outcome.hits))
        return unread

    def _count_hint(self, hint: str, pages_by_outcome: Mapping[str, int]) -> None:
        for outcome, pages in pages_by_outcome.items():
            if pages:
                self.metrics.hint_pages.labels(hint, outcome).inc(pages)

    def _contains(self, keys: Keys, until: float, *, touch: bool) -> list[bool]:
        path = self._wiring.reader.exists(self._names(keys), self._tie.cluster, until, touch=touch)
        known, whys, tier = self._bridge.run(path)
        if (report := current_call.report) is not None and report.is_detailed:
            add_missed(Counter(whys))
        run = len(known) if known.all() else int(np.argmin(known))
        current.series = series_of("exists", tier, run, len(known))
        current.missed = whys
        self.metrics.exists_asked.inc(len(keys))
        self.metrics.exists_found.inc(run)
        found: list[bool] = known.tolist()
        return found

    def _leading(self, keys: Keys, until: float, *, touch: bool, compute_s: ComputeSeconds) -> int:
        names = self._names(keys)
        path = self._wiring.reader.leading(names, self._tie.cluster, until, touch=touch)
        found = self._bridge.run(path)
        run, declined = found.run, ""
        if self._decliner is not None and run:
            run, declined = self._decliner.worth(names[:run], until, compute_s)
        if (report := current_call.report) is not None and report.is_detailed:
            add_missed({found.why: len(keys) - found.run, declined: found.run - run})
        current.series = series_of("exists", found.tier, run, len(keys))
        self.metrics.exists_asked.inc(len(keys))
        self.metrics.exists_found.inc(found.run)
        if found.is_again:
            self.metrics.exists_asked_again.inc(len(keys))
        return run

    def _make_decliner(self) -> Decliner:
        parts = self._wiring
        return Decliner(
            compute_s=self.config.page_compute_ms / 1000,
            get_s=self.config.op_timeout_s,
            cache=parts.cache,
            costs=parts.costs,
            reader=parts.reader,
            bridge=parts.bridge,
            clock=parts.clock,
            cluster=lambda: self._tie.cluster,
            call=partial(self._call, "stats", 0, None),
            metrics=parts.metrics,
        )

    def _names(self, keys: Keys) -> PageKeys:
        if not isinstance(keys, np.ndarray):
            return page_keys(keys, self._digest)
        if keys.dtype.kind != "V" or keys.dtype.itemsize != KEY_BYTES or keys.ndim != 1:
            # Its bytes would be other keys, or a request that the home node does not answer.
            found = f"an array of {keys.dtype}, {keys.shape}"
            raise UnusableBuffers(f"{found}, has no page keys: give names, or page keys, (n,) V16")
        return keys

    def _batch(self, keys: Keys, segments: Any) -> tuple[PageKeys, PageRuns]:
        runs = segments if isinstance(segments, PageRuns) else PageRuns.of(segments)
        pages = len(runs.lengths)
        if pages != len(keys):
            raise UnusableBuffers(f"{len(keys)} keys, but segments for {pages} pages")
        return self._names(keys), runs

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
        # The exported buffers must not move or be freed before the call ends.
        del held
        return answers

    def _named(self, incarnation: int) -> str:
        """Return a member's HOST:PORT, for operators; its incarnation once it is gone."""
        member = self._tie.cluster.members.get(incarnation)
        return name_of(incarnation) if member is None else member.control

    def _timeout_s(self, until: float) -> float:
        """Return how long the home node may wait for other members: its answer takes time, too."""
        return max(0.0, (until - self._clock()) * HOME_TIMEOUT_FRACTION)

    def _ask_home(self, messages: Sequence[Message], until: float) -> int:
        """Have the home node remove pages on every live member; return how many were removed."""
        attached = self._tie.attached
        if attached is None or not messages:
            return 0
        home = attached.incarnation
        answers = self._wiring.asker.ask([(home, message) for message in messages], until)
        removed = [answer for answer in answers if isinstance(answer, Removed)]
        missed = sorted({member for answer in removed for member in answer.missed})
        if missed or len(removed) < len(messages):
            self._log.warning(
                "client.removal_incomplete",
                unanswered=len(messages) - len(removed),
                missed=[self._named(member) for member in missed[:8]],
            )
        return sum(answer.count for answer in removed)

    def _home_figures(self, until: float) -> dict[str, int | float | str] | None:
        attached = self._tie.attached
        if attached is None:
            return None
        timeout = min(until, self._clock() + self.config.exists_timeout_s)
        answer = self._wiring.asker.ask([(attached.incarnation, RequestStats(0))], timeout)[0]
        return answer.figures if isinstance(answer, ReportStats) else None

    # --- `_call`: the deadline, closing, and no exceptions ----------------------------------------

    def _call(
        self,
        operation: str,
        pages: int,
        miss: Result,
        call: Callable[[float], Result],
        timeout_s: float | None = None,
    ) -> Result:
        """Run one call; on any failure return `miss`, and count it."""
        if os.getpid() != self._fork.owner:
            return miss
        started = self._clock()
        timeout_s = self.config.op_timeout_s if timeout_s is None else timeout_s
        with self._lock:
            if self._is_closed:
                self._count(operation, {reasons.CLOSED: pages})
                return miss
            self._calls_in_flight += 1
        outer, current.number = current.number, next(self._numbers)
        current.series, current.missed = PLACES[operation, "", ""], ()
        try:
            return call(started + timeout_s - min(RETURN_MARGIN_S, timeout_s / 10))
        except UnusableBuffers as error:
            return self._unusable(operation, miss, error)
        except Exception:
            # A bug of ours must not break the engine: a miss is always a correct answer.
            self._log.error("client.call_failed", operation=operation, pages=pages, exc_info=True)
            self._count(operation, {reasons.INTERNAL: pages})
            return miss
        finally:
            with self._lock:
                self._calls_in_flight -= 1
                if self._is_closed:
                    self._calls.notify_all()
            took_s = self._clock() - started
            self._wiring.report.calls.append((current.series, took_s))
            if (of_page := PAGE_OF.get(current.series)) is not None and pages:
                self._wiring.report.calls.append((of_page, took_s / pages))
            if took_s > self._wiring.report.slowest.floor:
                number, missed = current.number, current.missed
                note = CallNote.of(current.series, took_s, pages, number, missed)
                self._wiring.report.slowest.add(note)
            if took_s > timeout_s:
                self.metrics.deadlines_overrun.inc()
            if current_call.report is not None:
                current_call.report.call = current.number
            current.number = outer

    def _unusable(self, operation: str, miss: Result, error: UnusableBuffers) -> Result:
        self._log.warning("client.call_refused", operation=operation, problem=str(error))
        pages = len(miss) if isinstance(miss, list) else 0
        self._count(operation, {reasons.WRONG_SIZE: pages})
        return miss

    def _count(self, operation: str, pages_by_reason: Mapping[str, int]) -> None:
        """Count the pages that a call did not serve; reason "" means no failure."""
        current.missed = pages_by_reason
        if current_call.report is not None:
            add_missed(pages_by_reason)
        counters = {"get": self.metrics.pages_missed, "set": self.metrics.sets_refused}
        for reason, pages in pages_by_reason.items():
            if reason and operation in counters:
                counters[operation].labels(reason).inc(pages)

    def _own_figures(self) -> dict[str, int | float | str]:
        figures: dict[str, int | float | str] = {
            "client": name_of(self._wiring.identity),
            "attached": int(self._tie.attached is not None),
            "members": len(self._tie.cluster.members),
            "location_cache_entries": len(self._wiring.cache),
            "breakers_opened": self._wiring.breakers.opened_count,
        }
        for metric in self.metrics.registry.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total") and sample.value:
                    labels = "".join(f"_{value}" for value in sample.labels.values())
                    name = sample.name.removeprefix("peercache_").removesuffix("_total")
                    figures.setdefault(name + labels, sample.value)
        return figures


def _near(where: Whereabouts, cluster: Cluster) -> Mask:
    """Return which pages are in the memory of a node of this host, (n,) bool."""
    near: Mask = where.known & ((where.records["flags"] & RESIDENT) != 0)
    holders = where.records["holder"]
    for holder in dict.fromkeys(holders[near].tolist()):
        if holder not in cluster.members or cluster.distance(holder) >= FAR:
            near &= holders != holder
    return near


def series_of(operation: str, tier: str, served: int, asked: int) -> int:
    """Return the metric series of a call that served `served` of the `asked` pages."""
    outcome = ALL if served == asked else SOME if served else NONE
    return PLACES.get((operation, tier, outcome), 0) or PLACES[operation, "", ""]
