"""Quotas of a real node: a flood of one namespace, and the pages of another next to it."""

from __future__ import annotations

import json

import pytest

from peercache.cli import main as cli
from peercache.model.keys import Namespace
from tests.pace import wait_until
from tests.system.nodes import PAGE_BYTES, LocalCluster, empty, free_port, keys_of, pages_of


@pytest.mark.slow
def test_a_flood_of_another_namespace_leaves_the_pages_of_a_quota(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The name of a pattern is reported by its writer; memory, metrics and status know it."""
    with LocalCluster() as cluster:
        flags = ("--quotas", "team-*=50%,priority=1;batch=10%", "--metrics-port", free_port())
        node = cluster.start(pool="16MiB", flags=flags)
        team = cluster.client(node, namespace=Namespace("team-1"))
        flood = cluster.client(node, namespace=Namespace("batch"))
        kept = keys_of("kept", 7 * 2**20 // PAGE_BYTES)
        pages = pages_of(kept)
        assert all(team.batch_set(kept, pages))

        for turn in range(8):
            keys = keys_of(f"flood-{turn}", 8 * 2**20 // PAGE_BYTES)
            flood.batch_set(keys, pages_of(keys))

        found = empty(len(kept))
        assert all(team.batch_get(kept, found))
        assert all((one == page).all() for one, page in zip(found, pages, strict=True))
        shown = {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in node.page("/metrics").splitlines()
            if line.startswith("peercache_namespace_")
        }
        taken = shown['peercache_namespace_bytes{namespace="team-1",tier="pool"}']
        assert 7 * 2**20 <= taken <= 8 * 2**20
        assert shown['peercache_namespace_quota_bytes{namespace="team-1",tier="pool"}'] == 8 * 2**20
        assert shown['peercache_namespace_bytes{namespace="batch",tier="pool"}'] > 6 * 2**20
        evicted = 'peercache_namespace_pages_evicted_total{namespace="%s",tier="pool"}'
        assert shown[evicted % "team-1"] == 0
        assert shown[evicted % "batch"] >= 6 * 8 * 2**20 // PAGE_BYTES

        at = ["--at", node.ready["home"], "--cluster", cluster.name]
        # A node answers with what it has gathered a moment ago.
        wait_until(lambda: cli.main(["status", *at]) == 0)
        capsys.readouterr()
        assert cli.main(["status", "--json", *at]) == 0
        (member,) = json.loads(capsys.readouterr().out)["members"]
        uses = {use["name"]: use for use in member["status"]["namespaces"]}
        assert set(uses) == {"team-1", "batch", "(others)"}
        assert (uses["team-1"]["pages"], uses["team-1"]["priority"]) == (len(kept), 1)
        assert uses["team-1"]["bytes"] == taken
