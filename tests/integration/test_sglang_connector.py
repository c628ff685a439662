"""Tensor-parallel ranks as processes agree on the connector's results, over gloo.

Here because torch is in SGLang's environment; nothing of SGLang is used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("blake3", reason="SGLang's environment was made before blake3 was needed")

from tests.pace import TIMEOUT_S

ROOT = Path(__file__).parents[2]


def test_ranks_agree_over_gloo(tmp_path: Path) -> None:
    """Both ranks get the shorter prefix, in the same polls, with right bytes."""
    # Without this gloo takes the interface to which the host's name resolves, which takes a DNS.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.connector_rank", str(rank), str(tmp_path)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        reported = [json.loads(rank.communicate(timeout=TIMEOUT_S)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()

    assert [rank["own"] for rank in reported] == [28, 20]
    assert [rank["matched"] for rank in reported] == [20, 20]
    assert [rank["right"] for rank in reported] == [[True] * 5] * 2
    assert [(name, tokens) for _, name, tokens in reported[0]["ended"]] == [("r", 20), ("s", 20)]
    assert reported[0]["ended"] == reported[1]["ended"]
