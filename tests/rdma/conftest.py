"""Tests marked `rdma` need the devices of the rig's guest; elsewhere they are skipped."""

from __future__ import annotations

import os

import pytest

from tests.pace import PATIENCE_S, no_peer_is_taken_for_hung

# The rig sets it in its guest, to the generation of pyverbs: there nothing is skipped, so that a
# binding which cannot be imported is a failure.
IN_GUEST = "PEERCACHE_RDMA_GUEST" in os.environ


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if IN_GUEST:
        return
    skip = pytest.mark.skip(reason="needs RDMA devices: make test-rdma runs it in a guest")
    for item in items:
        if item.get_closest_marker("rdma") is not None:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have both sides wait for each other where the machine is slow."""
    no_peer_is_taken_for_hung(monkeypatch)
    monkeypatch.setattr("peercache.rdma.fabric.EXCHANGE_S", PATIENCE_S)
    monkeypatch.setattr("peercache.rdma.memory.REGISTER_S", PATIENCE_S)
