"""Grafana knows each field of the board."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.house.reference_pages import ROOT

if sys.version_info < (3, 11):
    pytest.skip("Grafana's types are not made for Python 3.10", allow_module_level=True)

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

BOARD = ROOT / "deploy/grafana/peercache.json"


def not_read(board: Any) -> list[str]:
    """Return what Grafana's own types do not keep of a board: what it does not know."""
    plugins.register_default_plugins()
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))
    return list(_lost(board, kept, ""))


def _lost(given: Any, kept: Any, at: str) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            yield from _lost(value, kept.get(name), f"{at}.{name}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from _lost(one, other, f"{at}[{index}]")
    elif given != kept:
        yield at


def test_grafana_reads_all_of_the_board() -> None:
    """Its types, made of Grafana's schema, keep each field; a misspelt one would be passed over."""
    given = json.loads(BOARD.read_text())

    assert not_read(given) == []


def test_a_field_that_grafana_does_not_know_is_found() -> None:
    """At each depth: of the board, of a panel, and of what a panel shows."""
    given = json.loads(BOARD.read_text())
    panel = next(panel for panel in given["panels"] if panel["type"] == "timeseries")
    given["refrsh"] = "5s"
    panel["gridpos"] = panel.pop("gridPos")
    panel["fieldConfig"]["defaults"]["unitt"] = "s"
    place = given["panels"].index(panel)

    found = not_read(given)

    assert found == [
        f".panels[{place}].fieldConfig.defaults.unitt",
        f".panels[{place}].gridpos",
        ".refrsh",
    ]
