"""The documentation: made pages are current, links lead somewhere, named things exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.reference_pages import BEGIN, END, MADE, PAGES, ROOT, with_made_part
from tests.house.test_tidy import HOMES

TEXTS = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"])


def targets_of(path: Path) -> list[str]:
    """Return the relative links of a page."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    return [target for target in targets if "://" not in target]


@pytest.mark.parametrize("page", MADE)
def test_made_page_is_current(page: str) -> None:
    """What the code says is what the reference says; `make docs` brings it up to date."""
    text = (PAGES / page).read_text()

    assert text == with_made_part(page, text), f"docs/reference/{page} is old: make docs"


def test_made_part_without_its_place_is_an_error() -> None:
    """A page that lost its markers would never be current again, and nobody would notice."""
    with pytest.raises(ValueError, match="no place"):
        with_made_part("metrics.md", f"# Metrics\n{END}\n")
    assert with_made_part("metrics.md", f"{BEGIN}\nold\n{END}\n").count("peercache_pages_hit") == 1


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    """Every relative link names a file that is there."""
    broken = [target for target in targets_of(path) if not (path.parent / target).exists()]

    assert not broken


def test_every_page_can_be_reached_from_the_readme() -> None:
    """A page that nothing links to is not read."""
    reached: set[Path] = set()
    open_ends = [ROOT / "README.md"]
    while open_ends:
        path = open_ends.pop()
        if path in reached or path.suffix != ".md":
            continue
        reached.add(path)
        open_ends += [(path.parent / target).resolve() for target in targets_of(path)]

    assert not set(TEXTS) - reached


def test_dependencies_stand_where_the_page_says() -> None:
    """Each library has its places in the table, as the rule about imports has them."""
    text = (ROOT / "docs" / "explanation" / "dependencies.md").read_text()
    told = {
        library.replace("-", "_"): set(re.findall(r"`(\w+)/?`", cells[2]))
        for cells in re.findall(r"^\| ([\w, -]+) \|(.*?)\|(.*?)\|", text, re.MULTILINE)
        for library in cells[0].split(", ")
    }
    free = {"attrs", "numpy"}
    of_the_standard_library = {"sqlite3", "asyncio"}

    assert {name: told.get(name) for name in HOMES.keys() - of_the_standard_library} == {
        name: set(HOMES[name]) for name in HOMES.keys() - of_the_standard_library
    }
    declared = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2]
    needed = set(re.findall(r'^    "([\w-]+)', declared.partition("\n]")[0], re.MULTILINE))
    assert {name.replace("-", "_") for name in needed} <= HOMES.keys() | free
