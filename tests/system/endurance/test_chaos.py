"""Chaos: nodes and clients are killed, paused and started again for a quarter of an hour.

`PEERCACHE_CHAOS_S=60 pytest -m soak tests/system/endurance/test_chaos.py` is a shorter run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.pace import FACTOR, wait_until
from tests.system.endurance.chaos_client import EXISTS_TIMEOUT_S, OP_TIMEOUT_S
from tests.system.nodes import LocalCluster, NodeProcess, free_port, keys_of, pages_of, read

CHAOS_S = float(os.environ.get("PEERCACHE_CHAOS_S", "900"))
NODES, CLIENTS = 4, 5
FABRICS = ("auto", "tcp", "shm")
PAUSE_S = (0.1, 3.0)
BETWEEN_S = (0.5, 4.0)
LATE_S = 1.5 * FACTOR
"""What a scheduler may add to a deadline where nine processes share the processors."""


class Chaos:
    """A cluster with engines as processes, and what happens to them."""

    def __init__(self, cluster: LocalCluster, folder: Path, seed: int) -> None:
        """Start nodes with pools of a quarter of what is written, two of them with a disk."""
        self.cluster = cluster
        self.folder = folder
        self.rng = random.Random(seed)
        self.did: Counter[str] = Counter()
        self.clients: dict[int, subprocess.Popen[str]] = {}
        self._number = 0
        self._flags: list[tuple[str, ...]] = []
        for place in range(NODES):
            path = str(folder / f"disk{place}")
            disk = ("--disk-enabled", "true", "--disk-path", path, "--disk-size", "32MiB")
            ports = ("--listen", f"127.0.0.1:{free_port()}", "--data-port", free_port())
            flags = ports + (disk if place % 2 else ())
            self._flags.append(flags)
            cluster.start(f"n{place}", pool="8MiB", flags=flags)
        for place in range(CLIENTS):
            self.start_client(place)

    def start_client(self, place: int) -> None:
        """Start an engine at one of the nodes."""
        self._number += 1
        node = self.cluster.nodes[place % NODES]
        command = [
            sys.executable, "-m", "tests.system.endurance.chaos_client", self.cluster.name,
            node.ready["home"], FABRICS[place % 3], str(self._number),
            str(self.folder / f"figures-{self._number}.json"),
        ]  # fmt: skip
        with (self.folder / f"client-{self._number}.log").open("w") as log:
            self.clients[place] = subprocess.Popen(command, text=True, stderr=log)

    def run(self, seconds: float) -> None:
        """Let something happen every few seconds."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            what = self.rng.choice(
                (self.kill_node, self.pause_node, self.kill_client, self.pause_client)
            )
            what()
            self.did[what.__name__] += 1
            self.assert_alive()
            time.sleep(self.rng.uniform(*BETWEEN_S))

    def kill_node(self) -> None:
        """Kill -9 a node, and start it again at its addresses a moment later."""
        place = self.rng.randrange(NODES)
        node = self.cluster.nodes[place]
        node.kill()
        time.sleep(self.rng.uniform(0.0, 2.0))
        node.end()
        other = self.cluster.nodes[(place + 1) % NODES]
        flags = (*self._flags[place], "--discovery-addr", other.ready["control"])
        again = self.cluster.start(f"n{place}", pool="8MiB", flags=flags)
        self.cluster.nodes.remove(again)
        self.cluster.nodes[place] = again

    def pause_node(self) -> None:
        """SIGSTOP a node for a while: longer than it takes to be suspected, or shorter."""
        node: NodeProcess = self.rng.choice(self.cluster.nodes)
        node.pause()
        time.sleep(self.rng.uniform(*PAUSE_S))
        node.resume()

    def kill_client(self) -> None:
        """Kill -9 an engine, and start another one in its place."""
        place = self.rng.randrange(CLIENTS)
        self.clients[place].kill()
        self.clients[place].wait()
        self.start_client(place)

    def pause_client(self) -> None:
        """SIGSTOP an engine in the middle of whatever it does."""
        client = self.clients[self.rng.randrange(CLIENTS)]
        client.send_signal(signal.SIGSTOP)
        time.sleep(self.rng.uniform(*PAUSE_S))
        client.send_signal(signal.SIGCONT)

    def assert_alive(self) -> None:
        """A client ends by itself where a promise was broken; a node never."""
        for node in self.cluster.nodes:
            node.assert_not_died()
        for client in self.clients.values():
            assert client.poll() is None, self.said()

    def said(self) -> str:
        """Return what clients have said before they ended."""
        logs = sorted(self.folder.glob("client-*.log"))
        return "\n".join(text for log in logs if "Error" in (text := log.read_text()))

    def end(self) -> None:
        """Leave no client behind."""
        for client in self.clients.values():
            with contextlib.suppress(ProcessLookupError):
                client.send_signal(signal.SIGCONT)
            client.kill()
            client.wait()

    def figures(self) -> Counter[str]:
        """Return what all clients did, those that were killed included."""
        total: Counter[str] = Counter()
        for path in self.folder.glob("figures-*.json"):
            one = json.loads(path.read_text())
            total.update({name: one[name] for name in ("hits", "misses", "stored", "calls")})
        return total

    def longest_calls(self) -> dict[str, float]:
        """Return the longest call of each kind in seconds, without pauses of the engine."""
        longest: dict[str, float] = {}
        for path in self.folder.glob("figures-*.json"):
            for kind, took_s in json.loads(path.read_text())["longest"].items():
                longest[kind] = max(took_s, longest.get(kind, 0.0))
        return longest


@pytest.mark.soak
def test_a_quarter_of_an_hour_of_chaos_gives_no_wrong_byte(tmp_path: Path) -> None:
    """No engine sees a wrong byte, an exception or a call past its deadline; then all heal."""
    with LocalCluster() as cluster:
        chaos = Chaos(cluster, tmp_path, seed=int.from_bytes(os.urandom(4), "little"))
        try:
            chaos.run(CHAOS_S)
            for node in cluster.nodes:
                cluster.wait_for_members(node, NODES)
            keys = keys_of("after", 8)
            first, other = (cluster.client(node) for node in cluster.nodes[:2])
            wait_until(lambda: all(first.batch_set(keys, pages_of(keys))), "a set")
            wait_until(lambda: all(read(other, keys)), "a hit at another node")
            chaos.assert_alive()
        finally:
            chaos.end()
        figures, longest = chaos.figures(), chaos.longest_calls()
        print(dict(chaos.did), dict(figures), {k: round(s, 2) for k, s in longest.items()})
        assert figures["hits"] > 20 * CHAOS_S
        allowed = {"exists": EXISTS_TIMEOUT_S}
        for kind, took_s in longest.items():
            assert took_s < allowed.get(kind, OP_TIMEOUT_S) + LATE_S, (kind, took_s)
