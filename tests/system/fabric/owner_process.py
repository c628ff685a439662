"""A data port in a process of its own. Arguments: WHAT, and AT for a signal.

It publishes pages of PAGE_BYTES: page i is full of the byte i + 1, and the word of granule g is
2 (g + 1). It prints its port, and does WHAT:

a signal's name   it sends that to itself when portion number AT (from 0) is sent and its words are
                  not, and prints "went on"
nothing           it serves until it is killed
hold              at the first line it keeps the interpreter's lock until one more line comes, and
                  prints a line before
fork              at the first line it forks a child that exits as any does, prints its status, and
                  waits for one more line

After "hold" and "fork" the process ends, with everything still running.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

import numpy as np
import trio

from peercache.fabric.tcp import wire
from peercache.fabric.tcp.admission import DataAdmission
from peercache.fabric.tcp.server import serve_pages
from peercache.fabric.tcp.sockets import open_listeners
from peercache.observability.metrics import Metrics
from tests.contracts.fabric_suite import GRANULE, INCARNATION
from tests.contracts.fakes import PlainMemory
from tests.unit.fabric.serving import CLUSTER

PAGE_BYTES = wire.PORTION_BYTES_MAX
PAGES = 6


async def serve(what: str, at: int) -> None:
    """Serve until the process ends."""
    memory = PlainMemory.of(PAGES * PAGE_BYTES, GRANULE)
    memory.pages[:] = np.repeat(np.arange(1, PAGES + 1, dtype=np.uint8), PAGE_BYTES)
    memory.seals["word"] = 2 * np.arange(len(memory.seals)) + 2
    memory.seals["length"] = len(memory.pages)
    portions = 0

    def act() -> None:
        nonlocal portions
        portions += 1
        if portions - 1 == at:
            # To this very thread: another one might take a signal to the process a moment later.
            signal.pthread_kill(threading.get_ident(), signal.Signals[what])
            print("went on", flush=True)

    admission = DataAdmission(cluster=CLUSTER, granule=GRANULE, incarnation=INCARNATION)
    listeners = await open_listeners("127.0.0.1", 0)
    print(listeners[0].socket.getsockname()[1], flush=True)
    await serve_pages(
        listeners, memory, admission=admission, metrics=Metrics(),
        between_bytes_and_words=act if what.startswith("SIG") else None,
    )  # fmt: skip


def main(what: str, at: str = "0") -> None:
    """Serve, and do what is asked for."""
    if what not in ("hold", "fork"):
        trio.run(serve, what, int(at))
        return
    threading.Thread(target=trio.run, args=(serve, what, 0), daemon=True).start()
    sys.stdin.readline()
    if what == "hold":
        print("holding", flush=True)
        # PyDLL: the call keeps the lock.
        ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)
        return
    child = os.fork()
    if not child:
        sys.exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
