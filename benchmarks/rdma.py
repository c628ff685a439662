"""`python -m benchmarks.rdma`: READs of our fabric, a bare loop of pyverbs, and ib_read_bw.

The fabric and the bare loop read the same pages over the same devices in turns, so that a busy host
affects both. The best turn of each counts.
"""

from __future__ import annotations

import random
import re
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, final

import attrs
import click

from peercache.cli.bench.command import seconds
from peercache.cli.main import run
from peercache.cli.options import SizeType, json_option
from peercache.cli.terminal import print_json, show_progress
from peercache.config.settings import Config
from peercache.errors import ConfigError
from peercache.rdma.key_table import MemoryKeys
from peercache.rdma.loopback import Loopback, LoopbackFailed
from peercache.rdma.queue_pair import PSN_MAX, SUCCESS, Completion, Completions, QueuePair, Sizes
from peercache.rdma.rail import Rail

TOTAL_BYTES = 128 * 2**20
GRANULE = 16 * 2**10

TURNS_MIN = 5
BATCH_MAX = 128
PERFTEST_S = 60.0
PERFTEST_START_S = 20.0
"""How long the server of ib_read_bw may take until it listens."""
PERFTEST_LOOK_S = 0.05
PERFTEST_TRIES = 3
"""ib_read_bw reports no figure if the processor's frequency seems unsteady."""
_LISTEN = "0A"

Figures = dict[str, float]


@attrs.frozen
class RdmaPlan:
    """What to measure. near: devices that read; far: devices that are read; gid_index of both."""

    near: tuple[str, ...]
    far: tuple[str, ...]
    gid_index: int
    page_bytes: tuple[int, ...]
    total_bytes: int
    seconds: float
    shm_dir: str


def run_rdma(plan: RdmaPlan, show: Callable[[str], None]) -> tuple[Figures, list[str]]:
    """Return the figures, and what could not be measured, one sentence each."""
    figures: Figures = {}
    problems: list[str] = []
    for page_bytes in plan.page_bytes:
        show(f"pages of {page_bytes >> 10} KiB")
        try:
            found = _next_to_bare_loop(plan, page_bytes)
        except LoopbackFailed as failed:
            problems.append(str(failed))
            break
        figures |= {f"{name}_{page_bytes >> 10}k": value for name, value in found.items()}
    if not problems:
        show("ib_read_bw")
        for page_bytes in plan.page_bytes:
            rate, problem = perftest(plan, page_bytes)
            if problem:
                problems.append(problem)
                break
            figures[f"ib_read_bw_gb_s_{page_bytes >> 10}k"] = rate
    return figures, problems


def _next_to_bare_loop(plan: RdmaPlan, page_bytes: int) -> Figures:
    pages = plan.total_bytes // page_bytes
    batch = min(pages, BATCH_MAX)
    pages = pages // batch * batch
    with closing(
        Loopback(
            near=Config(rdma_device_names=plan.near, rdma_gid_index=plan.gid_index),
            far=Config(rdma_device_names=plan.far, rdma_gid_index=plan.gid_index),
            shm_dir=plan.shm_dir,
            granule=GRANULE,
            page_bytes=page_bytes,
            pages=pages,
        )
    ) as loop:
        loop.read(0, 1)
        bare = BareLoop(loop, batch)
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
    """Return the average bandwidth from perftest's table, in GB/s; 0 if there is none."""
    row = rf"^\s*{page_bytes}\s+\d+\s+[\d.]+\s+([\d.]+)"
    match = re.search(row, output, re.MULTILINE)
    # Its "MB/sec" are mebibytes.
    return float(match[1]) * 2**20 / 1e9 if match else 0.0


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stdout + done.stderr).splitlines()
    kept = [line.strip() for line in lines if any(letter.isalpha() for letter in line)]
    return kept[-1] if kept else f"exit status {done.returncode}"


@final
class BareLoop:
    """The loop with which PeerCache is compared: chained READs, and a wait for the last of them.

    It posts a batch with one doorbell, over one queue pair. It reads no seals, has no deadline, and
    raises on a failure. It waits for the event of the completion, as the fabric does: a spinning
    loop would take the processor that a software device needs, and be slower.
    """

    def __init__(self, loop: Loopback, batch: int) -> None:
        """Connect the two ends of a loopback, which has read something."""
        assert loop.published is not None, "nothing was read yet"
        near, far = loop.near[0], loop.far[0]
        self._batch, self._page_bytes = batch, loop.page_bytes
        self._source = (loop.published.pages_address, loop.published.keys)
        self._target = (loop.address, near.regions.table)
        verbs = near.verbs
        self._queues = [Completions(verbs, rail.context, batch + 1) for rail in (near, far)]
        self._pairs = [
            rail.queue_pair(completions.queue, Sizes(work=batch, pieces=1))
            for rail, completions in zip((near, far), self._queues, strict=True)
        ]
        self._entry: Any = verbs.SGE(0, 0, 0)
        self._signaled = int(verbs.enums.IBV_SEND_SIGNALED)
        _connect((near, self._pairs[0]), (far, self._pairs[1]))

    def prepare(self, first: int) -> Callable[[], None]:
        """Return a function that reads a batch from page `first` on; it raises on a failure."""
        pages = [(first + number) * self._page_bytes for number in range(self._batch)]
        work = [
            (self._source[0] + page, _key(self._source, page), self._target[0] + page,
             _key(self._target, page))
            for page in pages
        ]  # fmt: skip
        pair, entry = self._pairs[0].posting, self._entry
        last = len(work) - 1

        def read() -> None:
            pair.wr_start()
            pair.wr_flags = 0
            for number, (remote, key, local, local_key) in enumerate(work):
                if number == last:
                    pair.wr_flags = self._signaled
                pair.wr_id = number
                pair.wr_rdma_read(key, remote)
                entry.addr, entry.length, entry.lkey = local, self._page_bytes, local_key
                pair.wr_set_sge(entry)
            pair.wr_complete()
            done = self._wait()
            if done.status != SUCCESS or done.number != last:
                raise RuntimeError(f"READ {done.number} ended with status {done.status}")

        return read

    def _wait(self) -> Completion:
        completions = self._queues[0]
        event = select.poll()
        event.register(completions.descriptor, select.POLLIN)
        while not (found := completions.take()):
            completions.arm()
            # A completion before the queue was armed creates no event.
            if found := completions.take():
                break
            if event.poll():
                completions.acknowledge()
        return found[0]

    def close(self) -> None:
        """Destroy both ends."""
        for pair in self._pairs:
            pair.destroy()
        queues, self._queues = self._queues, []
        for queue in queues:
            queue.close()
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.close()


def _key(side: tuple[int, MemoryKeys], page: int) -> int:
    address, table = side
    return int(table.keys[table.begins.searchsorted(address + page, side="right") - 1])


def _connect(one: tuple[Rail, QueuePair], other: tuple[Rail, QueuePair]) -> None:
    numbers = random.SystemRandom()
    psns = [numbers.randrange(PSN_MAX + 1) for _ in range(2)]
    ends = [rail.end(pair, psn) for (rail, pair), psn in zip((one, other), psns, strict=True)]
    reads = min(one[0].reads_started, other[0].reads_served(one[0].reads_started))
    mtu = min(one[0].abilities.mtu, other[0].abilities.mtu)
    for (rail, pair), psn, end in zip((one, other), psns, reversed(ends), strict=True):
        pair.connect(rail.path(mtu=mtu, reads_at_once=reads), end, psn=psn)


def rdma_table(figures: Figures, sizes: Sequence[int]) -> str:
    """Return READs compared with the bare loop, one line per page size."""
    lines = []
    for size in sizes:
        name = f"{size >> 10}k"
        if f"get_gb_s_{name}" not in figures:
            continue
        ours, bare, ratio, wrong = (
            figures[f"{what}_{name}"]
            for what in ("get_gb_s", "bare_gb_s", "get_ratio", "wrong_pages")
        )
        tool = figures.get(f"ib_read_bw_gb_s_{name}")
        lines.append(
            f"  pages of {size >> 10:5} KiB  ours {ours:7.3f} GB/s, bare loop {bare:7.3f}"
            f" (ratio {ratio:.2f})"
            + (f", ib_read_bw {tool:.3f}" if tool else "")
            + f", {wrong:.0f} wrong pages"
        )
    return "".join(f"{line}\n" for line in lines)


@click.command
@click.option("--near", default="", metavar="DEVICE", help="Device that reads; default: the best.")
@click.option("--far", default="", metavar="DEVICE", help="Device that is read; default: --near.")
@click.option("--gid-index", type=int, default=-1, metavar="N", help="Of both devices.")
@click.option(
    "--page-bytes",
    type=SizeType(multiple_of=GRANULE),
    multiple=True,
    default=("1MiB", "128KiB"),
    show_default=True,
    help="Bytes of a page; may be given several times.",
)
@click.option(
    "--total-bytes",
    type=SizeType(),
    default=TOTAL_BYTES,
    help=f"Bytes of all pages of a turn; default: {TOTAL_BYTES >> 20} MiB.",
)
@click.option("--shm-dir", default="/dev/shm", metavar="FOLDER", show_default=True)  # noqa: S108 - the kernel's shared memory
@seconds("each page size")
@json_option
def rdma(
    near: str,
    far: str,
    gid_index: int,
    page_bytes: tuple[int, ...],
    total_bytes: int,
    shm_dir: str,
    seconds: float,
    *,
    as_json: bool,
) -> int:
    """Measure READs, compared with a bare loop of pyverbs, on this host."""
    if max(page_bytes) > total_bytes:
        raise ConfigError("page-bytes", "must be sizes up to --total-bytes")
    devices = (near,) if near else ()
    plan = RdmaPlan(
        near=devices,
        far=(far,) if far else devices,
        gid_index=gid_index,
        page_bytes=page_bytes,
        total_bytes=total_bytes,
        seconds=seconds,
        shm_dir=shm_dir,
    )
    figures, problems = run_rdma(plan, show_progress)
    if as_json:
        print_json(figures)
    else:
        print(rdma_table(figures, page_bytes), end="")
    for problem in problems:
        click.echo(f"  {problem}", err=True)
    was_read = f"get_gb_s_{page_bytes[0] >> 10}k" in figures
    is_wrong = any(value for name, value in figures.items() if name.startswith("wrong_pages"))
    return 0 if was_read and not is_wrong else 1


if __name__ == "__main__":
    sys.exit(run(rdma, "benchmarks.rdma", sys.argv[1:]))
