"""Counts the path of a call through the package: the files it enters, and its moves between them.

    python benchmarks/walk.py [--json] [--show CASE]

The script starts real nodes and clients. Its first table traces one call each with
`sys.setprofile`, in the calling thread, from `batch_get` or `batch_set` to its return. Its second
table counts the files that a call or a join enters in all threads of all processes: the client's,
its home node's, the owners'.

file:  a file of `peercache` in which the call executes a function. Code that a library generates at
       run time (`<attrs generated ...>`) is in no file and does not count, nor does what a thread
       of nng calls.
move:  execution passes from one file of the package to another: a call, a return, and each resume
       and yield of a generator. A function of another library in between is passed over. The
       entry into the package and the return to the caller do not count.

warm:  the client knows where the pages are. cold: its location cache is empty, its connections
       exist. Each case is called 20 times, and its shortest walk is shown: a late answer adds a
       wait to a walk, and nothing makes it shorter.

In the second table a file counts if every repetition enters it: heartbeats and other work of idle
processes fall into some of the intervals, never into all. `idle` is the number of these files that
an idle interval of a heartbeat enters, too. They count, because the call also enters them. The
nodes of this table keep their memory in different folders, as on different hosts, and each record
has one owner, so that a client reads some from the table of its host and asks the other node for
the rest. A join begins as a new node, which is running, first reaches an address of the cluster,
and ends when both nodes have built the ring of both.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import numpy as np

import peercache
from peercache import Client
from peercache.cli.node import main as node_main

PACKAGE = os.fspath(Path(peercache.__file__).parent) + os.sep

PAGES = 16
PAGE_BYTES = 128 * 1024

CALLS = 20
"""Calls of one case. On a busy machine most have to wait somewhere, and only a few do not."""

LARGE_CALLS = 10
LARGE_PAGES = 128
LARGE_BYTES = 1024 * 1024

JOINS = 3
JOINED = "model/hash_ring.py"
"""A node that has entered this file has built the ring of its new view."""

IDLE_S = 1.5
"""Longer than the time between two heartbeats."""

AS_NODE = "--as-node"
"""As first argument: run a node that records which files it enters."""


@attrs.define
class Walk:
    """The path of one call. steps: the files in the order in which execution reached them."""

    steps: list[str] = attrs.field(factory=list)

    @property
    def files(self) -> int:
        """How many files the call entered."""
        return len(set(self.steps))

    @property
    def moves(self) -> int:
        """How often execution passed from one file of the package to another."""
        return len(self.steps) - 1

    def reach(self, file: str) -> None:
        """Record the file that execution has reached."""
        if not self.steps or self.steps[-1] != file:
            self.steps.append(file)


def walk_of(call: Callable[[], object]) -> Walk:
    """Return the walk of one call in this thread."""
    walk = Walk()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            file = file_of(frame)
        elif event == "return" and file_of(frame):
            file = caller_of(frame)
        else:
            return
        if file:
            walk.reach(file)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return walk


def file_of(frame: FrameType) -> str:
    """Return the file of the package that a frame executes, "" if it is not of the package."""
    name = frame.f_code.co_filename
    return name[len(PACKAGE) :] if name.startswith(PACKAGE) else ""


def caller_of(frame: FrameType) -> str:
    """Return the file of the package to which execution returns from a frame."""
    caller = frame.f_back
    while caller is not None and not file_of(caller):
        caller = caller.f_back
    return file_of(caller) if caller is not None else ""


def shortest(prepare: Callable[[], Callable[[], list[bool]]]) -> Walk:
    """Return the shortest walk of several calls; `prepare` returns the next one."""
    walks = []
    for _ in range(CALLS):
        answers: list[list[bool]] = []
        call = prepare()
        walks.append(walk_of(lambda: answers.append(call())))  # noqa: B023 - called at once
        assert all(answers[0]), "a page was missed"
    return min(walks, key=lambda walk: walk.moves)


class Entered:
    """The files that this process enters while it records them, in every thread of Python."""

    def __init__(self) -> None:
        """Start without recording."""
        self.is_noting = False
        self.files: set[str] = set()

    def follow(self) -> None:
        """Trace each call of this thread, and of those that start from now on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def begin(self) -> None:
        """Start to record files."""
        self.files, self.is_noting = set(), True

    def end(self) -> set[str]:
        """Stop recording; return the files entered since `begin`."""
        self.is_noting = False
        return self.files

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        # The body of a module or a class runs at its import.
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
        if self.is_noting and event == "call" and is_function and (file := file_of(frame)):
            self.files.add(file)


def run_as_node(arguments: list[str]) -> int:
    """Run a node; a line on stdin starts or stops recording, or requests the files so far."""
    entered = Entered()

    def obey() -> None:
        for line in sys.stdin:
            if line == "begin\n":
                entered.begin()
            elif line == "end\n":
                entered.end()
            print(json.dumps(list(entered.files)), flush=True)

    threading.Thread(target=obey, daemon=True).start()
    sys.argv[1:] = arguments
    entered.follow()
    return node_main()


class Process:
    """A node in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        """Start it, and wait until it serves."""
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own flags
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ready: dict[str, str] = self._line()

    def begin(self) -> None:
        """Start to record files."""
        self._ask("begin")

    def end(self) -> set[str]:
        """Stop recording; return the files entered since `begin`."""
        return self._ask("end")

    def entered(self) -> set[str]:
        """Return the files entered so far."""
        return self._ask("files")

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait(10)

    def _ask(self, word: str) -> set[str]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return set(self._line())

    def _line(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@contextmanager
def node(
    folder: str, cluster: str, *flags: str, by: Sequence[str] = ("-m", "peercache.node")
) -> Iterator[Process]:
    """Run a node."""
    number = sum(1 for _ in Path(folder).iterdir())
    home = f"ipc://{folder}/{number}.ipc"
    process = Process(
        *by, "--cluster", cluster, "--home", home, "--listen", "127.0.0.1:0",
        "--pool-size", "256MiB", "--metrics-port", "0", "--log-level", "error", *flags,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.stop()


def cases() -> dict[str, Walk]:
    """Return the walk of each case."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="peercache-"))
        cluster = f"walk-{os.getpid()}"
        first = stack.enter_context(node(folder, cluster)).ready
        discovery = ("--discovery-addr", first["control"])
        second = stack.enter_context(node(folder, cluster, *discovery)).ready

        def client(home: dict[str, str], fabric: str, **settings: Any) -> Client:
            opened = Client.open(
                cluster=cluster, home=home["home"], fabric=fabric, op_timeout_s=10.0, **settings
            )
            return stack.enter_context(opened)

        writer = client(first, "auto")
        while writer.stats().get("home_members_alive") != 2:
            time.sleep(0.05)
        batches = iter(range(10**6))

        def fresh_keys() -> list[str]:
            batch = next(batches)
            return [f"walk/{batch}/{page}" for page in range(PAGES)]

        pages = [np.full(PAGE_BYTES, page, np.uint8) for page in range(PAGES)]
        buffers = [np.zeros(PAGE_BYTES, np.uint8) for _ in range(PAGES)]
        known = fresh_keys()
        assert all(writer.batch_set(known, pages))

        def get(reader: Client, keys: Sequence[str]) -> Callable[[], list[bool]]:
            return lambda: reader.batch_get(keys, buffers)

        def set_again() -> Callable[[], list[bool]]:
            keys = fresh_keys()
            return lambda: writer.batch_set(keys, pages)

        over_tcp = client(second, "tcp")
        cold = client(second, "tcp", location_cache_entries=0)
        over_shm = client(second, "shm")
        return {
            "get, warm, tcp": shortest(lambda: get(over_tcp, known)),
            "get, cold, tcp": shortest(lambda: get(cold, known)),
            "get, warm, shm": shortest(lambda: get(over_shm, known)),
            "set": shortest(set_again),
        }


@attrs.frozen
class Reach:
    """The files that a call enters in all processes. idle: those that idle processes also enter."""

    files: set[str]
    idle: set[str]


class Cluster:
    """Nodes that record the files they enter, with separate memory; and a client's process."""

    def __init__(self, stack: ExitStack) -> None:
        """Start the first node."""
        self._stack = stack
        self._name = f"walk-all-{os.getpid()}"
        self._folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="peercache-"))
        self._own = Entered()
        self._own.follow()
        self._nodes: list[Process] = []
        self.first = stack.enter_context(self.node())

    @contextmanager
    def node(self, *flags: str) -> Iterator[Process]:
        """Run another node."""
        memory = self._stack.enter_context(
            tempfile.TemporaryDirectory(prefix="peercache-", dir="/dev/shm")
        )
        by = (__file__, AS_NODE)
        flags = (*flags, "--shm-dir", memory, "--directory-replicas", "1")
        with node(self._folder, self._name, *flags, by=by) as process:
            self._nodes.append(process)
            try:
                yield process
            finally:
                self._nodes.remove(process)

    def client(self, home: Process, **settings: Any) -> Client:
        """Open a client with every node in its view."""
        client = Client.open(
            cluster=self._name, home=home.ready["home"], op_timeout_s=20.0, **settings
        )
        self._stack.callback(client.close)
        while client.stats().get("home_members_alive") != len(self._nodes):
            time.sleep(0.05)
        return client

    def entered_by(self, call: Callable[[], object]) -> set[str]:
        """Return the files that all processes enter while a call runs."""
        self._own.begin()
        for each in self._nodes:
            each.begin()
        call()
        return self._own.end().union(*(each.end() for each in self._nodes))

    def reach_of(self, calls: Sequence[Callable[[], list[bool]]]) -> Reach:
        """Return the files that each of these calls enters, if it returns every page."""
        found = []
        for call in calls:
            answers: list[list[bool]] = []
            files = self.entered_by(lambda: answers.append(call()))  # noqa: B023 - called at once
            if all(answers[0]):
                found.append(files)
        assert len(found) >= len(calls) / 2, f"only {len(found)} calls had every page"
        return self.with_idle(set.intersection(*found))

    def with_idle(self, files: set[str]) -> Reach:
        """Find out which of these files idle processes also enter."""
        return Reach(files, files & self.entered_by(lambda: time.sleep(IDLE_S)))

    def join(self) -> set[str]:
        """Return the files entered while a node joins, from its first connection on."""
        with socket.create_server(("127.0.0.1", 0)) as way_in:
            address = "{}:{}".format(*way_in.getsockname())
            with self.node("--discovery-addr", address) as joining:
                knock, _ = way_in.accept()

                def let_in() -> None:
                    host, _, port = self.first.ready["control"].rpartition(":")
                    inner = socket.create_connection((host, int(port)))
                    for pair in ((knock, inner), (inner, knock)):
                        threading.Thread(target=forward, args=pair, daemon=True).start()
                    while not all(JOINED in each.entered() for each in (self.first, joining)):
                        time.sleep(0.02)

                return self.entered_by(let_in)


def forward(source: socket.socket, target: socket.socket) -> None:
    """Forward data from one connection to another, until either ends."""
    with source, target:
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            return


def cases_of_all() -> dict[str, Reach]:
    """Return the files that each case enters in all processes."""
    with ExitStack() as stack:
        cluster = Cluster(stack)
        joined = set.intersection(*(cluster.join() for _ in range(JOINS)))
        second = stack.enter_context(
            cluster.node("--discovery-addr", cluster.first.ready["control"])
        )
        writer = cluster.client(cluster.first)
        reader = cluster.client(second, fabric="tcp", location_cache_entries=0)
        pages = [np.full(LARGE_BYTES, page, np.uint8) for page in range(LARGE_PAGES)]
        buffers = [np.zeros(LARGE_BYTES, np.uint8) for _ in range(PAGES)]
        batches = iter(range(10**6))

        def stored() -> list[bool]:
            batch = next(batches)
            return writer.batch_set([f"walk/{batch}/{page}" for page in range(LARGE_PAGES)], pages)

        known = [f"walk/known/{page}" for page in range(PAGES)]

        def fetched() -> list[bool]:
            return reader.batch_get(known, buffers)

        # The first calls make connections, and fault in the pool. A new owner may be behind.
        assert all(writer.batch_set(known, pages[:PAGES])), "the pool has room"
        while not all(fetched()):
            time.sleep(0.1)
        gets = cluster.reach_of([fetched] * CALLS)
        stored()
        return {
            "set, 128 MiB": cluster.reach_of([stored] * LARGE_CALLS),
            "get, cold, all": gets,
            "join": cluster.with_idle(joined),
        }


def main() -> None:
    """Print the tables, or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--show", metavar="CASE", default="", help="list the files of a case too")
    flags = parser.parse_args()
    walks = cases()
    reached = cases_of_all()
    if flags.json:
        found: dict[str, Any] = {n: {"files": w.files, "moves": w.moves} for n, w in walks.items()}
        everywhere = {n: {"files": len(r.files), "idle": len(r.idle)} for n, r in reached.items()}
        print(json.dumps({**found, "all processes": everywhere}))
        return
    print(f"{'call':<16} {'files':>5} {'moves':>5}")
    for name, walk in walks.items():
        print(f"{name:<16} {walk.files:>5} {walk.moves:>5}")
    print(f"\n{'all processes':<16} {'files':>5} {'idle':>5}")
    for name, reach in reached.items():
        print(f"{name:<16} {len(reach.files):>5} {len(reach.idle):>5}")
    shown = walks[flags.show].steps if flags.show in walks else ()
    for file in shown or sorted(reached[flags.show].files if flags.show else ()):
        print(file)


if __name__ == "__main__":
    if sys.argv[1:2] == [AS_NODE]:
        sys.exit(run_as_node(sys.argv[2:]))
    main()
