"""A data port in a process whose Python is not there for it. Argument: WHAT.

Prints the port. At the first line it does WHAT: "hold" keeps the interpreter's lock until one more
line comes, and says so before; "fork" forks a child that exits as any does, prints its status, and
waits for one more line. Then the process ends, with everything still running.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

import numpy as np
import trio

from peercache.fabric.tcp.admission import DataAdmission
from peercache.fabric.tcp.server import serve_pages
from peercache.fabric.tcp.sockets import open_listeners
from peercache.observability.metrics import Metrics
from tests.contracts.fabric_suite import GRANULE, INCARNATION
from tests.contracts.fakes import PlainMemory
from tests.unit.fabric.serving import CLUSTER


async def serve() -> None:
    """Serve until the process ends."""
    memory = PlainMemory.of(16 * GRANULE, GRANULE)
    memory.seals["word"] = 2 * np.arange(16) + 2
    memory.seals["length"] = len(memory.pages)
    admission = DataAdmission(cluster=CLUSTER, granule=GRANULE, incarnation=INCARNATION)
    listeners = await open_listeners("127.0.0.1", 0)
    print(listeners[0].socket.getsockname()[1], flush=True)
    await serve_pages(listeners, memory, admission=admission, metrics=Metrics())


threading.Thread(target=trio.run, args=(serve,), daemon=True).start()
sys.stdin.readline()
if sys.argv[1] == "hold":
    print("holding", flush=True)
    # PyDLL: the call keeps the lock.
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)
else:
    child = os.fork()
    if not child:
        sys.exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
    sys.stdin.readline()
