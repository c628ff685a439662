"""Hints in vLLM's own classes are obeyed by the tier, in vLLM's Python."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.integration.other_engines import environment_of
from tests.pace import TIMEOUT_S

ROOT = Path(__file__).parents[2]


def test_the_tier_obeys_an_envelope_of_vllm() -> None:
    """A part of a prompt by the positions of its chunks, and a block by its hash."""
    python = environment_of("vllm") / "bin" / "python"
    ran = subprocess.run(
        [python, ROOT / "tests/integration/vllm_hints.py"],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONSAFEPATH": "1"},
        capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
    )  # fmt: skip

    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == [["retain", 9.0, 2], ["demote", 0.0, 1]]
