"""How much the benchmarks move, where their flags say nothing else."""

from __future__ import annotations

PAGE_BYTES = 2**20

BATCH = 32

WORKING_SET_BYTES = 512 * 2**20
"""Larger than any cache of the processor: hot buffers would flatter everything."""

DISK_SET_BYTES = 256 * 2**20
"""Written and read four times each: seconds on a fast disk, and a minute on a slow one."""

TAX_PAGES = 64
"""What is served again and again while the tax is measured: it costs the same from any cache."""

SECONDS = 2.0

RDMA_BYTES = 128 * 2**20
