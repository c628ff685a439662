"""The documentation: made pages are current, links lead somewhere, named things exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.contracts.frozen.public import COMMANDS, flags_of
from tests.house.layers import HOMES
from tests.house.reference_pages import BEGIN, END, FILES, MADE, PAGES, ROOT, with_made_part

DOCS = ROOT / "docs"
BESIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
TEXTS = sorted([*DOCS.rglob("*.md"), *(ROOT / name for name in BESIDE)])
README_LINES_MAX = 140


def targets_of(path: Path) -> list[str]:
    """Return the relative links of a page."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    return [target for target in targets if "://" not in target]


@pytest.mark.parametrize("page", MADE)
def test_made_page_is_current(page: str) -> None:
    """What the code says is what the reference says; `make docs` brings it up to date."""
    text = (PAGES / page).read_text()

    assert text == with_made_part(page, text), f"docs/reference/{page} is old: make docs"


@pytest.mark.parametrize("file", FILES)
def test_made_file_is_current(file: str) -> None:
    """A picture shows the figures of the table beside it, a rule the metrics of this build."""
    assert (PAGES / file).read_text() == FILES[file](), f"{file} is old: make docs"


def test_made_part_without_its_place_is_an_error() -> None:
    """A page that lost its markers would never be current again, unnoticed."""
    with pytest.raises(ValueError, match="no place"):
        with_made_part("metrics.md", f"# Metrics\n{END}\n")
    assert with_made_part("metrics.md", f"{BEGIN}\nold\n{END}\n").count("peercache_pages_hit") == 1


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    """Every relative link names a file that is there."""
    broken = [target for target in targets_of(path) if not (path.parent / target).exists()]

    assert not broken


def missing_paths(text: str, page: Path) -> list[str]:
    """Return the files and folders that a text names in code and that are not there.

    A path stands below the project, the package, the folder of its page, or, of a table of
    files, below the folder that the page is about.
    """
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    roots = [ROOT, ROOT / "src" / "peercache", page.parent, *ROOMS_OF_PAGES.get(page.name, [])]
    named = re.findall(
        r"`((?:[\w.-]+/)*[\w-]+\.(?:py|c|pml|toml|txt|sh)|[a-z]+/(?:[\w.-]+/?)*)`", prose
    )
    kept = [path for path in named if not path.endswith(".so") and path != "site/"]  # Built.
    return [path for path in kept if not any((root / path).exists() for root in roots)]


ROOMS_OF_PAGES = {
    "CONTRIBUTING.md": [ROOT / "tests" / "contracts"],
    "rdma.md": [ROOT / "src" / "peercache" / "rdma"],
    "add-an-actor.md": [ROOT / "src" / "peercache" / "actors" / "pool"],
}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_paths_are_there(path: Path) -> None:
    """A reader who is sent to a file finds it. (Decisions are kept as they were written.)"""
    if path.parent.name == "adr" or path.name == "CHANGELOG.md":
        pytest.skip("a record of its time")

    assert not missing_paths(path.read_text(), path)


def test_a_path_that_is_not_there_is_found() -> None:
    """Missing files and folders are found; settings, names and addresses are not paths."""
    page = ROOT / "docs" / "explanation" / "architecture.md"

    assert missing_paths("`paths/read.py` and `paths/gone.py`", page) == ["paths/gone.py"]
    assert missing_paths("| x | `src/gone/` |", page) == ["src/gone/"]
    assert not missing_paths("`pool_size`, `Client.open`, `/metrics`, `paths/`", page)


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


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    """And in the list of pages; decisions have a list of their own."""
    named = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    listed = set(targets_of(DOCS / "README.md"))
    decided = {f"adr/{name}" for name in targets_of(DOCS / "adr" / "README.md")}

    assert sorted(named) == sorted(pages)
    assert listed | decided == pages - {"README.md"}


def test_readme_is_short() -> None:
    """It is read before PeerCache is tried."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"node", "doctor", "health"}))
def test_every_flag_of_a_command_is_on_the_page(name: str) -> None:
    """`node`, `doctor` and `health` take every setting, which configuration.md lists."""
    text = (PAGES / "cli.md").read_text()

    missing = [flag for flag in flags_of(name) if not re.search(rf"{flag}\b", text)]
    assert missing in ([], ["--help"])


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
