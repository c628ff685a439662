"""vLLM's tiering on a CPU: its spec, with a worker that copies between two parts of memory.

vLLM refuses a CPU where it makes the worker that copies between the device and its CPU cache. The
scheduler, the tiering manager, the CPU cache and the tiers are vLLM's; only that worker is ours.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from peercache.net import breaker

# A node that is slow because the machine is must not be taken for hung: these tests expect hits.
# `tests.pace` requires pytest, which is not in this environment.
breaker.STALL_S = 240.0


class CopyingWorker(OffloadingWorker):
    """Copies blocks of one KV cache group, at once."""

    def __init__(self, caches: Any, region: Any, blocks_per_chunk: int) -> None:
        """Map the CPU cache's part of each device tensor."""
        self.device = [each.tensor for each in caches.tensors]
        self.region, self.blocks_per_chunk = region, blocks_per_chunk
        self.host = [
            region.create_next_worker_view(each.shape[1] * blocks_per_chunk) for each in self.device
        ]
        self.finished: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy from the device into the CPU cache."""
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Copy from the CPU cache into the device. expedited: from vLLM 0.33 on."""
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[Any]:
        """Return what was copied."""
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is left to wait for."""

    def shutdown(self) -> None:
        """Give the memory back."""
        self.host = []
        self.region.cleanup()

    def _copy(self, job_id: int, device: Any, host: Any, *, is_store: bool) -> bool:
        assert len(device.group_sizes) == 1
        began, moved, first = time.monotonic(), 0, device.block_indices[0] % self.blocks_per_chunk
        for place, block in enumerate(device.block_ids.tolist(), first):
            chunk = int(host.block_ids[place // self.blocks_per_chunk])
            within = place % self.blocks_per_chunk
            for ours, theirs in zip(self.device, self.host, strict=True):
                width = ours.shape[1]
                part = theirs[chunk, within * width : (within + 1) * width]
                if is_store:
                    part.copy_(ours[block])
                else:
                    ours[block].copy_(part)
                moved += width
        self.finished.append(TransferResult(job_id, True, moved, time.monotonic() - began))
        return True


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's own, but for the worker."""

    def get_worker(self, kv_caches: Any) -> Any:
        """Return the worker that copies."""
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
