"""The driver: does what the read and write paths ask for, in the caller's thread."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar, final

import attrs
import numpy as np
import xxhash

from peercache import observe
from peercache.net.asking import Asker
from peercache.ports import ODD, Ask, Fabric, Fetch, Fetched, PeerRead, Place, Post, Step
from peercache.runs import U64, PageRuns
from peercache.segment.attached import AttachedSegment
from peercache.segment.copying import copy_pages
from peercache.transfer.breaker import Breakers

FETCH_THREADS_MAX = 16
"""Holders read from at once over a network: their streams overlap, one thread each."""

Result = TypeVar("Result")


@final
class Driver:
    """Runs the steps of sans-IO paths with blocking calls. Thread-safe."""

    def __init__(
        self,
        *,
        asker: Asker,
        fabrics: tuple[Fabric, ...],
        breakers: Breakers,
        clock: Callable[[], float],
        log: Any,
    ) -> None:
        """Read through the first of `fabrics` that reaches a holder."""
        self._asker = asker
        self._fabrics = fabrics
        self._breakers = breakers
        self._clock = clock
        self._log = log
        self._chosen: dict[int, str] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._lock = Lock()

    def run(
        self, path: Generator[Step, Any, Result], home_segment: AttachedSegment | None = None
    ) -> Result:
        """Drive a path to its end; `home_segment` is where its pages are placed."""
        answer: Any = None
        while True:
            try:
                step = path.send(answer)
            except StopIteration as end:
                result: Result = end.value
                return result
            answer = self._do(step, home_segment)

    def close(self) -> None:
        """End the threads; reads in flight are bounded by their deadlines."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def forget(self, alive: set[int]) -> None:
        """Forget peers that are not alive any more."""
        for peer in [peer for peer in self._chosen if peer not in alive]:
            self._chosen.pop(peer, None)

    def fabric_of_peers(self) -> dict[int, str]:
        """Return the fabric last used for each peer."""
        return dict(self._chosen)

    def _do(self, step: Step, home_segment: AttachedSegment | None) -> Any:
        if isinstance(step, Ask):
            return self._asker.ask(step.questions, step.until, step.enough)
        if isinstance(step, Post):
            return self._asker.post(step.messages)
        if isinstance(step, Fetch):
            return self._fetch(step)
        if isinstance(step, Place):
            return _place(step, home_segment)
        return checksums_of(step.runs)

    def _fetch(self, step: Fetch) -> list[Fetched]:
        chosen = [self._fabric_for(read) for read in step.reads]
        waiting: list[Callable[[], Fetched]] = []
        for read, fabric in zip(step.reads[1:], chosen[1:], strict=True):
            # Memory copies gain nothing from threads; streams of a network do.
            if fabric is None or fabric.name == "shm":
                waiting.append(lambda r=read, f=fabric: self._read(r, f, step.until))  # type: ignore[misc]
            else:
                future = self._executor().submit(self._read, read, fabric, step.until)
                waiting.append(future.result)
        if not step.reads:
            return []
        return [self._read(step.reads[0], chosen[0], step.until), *(wait() for wait in waiting)]

    def _read(self, read: PeerRead, fabric: Fabric | None, until: float) -> Fetched:
        if fabric is None:
            return Fetched(np.full(len(read.offsets), ODD), observe.PEER_UNREACHABLE)
        holder = read.member.incarnation
        fetched = fabric.read(read, until)
        if fetched.failure == observe.PEER_UNREACHABLE:
            self._breakers.failed(holder, self._clock())
        elif not fetched.failure:
            self._breakers.answered(holder)
        return attrs.evolve(fetched, fabric=fabric.name)

    def _fabric_for(self, read: PeerRead) -> Fabric | None:
        holder = read.member.incarnation
        for fabric in self._fabrics:
            if fabric.reaches(read.member):
                if self._chosen.get(holder) != fabric.name:
                    self._chosen[holder] = fabric.name
                    self._log.info("fabric.chosen", peer=f"{holder:016x}", fabric=fabric.name)
                return fabric
        return None

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(FETCH_THREADS_MAX, "peercache-fetch")
            return self._threads


def _place(step: Place, segment: AttachedSegment | None) -> int:
    if segment is None:
        return 0
    ends = step.offsets + step.runs.lengths()
    # The home node is trusted with our pages, not with our memory.
    if len(ends) and int(ends.max()) > segment.page_bytes:
        return 0
    with segment.in_use():
        addresses = step.offsets + np.uint64(segment.pages_address)
        return copy_pages(step.runs, addresses, to_slots=True, deadline=step.until)


def checksums_of(runs: PageRuns) -> U64:
    """Return the xxh3_64 of each page's bytes, (n,) uint64; 0, which means none, becomes 1."""
    digests = np.empty(len(runs), np.uint64)
    for page in range(len(runs)):
        digest = xxhash.xxh3_64()
        for run in range(int(runs.starts[page]), int(runs.starts[page + 1])):
            size = int(runs.sizes[run])
            digest.update((ctypes.c_char * size).from_address(int(runs.addresses[run])))
        digests[page] = digest.intdigest() or 1
    return digests
