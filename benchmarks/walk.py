"""Counts how far a call walks through the package: the files it enters, and its moves between them.

    python benchmarks/walk.py [--json] [--show CASE]

The script starts two real nodes and a client, and traces one call each with `sys.setprofile`, in
the calling thread, from `batch_get` or `batch_set` to its return.

file:  a file of `peercache` in which the call executes a function. Code that a library makes while
       it runs (`<attrs generated ...>`) is in no file and does not count.
move:  execution passes from one file of the package to another: a call, a return, and each resume
       and yield of a generator. A function of another library in between is passed over. The
       entry into the package and the return to the caller do not count.

warm:  the client knows where the pages are. cold: its location cache is empty, its connections
stand. Each case is called 20 times, and its shortest walk is shown: an answer that is late makes a
walk longer by a wait, and none makes it shorter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
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

PACKAGE = os.fspath(Path(peercache.__file__).parent) + os.sep

PAGES = 16
PAGE_BYTES = 128 * 1024

CALLS = 20
"""Calls of one case. On a busy machine most have to wait somewhere, and a few walk straight."""


@attrs.define
class Walk:
    """Where one call went. steps: the files in the order in which execution came to them."""

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
        """Note where execution is now."""
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
    """Return the file of the package that a frame executes, "" where it is none."""
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


@contextmanager
def node(folder: str, cluster: str, *flags: str) -> Iterator[dict[str, str]]:
    """Run a node; yield its ready line."""
    number = sum(1 for _ in Path(folder).iterdir())
    process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own flags
        [
            sys.executable, "-m", "peercache.node", "--cluster", cluster,
            "--home", f"ipc://{folder}/{number}.ipc", "--listen", "127.0.0.1:0",
            "--pool-size", "256MiB", "--metrics-port", "0", "--log-level", "error", *flags,
        ],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(10)


def cases() -> dict[str, Walk]:
    """Return the walk of each case."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="peercache-"))
        cluster = f"walk-{os.getpid()}"
        first = stack.enter_context(node(folder, cluster))
        second = stack.enter_context(node(folder, cluster, "--discovery-addr", first["control"]))

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


def main() -> None:
    """Print the table, or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--show", metavar="CASE", default="", help="list the files of a case too")
    flags = parser.parse_args()
    walks = cases()
    if flags.json:
        print(json.dumps({n: {"files": w.files, "moves": w.moves} for n, w in walks.items()}))
        return
    print(f"{'call':<16} {'files':>5} {'moves':>5}")
    for name, walk in walks.items():
        print(f"{name:<16} {walk.files:>5} {walk.moves:>5}")
    for file in walks[flags.show].steps if flags.show else ():
        print(file)


if __name__ == "__main__":
    main()
