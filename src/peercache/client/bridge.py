"""The bridge: performs the steps of the synchronous `batch_get` and `batch_set` in the caller's
thread.

SGLang calls the store and blocks until it returns. The read and write paths are generators that
yield one step after another: ask, fetch, copy. The bridge performs each step with blocking calls in
the caller's thread, and sends the answer back to the path. No loop and no other thread is involved,
except that a read from several holders over a network uses a thread for each further holder.

`Tables` are the directory tables of this host's nodes, opened and read by a client:

Owns    one open table for each node of this host: opened when a view names the node, closed when
        the view no longer does.
Keeps   a table that cannot be read costs time only once: it stays closed until the next view. The
        reason is counted, and the client asks the node instead.
Limits  TABLES_MAX tables.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container, Generator, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias, TypeVar, final

import attrs
import numpy as np
import numpy.typing as npt
import xxhash

from peercache.errors import PeerCacheError, PeerUnreachable
from peercache.fabric.port import Fabric
from peercache.memory.attached import AttachedSegment
from peercache.memory.table_reading import TORN, AttachedTable, Unusable
from peercache.model.ids import Incarnation, name_of
from peercache.model.member import Member
from peercache.model.reads import Fetched, Looked, PeerRead
from peercache.model.runs import U64, PageRuns
from peercache.model.seal import unread_seals
from peercache.net.breaker import Breakers
from peercache.net.requests import Asker, Talk
from peercache.observability import reasons
from peercache.observability.metrics import Metrics
from peercache.paths.cluster import Cluster
from peercache.paths.steps import (
    Ask,
    Checksum,
    Collect,
    Drain,
    Fetch,
    Greet,
    Place,
    Post,
    ReadTable,
    Renew,
    Step,
    Submit,
)
from peercache.trust.sharing import Sharing

TABLES_MAX = 64
"""A host runs a few nodes; each table uses a descriptor and address space."""

NOT_OPENED = "not_opened"
"""The reason for a table that exists but cannot be opened."""


@final
@attrs.define(eq=False, kw_only=True)
class Tables:
    """The tables that a client can read. `look` may be called from any thread.

    shm_dir: the folder of the tables of this host's nodes, according to this client's settings;
             other tables are next to their segments, in one of `folders`.
    asker:   a number that identifies this client.
    clock:   CLOCK_MONOTONIC.
    """

    _boot_id: str
    _shm_dir: str
    _folders: Container[str]
    _sharing: Sharing
    _asker: int
    _clock: Callable[[], float]
    _metrics: Metrics
    _log: Any
    _opened: dict[int, AttachedTable] = attrs.field(factory=dict, init=False)
    _addresses: dict[int, str] = attrs.field(factory=dict, init=False)
    """HOST:PORT of the nodes of this host, for the log."""

    def nodes(self) -> Iterable[int]:
        """Return the nodes whose tables can be read now."""
        return self._opened

    def follow(self, members: Iterable[Member]) -> None:
        """Open the tables of the live members of this host, close those of others. One thread."""
        here = {member.incarnation: member for member in members if member.boot_id == self._boot_id}
        self._addresses = {node: member.control for node, member in here.items()}
        kept = {node: table for node, table in self._opened.items() if node in here}
        gone = [table for node, table in self._opened.items() if node not in here]
        for node, member in here.items():
            if node not in kept and len(kept) < TABLES_MAX:
                table = self._open(member)
                if table is not None:
                    kept[node] = table
        # Replaced, never modified: other threads may be using it.
        self._opened = kept
        for table in gone:
            table.close()

    def look(self, step: ReadTable) -> Looked | None:
        """Perform a step; None if the table cannot be read now."""
        table = self._opened.get(step.peer)
        if table is None:
            return None
        ring = int.from_bytes(step.ring, "little")
        try:
            return table.look(step.keys, ring, self._clock(), self._asker)
        except Unusable as unusable:
            self._metrics.tables_unusable.labels(unusable.reason).inc()
            if unusable.reason != TORN:
                self._opened = {node: t for node, t in self._opened.items() if node != step.peer}
                table.close()
                self._log_unusable(step.peer, unusable.reason)
            return None

    def removals(self, node: int) -> int:
        """Return the removal count of a node of this host; 0 without its table."""
        table = self._opened.get(node)
        return 0 if table is None else table.removals()

    def close(self) -> None:
        """Close every table."""
        self.follow(())

    def _open(self, member: Member) -> AttachedTable | None:
        own = str(Path(member.segment).parent)
        for folder in dict.fromkeys([own, self._shm_dir]):
            if folder != self._shm_dir and folder not in self._folders:
                continue
            try:
                return AttachedTable.open(
                    folder, incarnation=Incarnation(member.incarnation), sharing=self._sharing
                )
            except PeerUnreachable:
                continue  # A node of an older version has no table.
            except PeerCacheError as error:
                self._metrics.tables_unusable.labels(NOT_OPENED).inc()
                self._log_unusable(member.incarnation, str(error))
                return None
        return None

    def _log_unusable(self, node: int, problem: str) -> None:
        at = self._addresses.get(node, "")
        self._log.warning("client.table_unusable", node=name_of(node), at=at, problem=problem)


FETCH_THREADS_MAX = 16
"""Holders that are read at the same time over a network: their streams overlap, one thread each."""

Result = TypeVar("Result")

AtOnce: TypeAlias = Ask | ReadTable | Post | Greet | Drain | Fetch | Place | Checksum | Renew
"""The steps that are complete by themselves, without a later step."""


@final
@attrs.define(eq=False, kw_only=True)
class Bridge:
    """Performs the steps of a path with blocking calls in the caller's thread. Thread-safe.

    fabrics: a holder is read through the first that reaches it.
    tables:  None: read no tables.
    renew:   requests a new view, from the home node; its requests use this bridge, too.
    """

    _asker: Asker
    _fabrics: tuple[Fabric, ...]
    _breakers: Breakers
    _clock: Callable[[], float]
    _log: Any
    _tables: Tables | None = None
    renew: Callable[[float], Cluster] | None = attrs.field(default=None, init=False)
    _chosen: dict[int, str] = attrs.field(factory=dict, init=False)
    _threads: ThreadPoolExecutor | None = attrs.field(default=None, init=False)
    _is_closed: bool = attrs.field(default=False, init=False)
    _lock: Lock = attrs.field(factory=Lock, init=False)

    def run(
        self, path: Generator[Step, Any, Result], home_segment: AttachedSegment | None = None
    ) -> Result:
        """Run a path to its end. home_segment: the memory in which its pages are placed."""
        answer: Any = None
        talk: Talk | None = None
        try:
            while True:
                try:
                    step = path.send(answer)
                except StopIteration as end:
                    result: Result = end.value
                    return result
                if isinstance(step, Submit):
                    talk = talk or self._asker.talk()
                    answer = talk.send(step.peer, step.message)
                elif isinstance(step, Collect):
                    assert talk is not None, "an answer is collected after its question"
                    answer = talk.collect(step.number, step.until)
                else:
                    answer = self._do(step, home_segment)
        finally:
            if talk is not None:
                talk.end()
            # After an exception, too, the path must free its resources now, not when it is garbage
            # collected.
            path.close()

    def close(self) -> None:
        """End the threads; reads in flight end by their deadlines."""
        with self._lock:
            self._is_closed = True
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def forget(self, alive: set[int]) -> None:
        """Forget peers that are no longer alive."""
        for peer in [peer for peer in list(self._chosen) if peer not in alive]:
            self._chosen.pop(peer, None)

    def fabric_of_peers(self) -> dict[int, str]:
        """Return the fabric last used for each peer."""
        return dict(self._chosen)

    def shares_memory(self, member: Member) -> bool:
        """Return whether a member is read without a network."""
        fabric = next((each for each in self._fabrics if each.reaches(member)), None)
        return fabric is not None and fabric.name == "shm"

    def _do(self, step: AtOnce, home_segment: AttachedSegment | None) -> Any:
        if isinstance(step, Ask):
            return self._asker.ask(step.questions, step.until, step.enough, step.hedge)
        if isinstance(step, Place):
            return _place(step, home_segment)
        if isinstance(step, ReadTable):
            return None if self._tables is None else self._tables.look(step)
        if isinstance(step, Post):
            return self._asker.post(step.messages)
        if isinstance(step, Drain):
            return self._asker.drain(step.peer)
        if isinstance(step, Fetch):
            return self._fetch(step)
        if isinstance(step, Greet):
            return self._asker.greet(step.url, step.until)
        if isinstance(step, Renew):
            assert self.renew is not None, "a path that reads has a home node"
            return self.renew(step.until)
        return checksums_of(step.runs, step.pages)

    def _fetch(self, step: Fetch) -> list[Fetched]:
        chosen = [self._fabric_for(read) for read in step.reads]
        elsewhere: dict[int, Future[Fetched]] = {}
        try:
            for place, fabric in enumerate(chosen[1:], start=1):
                # Memory copies do not gain from threads; network streams do.
                if fabric is not None and fabric.name != "shm":
                    future = self.submit(step.reads[place], fabric, step.until)
                    if future is not None:
                        elsewhere[place] = future
            here = {
                place: self._read(read, chosen[place], step.until)
                for place, read in enumerate(step.reads)
                if place not in elsewhere
            }
            return [
                here[place] if place in here else self._result(elsewhere[place], read, step.until)
                for place, read in enumerate(step.reads)
            ]
        finally:
            # After an exception, too: nothing may write to a destination after the return.
            wait([future for future in elsewhere.values() if not future.cancel()])

    def _read(self, read: PeerRead, fabric: Fabric | None, until: float) -> Fetched:
        pages, holder = len(read.offsets), read.member.incarnation
        began = self._clock()
        if fabric is None or not self._breakers.begin_read(holder, began):
            return _nothing(pages, reasons.PEER_UNREACHABLE)
        fetched = fabric.read(read, until)
        now = self._clock()
        self._breakers.end_read(holder, fetched.failure, now)
        # A fabric that delegates a read to another one names that one.
        return attrs.evolve(fetched, fabric=fetched.fabric or fabric.name, took_s=now - began)

    def submit(self, read: PeerRead, fabric: Fabric, until: float) -> Future[Fetched] | None:
        """Read in another thread; None if none is available."""
        with self._lock:
            if self._is_closed:
                return None
            if self._threads is None:
                self._threads = ThreadPoolExecutor(FETCH_THREADS_MAX, "peercache-fetch")
            # A future of our own: if no thread can be started, `submit` raises, but has queued the
            # read anyway. The read must not begin after this call has given up.
            done: Future[Fetched] = Future()
            try:
                queued = self._threads.submit(self._fulfil, done, read, fabric, until)
            except RuntimeError:
                return None if done.cancel() else done
            # This also cancels a read that `close` drops from the queue.
            queued.add_done_callback(lambda dropped: dropped.cancelled() and done.cancel())
            return done

    def _fulfil(self, done: Future[Fetched], read: PeerRead, fabric: Fabric, until: float) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(self._read(read, fabric, until))
        except BaseException as error:
            done.set_exception(error)

    def _result(self, future: Future[Fetched], read: PeerRead, until: float) -> Fetched:
        try:
            return future.result(max(0.0, until - self._clock()))
        except FutureTimeoutError:
            # It may wait behind reads of other calls with later deadlines: then it never begins.
            if future.cancel():
                return _nothing(len(read.offsets), reasons.DEADLINE)
            return future.result()
        except CancelledError:
            return _nothing(len(read.offsets), reasons.CLOSED)

    def _fabric_for(self, read: PeerRead) -> Fabric | None:
        holder = read.member.incarnation
        for fabric in self._fabrics:
            if fabric.reaches(read.member):
                if self._chosen.get(holder) != fabric.name:
                    self._chosen[holder] = fabric.name
                    name, at = name_of(holder), read.member.control
                    self._log.info("fabric.chosen", peer=name, at=at, fabric=fabric.name)
                return fabric
        return None


def _nothing(pages: int, failure: str) -> Fetched:
    return Fetched(unread_seals(pages), failure)


def _place(step: Place, segment: AttachedSegment | None) -> int:
    if segment is None:
        return 0
    # The home node may give us wrong pages, but it must not make us access other memory.
    ends = step.offsets + step.runs.lengths
    # A sum that wraps around is smaller than its summand.
    inside = (ends <= np.uint64(segment.page_bytes)) & (ends >= step.offsets)
    if not inside.all():
        return 0
    try:
        with segment.in_use():
            return segment.copy(step.runs, step.offsets, to_slots=True, deadline=step.until)
    except PeerUnreachable:
        # The home node has restarted since, and its old segment is being unmapped.
        return 0


def checksums_of(runs: PageRuns, pages: npt.NDArray[np.intp]) -> U64:
    """Return the xxh3_64 of the bytes of each of the `pages`, (n,) uint64; never 0, "none": 1
    instead.
    """
    digests = np.empty(len(pages), np.uint64)
    for place, page in enumerate(pages.tolist()):
        begin, end = runs.starts[page : page + 2].tolist()
        pieces = [
            (ctypes.c_char * size).from_address(address)
            for address, size in zip(
                runs.addresses[begin:end].tolist(), runs.sizes[begin:end].tolist(), strict=True
            )
        ]
        if len(pieces) == 1:
            digest = xxhash.xxh3_64_intdigest(pieces[0])
        else:
            gathered = xxhash.xxh3_64()
            for piece in pieces:
                gathered.update(piece)
            digest = gathered.intdigest()
        digests[place] = digest or 1
    return digests
