"""The steps of the demo.

Three nodes A, B and C. Half of the pages are published through A, half through B, and read at the
other nodes over each fabric. Then B is killed while readers go on: A's pages stay hits, B's become
misses. Then B comes back, the client that was attached to it all the time sets its pages again, and
everything is read once more. Every byte of every hit is checked. `disk_part` has the other steps.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TypeAlias

import attrs

from peercache import Client
from peercache.cli.demo.content import contents_of, key_of, segments_of
from peercache.cli.demo.reading import PAGE_BYTES, batches, read
from peercache.cli.demo.report import Reading, Report
from peercache.cli.demo.screen import Advance, Screen
from peercache.cli.processes import LOCAL, NodeProcess, NodeProcesses
from peercache.config.settings import Config
from peercache.errors import DeadlineExceeded, PeerCacheError
from peercache.observability.log import configure_logging

PAGES = 256
FABRICS = ("shm", "tcp")
NODES = ("A", "B", "C")

SHM_DIR = "/dev/shm"  # noqa: S108 - the kernel's shared memory

POOL_SIZES = (512 * 2**20, 192 * 2**20)
"""Bytes of each pool: comfortable, or, where shared memory is short, for half of the pages with a
third to spare."""

BUDGET_S = 300.0
"""The whole demo takes a tenth of this; a demo that takes longer hangs, and has failed."""

SETTLE_S = 60.0
"""A killed node is dead in the view after 6 s, a restarted one joined within 2; this is enough for
a machine that is ten times slower. For so long a missed page that must be there is read again: a
busy machine may make any call a miss."""

SLOWER_S = 5.0
"""A machine that stands still for a moment adds this much to a call; a call that hangs takes
longer."""

WARM_ROUNDS = 3
POLL_S = 0.05
READ_BEFORE_KILL_S = 0.5
EXIT_FAILED = 1

Pages: TypeAlias = Sequence[int]
Clients: TypeAlias = dict[tuple[str, str], Client]
"""By node and fabric."""


@attrs.define(eq=False)
class TooLittleMemory(PeerCacheError):
    """The shared memory of this machine does not hold three small pools."""

    needs_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        """Return the sentence a person reads."""
        return (
            f"the demo needs {self.needs_bytes // 2**20} MiB in {SHM_DIR}, which has "
            f"{self.free_bytes // 2**20} MiB free (in a container: docker run --shm-size=2g)"
        )


@attrs.define(eq=False)
class Clock:
    """The end of the demo: its budget is used up, or a signal came.

    An exception from a signal may come anywhere, also where it is swallowed, as in a `__del__`, or
    between the start of a process and its note. So the first signal is only remembered.
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
    """One run of the demo: its cluster, its clients, and its findings."""

    nodes: NodeProcesses
    screen: Screen
    report: Report
    settings: dict[str, str]
    clock: Clock
    stack: ExitStack
    run: str = attrs.Factory(lambda: secrets.token_hex(4))
    running: dict[str, NodeProcess] = attrs.Factory(dict)
    clients: Clients = attrs.Factory(dict)

    @property
    def pages_of_a(self) -> Pages:
        """The pages that are published through A."""
        return range(PAGES // 2)

    @property
    def pages_of_b(self) -> Pages:
        """The pages that are published through B."""
        return range(PAGES // 2, PAGES)

    def keys(self, pages: Pages) -> list[str]:
        """Return the keys of pages."""
        return [key_of(page, run=self.run) for page in pages]

    # --- steps ------------------------------------------------------------------------------------

    def start_nodes(self) -> None:
        """Start A, and B and C that join it; then a client for each node and fabric."""
        with self.screen.step("starting three nodes", None):
            self._start("A")
            self._start("B", "C")
            self.clients = self.open_clients(NODES, self.settings["cluster"])
            self._await_members(len(NODES))
        self.screen.say("three nodes serve, as processes of their own, and see each other")

    def open_clients(self, nodes: Sequence[str], cluster: str) -> Clients:
        """Return a client for each node and fabric; the story closes them at its end."""
        clients = {}
        for name in nodes:
            for fabric in FABRICS:
                client = Client.open(home=self.running[name].home, cluster=cluster, fabric=fabric)
                self.stack.callback(client.close)
                clients[name, fabric] = client
        return clients

    def publish(self, name: str, pages: Pages) -> None:
        """Set pages through a node; each must be stored."""
        client = self.clients[name, FABRICS[0]]
        with self.screen.step(f"publishing through {name}", len(pages)) as advance:
            for keys in batches(self.keys(pages)):
                self.clock.check("publishing")
                self.publish_batch(client, name, keys)
                advance(len(keys))
        self.screen.say(f"{len(pages)} pages of 1 MiB published through {name}")

    def publish_batch(self, client: Client, name: str, keys: Sequence[str]) -> None:
        """Set one batch, retry pages that were not stored at once, and add to the report."""
        content = contents_of(keys, PAGE_BYTES)
        until = time.monotonic() + SETTLE_S
        while True:
            started = time.monotonic()
            stored = client.batch_set_from(keys, segments_of(content))
            self.report.publish_s += time.monotonic() - started
            if len(stored) == len(keys) and (all(stored) or time.monotonic() > until):
                break
            self.clock.check("publishing")
            time.sleep(POLL_S)
        if not all(stored):
            missing = len(keys) - sum(stored)
            self.report.failures.append(f"node {name} did not store {missing} pages")
        self.report.pages_published += sum(stored)
        self.report.published_bytes += sum(stored) * PAGE_BYTES

    def read_everything(self, step: str, readers: dict[str, Pages], rounds: int = 1) -> None:
        """Read pages at several nodes, over each fabric; every one must be a hit."""
        total = rounds * sum(len(pages) for pages in readers.values())
        for fabric in FABRICS:
            reading = Reading(step, fabric, hits_expected=total, misses_expected=0)
            self.report.readings.append(reading)
            with self.screen.step(f"reading over {fabric}", total) as advance:
                for name, pages in rounds * list(readers.items()):
                    self.read(self.clients[name, fabric], pages, reading, advance)
        self.screen.say(f"{step}: {total} pages read over each fabric")

    def kill_b_under_readers(self) -> None:
        """Kill B while C reads over each fabric, and read on until the cluster has noticed."""
        dying = {
            fabric: [
                (Reading("B killed, A's pages", fabric, None, 0), self.pages_of_a, SETTLE_S),
                (Reading("B killed, B's pages", fabric, None, None), self.pages_of_b, 0.0),
            ]
            for fabric in FABRICS
        }
        for part in (0, 1):
            self.report.readings += [parts[part][0] for parts in dying.values()]
        with self._reading_on(dying):
            time.sleep(READ_BEFORE_KILL_S)
            self.running["B"].kill()
            self.screen.say(f"B killed (pid {self.running['B'].process.pid}), readers go on")
            # Until the cluster has noticed, its memory may still be read, over shm.
            self.await_(
                "the cluster to notice that B is dead",
                lambda: all(self.clients["C", each].stats()["members"] == 2 for each in FABRICS),
            )
        for fabric in FABRICS:
            reading = Reading("B is gone", fabric, len(self.pages_of_a), len(self.pages_of_b))
            self.report.readings.append(reading)
            with self.screen.step(f"reading over {fabric}", PAGES) as advance:
                client = self.clients["C", fabric]
                self.read(client, self.pages_of_a, reading, advance)
                self.read(client, self.pages_of_b, reading, advance, again_s=0.0)
        self.screen.say("without B: A's pages are hits, B's are clean misses")

    def set_again(self) -> None:
        """Start B anew; the client that was attached to it all the time sets its pages again."""
        client = self.clients["B", FABRICS[0]]
        with self.screen.step("starting B again", None):
            self._start("B")
            self._await_members(len(NODES))
            node = self.running["B"].ready["node"]
            self.await_("B's client to find it", lambda: client.stats().get("home_node") == node)
        self.screen.say("B started again, and its client has found it")
        self.publish("B", self.pages_of_b)

    # --- helpers ----------------------------------------------------------------------------------

    def _start(self, *names: str) -> None:
        """Start nodes that join those that run, all at once."""
        self.clock.check(f"starting {' and '.join(names)}")
        others = [node.ready["control"] for node in self.running.values() if node.is_running]
        discovery = {"discovery": ",".join(others)} if others else {}
        for name in names:
            self.running[name] = self.nodes.launch(name, {**self.settings, **discovery})
        for name in names:
            self.nodes.await_ready(self.running[name], check=self.clock.check)

    def read(
        self,
        client: Client,
        pages: Pages,
        reading: Reading,
        advance: Advance,
        *,
        again_s: float = SETTLE_S,
    ) -> None:
        """Read pages with a client, and check every byte."""
        check = self.clock.check
        read(client, self.keys(pages), reading, check=check, advance=advance, again_s=again_s)

    @contextmanager
    def _reading_on(self, parts: dict[str, list[tuple[Reading, Pages, float]]]) -> Iterator[None]:
        """Read at C again and again, in a thread a fabric, for the length of a block."""
        stop = threading.Event()
        failures: list[BaseException] = []

        def go_on(fabric: str, advance: Advance) -> None:
            try:
                while not stop.is_set():
                    for reading, pages, again_s in parts[fabric]:
                        client = self.clients["C", fabric]
                        self.read(client, pages, reading, advance, again_s=again_s)
            except BaseException as error:  # the main thread raises it
                failures.append(error)

        with self.screen.step("reading while B dies", None) as advance:
            threads = [
                threading.Thread(target=go_on, args=(fabric, advance), daemon=True)
                for fabric in parts
            ]
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                stop.set()
                for thread in threads:
                    thread.join(BUDGET_S)
        if failures:
            raise failures[0]

    def _await_members(self, count: int) -> None:
        def all_see_all() -> bool:
            return all(client.stats()["members"] == count for client in self.clients.values())

        self.await_(f"all to see {count} nodes", all_see_all)

    def await_(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for a condition, for a bounded time."""
        until = time.monotonic() + SETTLE_S
        while not condition():
            self.clock.check(what)
            if time.monotonic() > until:
                raise DeadlineExceeded(f"waiting for {what}", SETTLE_S)
            time.sleep(POLL_S)


def run_demo(*, as_json: bool, log_folder: str | None, more: Callable[[Story], None]) -> int:
    """Run the demo and print its report; return 0 only if everything was as promised.

    more: further steps, after those of `tell`.
    """
    # A warning here would be about the node that the demo kills; an error would be a bug.
    configure_logging(log_format="console", level="error")
    clock = Clock(time.monotonic() + BUDGET_S)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, clock.interrupt)
    report = Report(Config().op_timeout_s + SLOWER_S, page_bytes=PAGE_BYTES, nodes=len(NODES))
    started = time.monotonic()
    screen = Screen(as_json=as_json)
    with screen:
        try:
            settings = {
                **LOCAL,
                "cluster": f"demo-{secrets.token_hex(4)}",
                "pool-size": str(pool_size_for(shutil.disk_usage(SHM_DIR).free)),
                "shm-dir": SHM_DIR,
            }
            with NodeProcesses(log_folder=log_folder) as nodes, ExitStack() as stack:
                story = Story(nodes, screen, report, settings, clock, stack)
                tell(story)
                more(story)
        except (PeerCacheError, OSError) as error:
            report.failures.append(str(error))
        report.seconds = time.monotonic() - started
    screen.show(report)
    return EXIT_FAILED if report.problems() else 0


def tell(story: Story) -> None:
    """Run all steps."""
    story.start_nodes()
    story.publish("A", story.pages_of_a)
    story.publish("B", story.pages_of_b)
    elsewhere = {"C": range(PAGES), "B": story.pages_of_a, "A": story.pages_of_b}
    story.read_everything("first read", elsewhere)
    # The kernel maps a peer's memory at the first touch, once: this is how fast reads stay.
    story.read_everything("read again", {"C": range(PAGES)}, rounds=WARM_ROUNDS)
    story.kill_b_under_readers()
    story.set_again()
    story.read_everything("B's pages set again", {"C": range(PAGES)})


def pool_size_for(free_bytes: int) -> int:
    """Return the pool size of each node; raise TooLittleMemory if shared memory is too short."""
    needs_bytes = 0
    for size in POOL_SIZES:
        # A tenth for the tables beside the pages.
        needs_bytes = len(NODES) * size * 11 // 10
        if needs_bytes <= free_bytes:
            return size
    raise TooLittleMemory(needs_bytes, free_bytes)
