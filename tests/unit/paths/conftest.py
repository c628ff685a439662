"""What the tests of the paths share."""

from __future__ import annotations

import pytest

from tests.unit.paths.world import World


@pytest.fixture
def world() -> World:
    """Three nodes, the first of which is the client's home."""
    return World()
