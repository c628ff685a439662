"""A node whose certificate another authority signed: it says that the others refuse it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

import tests.needs_openssl  # noqa: F401 - skips this module
from tests.certificates import Certificates
from tests.pace import wait_until
from tests.system.nodes import NodeProcess


def start(folder: Path, name: str, certificates: Certificates, *flags: str) -> NodeProcess:
    files = certificates.node(name)
    given = [word for key, value in files.items() for word in ("--" + key.replace("_", "-"), value)]
    return NodeProcess(
        ["--cluster", "tests", "--listen", "127.0.0.1:0", "--home", f"ipc://{folder}/{name}.ipc",
         "--pool-size", "16MiB", "--metrics-port", "0", "--log-format", "json", *given, *flags]
    )  # fmt: skip


def problems_of(node: NodeProcess) -> list[str]:
    lines = [json.loads(line) for line in node.said().splitlines() if line.startswith("{")]
    return [line["problem"] for line in lines if line["event"] == "node.not_reached"]


@pytest.mark.parametrize("is_same", [False, True], ids=["another authority", "the same"])
def test_a_node_of_another_authority_says_that_it_is_refused(tmp_path: Path, is_same: bool) -> None:
    """Nng tells no reason of a failed handshake; a node of the same authority has no problem."""
    ours = Certificates(tmp_path / "ours")
    theirs = ours if is_same else Certificates(tmp_path / "theirs")
    with contextlib.ExitStack() as nodes:
        first = start(tmp_path, "a", ours)
        nodes.callback(first.end)
        second = start(tmp_path, "b", theirs, "--discovery-addr", first.ready["control"])
        nodes.callback(second.end)

        if is_same:
            wait_until(lambda: "membership.member_changed" in second.said())
            assert problems_of(second) == []
            return
        wait_until(lambda: problems_of(second) != [])
        (problem,) = problems_of(second)
        assert "refuses this one" in problem
        assert first.ready["control"] in problem
        assert "cert" in problem
