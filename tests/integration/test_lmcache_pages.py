"""The adapter as README and the page on LMCache configure it, in LMCache's own benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.other_engines import EngineProcess, environment_of
from tests.integration.pages import json_of, node_of_a_page


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/use-with-lmcache.md"])
def test_the_adapter_of_a_page_stores_and_loads(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user pastes it, with a node that was started as the page shows."""
    venv = environment_of("lmcache")
    adapter = json.dumps(json_of(page, "--l2-adapter"))
    with (
        node_of_a_page(tmp_path, monkeypatch),
        EngineProcess(
            [
                venv / "bin/lmcache", "bench", "l2", "--l2-adapter", adapter,
                "--no-skip-verify", "--lookup-max-hit-rate", "1.0",
            ]
        ) as bench,
    ):  # fmt: skip
        said = bench.finish()
    assert "All 32 keys data verified OK" in said
