"""The prefix index compared with vLLM's own KV cache manager, with windows, states and adapters."""

from __future__ import annotations

import json

import pytest

from tests.contracts.engine_events import check
from tests.integration.other_engines import EngineProcess, environment_of


@pytest.mark.parametrize("seed", range(3))
def test_the_index_knows_what_vllm_has(seed: int) -> None:
    """Whatever is asked, it answers what vLLM would not compute, while blocks are evicted."""
    python = environment_of("vllm") / "bin/python"
    command = [python, "-m", "tests.integration.vllm_cache", str(seed), "40"]
    with EngineProcess(command) as process:
        said = process.finish()
    assert check(json.loads(said[said.index("{") :].splitlines()[0])) > 500
