"""A bug in a client is found in the history of a short run at one node, each by its checker."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults import planted
from tests.faults.checkers import YOUNG_S, check
from tests.faults.client import EXISTS_TIMEOUT_S, OP_TIMEOUT_S, PLAN, Ours
from tests.faults.history import History, Life, read_calls
from tests.faults.recorder import Recorder
from tests.faults.worker import Worker
from tests.pace import no_peer_is_taken_for_hung
from tests.system.nodes import LocalCluster

STEPS, RUN_S = 700, 4.0

FOUND_BY = {
    "": set(),
    "TornPages": {"wrong-bytes"},
    "NeverForgets": {"register", "removed-is-found"},
    "StoresNothing": {"stored-is-found"},
    "SeesGhosts": {"views"},
    "Dawdles": {"calls"},
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", FOUND_BY)
def test_bug_in_a_client_is_found(
    bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a bug nothing is found."""
    no_peer_is_taken_for_hung(monkeypatch)
    monkeypatch.setenv(planted.VARIABLE, bug)
    with LocalCluster() as cluster, (tmp_path / "history").open("w") as file:
        # Long ago: removals are held to their promise where no node is young.
        began = time.monotonic() - 2 * YOUNG_S
        node = cluster.start(pool="32MiB")
        client = cluster.client(node, op_timeout_s=OP_TIMEOUT_S, exists_timeout_s=EXISTS_TIMEOUT_S)
        worker = Worker(Ours(client), Recorder(file, 1, "n0"), PLAN, seed=1)
        until = time.monotonic() + RUN_S
        worker.look()
        for _ in range(STEPS):
            worker.step()
            if time.monotonic() > until:
                break
        worker.look()
        lives = [Life(host="n0", incarnation=node.ready["node"], began=began)]

    calls, sights = read_calls([tmp_path / "history"])
    found = check(History(calls=calls, sights=sights, lives=lives))

    assert {problem.split(":")[0] for problem in found} == FOUND_BY[bug], found[:5]
