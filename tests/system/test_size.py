"""What more memory would bring: `peercache size` against nodes in use, and from a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pace import wait_until
from tests.system.nodes import LocalCluster, NodeProcess, command, keys_of, page_of, read

pytestmark = pytest.mark.slow

SIZE = 16 * 1024
PAGES = 768
POOL = 1024 * SIZE
LLAMA_8B = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--dtype", "fp8")
TOKEN_BYTES = 2 * 32 * 8 * 128


def sized(*words: str) -> Any:
    """Return what the command prints as JSON."""
    said = command("size", *words, "--json")
    assert (said.returncode, said.stderr) == (0, "")
    return json.loads(said.stdout)


def uses_of(node: NodeProcess) -> float:
    """Return how many uses of pages a node has counted."""
    members = json.loads(node.page(f"/api/v1/status/{node.ready['control']}"))
    return float(members["status"]["reuse"]["uses"])


def test_the_estimate_of_nodes_in_use_is_the_hit_rate_that_their_memory_has() -> None:
    """Three of four uses are hits in the memory of today; half of it holds two thirds of a prompt.

    The node without a client does not change the hit rate; memory is that of both.
    """
    with LocalCluster() as cluster:
        flags = ("--metrics-port=-1",)
        node, _ = (cluster.start(pool=f"{POOL // 2**20}MiB", flags=flags) for _ in range(2))
        cluster.wait_for_members(node, 2)
        at = ("--at", node.ready["control"], "--cluster", cluster.name)
        keys = keys_of("used", PAGES)
        assert all(cluster.client(node).batch_set(keys, [page_of(key, SIZE) for key in keys]))
        for _ in range(3):
            # What one client uses twice within two seconds counts as one use.
            assert all(read(cluster.client(node), keys, SIZE))
        wait_until(lambda: uses_of(node) > 4 * PAGES - 16)

        found = sized(*at, *LLAMA_8B)
        shown = command("size", *at, *LLAMA_8B)

    assert (found["source"], found["hosts"]) == (f"cluster {cluster.name}", 1)
    rates = {each["times"]: each["hit_rate"] for each in found["sizes"]}
    assert list(rates) == [0.25, 0.5, 1, 2, 4, 8]
    assert rates[0.5] == pytest.approx(0.5, abs=0.08)
    assert rates[1] == rates[8] == pytest.approx(0.75, abs=0.05)
    assert found["bytes_a_token"] == TOKEN_BYTES
    tokens = [each["tokens"] * TOKEN_BYTES for each in found["sizes"]]
    assert tokens == [2 * POOL * times for times in rates]
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "a token takes 64.0 KiB" in shown.stdout


def test_a_trace_needs_no_cluster(tmp_path: Path) -> None:
    """The same uses as a trace: each request has three blocks, and comes back after all others."""
    path = tmp_path / "trace.jsonl"
    prompts = [[at, at + 1, at + 2] for at in range(0, PAGES, 3)]
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": number, "hash_ids": prompt})
            for number, prompt in enumerate(prompts + prompts)
        )
    )

    found = sized("--trace", str(path), "--page-size", "64", "--hosts", "2", *LLAMA_8B)

    last, before = found["sizes"][-1], found["sizes"][-2]
    assert (found["uses"], found["hosts"], last["blocks"]) == (2 * PAGES, 2, PAGES)
    assert (before["hit_rate"], last["hit_rate"]) == (0.0, pytest.approx(0.5, abs=0.02))
    assert last["bytes"] == 2 * last["bytes_a_host"] == PAGES * 64 * TOKEN_BYTES
    wrong = command("size", "--trace", str(tmp_path / "none"))
    assert (wrong.returncode, "Traceback" in wrong.stderr) == (2, False)
    assert "none" in wrong.stderr
