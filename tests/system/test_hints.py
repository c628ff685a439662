"""Hints of clients: pages that are retained, demoted, prefetched and shared, and refusals."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import attrs
import pytest

from peercache import Client
from peercache.model.keys import Namespace
from tests.pace import TIMEOUT_S, assert_within, wait_until
from tests.system.nodes import (
    CALL_S,
    EVICTED_IS_GONE,
    PAGE_BYTES,
    LocalCluster,
    NodeProcess,
    free_port,
    keys_of,
    pages_of,
    read,
)

pytestmark = pytest.mark.slow

TTL_S = 30.0
TURNS = 40
"""As many turns of the flood, which writes 4 MiB in each, fill the pool five times."""


def put(client: Client, keys: list[str]) -> None:
    for begin in range(0, len(keys), 16):
        part = keys[begin : begin + 16]
        assert all(client.batch_set(part, pages_of(part)))


def outcomes(client: Client, hint: str) -> dict[str, float]:
    """Return how many pages had which outcome."""
    prefix = f"hint_pages_{hint}_"
    return {
        name.removeprefix(prefix): float(value)
        for name, value in client.stats().items()
        if name.startswith(prefix)
    }


def counted(node: NodeProcess, metric: str) -> float:
    """Return a sample of a node's metrics."""
    lines = node.page("/metrics").splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric)), 0.0)


def test_demoted_pages_are_evicted_first_and_read_from_disk(tmp_path: Path) -> None:
    """Without a disk they are gone; a page that was used since is not. Any node takes the hint."""
    with LocalCluster() as cluster:
        disk = ("--disk-enabled", "true", "--disk-path", str(tmp_path), "--disk-size", "64MiB")
        plain = cluster.start(pool="8MiB", flags=EVICTED_IS_GONE)
        with_disk = cluster.start(pool="8MiB", flags=(*disk, *EVICTED_IS_GONE))
        for node in (plain, with_disk):
            cluster.wait_for_members(node, 2)
            client, other = cluster.client(node), cluster.client(plain)
            name = node.ready["control"]
            keys, more = keys_of(name, 48), keys_of(f"{name}/more", 24)
            put(client, keys)
            if node is with_disk:
                wait_until(lambda client=client: client.stats()["home_disk_pages"] >= 48)  # type: ignore[misc]

            assert other.demote([*keys[32:], "nowhere"]) == 16
            assert client.touch(keys[40:41]) == [True]
            wait_until(lambda client=client: client.stats()["home_pool_pages"] == 48)  # type: ignore[misc]
            put(client, more)

            # 64 pages have room. Of the oldest none is gone, although they are the coldest ones.
            assert read(client, keys[:32]) == [True] * 32
            gone = [number for number in range(32, 48) if not _in_memory(client, keys[number])]
            assert 8 <= len(gone) <= 12
            assert 40 not in gone
            expected = node is with_disk
            assert read(client, [keys[number] for number in gone]) == [expected] * len(gone)
            assert outcomes(other, "demote")["missing"] >= 1


def _in_memory(client: Client, key: str) -> bool:
    return client.overlap([key]).stored(1) == 1


def test_prefetch_loads_pages_from_disk(tmp_path: Path) -> None:
    """They are in memory when it returns; what is there already, or nowhere, is counted."""
    with LocalCluster() as cluster:
        disk = ("--disk-enabled", "true", "--disk-path", str(tmp_path), "--disk-size", "256MiB")
        node = cluster.start(pool="8MiB", flags=(*disk, "--metrics-port", free_port()))
        client = cluster.client(node)
        keys, flood = keys_of("prompt", 16), keys_of("flood", 128)
        put(client, keys)
        wait_until(lambda: client.stats()["home_disk_pages"] >= 16)
        put(client, flood)

        assert client.prefetch([*keys, *flood[-4:], "nowhere"]) == 20

        assert outcomes(client, "prefetch") == {"done": 16, "already": 4, "missing": 1}
        loaded = counted(node, "peercache_pages_promoted_total")
        assert read(client, keys) == [True] * 16
        assert counted(node, "peercache_pages_promoted_total") == loaded == 16
        wait_until(lambda: counted(
            node, 'peercache_hint_pages_total{hint="prefetch",outcome="done"}') == 16)  # fmt: skip


@pytest.mark.usefixtures("stalls")
def test_a_prefetch_without_an_answer_is_not_counted_as_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pages are on a node that has been paused since it was asked where they are."""
    monkeypatch.setattr("peercache.client.client.FAR", 0)
    with LocalCluster() as cluster:
        holder, home = cluster.start_many(2)
        keys = keys_of("far", 8)
        put(cluster.client(holder), keys)
        client = cluster.client(home, fabric="tcp")
        wait_until(lambda: client.contains(keys) == [True] * 8)

        holder.pause()
        copied = client.prefetch(keys)
        holder.resume()

        assert copied == 0
        assert outcomes(client, "prefetch") == {"unanswered": 8}


def test_pages_that_are_stored_are_shared_already() -> None:
    with LocalCluster() as cluster:
        one, other = (cluster.client(node) for node in cluster.start_many(2))
        keys = keys_of("prompt", 8)
        put(one, keys)

        assert other.share([*keys, "nowhere"]) == 8
        assert outcomes(other, "share") == {"already": 8, "missing": 1}


def test_absurd_hints_are_counted_refusals() -> None:
    """Ten thousand keys, times that are none, pages of other names: an answer in time, no error."""
    with LocalCluster() as cluster:
        node = cluster.start(pool="8MiB")
        client = cluster.client(node)
        foreign = cluster.client(node, namespace=Namespace("another"))
        mine = keys_of("mine", 32)
        put(client, mine)
        many: list[Any] = [*mine, *keys_of("many", 10_000)]

        for seconds in (10**400, float("inf"), 60.0):
            began = time.monotonic()
            assert client.retain(many, seconds) == 16
            assert client.demote(many) == 16
            assert client.prefetch(many) == 32
            assert_within(time.monotonic() - began, 4 * CALL_S)
        for seconds in (-1.0, float("nan"), float("-inf")):
            assert client.retain(mine, seconds) == 32
            assert client.retain([], 1.0) == client.demote([]) == client.prefetch([]) == 0

        assert foreign.retain(mine, 60.0) == foreign.demote(mine) == foreign.prefetch(mine) == 0
        figures = outcomes(client, "retain")
        assert figures["refused"] == 3 * 16
        assert figures["missing"] == 3 * 10_000
        assert outcomes(foreign, "retain") == {"missing": 32}
        put(client, keys_of("flood", 128))
        assert read(client, mine) == [False] * 32


@attrs.define
class Session:
    """A conversation of an agent: its prompt grows with each turn."""

    name: str
    resumes_at: float = 0.0
    pages: int = 0

    def keys(self) -> list[str]:
        return keys_of(self.name, self.pages)


def test_agents_find_their_retained_pages_after_each_pause() -> None:
    """Sessions that think between turns, while another tenant floods the pool all the time.

    Their pages are retained for longer than they think, within the quota; a third tenant, which is
    within its own, loses nothing to either of them.
    """
    rng = random.Random(29)
    with LocalCluster() as cluster:
        flags = ("--quotas", "agents=50%;quiet=25%", "--metrics-port", free_port())
        node = cluster.start(pool="32MiB", flags=flags)
        agents, quiet, noisy = (
            cluster.client(node, namespace=Namespace(name)) for name in ("agents", "quiet", "noisy")
        )
        calm = keys_of("calm", 4 * 2**20 // PAGE_BYTES)
        put(quiet, calm)
        sessions = [Session(f"session-{number}") for number in range(6)]
        asked = hits = retained = turn = 0
        until = time.monotonic() + TIMEOUT_S
        while (asked <= 200 or turn < TURNS) and time.monotonic() < until:
            turn += 1
            put(noisy, keys_of(f"flood-{turn}", 32))
            for session in sessions:
                if session.resumes_at > time.monotonic() or session.pages >= 16:
                    continue
                before = session.keys()
                asked += len(before)
                hits += sum(read(agents, before)) if before else 0
                session.pages += rng.choice((1, 2))
                put(agents, session.keys())
                retained += agents.retain(session.keys(), TTL_S) == session.pages
                session.resumes_at = time.monotonic() + rng.uniform(0.1, 1.0)

        assert asked > 200
        assert hits >= 0.99 * asked
        assert retained > 30
        assert read(quiet, calm) == [True] * len(calm)
        name = 'peercache_namespace_pages_evicted_total{namespace="quiet",tier="pool"}'
        assert counted(node, name) == 0


def ask(node: NodeProcess, by: str, **question: Any) -> tuple[int, Any]:
    """Send a hint over HTTP; return the status and the answer."""
    asked = urllib.request.Request(
        f"http://{node.ready['http']}/api/v1/hints/{by}",
        json.dumps(question).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.load(refusal)


def test_hints_over_http_do_what_those_of_clients_do(tmp_path: Path) -> None:
    """On all nodes for retain and demote; a prefetch concerns the disk of the node itself."""
    with LocalCluster() as cluster:
        disk = ("--disk-enabled", "true", "--disk-path", str(tmp_path), "--disk-size", "256MiB")
        node = cluster.start(pool="8MiB", flags=(*disk, "--metrics-port", free_port()))
        other = cluster.start(pool="8MiB", flags=("--metrics-port", free_port()))
        cluster.wait_for_members(node, 2)
        client, elsewhere = cluster.client(node), cluster.client(other)
        keys, flood, far = keys_of("prompt", 16), keys_of("flood", 128), keys_of("far", 4)
        put(client, keys)
        put(elsewhere, far)
        wait_until(lambda: client.stats()["home_disk_pages"] >= 16)
        put(client, flood)

        def hint(kind: str, *pages: str, seconds: float = 0.0, at: NodeProcess = node) -> Any:
            status, answer = ask(at, "hashes", hint=kind, hashes=pages, seconds=seconds)
            assert status == 200, answer
            assert answer["pages"] == len(pages)
            return answer["outcomes"]

        wait_until(lambda: hint("share", *keys, *far, "nowhere") == {"already": 20, "missing": 1})
        found = hint("prefetch", *keys, *far, flood[-1], "nowhere")
        assert found == {"done": 16, "refused": 4, "already": 1, "missing": 1}
        assert read(client, keys) == [True] * 16
        assert hint("retain", *keys[:8], *far, seconds=60) == {"done": 12}
        assert hint("demote", *keys, at=other) == {"done": 8, "refused": 8}
        name = 'peercache_hint_pages_total{hint="retain",outcome="done"}'
        assert counted(node, name) == 12

        wait_until(lambda: "prefetch done: 16" in node.page(f"/nodes/{node.ready['control']}"))

        many = keys_of("many", 8192)
        assert hint("retain", *many, seconds=1e9) == {"missing": 8192}
        assert ask(node, "hashes", hint="retain", hashes=[*many, "more"])[0] == 422
        assert ask(node, "hashes", hint="retain", hashes=keys, seconds=1e10)[0] == 422
        assert ask(node, "hashes", hint="forget", hashes=keys)[0] == 422
        foreign = {"name": "another"}
        status, answer = ask(node, "hashes", hint="demote", hashes=keys, namespace=foreign)
        assert (status, answer["outcomes"]) == (200, {"missing": 16})
        prompt = {"tokens": list(range(64)), "model": "m", "dtype": "bf16", "page_tokens": 16}
        assert ask(node, "tokens", hint="retain", seconds=1, **prompt) == (
            200, {"pages": 4, "outcomes": {"missing": 4}},
        )  # fmt: skip
