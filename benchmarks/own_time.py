"""`python -m benchmarks.own_time`: the processor time of a get in our own code.

The whole path runs over a device that completes at once. Keys are hashed, records are looked up in
the location cache, READs are planned and posted, words are judged: everything that a client does
for a batch whose records it knows, without moving bytes.
"""

from __future__ import annotations

import hashlib
import json
import time

import numpy as np
import numpy.typing as npt

from benchmarks.null_device import instant_fabric
from peercache.model.keys import Namespace, page_keys
from peercache.model.member import ALIVE, Member
from peercache.model.reads import PeerRead
from peercache.model.records import RECORD, RESIDENT
from peercache.model.runs import U64, PageRuns
from peercache.model.seal import SEAL, Seals
from peercache.net.breaker import Breakers
from peercache.paths.cluster import Cluster
from peercache.paths.location_cache import LocationCache
from peercache.paths.lookup import Locator
from peercache.paths.read import Reader, ReadOutcome
from peercache.paths.steps import Fetch
from peercache.rdma.fabric import RdmaFabric

BATCH = 128
PAGE_BYTES = 64 * 2**10
GRANULE = 16 * 2**10
READS = 200
WORD = 2
"""The generation of every page."""
TURNS = 4
TIMEOUT_S = 10.0

OWNER = Member(
    incarnation=1, counter=1, state=ALIVE, head_rank=0, host_name="instant",
    control="127.0.0.1:1", data="127.0.0.1:1", boot_id="", segment="",
)  # fmt: skip


def own_time_us() -> dict[str, float]:
    """Return the processor time per page of a batch of BATCH: of a get, and of its fabric alone.

    Consecutive pages on both sides become few READs; each scattered page is one READ.
    """
    total = BATCH * PAGE_BYTES
    target = np.zeros(2 * total, np.uint8)
    seals = np.zeros(2 * total // GRANULE, SEAL)
    fabric = instant_fabric(page_bytes=2 * total, granule=GRANULE, seals=seals)
    try:
        fabric.register("bench", int(target.ctypes.data), target.nbytes, target)
        in_order = np.arange(BATCH, dtype=np.uint64)
        together, apart = (
            Batch(fabric, target, seals, places) for places in (in_order, in_order * np.uint64(2))
        )
        return {
            "cpu_us_page": together.get_us(),
            "cpu_us_page_scattered": apart.get_us(),
            "cpu_us_page_fabric": together.read_us(),
            "cpu_us_page_fabric_scattered": apart.read_us(),
        }
    finally:
        fabric.close()


class Batch:
    """Pages at some places of the owner's memory, and of ours."""

    def __init__(
        self, fabric: RdmaFabric, target: npt.NDArray[np.uint8], seals: Seals, places: U64
    ) -> None:
        """Put every record into the cache, as after an exists, and set matching seals."""
        offsets = places * np.uint64(PAGE_BYTES)
        lengths = np.full(BATCH, PAGE_BYTES, np.uint64)
        self._fabric = fabric
        self._runs = PageRuns.regular(offsets + np.uint64(target.ctypes.data), lengths, BATCH)
        generations = np.full(BATCH, WORD, np.uint64)
        self._wanted = PeerRead(OWNER, offsets, lengths, self._runs, generations)
        self._keys = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(BATCH)]
        self._digest, space = Namespace().digest(), Namespace().space_tag()
        self._cluster = Cluster.of(
            {OWNER.incarnation: OWNER}, home=0, boot_id="", replicas=1, virtual_nodes=8,
            handover_until=0.0,
        )  # fmt: skip
        cache, clock = LocationCache(entries_max=16 * BATCH), time.monotonic
        locator = Locator(cache=cache, breakers=Breakers(), clock=clock)
        self._reader = Reader(
            locator=locator, cache=cache, verify="generation", space=space, clock=clock
        )
        records = np.zeros(BATCH, RECORD)
        records["key"] = page_keys(self._keys, self._digest)
        records["holder"], records["generation"] = OWNER.incarnation, WORD
        records["offset"], records["length"] = offsets, lengths
        records["flags"] = RESIDENT
        cache.store(records, clock())
        self._seals, self._sealed = seals, np.zeros(BATCH, SEAL)
        for field in ("key", "length"):
            self._sealed[field] = records[field]
        self._sealed["word"], self._sealed["space"] = WORD, space
        self._granules = offsets // np.uint64(GRANULE)

    def commit(self) -> None:
        """Store the seals of these pages."""
        self._seals[self._granules] = self._sealed

    def get(self) -> ReadOutcome:
        """Get the batch, as a client does."""
        until = time.monotonic() + TIMEOUT_S
        names = page_keys(self._keys, self._digest)
        steps = self._reader.get(names, self._runs, self._cluster, until)
        try:
            step = next(steps)
            while True:
                assert isinstance(step, Fetch), step
                step = steps.send([self._fabric.read(read, until) for read in step.reads])
        except StopIteration as ended:
            outcome: ReadOutcome = ended.value
            return outcome

    def get_us(self) -> float:
        """Return the processor µs per page of a get; asserts that all pages were hits."""
        self.commit()
        assert self.get().hits.all()
        best = float("inf")
        for _ in range(TURNS):
            # Many at a time: some kernels count a thread's time in steps of 10 ms.
            started = time.thread_time()
            for _ in range(READS):
                self.get()
            best = min(best, time.thread_time() - started)
        return best / READS / BATCH * 1e6

    def read_us(self) -> float:
        """Return the processor µs per page of the fabric's part alone."""
        best = float("inf")
        for _ in range(TURNS):
            started = time.thread_time()
            for _ in range(READS):
                self._fabric.read(self._wanted, time.monotonic() + TIMEOUT_S)
            best = min(best, time.thread_time() - started)
        return best / READS / BATCH * 1e6


if __name__ == "__main__":
    print(json.dumps({name: round(value, 2) for name, value in own_time_us().items()}))
