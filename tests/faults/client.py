"""A client of a run, as a process: it calls at random, and records every call and what it sees.

    python -m tests.faults.client PROCESS HOST CLOCK_S SEED FILE SETTINGS

CLOCK_S: by how much the monotonic clock of its host is ahead of the machine's. SETTINGS: of
`Client.open`, as JSON.

`PEERCACHE_PLANTED` names a bug (planted.py) that its calls have, to see that a checker finds it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from peercache import Client
from peercache.client.report import reporting
from peercache.errors import PeerCacheError
from peercache.model.ids import name_of
from tests.faults import planted
from tests.faults.recorder import EXISTS, GET, REMOVE, SET, Recorder
from tests.faults.schedule import CLIENTS, key_after
from tests.faults.worker import Page, Plan, Worker, arrays

T = TypeVar("T")

OP_TIMEOUT_S, EXISTS_TIMEOUT_S = 2.0, 0.5
LIMITS_S = {GET: OP_TIMEOUT_S, SET: OP_TIMEOUT_S, REMOVE: OP_TIMEOUT_S, EXISTS: EXISTS_TIMEOUT_S}
PLAN = Plan(
    count=96, hot=16, page_bytes=32 * 1024, weights=(47, 27, 18, 8), limits_s=LIMITS_S,
    more_keys=[key_after(number) for number in range(CLIENTS)],
)  # fmt: skip


class _Removals(logging.Handler):
    """Notes whether a removal did not reach every member."""

    is_incomplete = False

    def emit(self, record: logging.LogRecord) -> None:
        """Look at a line of the client's log."""
        if "removal_incomplete" in record.getMessage():
            self.is_incomplete = True


class Ours:
    """PeerCache as a worker calls it."""

    can_remove = True

    def __init__(self, client: Client) -> None:
        """Call a client, which may have a planted bug."""
        self.misses: Mapping[str, int] = {}
        self._client: Any = planted.wrapped(client)
        self._removals = _Removals()
        logging.getLogger("peercache").addHandler(self._removals)

    def set(self, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Store pages; return which are stored."""
        return self._reported(lambda: list(self._client.batch_set(keys, pages)))

    def get(self, keys: Sequence[str], buffers: Sequence[Page]) -> list[bool]:
        """Read pages into buffers; return which are hits."""
        return self._reported(lambda: list(self._client.batch_get(keys, buffers)))

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return which keys are found."""
        return self._reported(lambda: list(self._client.contains(keys)))

    def remove(self, keys: Sequence[str]) -> list[bool]:
        """Remove keys; return whether every member has answered."""
        return [self._has_removed(lambda: self._client.remove(keys))] * len(keys)

    def clear(self) -> bool:
        """Remove everything; return whether every member has answered."""
        return self._has_removed(self._client.clear)

    def buffers(self, size: int) -> tuple[list[Page], list[Page]]:
        """Return memory of a batch to set from, and of one to read into."""
        return arrays(size), arrays(size)

    def look(self) -> dict[str, Any]:
        """Return what the client sees of the cluster."""
        stats = self._client.stats()
        return {
            "home": str(stats.get("home_node", "")),
            "members": sorted(map(name_of, self._client.member_addresses())),
            "alive": int(stats.get("home_members_alive", -1)),
            "evicted": int(stats.get("home_pool_pages_evicted", -1)),
            "unpublished": int(stats.get("pages_unpublished", 0)),
        }

    def _has_removed(self, call: Callable[[], object]) -> bool:
        self._removals.is_incomplete = False
        self._reported(call)
        return not (self._client.home_state.is_lost or self._removals.is_incomplete)

    def _reported(self, call: Callable[[], T]) -> T:
        with reporting(is_detailed=True) as report:
            try:
                return call()
            finally:
                self.misses = dict(report.misses)


def opened(settings: dict[str, Any]) -> Client:
    """Attach to a home node, which may be dead for now."""
    while True:
        try:
            return Client.open(
                op_timeout_s=OP_TIMEOUT_S, exists_timeout_s=EXISTS_TIMEOUT_S, **settings
            )
        except (PeerCacheError, OSError) as error:  # noqa: PERF203 - each turn waits
            print(f"not opened: {error!r}", file=sys.stderr, flush=True)
            time.sleep(0.3)


def main() -> None:
    """Work until standard input ends; a line there, {"kind": …, "keys": …}, is a call to make."""
    process, host, clock_s, seed, path, settings = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    store, ahead_s = Ours(opened(json.loads(settings))), float(clock_s)
    with Path(path).open("a") as file:
        recorder = Recorder(file, int(process), host)
        Worker(store, recorder, PLAN, int(seed), lambda: time.monotonic() - ahead_s).serve(
            sys.stdout
        )


if __name__ == "__main__":
    main()
