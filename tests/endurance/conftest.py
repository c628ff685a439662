"""A soak takes ten minutes: it runs only where somebody asks for it by its mark."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked `soak`, unless -m speaks of it."""
    if "soak" in config.option.markexpr:
        return
    asked_for = pytest.mark.skip(reason="takes ten minutes: pytest -m soak")
    for item in items:
        if item.get_closest_marker("soak") is not None:
            item.add_marker(asked_for)
