"""The tier under vLLM's own manager, in vLLM's Python and without an engine: events, back-pressure.

In:  the home address and the name of a cluster whose node has a small pool.
Out: one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingKVEventsConfig,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from peercache.net import breaker

CHUNK = 1 << 20
CHUNKS = 24
ANSWER_S = 60.0
# A node that is slow because the machine is must not be taken for hung.
breaker.STALL_S = ANSWER_S
STORES_DROPPED = "vllm:kv_offload_tiering_backpressure_stores_dropped"
PRESSURE = {"backpressure_cls": "EMABackpressureDetector"}
EVENTS = OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=True)


def spec() -> Any:
    """Return what the tier reads of an offloading spec."""
    group = SimpleNamespace(tokens_per_block=16, layer_names=("layer.0",))
    config = SimpleNamespace(
        groups=(group,),
        model=SimpleNamespace(name="a/model", dtype="torch.bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
        kv_cache_layout="NHD", canonical_layout=False, replicated_layout=False,
    )  # fmt: skip
    return SimpleNamespace(config=config, kv_events_config=EVENTS)


def keys_of(first: int, count: int) -> list[Any]:
    """Return the keys of chunks with successive numbers."""
    numbers = range(first, first + count)
    return [make_offload_key(number.to_bytes(32, "big"), 0) for number in numbers]


class Rig:
    """vLLM's manager, its CPU cache, and one tier."""

    def __init__(self, home: str, cluster: str, name: str, **pressure: float) -> None:
        """Build them as vLLM's spec does."""
        self.region = SharedOffloadRegion(
            f"peercache-{os.getpid()}-{name}", CHUNKS, None, CHUNK, CHUNK
        )
        primary = CPUPrimaryTierOffloadingManager(CHUNKS, self.region, enable_events=True)
        view = primary.get_kv_memoryview()
        np.asarray(view)[:] = 1
        line = {
            "type": "PeerCacheTier", "module_path": "peercache.vllm", "home": home,
            "cluster": cluster, "namespace": name, "op_timeout_s": 20, "exists_timeout_s": 20,
            "locality": "REMOTE", "enable_kv_events": True, "log_level": "info",
            "backpressure": {**PRESSURE, **pressure},
        }  # fmt: skip
        self.tier: Any = SecondaryTierFactory.create_secondary_tier(line, view, spec())
        self.manager = TieringOffloadingManager(primary, [self.tier])
        self.tracker = OffloadingEventsTracker(EVENTS)
        self.known: set[int] = set()
        """Hashes that a router would take for stored in the tier."""
        self.dropped = 0
        self.requests = 0

    def step(self) -> None:
        """End a step of the scheduler, and take what vLLM takes then."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        for event in self.tracker.take_events(self.manager.take_events()):
            if event.ownership == "peercache":
                assert (event.medium, event.locality) == ("STORAGE", "LOCAL")
                hashes = set(event.block_hashes)
                if hasattr(event, "token_ids"):
                    assert not hashes & self.known
                    self.known |= hashes
                else:
                    assert hashes <= self.known
                    self.known -= hashes
        stats = self.manager.get_stats()
        if stats is not None:
            for value in stats.data["data"].get(STORES_DROPPED, {}).values():
                self.dropped += value

    def wait_until(self, comes: Callable[[], bool]) -> None:
        """Make steps until something is so."""
        until = time.monotonic() + ANSWER_S
        while not comes():
            assert time.monotonic() < until, "it does not come"
            self.step()
            time.sleep(0.005)

    def store(self, first: int, count: int) -> None:
        """Store chunks into the CPU cache, and so into the tier; wait for the end."""
        keys = [
            make_offload_key(number.to_bytes(32, "big"), 0)
            for number in range(first, first + count)
        ]
        self.requests += 1
        context = ReqContext(req_id=str(self.requests))
        self.manager.on_new_request(context)
        assert self.manager.prepare_store(keys, context) is not None
        self.manager.complete_store(keys, context)
        self.manager.on_request_finished(context)
        self.wait_until(lambda: not self.manager._jobs)

    def found(self, first: int, count: int) -> int:
        """Return how many chunks come from the tier."""
        self.requests += 1
        context = ReqContext(req_id=str(self.requests))
        self.manager.on_new_request(context)
        keys = [
            make_offload_key(number.to_bytes(32, "big"), 0)
            for number in range(first, first + count)
        ]
        last: dict[Any, LookupResult] = {}

        def settled() -> bool:
            last.update((key, self.manager.lookup(key, context)) for key in keys)
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(last.values())

        self.wait_until(settled)
        self.manager.on_request_finished(context)
        return sum(result is LookupResult.HIT for result in last.values())

    def close(self) -> None:
        """End all of it."""
        self.manager.shutdown()


def main() -> None:
    """Print what happened."""
    home, cluster = sys.argv[1:]
    said: dict[str, Any] = {"version": vllm.__version__.partition("+")[0]}

    rig = Rig(home, cluster, "healthy")
    rig.store(0, 4)
    rig.wait_until(lambda: len(rig.known) == 4)
    # The CPU cache has room for 24 chunks, the node's pool for about 60.
    for number in range(40):
        rig.store(100 + 3 * number, 3)
    detector = rig.tier.bp_detector
    said["completions"] = detector._completions
    said["average"] = detector.store_latency_ema
    said["dropped"] = rig.dropped
    # What is stored within five seconds counts as stored at once: the first chunks stay.
    assert {0, 3} <= rig.known, "events name a chunk by the last 64 bits of its hash"
    rig.wait_until(lambda: 100 not in rig.known)
    said["fits"] = len(rig.known) * CHUNK <= 64 << 20
    said["found"] = rig.found(100 + 3 * 30, 3)
    said["gone"] = rig.found(100, 2)
    rig.manager.reset_cache()
    if hasattr(rig.manager, "on_reset_flushed"):
        rig.manager.on_reset_flushed()
    rig.wait_until(lambda: not rig.known)
    said["after_reset"] = rig.found(100 + 3 * 30, 3)
    rig.close()

    # No tier is fast enough for these limits.
    rig = Rig(home, cluster, "shut-out", high_water_s=1e-9, low_water_s=1e-10)
    for number in range(20):
        rig.store(number, 1)
    rig.wait_until(lambda: rig.dropped > 0)
    rig.wait_until(lambda: not rig.tier.bp_detector.is_under_pressure())
    rig.step()
    rig.close()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
