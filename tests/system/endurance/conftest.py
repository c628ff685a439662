"""A soak takes ten minutes: it runs only when its mark is selected.

All of these tests load the machine themselves, and none is about its speed.
"""

from __future__ import annotations

import pytest

from tests.pace import no_peer_is_taken_for_hung


@pytest.fixture(autouse=True)
def timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the clients wait for nodes that are slow because the machine is."""
    no_peer_is_taken_for_hung(monkeypatch)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked `soak`, unless -m speaks of it."""
    if "soak" in config.option.markexpr:
        return
    asked_for = pytest.mark.skip(reason="takes ten minutes: pytest -m soak")
    for item in items:
        if item.get_closest_marker("soak") is not None:
            item.add_marker(asked_for)
