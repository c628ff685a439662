"""The L2 adapter in LMCache's own Python, between two nodes: another size, and a peer that hangs.

In:  the JSON of the adapter at either node, and the process id of the first node.
Out: one line of JSON.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey

from peercache.lmcache import PeerCacheL2Adapter

SIZE = 1 << 20
ANSWER_S = 30.0


def key(number: int) -> ObjectKey:
    """Return the key of an object."""
    return ObjectKey(bytes([number]) * 32, "a/model", 0x01000100)


def memory(fill: int, size: int = SIZE) -> Any:
    """Return an object as LMCache's allocator gives it."""
    tensor = torch.full((size,), fill, dtype=torch.uint8)
    meta = SimpleNamespace(shapes=[torch.Size([size])], dtypes=[torch.uint8])
    return SimpleNamespace(
        tensor=tensor, data_ptr=tensor.data_ptr(), get_size=lambda: size, meta=meta
    )


def load(adapter: Any, number: int, into: Any) -> tuple[int, float]:
    """Load an object; return how many came, and the seconds until the signal."""
    began = time.monotonic()
    task = adapter.submit_load_task([key(number)], [into])
    select.select([adapter.get_load_event_fd()], [], [], ANSWER_S)
    took_s = time.monotonic() - began
    os.eventfd_read(adapter.get_load_event_fd())
    return adapter.query_load_result(task).popcount(), took_s


def look_up(adapter: Any, number: int) -> int:
    """Look an object up; return how many are held."""
    layout = MemoryLayoutDesc(shapes=[torch.Size([SIZE])], dtypes=[torch.uint8])
    task = adapter.submit_lookup_and_lock_task([key(number)], {0: layout})
    select.select([adapter.get_lookup_and_lock_event_fd()], [], [], ANSWER_S)
    os.eventfd_read(adapter.get_lookup_and_lock_event_fd())
    return adapter.query_lookup_and_lock_result(task).popcount()


def state_of(thread: Path) -> str:
    """Return the kernel's letter for what a thread does."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


def stop(process: int) -> None:
    """Stop a process, and wait until each of its threads is paused, which takes a while."""
    os.kill(process, signal.SIGSTOP)
    threads = Path(f"/proc/{process}/task")
    until = time.monotonic() + ANSWER_S
    while any(state_of(thread) != "T" for thread in threads.iterdir()):
        assert time.monotonic() < until, "the node did not stop"
        time.sleep(0.001)


def main() -> None:
    """Report what happened."""
    first, second = (PeerCacheL2Adapter(json.loads(each)) for each in sys.argv[1:3])
    node = int(sys.argv[3])
    task = first.submit_store_task([key(1), key(2)], [memory(1), memory(2)])
    select.select([first.get_store_event_fd()], [], [], ANSWER_S)
    said: dict[str, Any] = {"stored": int(first.pop_completed_store_tasks()[task])}
    said["held"] = look_up(second, 1) + look_up(second, 2)
    said["locked"] = second.report_status()["locked"]
    into = memory(0)
    said["loaded"] = load(second, 1, into)[0]
    said["sum"] = int(into.tensor.sum())
    said["another_size"] = load(second, 1, memory(0, SIZE // 2))[0]
    stop(node)
    try:
        said["hung"], said["hung_s"] = load(second, 2, memory(0))
        began = time.monotonic()
        second.submit_unlock([key(1), key(2)])
        said["locked_at_close"] = second.report_status()["locked"]
        second.close()
        said["close_s"] = time.monotonic() - began
    finally:
        os.kill(node, signal.SIGCONT)
    first.close()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
