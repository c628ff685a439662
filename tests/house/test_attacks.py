"""The table of attacks names tests and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOSTILE = ROOT / "tests" / "hostile"
TEST = re.compile(r"`([\w./]+\.py)::(\w+)`")
SOURCE = re.compile(r"`([a-z]\w*/[\w/]+(?:\.py|/))`")


def test_table_of_attacks_names_what_exists() -> None:
    """A row without its test, or without the line that stops the attack, shows nothing."""
    table = (HOSTILE / "README.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 20
    for row in rows:
        tests, sources = TEST.findall(row), SOURCE.findall(row)
        assert tests, f"no test: {row}"
        assert sources, f"no file: {row}"
        for file, name in tests:
            said = (HOSTILE / file).resolve().read_text()
            assert re.search(rf"^(async )?def {name}\(", said, re.MULTILINE), name
        for source in sources:
            assert (ROOT / "src" / "peercache" / source).exists(), source
