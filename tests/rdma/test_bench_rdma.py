"""The benchmarks of RDMA where there are devices: figures, and no wrong byte under them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.rdma

LIMIT_S = 600
PAGE_BYTES, PAGES = 128 * 2**10, 16


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    """Run one of the benchmarks to its end."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


def test_bench_rdma_measures_both_loops_and_finds_no_wrong_page() -> None:
    """One run gives the bare loop, ours, their ratio, and ib_read_bw."""
    done = bench(
        "benchmarks.rdma", "--near", "rxe1", "--far", "rxe2", "--total-bytes", "4MiB",
        "--seconds", "0.1", "--json",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["wrong_pages_1024k"] == figures["wrong_pages_128k"] == 0
    assert figures["bare_gb_s_1024k"] > 0
    assert figures["get_ratio_128k"] > 0
    # ib_read_bw is among the guest's packages.
    assert {"ib_read_bw_gb_s_1024k", "ib_read_bw_gb_s_128k"} <= set(figures), done.stderr
    assert figures["ib_read_bw_gb_s_1024k"] > 0
    assert figures["ib_read_bw_gb_s_128k"] > 0


@pytest.fixture
def served() -> Iterator[str]:
    """`bench serve` over rxe2, in a process of its own; the address of its control port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    with subprocess.Popen(
        [sys.executable, "-m", "peercache", "bench", "serve", "--listen", address,
         "--fabric", "rdma", "--rdma-device-names", "rxe2",
         "--page-bytes", str(PAGE_BYTES), "--pages", str(PAGES)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert f"{PAGES} of {PAGES} pages" in process.stdout.readline()
        yield address
        process.terminate()


def test_drive_reads_what_serve_holds_over_rdma(served: str) -> None:
    """Two processes, two devices: every page came as READs, and every byte is right."""
    done = bench(
        "peercache", "bench", "drive", "--discovery", served, "--fabric", "rdma",
        "--rdma-device-names", "rxe1",
        "--page-bytes", str(PAGE_BYTES), "--pages", str(PAGES), "--seconds", "0.5", "--json",
        limit_s=LIMIT_S,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["wrong_bytes"] == figures["misses"] == 0
    assert figures["pages_hit_rdma"] >= PAGES
    assert not {"pages_hit_tcp", "pages_hit_shm"} & set(figures)
