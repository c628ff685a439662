"""RDMA does not encrypt: where it may be used together with TLS, from the settings of each side.

That a client whose certificate names namespaces gets no queue pair is in test_control_tls.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tests.needs_openssl  # noqa: F401 - skips this module
from peercache import Client
from tests.certificates import Certificates
from tests.pace import wait_until
from tests.rdma.fake_device import FakeRail, World

NOT_TRUSTED = "this node has TLS, and not rdma_clear_text = true"


@pytest.mark.parametrize(
    ("has_tls", "settings", "node_reports"),
    [
        (False, {}, "serves"),
        (True, {"rdma_clear_text": True}, "serves"),
        (True, {}, NOT_TRUSTED),
        (True, {"rdma_clear_text": True, "fabric": "tcp"}, "this node has fabric = tcp"),
    ],
)
def test_rdma_is_used_only_where_its_network_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *,
    has_tls: bool, settings: dict[str, Any], node_reports: str,
) -> None:  # fmt: skip
    """By a node for its clients, and by a client for its reads; the node names which setting it is.

    An engine with a node of its own is both.
    """
    certificates = Certificates(tmp_path).node("engine") if has_tls else {}
    looked: list[str] = []

    def rails_of(side: str) -> Any:
        return lambda _: looked.append(side) or ((FakeRail(World()),), ())

    monkeypatch.setattr("peercache.rdma.serving.open_rails", rails_of("node"))
    monkeypatch.setattr("peercache.client.assembly.open_rails", rails_of("client"))
    where = {
        "embedded": True,
        "cluster": "tests",
        "pool_size": "1MiB",
        "listen": "127.0.0.1:0",
        "shm_dir": str(tmp_path),
    }

    with Client.open(**where, **certificates, **settings) as client:
        wait_until(lambda: client.stats().get("home_rdma") == node_reports)

    assert sorted(looked) == (["client", "node"] if node_reports == "serves" else [])
