"""The same recorder and checkers for other stores: owners that are killed or paused, and eviction.

    python -m tests.faults.peers --json benchmarks/peers_faults.json

Each run is one store with one scenario, on loopback: a process that holds the bytes (the owner), a
client that sets and removes pages there, and two that read. Prints the seed and what was counted.
Only our own violations make the exit status 1: what other stores do is a figure, not a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.peers_clusters import StoreFailed
from benchmarks.peers_install import NotInstalled
from tests.faults.history import History, Span, read_calls, write_json
from tests.faults.peers_clusters import (
    EVICTED,
    KILLED,
    PAUSED,
    SCENARIOS,
    STARTS,
    StoreCluster,
    version,
)
from tests.faults.peers_verdict import Figures, figures_of, sights_of
from tests.faults.recorder import GET, SET
from tests.faults.worker import SIGHT_S

WARM_S = 18.0
"""A node of ours is young for 15 s, in which removals need not reach every page."""
DOWN_S, AFTER_S, RECOVERY_MAX_S, ASK_S = 4.0, 4.0, 60.0, 5.0
KILLS = 3
PAUSES_S = (2.0, 8.0, 14.0)
"""Below and above what stores take for a death: 6 s (ours, PyPI's), 10 s (Mooncake)."""
EVICTS_S = 30.0


@attrs.define(eq=False)
class Run:
    """One store with one scenario.

    spans: the faults. starts_s: how long each start of the owner took until it served;
    recoveries_s: until a new page was found, from the begin of that start or the end of a pause.
    """

    cluster: StoreCluster
    rng: random.Random
    spans: list[Span] = attrs.Factory(list)
    starts_s: list[float] = attrs.Factory(list)
    recoveries_s: list[float | None] = attrs.Factory(list)
    _sights: list[tuple[float, int]] = attrs.Factory(list)
    _is_over: threading.Event = attrs.Factory(threading.Event)
    _probes: int = 0

    def go(self, scenario: str) -> None:
        """Do what the scenario is, while clients call."""
        looking = threading.Thread(target=self._look, daemon=True)
        looking.start()
        try:
            time.sleep(WARM_S)
            if scenario == KILLED:
                for _ in range(KILLS):
                    self._kill()
            elif scenario == PAUSED:
                for seconds in PAUSES_S:
                    self._pause(seconds)
            else:
                time.sleep(EVICTS_S)
                self._recovers(time.monotonic())
        finally:
            self._is_over.set()
            looking.join()

    def _kill(self) -> None:
        began = self._strike(signal.SIGKILL)
        self.cluster.owner_died()
        time.sleep(DOWN_S)
        again = time.monotonic()
        self.cluster.start_owner()
        self.starts_s.append(time.monotonic() - again)
        self._is_over_since(began, "kill_node")
        self._recovers(again)

    def _pause(self, seconds: float) -> None:
        began = self._strike(signal.SIGSTOP)
        time.sleep(seconds)
        again = time.monotonic()
        self.cluster.owner().send_signal(signal.SIGCONT)
        self._is_over_since(began, "pause_node")
        self._recovers(again)

    def _strike(self, number: signal.Signals) -> float:
        """Send the owner a signal in the middle of a reader's get; return the moment."""
        time.sleep(self.rng.uniform(0, 0.5))
        owner = self.cluster.owner()
        asked = {"signal": number, "pid": owner.pid}
        at = self.cluster.clients[-1].ask(asked, RECOVERY_MAX_S)
        if at is None:
            raise StoreFailed("a reader sent no signal")
        return float(at)

    def _is_over_since(self, began: float, kind: str) -> None:
        ended = time.monotonic()
        self.spans.append(Span(kind=kind, targets=("owner",), began=began, ended=ended))

    def _recovers(self, began: float) -> None:
        """Set new pages until a reader finds one; note how long that took."""
        writer, reader = self.cluster.clients[:2]  # The other one may still be in a get.
        while time.monotonic() - began < RECOVERY_MAX_S:
            self._probes += 1
            key = f"after-{self._probes}"
            if all(
                client.ask({"kind": kind, "keys": [key]}, ASK_S) == [True]
                for client, kind in ((writer, SET), (reader, GET))
            ):
                self.recoveries_s.append(time.monotonic() - began)
                break
            time.sleep(0.05)
        else:
            self.recoveries_s.append(None)
        time.sleep(AFTER_S)

    def _look(self) -> None:
        """Note the evictions that the owner has counted; -1 where it does not answer."""
        while not self._is_over.wait(SIGHT_S):
            at = time.monotonic()
            try:
                evicted = self.cluster.evicted()
            except OSError:
                evicted = -1
            self._sights.append((at, evicted))

    def history(self, files: list[Path]) -> History:
        """Return what clients recorded, with what the driver did and saw."""
        calls, sights = read_calls(files)
        lives = self.cluster.lives
        if not sights:
            sights = sights_of(lives, self._sights, {call.process for call in calls})
        return History(calls=calls, sights=sights, spans=self.spans, lives=lives)


def run(store: str, scenario: str, seed: int, keep: Path | None = None) -> Figures:
    """Make one run; return its figures."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peercache-peers-")))
        cluster = stack.enter_context(
            contextlib.closing(STARTS[store](folder, seed, is_evicting=scenario == EVICTED))
        )
        cluster.start()
        made = Run(cluster, random.Random(f"{seed}/{scenario}"))
        made.go(scenario)
        over = time.monotonic()
        cluster.close()
        history = made.history(sorted(folder.glob("client-*.jsonl")))
        figures = figures_of(history, over, cluster.killed_clients) | {
            "starts_s": _rounded(made.starts_s), "recoveries_s": _rounded(made.recoveries_s),
        }  # fmt: skip
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            write_json(history, keep / f"{store}-{scenario}.jsonl")
            for log in folder.glob("*.log"):
                (keep / f"{store}-{scenario}-{log.name}").write_bytes(log.read_bytes())
        return figures


def _rounded(seconds: Sequence[float | None]) -> list[float | None]:
    return [each if each is None else round(each, 2) for each in seconds]


def measured(
    stores: list[str], scenarios: list[str], seed: int, keep: Path | None
) -> dict[str, Any]:
    """Return figures of all runs, as benchmarks/peers_faults_report.py shows them."""
    versions: dict[str, str] = {}
    missing: dict[str, str] = {}
    runs: dict[str, dict[str, Figures]] = {}
    loads = [os.getloadavg()[0]]
    for store in stores:
        try:
            versions[store] = version(store)
        except NotInstalled as error:
            missing[store] = f"cannot be installed here: {error}"
            continue
        runs[store] = {}
        for scenario in scenarios:
            if scenario not in STARTS[store].scenarios:
                continue
            print(f"{store}, {scenario}", flush=True)
            try:
                figures = run(store, scenario, seed, keep)
            except StoreFailed as error:
                figures = {"failed": str(error).partition("\n")[0], "problems": [str(error)]}
            runs[store][scenario] = figures
            print(f"  {json.dumps(figures)}", flush=True)
    return {
        "seed": seed,
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "processors": len(os.sched_getaffinity(0)),
        "load_averages": [*loads, os.getloadavg()[0]],
        "versions": versions,
        "missing": missing,
        "runs": runs,
    }


def ours_violated(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the violations of our own runs."""
    for store, runs in figures["runs"].items():
        if store.startswith("ours"):
            for scenario, found in runs.items():
                problems = list(found["problems"])
                if None in found.get("recoveries_s", []):
                    problems.append("heals: a reader finds no new page")
                yield from (f"{store}, {scenario}: {problem}" for problem in problems)


def main() -> int:
    """Run, print, and keep the figures; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.peers", description=__doc__)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--store", action="append", choices=STARTS, default=[])
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, default=[])
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    parser.add_argument("--keep", type=Path, help="a folder for histories and logs")
    asked = parser.parse_args()
    print(f"reproduce: python -m tests.faults.peers --seed {asked.seed}", flush=True)
    stores = asked.store or list(STARTS)
    figures = measured(stores, asked.scenario or list(SCENARIOS), asked.seed, asked.keep)
    violated = list(ours_violated(figures))
    for problem in violated:
        print(f"VIOLATED {problem}")
    if asked.json is not None:
        asked.json.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    return int(bool(violated))


if __name__ == "__main__":
    sys.exit(main())
