"""Calls at random on any store, recorded: what the clients of our runs and of other stores share.

Only numpy and the standard library. The bytes of a page follow from its key and a version; a reader
makes the page of the version that it finds in the bytes again, so that it knows a torn one.
"""

from __future__ import annotations

import hashlib
import json
import random
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TextIO, TypeAlias

import numpy as np
import numpy.typing as npt

from tests.faults.recorder import EXISTS, GET, REMOVE, SET, Recorder

Page: TypeAlias = npt.NDArray[np.uint8]

BATCH = 8
VERSIONS = 64
LATE_S = 1.0
"""What a scheduler may add to a deadline where eleven processes share the processors."""
CLEARED = 0.03
"""The fraction of removals that clear everything."""
SIGHT_S = 0.5
REST_S = 0.02
STEP = np.uint64(0x9E3779B97F4A7C15)
TORN, OTHER, FOREIGN = "torn", "other", "foreign"
"""How the value of a page begins that no set was given: parts of several pages, another page as a
whole, or bytes of none."""


def _seed_of(key: str, version: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{key}/{version}".encode()).digest()[:8], "little")


def page_of(key: str, version: int, size: int) -> Page:
    """Return the bytes of a version of a key, which begin with the version."""
    words = np.arange(size // 8, dtype=np.uint64) * STEP
    words ^= np.uint64(_seed_of(key, version))
    words[0] = version
    return words.view(np.uint8)


def digest_of(page: Page) -> str:
    """Return what stands for the bytes of a page in a history."""
    return hashlib.blake2b(page.tobytes(), digest_size=8).hexdigest()


def value_of(page: Page, key: str) -> str:
    """Return the digest of a page that was read, or of which kind its wrong bytes are.

    Each word shows which page it belongs to, so that a torn page is not taken for a foreign one.
    """
    version = int(page[:8].view(np.uint64)[0])
    if version < VERSIONS and np.array_equal(page, page_of(key, version, page.nbytes)):
        return digest_of(page)
    words = page.view(np.uint64) ^ (np.arange(page.nbytes // 8, dtype=np.uint64) * STEP)
    counts = np.unique(words[1:], return_counts=True)[1]
    # Bytes of no page have another seed in each word; a part may begin within a word.
    parts = np.count_nonzero(counts > 1)
    kind = TORN if parts > 1 else OTHER if len(counts) == 1 else FOREIGN
    return f"{kind} {digest_of(page)}"


STRIKER = """
import os, sys, time
after_s, pid, number = sys.argv[1:]
print("ready", file=sys.stderr, flush=True)
sys.stdin.read()
time.sleep(float(after_s))
at = time.monotonic()
os.kill(int(pid), int(number))
print(at, flush=True)
"""
"""A process of its own: a thread would wait for the lock of the interpreter that makes the call."""


class Store(Protocol):
    """A store, as a worker calls it: answers are by key."""

    misses: Mapping[str, int]
    """Why pages of the last get or exists were misses, by reason."""
    can_remove: bool
    """Whether it removes single keys; it clears otherwise, and always everything."""

    def set(self, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Store pages; return which are stored."""

    def get(self, keys: Sequence[str], buffers: Sequence[Page]) -> list[bool]:
        """Read pages into buffers; return which are hits."""

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return which keys are found."""

    def remove(self, keys: Sequence[str]) -> list[bool]:
        """Remove keys; return of each whether it is certainly gone."""

    def clear(self) -> bool:
        """Remove everything; return whether that is certain."""

    def buffers(self, size: int) -> tuple[list[Page], list[Page]]:
        """Return the memory of a batch to set from, and of one to read into."""

    def look(self) -> dict[str, Any]:
        """Return fields of a Sight; {} for a store without views."""


class Pauses:
    """How long this process did not run: it was stopped, or the machine was busy."""

    TICK_S = 0.02

    def __init__(self) -> None:
        """Begin to look."""
        self.total_s = 0.0
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(self.TICK_S)
            now = time.monotonic()
            self.total_s += max(0.0, now - last - 2 * self.TICK_S)
            last = now


class Plan:
    """What a worker calls. weights: of get, set, exists and remove; hot: keys of half of the calls.

    keys: all of them, also those that no random call has; limits_s: the deadline of each kind.
    """

    def __init__(
        self,
        *,
        count: int,
        hot: int,
        page_bytes: int,
        weights: Sequence[float],
        limits_s: Mapping[str, float],
        rest_s: float = REST_S,
        more_keys: Sequence[str] = (),
    ) -> None:
        """Give every field."""
        self.hot, self.count, self.page_bytes = hot, count, page_bytes
        self.weights, self.limits_s, self.rest_s = weights, limits_s, rest_s
        self.keys = [*(f"k{index}" for index in range(count)), *more_keys]


class Worker:
    """Makes calls at random on one store, and records them."""

    def __init__(
        self,
        store: Store,
        recorder: Recorder,
        plan: Plan,
        seed: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Record times of `now`, the machine's clock."""
        self._store, self._recorder, self._plan = store, recorder, plan
        self._rng = random.Random(seed)
        self._now = now
        self._pauses = Pauses()
        self._seen_at = 0.0
        self._get_s = 0.0
        self._on_begin: Callable[[], object] = lambda: None
        self._sources, self._targets = store.buffers(plan.page_bytes)

    def step(self) -> None:
        """Make one call; look at the cluster now and then."""
        kind = self._rng.choices((GET, SET, EXISTS, REMOVE), self._plan.weights)[0]
        count = self._rng.randint(1, 2 if kind == REMOVE else BATCH)
        # Half of the calls meet at a few keys.
        chosen = self._rng.sample(
            range(self._rng.choice((self._plan.hot, self._plan.count))), count
        )
        is_clear = kind == REMOVE and self._rng.random() < CLEARED
        if kind == REMOVE and not (is_clear or self._store.can_remove):
            kind = GET
        self.call(kind, self._plan.keys if is_clear else [f"k{index}" for index in chosen])
        if self._now() - self._seen_at > SIGHT_S:
            self.look()

    def call(self, kind: str, keys: Sequence[str]) -> list[bool]:
        """Make one call, and record it; return its answers."""
        values: list[str] = []
        if kind == SET:
            for key, source in zip(keys, self._sources, strict=False):
                source[:] = page_of(key, self._rng.randrange(VERSIONS), source.nbytes)
                values.append(digest_of(source))
        elif kind == GET:
            for buffer in self._targets:
                buffer[:8] = buffer[-8:] = 0xA5  # A hit that wrote nothing is noticed.
        began, paused_s = self._now(), self._pauses.total_s
        number = self._recorder.invoked(kind, began, keys, values)
        error, answers = "", [False] * len(keys)
        self._store.misses = {}
        self._on_begin()
        try:
            answers = self._made(kind, keys)
        except Exception as raised:
            error = repr(raised)
        ended = self._now()
        if kind == GET:
            self._get_s = ended - began
        excess_s = ended - began - self._plan.limits_s[kind] - LATE_S
        if excess_s > 0:
            # A pause that ends with the call is counted a moment later.
            time.sleep(3 * Pauses.TICK_S)
            excess_s -= self._pauses.total_s - paused_s
        if kind == GET:
            values = [
                value_of(buffer, key) if hit else ""
                for key, buffer, hit in zip(keys, self._targets, answers, strict=False)
            ]
        self._recorder.answered(number, ended=ended, values=values, answers=answers, error=error,
                                misses=dict(self._store.misses), excess_s=excess_s)  # fmt: skip
        return answers

    def look(self) -> None:
        """Record what the client sees of the cluster."""
        self._seen_at = at = self._now()
        seen = self._store.look()
        if seen:
            self._recorder.saw(at=at, **seen)

    def serve(self, answers: TextIO) -> None:
        """Work until standard input ends.

        A line, {"kind": …, "keys": …}, is a call to make. {"signal": …, "pid": …} is a signal that
        is sent in the middle of a get; its answer is the moment.
        """
        answers.write("{}\n")
        answers.flush()
        while True:
            if select.select([0], [], [], self._plan.rest_s)[0]:
                line = sys.stdin.readline()
                if not line:
                    return
                asked = json.loads(line)
                if "signal" in asked:
                    self._strike(asked["pid"], asked["signal"], answers)
                    continue
                answers.write(json.dumps(self.call(asked["kind"], asked["keys"])) + "\n")
                answers.flush()
            else:
                self.step()

    def _strike(self, pid: int, number: int, answers: TextIO) -> None:
        after_s = self._rng.random() * self._get_s  # As long as the last one took.
        command = [sys.executable, "-c", STRIKER, str(after_s), str(pid), str(number)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=answers,
                              stderr=subprocess.PIPE, text=True) as striker:  # fmt: skip
            assert striker.stdin is not None
            assert striker.stderr is not None
            striker.stderr.readline()
            self._on_begin = striker.stdin.close
            self.call(GET, [f"k{index}" for index in range(BATCH)])
            self._on_begin = lambda: None

    def _made(self, kind: str, keys: Sequence[str]) -> list[bool]:
        store, count = self._store, len(keys)
        if kind == SET:
            return list(store.set(keys, self._sources[:count]))
        if kind == GET:
            return list(store.get(keys, self._targets[:count]))
        if kind == EXISTS:
            return list(store.exists(keys))
        if count == len(self._plan.keys):
            return [store.clear()] * count
        return list(store.remove(keys))


def arrays(size: int) -> list[Page]:
    """Return the memory of a batch."""
    return [np.zeros(size, np.uint8) for _ in range(BATCH)]
