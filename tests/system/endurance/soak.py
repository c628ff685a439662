"""A soak: a cluster and engines that live long, others that are killed and paused, and samples.

Two of the four nodes are never disturbed, two are killed, paused and stalled; one of each has a
disk. Three engines and a visitor, which opens and closes clients, live as long as the run: the home
of one of these engines is a node that is killed. Two more engines are killed and paused. All the
time engines die between reserve and commit, and strangers send garbage to every port.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs

from peercache import Client
from tests.hostile.garbage import conversation
from tests.hostile.strangers import ports_of
from tests.pace import wait_until
from tests.system.endurance import samples, worker
from tests.system.endurance.gates import BUCKETS, DISK_BYTES
from tests.system.endurance.load import opened
from tests.system.endurance.samples import CLIENT, END, EVENT, MACHINE, NODE, Journal
from tests.system.nodes import (
    DIES_WRITING,
    LocalCluster,
    free_port,
    keys_of,
    pages_of,
    read,
    script,
)

POOL = "8MiB"
"""A quarter of what is written."""
STEADY, RESTARTED = 2, 2
NODES = STEADY + RESTARTED
SAMPLE_S = 5.0
PAUSE_S = (0.1, 3.0)
STALLS, STALL_S, BETWEEN_STALLS_S = 10, (0.02, 0.3), (0.02, 0.1)
STORED = 4
"""Pages of a batch at a node that stalls: few enough that the pool reserves slots ahead for it."""
BETWEEN_S = (2.0, 8.0)
BABBLE_S = 1.0
HEALED_S = 60.0
"""Within this all heals after the last event, and no slot is reserved any more."""


@attrs.define
class Engine:
    """A client process. home: the number of its node. Only a steady one is left alone."""

    name: str
    role: str
    home: int
    fabric: str
    is_steady: bool
    lives: int = 0
    figures: Path = Path()
    process: subprocess.Popen[str] | None = None

    @property
    def running(self) -> subprocess.Popen[str]:
        """Its process, which has been started."""
        assert self.process is not None
        return self.process


def engines() -> list[Engine]:
    """Return all client processes: those that live long first."""
    return [
        Engine("engine0", worker.ENGINE, 0, "shm", is_steady=True),
        Engine("engine1", worker.ENGINE, 1, "tcp", is_steady=True),
        Engine("engine2", worker.ENGINE, 2, "auto", is_steady=True),
        Engine("visitor", worker.VISITOR, 0, "auto", is_steady=True),
        Engine("engine3", worker.ENGINE, 3, "auto", is_steady=False),
        Engine("engine4", worker.ENGINE, 0, "tcp", is_steady=False),
    ]


class Soak:
    """One run: its processes, what happens to them, and the samples of all."""

    def __init__(self, cluster: LocalCluster, folder: Path, shm: Path, seed: int) -> None:
        """Start all processes; samples and logs go to the folder, memory is shared in `shm`."""
        self.cluster = cluster
        self.folder = folder
        self.rng = random.Random(seed)
        self.did: Counter[str] = Counter()
        self.journal = Journal(folder / samples.SAMPLES)
        self.engines = engines()
        self._keys = keys_of(worker.CORPUS, worker.KEYS)
        self._firsts = itertools.cycle(range(0, worker.KEYS, STORED))
        self.shm = shm
        self.babbled = 0
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._flags = [self._flags_of(place) for place in range(NODES)]
        for place in range(NODES):
            cluster.start(f"n{place}", pool=POOL, flags=self._flags[place])
        for node in cluster.nodes:
            cluster.wait_for_members(node, NODES)
        for engine in self.engines:
            self._start(engine)
        wait_until(lambda: all(each.figures.exists() for each in self.engines), "calls of all")

    def _flags_of(self, place: int) -> tuple[str, ...]:
        addresses = ("--listen", f"127.0.0.1:{free_port()}", "--data-port", free_port())
        memory = ("--metrics-port", free_port(), "--shm-dir", str(self.shm))
        path = str(self._disk_of(place))
        disk = ("--disk-enabled", "true", "--disk-path", path, "--disk-size", str(DISK_BYTES))
        # So that second copies are made all the time, of pages that were stored just now.
        copies = ("--copies", "2", "--placement-min-age", "0")
        return (*addresses, *memory, *copies, *(() if place % 2 else disk))

    def _disk_of(self, place: int) -> Path:
        return self.folder / f"disk{place}"

    def _start(self, engine: Engine) -> None:
        number = sum(each.lives for each in self.engines)
        engine.lives += 1
        engine.figures = self.folder / f"figures-{engine.name}-{engine.lives}.json"
        homes = [self.cluster.nodes[engine.home].ready["home"]]
        if engine.role == worker.VISITOR:
            homes = [node.ready["home"] for node in self.cluster.nodes]
        command = [
            sys.executable, "-m", "tests.system.endurance.worker", engine.role, self.cluster.name,
            engine.fabric, str(number), str(engine.figures), *homes,
        ]  # fmt: skip
        with (self.folder / f"{engine.name}-{engine.lives}.log").open("w") as log:
            engine.process = subprocess.Popen(command, text=True, stderr=log)

    # --- events -----------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Let something happen every few seconds, and take samples of everything."""
        threads = [threading.Thread(target=self._repeat, args=each) for each in (
            (self.sample, min(SAMPLE_S, seconds / BUCKETS)), (self._babble, BABBLE_S))]  # fmt: skip
        self.journal.began = time.monotonic()
        for thread in threads:
            thread.start()
        until = time.monotonic() + seconds
        events = (
            self.kill_node, self.pause_node, self.stall_node, self.kill_engine, self.pause_engine,
            self.die_writing,
        )  # fmt: skip
        try:
            while time.monotonic() < until and not self._errors:
                what = self.rng.choice(events)
                who = what()
                self.did[what.__name__] += 1
                self.journal.write(EVENT, what.__name__, who=who)
                self.assert_alive()
                time.sleep(self.rng.uniform(*BETWEEN_S))
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        if self._errors:
            raise self._errors[0]

    def _repeat(self, step: Any, every_s: float) -> None:
        try:
            while not self._stop.wait(every_s):
                step()
        except BaseException as error:
            self._errors.append(error)

    def kill_node(self) -> str:
        """Kill -9 a node, and start it again at its addresses a moment later."""
        place = self.rng.randrange(STEADY, NODES)
        node = self.cluster.nodes[place]
        node.kill()
        time.sleep(self.rng.uniform(0.0, 2.0))
        node.end()
        flags = (*self._flags[place], "--discovery-addr", self.cluster.nodes[0].ready["control"])
        again = self.cluster.start(f"n{place}", pool=POOL, flags=flags)
        self.cluster.nodes.remove(again)
        self.cluster.nodes[place] = again
        return f"n{place}"

    def pause_node(self) -> str:
        """SIGSTOP a node for a while: longer than it takes to be suspected, or shorter."""
        place = self.rng.randrange(STEADY, NODES)
        node = self.cluster.nodes[place]
        node.pause()
        time.sleep(self.rng.uniform(*PAUSE_S))
        node.resume()
        return f"n{place}"

    def stall_node(self) -> str:
        """SIGSTOP a node for moments, as if its loop stalled, while pages are stored there.

        Slots ahead are reserved a millisecond after a set: some stalls begin in between.
        """
        place = self.rng.randrange(STEADY, NODES)
        node = self.cluster.nodes[place]
        is_over = threading.Event()
        with opened(self.cluster.name, node.ready["home"], "auto") as client:
            storing = threading.Thread(target=self._store, args=(client, is_over))
            storing.start()
            try:
                for _ in range(STALLS):
                    node.pause()
                    time.sleep(self.rng.uniform(*STALL_S))
                    node.resume()
                    time.sleep(self.rng.uniform(*BETWEEN_STALLS_S))
            finally:
                is_over.set()
                storing.join()
        return f"n{place}"

    def _store(self, client: Client, is_over: threading.Event) -> None:
        """Store pages of the corpus, batch after batch, from where the last call has ended."""
        while not is_over.is_set():
            first = next(self._firsts)
            keys = self._keys[first : first + STORED]
            client.batch_set(keys, pages_of(keys, worker.PAGE_BYTES))

    def kill_engine(self) -> str:
        """Kill -9 an engine, and start another one in its place."""
        engine = self._disturbed()
        engine.running.kill()
        engine.running.wait()
        self._start(engine)
        return engine.name

    def pause_engine(self) -> str:
        """SIGSTOP an engine in the middle of whatever it does."""
        engine = self._disturbed()
        engine.running.send_signal(signal.SIGSTOP)
        time.sleep(self.rng.uniform(*PAUSE_S))
        engine.running.send_signal(signal.SIGCONT)
        return engine.name

    def die_writing(self) -> str:
        """Be an engine that is killed between reserve and commit."""
        place = self.rng.randrange(STEADY)
        home = self.cluster.nodes[place].ready["home"]
        with script(DIES_WRITING, self.cluster.name, home, f"dead {self.did.total()}") as process:
            assert process.wait(HEALED_S) == -signal.SIGKILL
        return f"n{place}"

    def _disturbed(self) -> Engine:
        return self.rng.choice([engine for engine in self.engines if not engine.is_steady])

    def _babble(self) -> None:
        """Be a scanner of ports."""
        for node in self.cluster.nodes[:STEADY]:
            for port in ("control", "home", "data", "http"):
                with contextlib.suppress(OSError), ports_of(node)[port]() as connection:
                    connection.settimeout(1.0)
                    connection.sendall(conversation(self.rng))
                self.babbled += 1

    # --- samples ----------------------------------------------------------------------------------

    def sample(self) -> None:
        """Write down what every process takes now."""
        for place, node in enumerate(list(self.cluster.nodes)):
            figures: dict[str, Any] = self._vitals(node.process.pid)
            if figures:
                figures.update(samples.scraped(node.ready["http"]))
                figures.update(pid=node.process.pid, is_steady=place < STEADY)
                disk = self._disk_of(place)
                if disk.exists():
                    found = samples.folder_of(disk)
                    figures.update(disk_bytes=found["bytes"], disk_files=found["files"])
                self.journal.write(NODE, f"n{place}", **figures)
        for engine in self.engines:
            figures = self._vitals(engine.running.pid)
            with contextlib.suppress(FileNotFoundError):
                figures.update(json.loads(engine.figures.read_text()))
            figures.update(pid=engine.running.pid, is_steady=engine.is_steady)
            self.journal.write(CLIENT, engine.name, **figures)
        found = samples.folder_of(self.shm)
        self.journal.write(MACHINE, "machine", loop_ms=samples.loop_ms(), wake_ms=samples.wake_ms(),
                           shm_bytes=found["bytes"], shm_files=found["files"])  # fmt: skip

    def _vitals(self, pid: int) -> dict[str, int]:
        # A process may be killed while it is read.
        try:
            return samples.vitals(pid)
        except (OSError, KeyError):
            return {}

    # --- the end ----------------------------------------------------------------------------------

    def assert_alive(self) -> None:
        """A client ends by itself where a promise was broken; a node never."""
        for node in self.cluster.nodes:
            node.assert_not_died()
        for engine in self.engines:
            assert engine.running.poll() is None, self.said()

    def said(self) -> str:
        """Return what clients have printed before they ended."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(text for log in logs if "Error" in (text := log.read_text()))

    def heal(self) -> None:
        """All nodes see all, pages cross hosts, no log has an error, and a clear leaves nothing.

        After it no node has a page, a record or a reserved slot.
        """
        for node in self.cluster.nodes:
            self.cluster.wait_for_members(node, NODES)
        keys = keys_of("after", 8)
        first, other = (self.cluster.client(node) for node in self.cluster.nodes[:2])
        wait_until(lambda: all(first.batch_set(keys, pages_of(keys))), "a set")
        wait_until(lambda: all(read(other, keys)), "a hit at another node")
        self.assert_alive()
        self.end_engines()
        first.clear()
        for node in self.cluster.nodes:
            assert '"error"' not in node.said()
        wait_until(
            self._is_cleared, "no page, no record and no reserved slot after a clear", HEALED_S
        )
        self.journal.write(END, "all", **self.figures(), did=dict(self.did), babbled=self.babbled,
                           shm_files=samples.folder_of(self.shm)["files"])  # fmt: skip

    def _is_cleared(self) -> bool:
        """Write down what nodes still have; return whether that is nothing."""
        time.sleep(0.5)
        left = [samples.scraped(node.ready["http"]) for node in self.cluster.nodes]
        for place, figures in enumerate(left):
            self.journal.write(END, f"n{place}", **figures)
        return all(figures and not any(figures.values()) for figures in left)

    def figures(self) -> dict[str, Any]:
        """Return what all clients did, those that were killed included, and their longest calls."""
        total: Counter[str] = Counter()
        longest: dict[str, float] = {}
        for path in self.folder.glob("figures-*.json"):
            one = json.loads(path.read_text())
            one.pop("latency_ms")
            for kind, took_s in one.pop("longest_s").items():
                longest[kind] = max(took_s, longest.get(kind, 0.0))
            total.update(one)
        return {**total, "longest_s": longest}

    def end_engines(self) -> None:
        """End every client process."""
        for engine in self.engines:
            with contextlib.suppress(ProcessLookupError):
                engine.running.send_signal(signal.SIGCONT)
            engine.running.kill()
            engine.running.wait()

    def end(self) -> None:
        """Leave no client behind, and keep the logs of the nodes."""
        self.end_engines()
        for node in self.cluster.nodes:
            (self.folder / f"{node.ready['node']}.log").write_text(node.said())
