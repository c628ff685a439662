"""What happens where SGLang is not installed."""

from __future__ import annotations

import importlib
import importlib.util

import pytest


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")
def test_the_connector_says_what_is_missing() -> None:
    """One clear error that names what to install, in place of a stack of theirs."""
    with pytest.raises(ImportError, match=r"install sglang 0\.5\.12 or later"):
        importlib.import_module("peercache.sglang")
