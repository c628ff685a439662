"""What happens where SGLang is not installed."""

from __future__ import annotations

import importlib
import importlib.util

import pytest


@pytest.mark.parametrize(("name", "since"), [("PeerCacheStore", 12), ("PeerCacheLinker", 23)])
@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")
def test_the_connector_reports_what_is_missing(name: str, since: int) -> None:
    """One clear error that names what to install, in place of a stack of theirs."""
    connector = importlib.import_module("peercache.sglang")

    with pytest.raises(ImportError, match=rf"{name} .*install sglang 0\.5\.{since} or later"):
        getattr(connector, name)
    with pytest.raises(AttributeError, match="no attribute 'PeerCacheOther'"):
        _ = connector.PeerCacheOther
