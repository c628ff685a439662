"""The health of a node whose disk does not do what was asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from peercache.config.settings import Config
from peercache.node.status import NodeStatus


def trouble_of(**disk: Any) -> str:
    """Return what the health says of a disk."""
    tier = SimpleNamespace(trouble=disk.pop("trouble", ""))
    parts: Any = SimpleNamespace(disk=tier)
    found: Any = SimpleNamespace(**disk) if disk else None
    status = NodeStatus(
        1, parts, found, parts, reach=parts, config=Config.load({"disk_path": "/data"}), tls=None,
        is_leaving=bool,
    )  # fmt: skip
    return status._disk_trouble()


@pytest.mark.parametrize(
    ("disk", "says"),
    [
        ({}, ""),
        ({"problem": "", "is_opening": False}, ""),
        ({"problem": "it is being opened", "is_opening": True}, ""),
        ({"problem": "it is being opened", "is_opening": False}, "/data: it is being opened"),
        ({"problem": "/data is read-only", "is_opening": False}, "/data: /data is read-only"),
        ({"problem": "", "is_opening": False, "trouble": "it is full"}, "/data: it is full"),
    ],
)
def test_disk_that_takes_no_pages_is_told(disk: dict[str, Any], says: str) -> None:
    """A disk that is being opened is no trouble, unless there is no room for a folder."""
    assert trouble_of(**disk).endswith(says)
    assert bool(trouble_of(**disk)) is bool(says)
