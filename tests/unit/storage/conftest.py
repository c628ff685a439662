"""What the tests of the page store share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from peercache.storage import store
from tests.pace import TIMEOUT_S
from tests.tmpfs import mounted_tmpfs


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    with mounted_tmpfs(tmp_path / "small", "8m") as folder:
        yield folder


@pytest.fixture(autouse=True)
def no_close_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose threads have not ended in time keeps its folder locked, as it should."""
    monkeypatch.setattr(store, "CLOSE_S", TIMEOUT_S)
