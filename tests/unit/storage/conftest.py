"""What the tests of the page store share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tmpfs import mounted_tmpfs


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    with mounted_tmpfs(tmp_path / "small", "8m") as folder:
        yield folder
