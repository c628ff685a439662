"""`peercache demo`: its steps.

Three nodes A, B and C. Half of the pages are published through A, half through B, and read at the
other nodes over each fabric. Then B is killed while readers go on: A's pages stay hits, B's become
misses. Then B comes back, its client, which was attached all the time, sets its pages again, and
everything is read once more.

Two more nodes D and E have small pools and a disk each. Twice as many pages are published as both
pools hold. Then both are stopped and started again, with nothing in memory, and everything is read
back from disk. Every byte of every hit is checked.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType

import attrs
import click

from peercache import Client
from peercache.cli.demo.pages import (
    BATCH_PAGES,
    PAGE_BYTES,
    Pages,
    Reading,
    content_of,
    key_of,
    read,
)
from peercache.cli.demo.report import Report, Screen
from peercache.cli.options import json_option
from peercache.cli.processes import LOCAL, NodeProcess, NodeProcesses
from peercache.config.settings import Config
from peercache.errors import DeadlineExceeded, PeerCacheError
from peercache.observability.log import configure_logging

FABRICS = ("shm", "tcp")
NODES = ("A", "B", "C")
PAGES = 256
OF_A, OF_B = range(PAGES // 2), range(PAGES // 2, PAGES)
"""The pages that are published through A, and through B."""

SHM_DIR = "/dev/shm"  # noqa: S108 - the kernel's shared memory

POOL_SIZES = (512 * 2**20, 192 * 2**20)
"""Bytes of each pool: comfortable, or, if shared memory is short, half of the pages and a third
more."""

DISK_POOL_BYTES = 32 * 2**20
OF_DISKS = {"D": range(1000, 1064), "E": range(2000, 2064)}
"""The pages that are published through each node with a disk: as many as both hold in memory."""

DISK_BYTES = 512 * 2**20
NEEDS_BYTES = 3 * DISK_BYTES
"""Free bytes needed in the temporary folder, for both disks with a margin."""

BUDGET_S = 300.0
"""The whole demo takes a tenth of this; a demo that takes longer hangs, and has failed."""

SETTLE_S = 60.0
"""A killed node is dead in the view after 6 s, a restarted one joined within 2; this is enough for
a machine that is ten times slower. A missed page that must be there is read again for this time: on
a busy machine any call may miss."""

SLOWER_S = 5.0
"""A machine that is paused for a moment adds this much to a call; a call that hangs takes
longer."""

WARM_ROUNDS = 3
POLL_S = 0.05
READ_BEFORE_KILL_S = 0.5
EXIT_FAILED = 1


@attrs.define(eq=False)
class Clock:
    """The end of the demo: its budget is used up, or a signal came.

    An exception from a signal may be raised anywhere, also where it is swallowed, as in a
    `__del__`, or between the start of a process and its registration. So the first signal is only
    remembered.
    """

    until: float
    interrupted: bool = False

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Note a signal; the second one raises at once."""
        if self.interrupted:
            signal.default_int_handler(number, frame)
        self.interrupted = True

    def check(self, what: str) -> None:
        """Raise KeyboardInterrupt after a signal, DeadlineExceeded at the end of the budget."""
        if self.interrupted:
            raise KeyboardInterrupt
        if time.monotonic() > self.until:
            raise DeadlineExceeded(f"the demo ({what})", BUDGET_S)


@attrs.define(eq=False)
class Story:
    """A part of the demo: its cluster, a client for each node and fabric, and the findings."""

    nodes: NodeProcesses
    screen: Screen
    report: Report
    settings: dict[str, str]
    clock: Clock
    stack: ExitStack
    run: str = attrs.Factory(lambda: secrets.token_hex(4))
    running: dict[str, NodeProcess] = attrs.Factory(dict)
    clients: dict[tuple[str, str], Client] = attrs.Factory(dict)

    def start(self, *names: str, **settings: str) -> None:
        """Start nodes at the same time, which join the running ones; open clients for new nodes."""
        self.clock.check(f"starting {' and '.join(names)}")
        others = [node.ready["control"] for node in self.running.values() if node.is_running]
        settings |= {"discovery": ",".join(others)} if others else {}
        for name in names:
            self.running[name] = self.nodes.launch(name, {**self.settings, **settings})
        for name in names:
            self.nodes.await_ready(self.running[name], check=self.clock.check)
            for fabric in FABRICS if (name, FABRICS[0]) not in self.clients else ():
                home, cluster = self.running[name].home, self.settings["cluster"]
                client = Client.open(home=home, cluster=cluster, fabric=fabric)
                self.stack.callback(client.close)
                self.clients[name, fabric] = client

    def await_clients(self, what: str, **wanted: object) -> None:
        """Wait until each client is attached to its running node, and has these figures."""

        def are_well() -> bool:
            for (name, _), client in self.clients.items():
                stats = client.stats()
                if stats.get("home_disk_problem") not in ("", None, "it is being opened"):
                    raise DeadlineExceeded(f"the disk: {stats['home_disk_problem']}", 0.0)
                wanted["home_node"] = self.running[name].ready["node"]
                if any(stats.get(figure) != value for figure, value in wanted.items()):
                    return False
            return True

        self.await_(what, are_well)

    def await_(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for a condition, for a bounded time."""
        until = time.monotonic() + SETTLE_S
        while not condition():
            self.clock.check(what)
            if time.monotonic() > until:
                raise DeadlineExceeded(f"waiting for {what}", SETTLE_S)
            time.sleep(POLL_S)

    def publish(self, name: str, pages: Sequence[int], done: str = "") -> None:
        """Set pages through a node; all must be stored, and on its disk if it has one."""
        client, report, has_disk = self.clients[name, FABRICS[0]], self.report, name in OF_DISKS

        def are_stored(keys: Sequence[str], content: Sequence[Pages]) -> bool:
            started = time.monotonic()
            stored = client.batch_set(keys, content)
            report.publish_s += time.monotonic() - started
            return len(stored) == len(keys) and all(stored)

        def are_on_disk(count: int) -> bool:
            return int(client.stats().get("home_disk_pages", 0)) >= count

        with self.screen.step(f"publishing through {name}", done):
            for first in range(0, len(pages), BATCH_PAGES):
                keys = self._keys(pages[first : first + BATCH_PAGES])
                stored = partial(are_stored, keys, [content_of(key) for key in keys])
                self.await_(f"node {name} to store {len(keys)} pages", stored)
                report.pages_published += len(keys)
                if has_disk:
                    written = partial(are_on_disk, first + len(keys))
                    self.await_(f"node {name} to write {len(keys)} pages to its disk", written)

    def read_everything(
        self,
        step: str,
        readers: Mapping[str, Sequence[int]],
        *,
        rounds: int = 1,
        done: str = "{step}: {total} pages read over each fabric",
    ) -> None:
        """Read pages at several nodes, over each fabric; every one must be a hit."""
        total = rounds * sum(len(pages) for pages in readers.values())
        with self.screen.step(f"reading, {step}", done.format(step=step, total=total)):
            for fabric in FABRICS:
                reading = self.reading(step, fabric, hits=total, misses=0)
                for name, pages in rounds * list(readers.items()):
                    self.read(name, pages, reading)

    def reading(self, step: str, fabric: str, *, hits: int | None, misses: int | None) -> Reading:
        """Return a new row of the report, with its expected counts."""
        self.report.readings.append(Reading(step, fabric, hits, misses))
        return self.report.readings[-1]

    def read(
        self, name: str, pages: Sequence[int], reading: Reading, again_s: float = SETTLE_S
    ) -> None:
        """Read pages at a node, and check every byte."""
        get = self.clients[name, reading.fabric].batch_get
        read(get, self._keys(pages), reading, check=self.clock.check, again_s=again_s)

    def _keys(self, pages: Sequence[int]) -> list[str]:
        return [key_of(page, run=self.run) for page in pages]


def play(story: Story) -> None:
    """Run the steps with three nodes."""
    all_see_all = partial(story.await_clients, f"all to see {len(NODES)} nodes", members=len(NODES))
    started = "three nodes serve, as processes of their own, and see each other"
    with story.screen.step("starting three nodes", started):
        story.start("A")
        story.start("B", "C")
        all_see_all()
    story.publish("A", OF_A, f"{len(OF_A)} pages of 1 MiB published through A")
    story.publish("B", OF_B, f"{len(OF_B)} pages of 1 MiB published through B")
    story.read_everything("first read", {"C": range(PAGES), "B": OF_A, "A": OF_B})
    # The kernel maps a peer's memory once, at the first touch: later reads stay this fast.
    story.read_everything("read again", {"C": range(PAGES)}, rounds=WARM_ROUNDS)
    survived = "without B: A's pages are hits, B's are clean misses"
    with story.screen.step("reading while B dies", survived):
        _kill_b_under_readers(story)
        for fabric in FABRICS:
            reading = story.reading("B is gone", fabric, hits=len(OF_A), misses=len(OF_B))
            story.read("C", OF_A, reading)
            story.read("C", OF_B, reading, again_s=0.0)
    with story.screen.step("starting B again", "B started again, and its client has found it"):
        story.start("B")
        all_see_all()
    story.publish("B", OF_B, f"{len(OF_B)} pages of 1 MiB published through B")
    story.read_everything("B's pages set again", {"C": range(PAGES)})


def _kill_b_under_readers(story: Story) -> None:
    """Kill B while C reads over each fabric, and read on until the cluster has noticed."""
    # Pages of A must be hits, possibly after a retry; pages of B may be hits or misses.
    of_a = [story.reading("B killed, A's pages", each, hits=None, misses=0) for each in FABRICS]
    of_b = [story.reading("B killed, B's pages", each, hits=None, misses=None) for each in FABRICS]
    stop = threading.Event()

    def go_on(of_a: Reading, of_b: Reading) -> None:
        while not stop.is_set():
            story.read("C", OF_A, of_a)
            story.read("C", OF_B, of_b, again_s=0.0)

    with ThreadPoolExecutor() as pool:
        readers = [pool.submit(go_on, *both) for both in zip(of_a, of_b, strict=True)]
        try:
            time.sleep(READ_BEFORE_KILL_S)
            story.running["B"].kill()
            story.screen.say(f"B killed (pid {story.running['B'].process.pid}), readers go on")
            # Until the cluster has noticed, its memory may still be read, over shm.
            story.await_(
                "the cluster to notice that B is dead",
                lambda: all(story.clients["C", each].stats()["members"] == 2 for each in FABRICS),
            )
        finally:
            stop.set()
    for reader in readers:
        reader.result()


def show_disks(story: Story) -> None:
    """Run the steps with disks, or say that the temporary folder has no room for them."""
    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    if free_bytes < NEEDS_BYTES:
        story.screen.say(
            f"the part with disks is left out: {tempfile.gettempdir()} has "
            f"{free_bytes // 2**20} MiB free, and it requires {NEEDS_BYTES // 2**20}"
        )
        return
    folder = story.stack.enter_context(tempfile.TemporaryDirectory(prefix="peercache-demo-disk-"))
    # Before the folder is removed.
    story.stack.callback(_stop, story)

    def start() -> None:
        for name in OF_DISKS:
            path = Path(folder) / name
            path.mkdir(exist_ok=True)
            story.start(name, **{"disk-path": str(path)})
        story.await_clients("the disks", members=len(OF_DISKS), home_disk_open=1)

    started = "two nodes with small pools serve, each with a disk of its own"
    with story.screen.step("starting two nodes with disks", started):
        start()
    everything = [page for pages in OF_DISKS.values() for page in pages]
    story.publish("D", OF_DISKS["D"])
    fit = 2 * DISK_POOL_BYTES // PAGE_BYTES
    published = f"{len(everything)} pages of 1 MiB published, of which {fit} fit in memory"
    story.publish("E", OF_DISKS["E"], published)
    with story.screen.step("starting both nodes again"):
        _stop(story)
        started_s = time.monotonic()
        start()
    took_s = time.monotonic() - started_s
    story.screen.say(f"both nodes stopped, and serving again after {took_s:.1f} s, from disk")
    story.read_everything(
        "restarted, from disk",
        dict.fromkeys(OF_DISKS, everything),
        done="restarted: {total} pages read from disk over each fabric",
    )


def _stop(story: Story) -> None:
    """Stop the nodes of one part of the demo, and wait until they have closed their disks."""
    for node in story.running.values():
        node.process.terminate()
    for node in story.running.values():
        node.process.wait(SETTLE_S)


def run_demo(*, as_json: bool, log_folder: str | None) -> int:
    """Run the demo and print its report; return 0 only if everything was as promised."""
    # A warning here is about the node that the demo kills; an error would be a bug.
    configure_logging(log_format="console", level="error")
    clock = Clock(time.monotonic() + BUDGET_S)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, clock.interrupt)
    report = Report(Config().op_timeout_s + SLOWER_S, page_bytes=PAGE_BYTES, nodes=len(NODES))
    started = time.monotonic()
    screen = Screen(as_json=as_json)
    try:
        settings = {
            **LOCAL,
            "cluster": f"demo-{secrets.token_hex(4)}",
            "pool-size": str(pool_size_for(shutil.disk_usage(SHM_DIR).free)),
            "shm-dir": SHM_DIR,
        }
        disks = {
            "cluster": f"{settings['cluster']}-disks",
            "pool-size": str(DISK_POOL_BYTES),
            "disk-enabled": "true",
            "disk-size": str(DISK_BYTES),
            "disk-free-floor": "0",
        }
        with NodeProcesses(log_folder=log_folder) as nodes, ExitStack() as stack:
            play(Story(nodes, screen, report, settings, clock, stack))
            show_disks(Story(nodes, screen, report, {**settings, **disks}, clock, stack))
    except (PeerCacheError, OSError) as error:
        report.failures.append(str(error))
    report.seconds = time.monotonic() - started
    screen.show(report)
    return EXIT_FAILED if report.problems() else 0


def pool_size_for(free_bytes: int) -> int:
    """Return the pool size of each node; raise if the shared memory holds no three small pools."""
    # A tenth more for the tables.
    needs = {size: len(NODES) * size * 11 // 10 for size in POOL_SIZES}
    for size, needs_bytes in needs.items():
        if needs_bytes <= free_bytes:
            return size
    raise PeerCacheError(
        f"the demo needs {needs[POOL_SIZES[-1]] // 2**20} MiB in {SHM_DIR}, which has "
        f"{free_bytes // 2**20} MiB free (in a container: docker run --shm-size=2g)"
    )


@click.command
@json_option
@click.option("--keep-logs", metavar="FOLDER", help="Keep the logs of the nodes in this folder.")
def demo(keep_logs: str | None, *, as_json: bool) -> int:
    """Run a cluster on this machine, kill a node of it, and check every byte."""
    return run_demo(as_json=as_json, log_folder=keep_logs)
