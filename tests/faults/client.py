"""A client of a run, as a process: it calls at random, and records every call and what it sees.

    python -m tests.faults.client PROCESS HOST CLOCK_S SEED FILE SETTINGS

CLOCK_S: by how much the monotonic clock of its host is ahead of the machine's. SETTINGS: of
`Client.open`, as JSON. The bytes of a page follow from its key and a version; a reader makes the
page of the version that it finds in the bytes again, so that it knows a torn one.

`PEERCACHE_PLANTED` names a bug (planted.py) that its calls have, to see that a checker finds it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peercache import Client
from peercache.client.report import CallReport, reporting
from peercache.errors import PeerCacheError
from peercache.model.ids import name_of
from tests.faults import planted
from tests.faults.history import EXISTS, GET, REMOVE, SET, Recorder
from tests.faults.schedule import CLIENTS, key_after
from tests.system.endurance.chaos_client import Pauses
from tests.system.nodes import Page

KEYS, HOT, PAGE_BYTES, BATCH = 96, 16, 32 * 1024, 8
EVERY_KEY = [*(f"k{index}" for index in range(KEYS)), *map(key_after, range(CLIENTS))]
CLEARED = 0.03
"""The fraction of removals that clear the namespace."""
VERSIONS = 64
OP_TIMEOUT_S, EXISTS_TIMEOUT_S = 2.0, 0.5
LATE_S = 1.0
"""What a scheduler may add to a deadline where eleven processes share the processors."""
SIGHT_S = 0.5
REST_S = 0.02


def page_of(key: str, version: int) -> Page:
    """Return the bytes of a version of a key, which begin with the version."""
    seed = int.from_bytes(hashlib.sha256(f"{key}/{version}".encode()).digest()[:8], "little")
    words = np.arange(PAGE_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words ^= np.uint64(seed)
    words[0] = version
    return words.view(np.uint8)


def digest_of(page: Page) -> str:
    """Return what stands for the bytes of a page in a history."""
    return hashlib.blake2b(page.tobytes(), digest_size=8).hexdigest()


class _Removals(logging.Handler):
    """Notes whether a removal did not reach every member."""

    is_incomplete = False

    def emit(self, record: logging.LogRecord) -> None:
        """Look at a line of the client's log."""
        if "removal_incomplete" in record.getMessage():
            self.is_incomplete = True


class Worker:
    """Makes calls at random with one client, and records them."""

    def __init__(self, client: Client, recorder: Recorder, seed: int, clock_s: float) -> None:
        """Record times of the machine's clock, from which the host's differs."""
        self._client: Any = planted.wrapped(client)
        self._recorder = recorder
        self._rng = random.Random(seed)
        self._clock_s = clock_s
        self._pauses = Pauses()
        self._seen_at = 0.0
        self._buffers = [np.empty(PAGE_BYTES, np.uint8) for _ in range(BATCH)]
        self._removals = _Removals()
        logging.getLogger("peercache").addHandler(self._removals)

    def step(self) -> None:
        """Make one call; look at the cluster now and then."""
        kind = self._rng.choices((GET, SET, EXISTS, REMOVE), (47, 27, 18, 8))[0]
        count = self._rng.randint(1, 2 if kind == REMOVE else BATCH)
        # Half of the calls meet at a few keys.
        chosen = self._rng.sample(range(self._rng.choice((HOT, KEYS))), count)
        is_clear = kind == REMOVE and self._rng.random() < CLEARED
        self.call(kind, EVERY_KEY if is_clear else [f"k{index}" for index in chosen])
        if self._now() - self._seen_at > SIGHT_S:
            self.look()

    def call(self, kind: str, keys: Sequence[str]) -> list[bool]:
        """Make one call, and record it; return its answers."""
        pages = [self._page(key) for key in keys] if kind == SET else []
        values = [digest_of(page) for page in pages]
        if kind == GET:
            for buffer in self._buffers:
                buffer[:8] = buffer[-8:] = 0xA5  # A hit that wrote nothing is noticed.
        self._removals.is_incomplete = False
        began, paused_s = self._now(), self._pauses.total_s
        number = self._recorder.invoked(kind, began, keys, values)
        error, answers = "", [False] * len(keys)
        with reporting(is_detailed=True) as report:
            try:
                answers = self._made(kind, keys, pages)
            except Exception as raised:
                error = repr(raised)
        ended = self._now()
        limit_s = EXISTS_TIMEOUT_S if kind == EXISTS else OP_TIMEOUT_S
        excess_s = ended - began - limit_s - LATE_S
        if excess_s > 0:
            # A pause that ends with the call is counted a moment later.
            time.sleep(3 * Pauses.TICK_S)
            excess_s -= self._pauses.total_s - paused_s
        if kind == GET:
            values = [
                digest_of(buffer) if hit else ""
                for buffer, hit in zip(self._buffers, answers, strict=False)
            ]
        self._recorder.answered(number, ended=ended, values=values, answers=answers, error=error,
                                misses=_misses(report), excess_s=excess_s)  # fmt: skip
        return answers

    def look(self) -> None:
        """Record what the client sees of the cluster."""
        self._seen_at = at = self._now()
        stats = self._client.stats()
        self._recorder.saw(
            at=at,
            home=str(stats.get("home_node", "")),
            members=sorted(map(name_of, self._client.member_addresses())),
            alive=int(stats.get("home_members_alive", -1)),
            evicted=int(stats.get("home_pool_pages_evicted", -1)),
            unpublished=int(stats.get("pages_unpublished", 0)),
        )

    def _made(self, kind: str, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        client, made = self._client, []
        if kind == SET:
            made = client.batch_set(keys, pages)
        elif kind == GET:
            made = client.batch_get(keys, self._buffers[: len(keys)])
        elif kind == EXISTS:
            made = client.contains(keys)
        else:
            client.clear() if len(keys) == len(EVERY_KEY) else client.remove(keys)
            is_whole = not (client.home_state.is_lost or self._removals.is_incomplete)
            made = [is_whole] * len(keys)
        return list(made)

    def _page(self, key: str) -> Page:
        return page_of(key, self._rng.randrange(VERSIONS))

    def _now(self) -> float:
        return time.monotonic() - self._clock_s


def _misses(report: CallReport) -> dict[str, int]:
    return dict(report.misses)


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
    client = opened(json.loads(settings))
    with Path(path).open("a") as file:
        worker = Worker(client, Recorder(file, int(process), host), int(seed), float(clock_s))
        print("{}", flush=True)
        while True:
            if select.select([0], [], [], REST_S)[0]:
                line = sys.stdin.readline()
                if not line:
                    return
                asked = json.loads(line)
                print(json.dumps(worker.call(asked["kind"], asked["keys"])), flush=True)
            else:
                worker.step()


if __name__ == "__main__":
    main()
