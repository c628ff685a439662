"""`peercache bench rdma`: READs of our fabric beside a bare loop of pyverbs, and beside ib_read_bw.

The fabric and the bare loop read the same pages over the same devices in turns, so that a busy host
slows both. The best turn of each counts.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from peercache.rdma.loopback import BareLoop, Loopback, LoopbackFailed
from peercache.rdma.rail import Settings

TURNS_MIN = 5
BATCH_MAX = 128
PERFTEST_S = 60.0
PERFTEST_START_S = 20.0
"""How long the server of ib_read_bw may take until it listens."""
PERFTEST_LOOK_S = 0.05
PERFTEST_TRIES = 3
"""ib_read_bw gives no figure where the processor's frequency looks unsteady to it."""
_LISTEN = "0A"

Figures = dict[str, float]


@attrs.frozen
class RdmaPlan:
    """What to measure. near: devices that read; far: devices that are read; gid_index of both."""

    near: tuple[str, ...]
    far: tuple[str, ...]
    gid_index: int
    granule: int
    page_bytes: tuple[int, ...]
    total_bytes: int
    seconds: float
    shm_dir: str


def run_rdma(plan: RdmaPlan, tell: Callable[[str], None]) -> tuple[Figures, list[str]]:
    """Return the figures, and what could not be measured: a sentence each."""
    figures: Figures = {}
    problems: list[str] = []
    for page_bytes in plan.page_bytes:
        tell(f"pages of {page_bytes >> 10} KiB")
        try:
            found = _beside_bare_loop(plan, page_bytes)
        except LoopbackFailed as failed:
            problems.append(str(failed))
            break
        figures |= {f"{name}_{page_bytes >> 10}k": value for name, value in found.items()}
    if not problems:
        tell("ib_read_bw")
        for page_bytes in plan.page_bytes:
            rate, problem = perftest(plan, page_bytes)
            if problem:
                problems.append(problem)
                break
            figures[f"ib_read_bw_gb_s_{page_bytes >> 10}k"] = rate
    return figures, problems


def _beside_bare_loop(plan: RdmaPlan, page_bytes: int) -> Figures:
    pages = plan.total_bytes // page_bytes
    batch = min(pages, BATCH_MAX)
    pages = pages // batch * batch
    with Loopback(
        near=Settings(device_names=plan.near, gid_index=plan.gid_index),
        far=Settings(device_names=plan.far, gid_index=plan.gid_index),
        shm_dir=plan.shm_dir,
        granule=plan.granule,
        page_bytes=page_bytes,
        pages=pages,
    ) as loop:
        loop.read(0, 1)
        near, far = loop.rails
        bare = BareLoop(
            near, far, batch=batch, page_bytes=page_bytes, source=loop.source, target=loop.target
        )
        try:
            bare_reads = [bare.prepare(first) for first in range(0, pages, batch)]
            best_bare, best_ours, wrong = _in_turns(plan, loop, bare_reads, batch)
        finally:
            bare.close()
    total = pages * page_bytes
    return {
        "bare_gb_s": total / best_bare / 1e9,
        "get_gb_s": total / best_ours / 1e9,
        "get_ratio": best_bare / best_ours,
        "wrong_pages": wrong,
    }


def _in_turns(
    plan: RdmaPlan, loop: Loopback, bare_reads: Sequence[Callable[[], None]], batch: int
) -> tuple[float, float, int]:
    """Return the best time of the bare loop and of ours over all pages, and how many were wrong."""
    best_bare = best_ours = float("inf")
    wrong = turns = 0
    until = time.monotonic() + plan.seconds
    while turns < TURNS_MIN or time.monotonic() < until:
        # Before both: it decides what the processor's caches hold.
        loop.clear()
        started = time.perf_counter()
        for read in bare_reads:
            read()
        bare_s = time.perf_counter() - started
        loop.clear()
        started = time.perf_counter()
        fetched = [loop.read(first, batch) for first in range(0, loop.pages, batch)]
        ours_s = time.perf_counter() - started
        for number, each in enumerate(fetched):
            wrong += 0 if loop.arrived(number * batch, batch, each) else batch
        if turns:  # The first turn connects, and meets untouched page tables.
            best_bare, best_ours = min(best_bare, bare_s), min(best_ours, ours_s)
        turns += 1
    return best_bare, best_ours, wrong


def perftest(plan: RdmaPlan, page_bytes: int) -> tuple[float, str]:
    """Return the GB/s of perftest's ib_read_bw, or why there is no figure."""
    tool = shutil.which("ib_read_bw")
    if tool is None:
        return 0.0, "ib_read_bw is not installed (apt-get install perftest)"
    rate, problem = 0.0, ""
    for _ in range(PERFTEST_TRIES):
        rate, problem = _one_perftest(tool, plan, page_bytes)
        if rate:
            break
    return rate, problem


def _one_perftest(tool: str, plan: RdmaPlan, page_bytes: int) -> tuple[float, str]:
    with socket.create_server(("", 0)) as free:
        port = int(free.getsockname()[1])
    words = [tool, "-F", "-s", str(page_bytes), "-n", "500", "-p", str(port)]
    words += ["-x", str(plan.gid_index)] if plan.gid_index >= 0 else []
    near, far = ([name.partition(":")[0] for name in names] for names in (plan.near, plan.far))
    owner = subprocess.Popen(  # noqa: S603 - the path is the system's
        [*words, "-d", far[0]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + PERFTEST_START_S
        while not _listens(port) and owner.poll() is None and time.monotonic() < until:
            time.sleep(PERFTEST_LOOK_S)
        done = subprocess.run(  # noqa: S603 - as above
            [*words, "-d", near[0], "127.0.0.1"],
            capture_output=True, text=True, check=False, timeout=PERFTEST_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 0.0, f"ib_read_bw gave no answer within {PERFTEST_S:.0f} s"
    finally:
        owner.terminate()
        owner.wait()
    rate = perftest_gb_s(done.stdout, page_bytes)
    return rate, "" if rate else f"ib_read_bw gave no figure: {_last_line(done)}"


def _listens(port: int) -> bool:
    """Return whether a server listens there. A connection would use up ib_read_bw's only one."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        rows = table.read_text().splitlines()[1:] if table.exists() else []
        for _, local, _, state, *_ in map(str.split, rows):
            if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                return True
    return False


def perftest_gb_s(output: str, page_bytes: int) -> float:
    """Return the average bandwidth out of perftest's table, in GB/s; 0 where there is none."""
    row = rf"^\s*{page_bytes}\s+\d+\s+[\d.]+\s+([\d.]+)"
    match = re.search(row, output, re.MULTILINE)
    # Its "MB/sec" are mebibytes.
    return float(match[1]) * 2**20 / 1e9 if match else 0.0


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stdout + done.stderr).splitlines()
    told = [line.strip() for line in lines if any(letter.isalpha() for letter in line)]
    return told[-1] if told else f"exit status {done.returncode}"
