"""A home node that does not answer: what its clients report."""

from __future__ import annotations

import logging

import pytest

from tests.pace import wait_until
from tests.system.nodes import LocalCluster, capture_logs


def test_a_lost_home_node_is_one_warning_and_its_return_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An engine whose every page is a miss says why, once; so does its status."""
    caplog.set_level(logging.INFO, logger="peercache")
    with LocalCluster() as cluster, capture_logs() as said:
        node = cluster.start()
        client = cluster.client(node)
        assert not client.home_state.is_lost

        def told(event: str) -> list[str]:
            return [line for line in said if f"event={event}" in line]

        for _ in range(2):
            before = len(told("home.lost"))
            node.pause()
            wait_until(lambda: client.home_state.is_lost)
            assert client.home_state.reason == "no_answer"
            node.resume()
            wait_until(lambda: not client.home_state.is_lost)
            assert len(told("home.lost")) == before + 1
        wait_until(lambda: len(told("home.found")) == 2)
        assert all(node.ready["home"] in line for line in told("home.lost") + told("home.found"))
