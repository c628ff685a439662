"""PeerCacheStore that records its calls, and strikes a node in the middle of one.

It runs in an engine's scheduler, the test in another process. They share a folder:

calls.jsonl   out: one line a call. Times are CLOCK_MONOTONIC, which is one clock for a whole host.
strike.json   in: the next call of that operation takes it, and sends the signal so long after its
              own begin.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import attrs
from sglang.srt.environ import envs

from peercache.sglang import PeerCacheStore

Answer = TypeVar("Answer")

INJECTED = {
    "failure": envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE,
    "delay_s": envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY,
}
"""What has SGLang wrap the backend in its own injector; it looks when the backend is built."""


@attrs.frozen(kw_only=True)
class Strike:
    """A signal to send to a process, so long after a call of an operation has begun."""

    operation: str
    process: int
    signal: int
    after_s: float


@attrs.frozen(kw_only=True)
class Call:
    """One call that has returned. good: pages that were found, read or stored.

    struck: when a strike was sent in it, if one was: it has met the call if that is before `ended`.
    """

    operation: str
    begun: float
    ended: float
    pages: int
    good: int
    struck: float | None

    @property
    def took_s(self) -> float:
        """Return how long the engine's thread waited."""
        return self.ended - self.begun

    @property
    def was_met(self) -> bool:
        """Return whether a strike was sent while the call was under way."""
        return self.struck is not None and self.struck <= self.ended

    def overlaps(self, begin: float, end: float) -> bool:
        """Return whether the call was under way at some time between two."""
        return self.begun <= end and begin <= self.ended


def order(folder: Path, strike: Strike) -> None:
    """Have the next call of the operation strike; an order that waits is replaced."""
    draft = folder / "strike.draft"
    draft.write_text(json.dumps(attrs.asdict(strike)))
    draft.rename(folder / "strike.json")


def calls(folder: Path) -> list[Call]:
    """Return the calls that have returned, in that order."""
    path = folder / "calls.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [Call(**json.loads(line)) for line in lines]


class RecordedStore(PeerCacheStore):
    """PeerCacheStore with a folder, and with SGLang's fault injector where the test asks for it."""

    def __init__(self, storage_config: Any, *rest: Any) -> None:
        """Take our own keys out of the extra configuration, which refuses keys it does not know."""
        extra = dict(storage_config.extra_config)
        self._folder = Path(extra.pop("record"))
        self._writing = threading.Lock()
        for key, variable in INJECTED.items():
            if key in extra:
                variable.set(extra.pop(key))
            else:
                variable.clear()
        super().__init__(dataclasses.replace(storage_config, extra_config=extra), *rest)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Record it."""
        ask = super().batch_exists
        return self._recorded("exists", len(keys), lambda: ask(keys, extra_info), int)

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Record it."""
        ask = super().batch_get_v1
        return self._recorded("get", len(keys), lambda: ask(keys, host_indices, extra_info), sum)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Record it."""
        ask = super().batch_set_v1
        return self._recorded("set", len(keys), lambda: ask(keys, host_indices, extra_info), sum)

    def _recorded(
        self,
        operation: str,
        pages: int,
        ask: Callable[[], Answer],
        good: Callable[[Answer], int],
    ) -> Answer:
        strike = self._ordered(operation)
        struck: list[float] = []

        def send() -> None:
            assert strike is not None
            os.kill(strike.process, signal.Signals(strike.signal))
            struck.append(time.monotonic())

        begun = time.monotonic()
        timer = threading.Timer(strike.after_s, send) if strike is not None else None
        if timer is not None:
            timer.start()
        answer = ask()
        ended = time.monotonic()
        if timer is not None:
            timer.join()
        call = Call(
            operation=operation,
            begun=begun,
            ended=ended,
            pages=pages,
            good=good(answer),
            struck=struck[0] if struck else None,
        )
        with self._writing, (self._folder / "calls.jsonl").open("a") as file:
            file.write(json.dumps(attrs.asdict(call)) + "\n")
        return answer

    def _ordered(self, operation: str) -> Strike | None:
        """Take the order, if it is for this operation."""
        path = self._folder / "strike.json"
        try:
            strike = Strike(**json.loads(path.read_text()))
            if strike.operation != operation:
                return None
            path.unlink()
        except FileNotFoundError:
            return None
        return strike
