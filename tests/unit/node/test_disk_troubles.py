"""What a node logs of a disk that pages do not get to."""

from __future__ import annotations

from typing import Any

from peercache.node.disk import DiskTroubles


class Said:
    """A log that keeps its events."""

    def __init__(self) -> None:
        """Begin empty."""
        self.events: list[tuple[str, str, dict[str, Any]]] = []

    def warning(self, event: str, **fields: Any) -> None:
        """Keep a warning."""
        self.events.append(("warning", event, fields))

    def info(self, event: str, **fields: Any) -> None:
        """Keep what is told."""
        self.events.append(("info", event, fields))


def test_a_disk_that_fills_up_is_told_once_and_its_recovery_too() -> None:
    """One line when it begins and one when it ends, however often housekeeping looks."""
    log = Said()
    seen = {0.0: "", 1.0: "full", 2.0: "full", 3.0: "", 4.0: "full", 5.0: "", 14.0: "", 15.0: "old"}
    times, found = iter(seen), iter(seen.values())
    troubles = DiskTroubles(lambda: next(found), path="/data", log=log, clock=lambda: next(times))

    for _ in seen:
        troubles.look()

    assert log.events == [
        ("warning", "disk.writes_failed", {"path": "/data", "why": "full"}),
        ("info", "disk.writes_recovered", {"path": "/data"}),
        ("warning", "disk.writes_failed", {"path": "/data", "why": "old"}),
    ]
