"""Which part of a found prefix an engine should read: not what it computes in less time.

`Decliner` compares what `ReadCosts` has measured with the time that the engine states. About a
source without a recent measurement it knows nothing: then it reads a few pages in the background,
into memory of its own, and waits for them for a small fraction of the time to compute the prefix.
So a slow source is known before an engine waits for it, and one that has recovered is found again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias, final

import attrs
import numpy as np

from peercache.client.bridge import Bridge
from peercache.model.keys import PageKeys
from peercache.model.records import RESIDENT, Records
from peercache.model.runs import U64, PageRuns
from peercache.observability import reasons
from peercache.observability.metrics import Metrics
from peercache.paths.cluster import Cluster
from peercache.paths.costs import (
    Line,
    Mask,
    ReadCosts,
    Seconds,
    Source,
    by_source,
    cheapest,
)
from peercache.paths.lookup import LocationCache
from peercache.paths.read import Reader

PROBE_SHARE = 0.05
"""How long a call waits for its probes, as a fraction of the time to compute the prefix."""

PROBE_PAGES_MIN, PROBE_PAGES = 3, 8
PROBE_BYTES = 8 * 2**20
"""The most that a probe reads, beyond two pages."""

PROBES_MAX = 4
"""Probes at the same time: each has a thread, and memory for its pages."""

READ_SHARE = 0.8
"""How long a prefix may take to read, as a fraction of a get's deadline: SGLang reads it with one
get, and a get over tcp that ends before its last byte has no hits."""

LATE_FACTOR = 3.0
LATE_S = 0.01
"""A probe is late after so many times its time by earlier measurements, and this, in which a busy
engine may keep Python's lock."""

Part: TypeAlias = tuple[Source, Mask | None]
"""A source, and which pages of the prefix are of it; None: all."""


@attrs.define(eq=False)
class _Probe:
    """A read in the background.

    line: what was measured before, at any time, or else by its first page. late_at: from then on
          that is wrong.
    """

    began: float
    line: Line | None
    late_at: float
    is_done: threading.Event = attrs.field(factory=threading.Event)

    def expect(self, line: Line, reads: int, size: int, now: float) -> None:
        """Expect from now on to have read so many bytes, in so many reads, as this line says."""
        usual_s = reads * line[0] + line[1] * size
        self.line, self.late_at = line, now + LATE_FACTOR * usual_s + LATE_S


@final
@attrs.define(eq=False, kw_only=True)
class Decliner:
    """Shortens prefixes. Thread-safe.

    compute_s: seconds that the engine takes to compute a page, unless a call states others.
    get_s:     the deadline of a get.
    cluster:   returns the latest known cluster.
    call:      runs a function with its deadline as a call of the client, which raises nothing.
    """

    _compute_s: float
    _get_s: float
    _cache: LocationCache
    _costs: ReadCosts
    _reader: Reader
    _bridge: Bridge
    _clock: Callable[[], float]
    _cluster: Callable[[], Cluster]
    _call: Callable[[Callable[[float], None]], None]
    _metrics: Metrics
    _probes: dict[Source, _Probe] = attrs.field(factory=dict, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def worth(
        self, keys: PageKeys, until: float, compute_s: float | Sequence[float] | None
    ) -> tuple[int, str]:
        """Return how many of these found pages to read, and why not all of them.

        compute_s: seconds to compute a page, or each page, further ones are ignored; None: those
                   of the settings.
        """
        if not len(keys):
            return 0, ""
        given = self._compute_s if compute_s is None else compute_s
        if isinstance(given, float | int) and self._are_cheap(keys, given):
            return len(keys), ""
        stated = np.atleast_1d(np.asarray(given, np.float64))[: len(keys)]
        records, are_found = self._cache.find(keys)
        reach = len(keys) - int(np.argmax(are_found[::-1]))
        # What is not found after that is computed in any case.
        seconds: Seconds = np.where(np.arange(len(keys)) < reach, stated, 0.0)
        known: list[tuple[Line, Mask | None]] = []
        unknown: list[Part] = []
        for source, chosen in by_source(records):
            line = self._costs.line_of(source)
            if source in self._probes or (line is None and self._is_far(source)):
                unknown.append((source, chosen))
            elif line is not None:
                known.append((line, chosen))
        run, why = len(keys), ""
        if unknown:
            run, measured = self._measure(keys, records, unknown, float(seconds.sum()), until)
            known += measured
            why = reasons.UNMEASURED if run < len(keys) else ""
        cheap = cheapest(records["length"][:run], known, seconds[:run], READ_SHARE * self._get_s)
        if cheap < run:
            is_on_disk = not records["flags"][cheap] & RESIDENT
            run, why = cheap, reasons.SLOW_DISK if is_on_disk else reasons.SLOW_FABRIC
        if why:
            self._metrics.exists_declined.labels(why).inc(int(are_found[run:].sum()))
        return run, why

    def _are_cheap(self, keys: PageKeys, page_s: float) -> bool:
        """Return whether pages in the memory of one holder are all worth it: the usual case."""
        holders = self._cache.holders(keys, not_before=-np.inf)
        if holders is None or len(holders) > 1:
            return False
        source = holders[0], False
        line = self._costs.line_of(source)
        if line is None:
            return not self._is_far(source)
        # An estimate: the pages of a batch nearly always have the same size.
        read_s = int(self._cache.find(keys[:1])[0]["length"][0]) * line[1]
        whole_s = line[0] + read_s * len(keys)
        may_end_s = min(page_s * len(keys), READ_SHARE * self._get_s)
        return whole_s <= may_end_s and source not in self._probes

    def _measure(
        self, keys: PageKeys, records: Records, parts: list[Part], compute_s: float, until: float
    ) -> tuple[int, list[tuple[Line, Mask | None]]]:
        """Probe sources; return what they cost, as far as that is known by then.

        And how many pages come before the first one of a source that is slower than computing.
        """
        wait_s = min(PROBE_SHARE * compute_s, until - self._clock())
        # A source that is as fast as computing delivers this many in time.
        pages = int(
            np.clip(wait_s * len(keys) / max(compute_s, 1e-9), PROBE_PAGES_MIN, PROBE_PAGES)
        )
        probes = [self._probe(source, keys, records, chosen, pages) for source, chosen in parts]
        run, measured = len(keys), []
        for (source, chosen), probe in zip(parts, probes, strict=True):
            line = None
            if probe is None or probe.is_done.wait(max(0.0, probe.began + wait_s - self._clock())):
                line = self._costs.line_of(source)
            elif self._clock() < probe.late_at:
                line = probe.line
            else:
                run = min(run, 0 if chosen is None else int(np.argmax(chosen)))
            if line is not None:
                measured.append((line, chosen))
        return run, measured

    def _probe(
        self, source: Source, keys: PageKeys, records: Records, chosen: Mask | None, count: int
    ) -> _Probe | None:
        """Begin to read the first pages of a source, unless that is going on; None: it cannot."""
        now, earlier = self._clock(), self._costs.line_of(source, age_max_s=np.inf)
        pages = (np.arange(len(keys)) if chosen is None else np.flatnonzero(chosen))[:count]
        sizes = records["length"][pages].astype(np.uint64)
        pages = pages[: max(2, int(np.searchsorted(np.cumsum(sizes), PROBE_BYTES, "right")))]
        sizes = sizes[: len(pages)]
        with self._lock:
            if source in self._probes or len(self._probes) >= PROBES_MAX:
                return self._probes.get(source)
            probe = self._probes[source] = _Probe(now, None, now)
            if earlier is not None:
                probe.expect(earlier, 2, int(sizes.sum()), now)

        def read(until: float) -> None:
            # Two sizes show latency and throughput.
            self._read(keys[pages[:1]], sizes[:1], until)
            line = self._costs.line_of(source)
            if line is not None and earlier is None:
                probe.expect(line, 1, int(sizes[1:].sum()), self._clock())
            if len(pages) > 1:
                self._read(keys[pages[1:]], sizes[1:], until)

        def run() -> None:
            try:
                self._call(read)
            finally:
                with self._lock:
                    del self._probes[source]
                probe.is_done.set()

        try:
            threading.Thread(target=run, name="peercache-probe", daemon=True).start()
        except RuntimeError:  # The process has too many threads.
            with self._lock:
                del self._probes[source]
            return None
        return probe

    def _read(self, keys: PageKeys, sizes: U64, until: float) -> None:
        """Read pages for their time: `Reader` measures it, and nothing else uses the bytes."""
        memory = np.empty(int(sizes.sum()), np.uint8)
        first = np.uint64(memory.__array_interface__["data"][0])
        runs = PageRuns.regular(first + np.cumsum(sizes) - sizes, sizes, len(sizes))
        self._bridge.run(self._reader.get(keys, runs, self._cluster(), until))

    def _is_far(self, source: Source) -> bool:
        """Return whether a source may be slow: memory that is read without a network is not."""
        (holder, is_on_disk), members = source, self._cluster().members
        if holder not in members:
            return False
        return is_on_disk or not self._bridge.shares_memory(members[holder])
