"""What a node tells of directory owners that lag, and of its own shard's authority."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from peercache.model.ids import name_of
from peercache.node.housekeeping import OwnersWatch
from peercache.observability.metrics import Metrics


def test_an_owner_that_lags_is_told_of_by_its_address_and_counted() -> None:
    """An operator looks for the node, not for its number."""
    said: list[tuple[str, str]] = []
    log: Any = SimpleNamespace(
        warning=lambda event, owner, **_: said.append((event, owner)),
        info=lambda event, owner: said.append((event, owner)),
    )
    lagging: set[int] = set()
    authority: Any = SimpleNamespace(ring=b"", doubted=2)
    metrics, members = Metrics(), {7: SimpleNamespace(control="10.0.0.7:31999")}
    publisher: Any = SimpleNamespace(lagging=lambda: frozenset(lagging), followers=3)
    watch = OwnersWatch(publisher, authority, members.get, metrics, log)

    def gauge(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"peercache_directory_{name}")

    watch.look()
    assert said == []
    assert (gauge("authority"), gauge("holders_doubted")) == (0.0, 2.0)
    assert metrics.registry.get_sample_value("peercache_followers") == 3.0

    lagging |= {7, 9}
    watch.look()
    watch.look()
    assert said == [
        ("directory.owner_lagged", "10.0.0.7:31999"),
        ("directory.owner_lagged", name_of(9)),
    ]
    assert gauge("owners_lagging") == 2.0

    lagging.remove(7)
    authority.ring, authority.doubted = b"ring", 0
    watch.look()
    assert said[2:] == [("directory.owner_recovered", "10.0.0.7:31999")]
    assert (gauge("authority"), gauge("holders_doubted"), gauge("owners_lagging")) == (1, 0, 1)
