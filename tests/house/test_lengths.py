"""No file is longer than one sitting: the rule of the package, for what stands beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.test_tidy import FILE_LINES_MAX, ROOT


def long_files(folder: Path) -> list[str]:
    """Return the files of a tree that are longer than one sitting."""
    lengths = {path: len(path.read_text().splitlines()) for path in folder.rglob("*.py")}
    return [
        f"{path}: {length} lines" for path, length in lengths.items() if length > FILE_LINES_MAX
    ]


@pytest.mark.parametrize("folder", ["tests", "sims", "benchmarks"])
def test_files_beside_the_package_are_short_too(folder: str) -> None:
    """A file is a subject; what outgrows one is two subjects."""
    assert not long_files(ROOT / folder)


def test_a_long_file_is_found(tmp_path: Path) -> None:
    """A line more than are allowed is named."""
    for name, lines in (("short", FILE_LINES_MAX), ("long", FILE_LINES_MAX + 1)):
        (tmp_path / f"{name}.py").write_text("\n" * lines)

    assert long_files(tmp_path) == [f"{tmp_path / 'long.py'}: {FILE_LINES_MAX + 1} lines"]
