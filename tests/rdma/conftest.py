"""Both ends of a read wait for each other on a slow machine."""

from __future__ import annotations

import pytest

from tests.pace import PATIENCE_S, no_peer_is_taken_for_hung


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeouts between the two ends."""
    no_peer_is_taken_for_hung(monkeypatch)
    monkeypatch.setattr("peercache.rdma.fabric.EXCHANGE_S", PATIENCE_S)
    monkeypatch.setattr("peercache.rdma.memory.REGISTER_S", PATIENCE_S)
