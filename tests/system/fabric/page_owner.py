"""A node's data port as a process: publishes pages, serves them, and acts on itself in mid-read.

Arguments: SHM_DIR INCARNATION PAGES PAGE_BYTES ACTION AT. Page i is full of the byte i + 1, its
word is 2 (i + 1). Prints the port. When the portion number AT (from 0) has been sent and its words
have not, the process does ACTION to itself (a signal's name, or "nothing"), and prints "went on".
"""

from __future__ import annotations

import signal
import sys
import threading

import numpy as np
import trio

from peercache.fabric.tcp.admission import DataAdmission
from peercache.fabric.tcp.server import serve_pages
from peercache.fabric.tcp.sockets import open_listeners
from peercache.memory.published import PublishedSegment
from peercache.model.ids import Incarnation
from peercache.observability.metrics import Metrics
from tests.contracts.fabric_suite import GRANULE
from tests.unit.fabric.serving import CLUSTER


async def main() -> None:
    """Serve until killed."""
    shm_dir, incarnation, pages, page_bytes, action, at = sys.argv[1:]
    count, size = int(pages), int(page_bytes)
    segment = PublishedSegment.create(
        shm_dir,
        incarnation=Incarnation(int(incarnation)),
        page_bytes=count * size,
        granule=GRANULE,
    )
    segment.populate(count * size)
    for page in range(count):
        segment.pages[page * size : (page + 1) * size] = page + 1
    starts = np.arange(count) * (size // GRANULE)
    segment.store_words(starts, 2 * (np.arange(count, dtype=np.uint64) + np.uint64(1)))
    segment.seals["length"][starts] = size
    admission = DataAdmission(
        cluster=CLUSTER,
        granule=GRANULE,
        incarnation=int(incarnation),
    )
    portions = 0

    def act() -> None:
        nonlocal portions
        portions += 1
        if portions - 1 == int(at) and action != "nothing":
            # To this very thread: another one might take a signal to the process a moment later.
            signal.pthread_kill(threading.get_ident(), signal.Signals[action])
            print("went on", flush=True)

    listeners = await open_listeners("127.0.0.1", 0)
    print(listeners[0].socket.getsockname()[1], flush=True)
    await serve_pages(
        listeners,
        segment,
        admission=admission,
        metrics=Metrics(),
        between_bytes_and_words=act,
    )


trio.run(main)
