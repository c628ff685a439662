"""Warnings that are written once."""

from __future__ import annotations

from typing import Any

import pytest

from peercache.observability import log
from peercache.observability.log import WARNED_FORGET_S, WarnOnce


class Written:
    """A log that keeps its lines."""

    def __init__(self) -> None:
        """Start empty."""
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def warning(self, event: str, **facts: Any) -> None:
        """Keep a line."""
        self.lines.append((event, facts))


def test_warning_is_written_once_for_each_event_and_key() -> None:
    """A second peer, or another fault of the same peer, has a line of its own."""
    written = Written()
    warn_once = WarnOnce(written)

    for peer in (1, 2, 1):
        warn_once("rdma.fell_back", peer, peer=peer)
    warn_once("rdma.connect_failed", 1, peer=1)

    assert written.lines == [
        ("rdma.fell_back", {"peer": 1}),
        ("rdma.fell_back", {"peer": 2}),
        ("rdma.connect_failed", {"peer": 1}),
    ]


def test_keys_that_a_peer_invents_fill_neither_memory_nor_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full memory writes nothing new, until it is forgotten as a whole."""
    monkeypatch.setattr(log, "WARNED_KEYS_MAX", 3)
    written, now = Written(), [100.0]
    warn_once = WarnOnce(written, clock=lambda: now[0])

    for key in range(10):
        warn_once("node.peer_refused", key)
    before = len(written.lines)
    now[0] += WARNED_FORGET_S
    warn_once("node.peer_refused", 11)
    warn_once("node.peer_refused", 0)

    assert before == 3
    assert len(written.lines) == 5
    assert len(warn_once._written) == 2
