"""The events of a real engine, as they were recorded: `tests/integration/vllm_cache.py`."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

from tests.contracts.engine_events import check

FOLDER = Path(__file__).parent / "frozen"


def test_the_index_knows_what_vllm_has() -> None:
    """In eleven layouts of groups of layers, with and without an adapter, while it evicts."""
    reported = json.loads(lzma.decompress((FOLDER / "vllm-0.32.0.json.xz").read_bytes()))
    assert len(reported) == 11
    assert check(reported) > 300


def test_the_index_knows_what_vllm_has_with_a_draft() -> None:
    """Since vLLM 0.33 a block's hash then covers tokens behind it: in three layouts."""
    reported = json.loads(lzma.decompress((FOLDER / "vllm-0.33.0.json.xz").read_bytes()))
    assert len(reported) == 3
    assert check(reported) > 80
