"""The documentation: made pages are current, links lead somewhere, named things exist.

Settings in its examples, metrics, log events, reasons, and the tests of the table of attacks.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from peercache.config.settings import SETTINGS, Config
from peercache.errors import ConfigError
from tests.contracts.frozen.public import COMMANDS, flags_of, table
from tests.house.layers import HOMES
from tests.house.reference_pages import (
    BEGIN,
    END,
    FILES,
    MADE,
    PAGES,
    ROOT,
    place_of,
    with_made_part,
)

DOCS = ROOT / "docs"
AT_THE_TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
TEXTS = sorted([*DOCS.rglob("*.md"), *(ROOT / name for name in AT_THE_TOP)])
README_LINES_MAX = 140


def id_of(page: Path) -> str:
    """Return how a page is called in a test's name."""
    return str(page.relative_to(ROOT))


def targets_of(path: Path) -> list[str]:
    """Return the relative links of a page."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    return [target for target in targets if "://" not in target]


@pytest.mark.parametrize("page", MADE)
def test_made_page_is_current(page: str) -> None:
    """What the code states is what the reference states; `make docs` brings it up to date."""
    text = (PAGES / page).read_text()

    assert text == with_made_part(page, text), f"docs/reference/{page} is old: make docs"


@pytest.mark.parametrize("file", FILES)
def test_made_file_is_current(file: str) -> None:
    """A picture shows the figures of the table next to it, a rule the metrics of this build."""
    assert (PAGES / file).read_text() == FILES[file](), f"{file} is old: make docs"


def test_made_part_without_its_place_is_an_error() -> None:
    """A page that lost its markers would never be current again, unnoticed."""
    with pytest.raises(ValueError, match="no place"):
        with_made_part("metrics.md", f"# Metrics\n{END}\n")
    assert with_made_part("metrics.md", f"{BEGIN}\nold\n{END}\n").count("peercache_pages_hit") == 1


@pytest.mark.parametrize("path", TEXTS, ids=id_of)
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


@pytest.mark.parametrize("path", TEXTS, ids=id_of)
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
    listed = {name for name in targets_of(DOCS / "README.md") if name.endswith(".md")}
    decided = {f"adr/{name}" for name in targets_of(DOCS / "adr" / "README.md")}

    assert sorted(named) == sorted(pages)
    assert listed | decided == pages - {"README.md"}


def test_readme_is_short() -> None:
    """It is read before PeerCache is tried."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


def test_nothing_is_installed_by_a_name_that_no_index_has() -> None:
    """A wheel or a checkout is named by its path; no page leaves an address to be guessed."""
    sources = (ROOT / "src").rglob("*.py")
    others = (ROOT / "integrations").rglob("*.md")
    wrong = re.compile(r"pip install [^\n`]*\bpeercache-kv\b|<this repository>")

    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in (*TEXTS, *sources, *others)
        for match in wrong.finditer(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"node", "doctor", "health"}))
def test_every_flag_of_a_command_is_on_the_page(name: str) -> None:
    """`node`, `doctor` and `health` take every setting, which configuration.md lists."""
    text = (PAGES / "cli.md").read_text()

    missing = [flag for flag in flags_of(name) if not re.search(rf"{flag}\b", text)]
    assert missing in ([], ["--help"])


def readers_of_settings() -> dict[str, set[str]]:
    """Return the packages that read each setting as an attribute of a configuration."""
    package = ROOT / "src" / "peercache"
    found: dict[str, set[str]] = {name: set() for name in SETTINGS}
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in found:
                of = ast.unparse(node.value).rpartition(".")[2]
                if of in ("config", "_config", "loaded", "settings"):
                    found[node.attr].add(file.relative_to(package).parts[0])
    return found


def test_settings_are_read_where_the_page_states() -> None:
    """By the packages of nodes, and by those of clients and engines."""
    clients, nodes = {"client", "engines", "lmcache", "sglang", "vllm"}, {"node", "http", "actors"}
    for name, packages in readers_of_settings().items():
        assert place_of(name) != "node" or not packages & clients, name
        assert place_of(name) != "client" or not packages & nodes, name


def test_dependencies_stand_where_the_page_lists_them() -> None:
    """Each library has its places in the table, as the rule about imports has them."""
    text = (ROOT / "docs" / "explanation" / "dependencies.md").read_text()
    reported = {
        library.replace("-", "_"): set(re.findall(r"`(\w+)/?`", cells[2]))
        for cells in re.findall(r"^\| ([\w, -]+) \|(.*?)\|(.*?)\|", text, re.MULTILINE)
        for library in cells[0].split(", ")
    }
    free = {"attrs", "numpy"}
    of_the_standard_library = {"sqlite3", "asyncio"}

    assert {name: reported.get(name) for name in HOMES.keys() - of_the_standard_library} == {
        name: set(HOMES[name]) for name in HOMES.keys() - of_the_standard_library
    }
    declared = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2]
    needed = set(re.findall(r'^    "([\w-]+)', declared.partition("\n]")[0], re.MULTILINE))
    assert {name.replace("-", "_") for name in needed} <= HOMES.keys() | free


NOW = [page for page in TEXTS if page.parent.name != "adr" and page.name != "CHANGELOG.md"]
"""Pages about this build: decisions and changes are records of their time."""

FOR_SGLANG = re.compile(r'\{\s*"backend_name"[^{}]*\}')
TOML = re.compile(r"```toml\n(.*?)```", re.DOTALL)
METRIC = re.compile(r"\bpeercache_[a-z_]+[a-z]\b")
EVENT = re.compile(r"`([a-z]+\.[a-z_]+)`")
SUFFIXES = {"c", "crl", "crt", "h", "ini", "ipc", "json", "key", "md", "py", "so", "toml"}


def examples() -> list[Any]:
    """Return each JSON line for SGLang, and each TOML file, with the page that shows it."""
    found = []
    for page in NOW:
        text = page.read_text()
        for number, shown in enumerate([*FOR_SGLANG.findall(text), *TOML.findall(text)]):
            found.append(pytest.param(shown, id=f"{id_of(page)}-{number}"))
    return found


@pytest.mark.parametrize("shown", examples())
def test_settings_of_an_example_can_be_used(shown: str, tmp_path: Path) -> None:
    """A reader copies them as they are."""
    if shown.startswith("{"):
        Config.from_sglang(json.loads(shown))
    else:
        file = tmp_path / "node.toml"
        file.write_text(shown)
        Config.load(file=file)


def test_an_example_with_a_wrong_setting_is_found(tmp_path: Path) -> None:
    """A name that is gone, in each of both forms; and there are examples to look at."""
    (line,) = FOR_SGLANG.findall('x\n{"backend_name": "peercache",\n "pool_sise": "1GiB"}\n')
    with pytest.raises(ConfigError, match="pool_sise"):
        test_settings_of_an_example_can_be_used(line, tmp_path)
    (file,) = TOML.findall('```toml\ncredentials = "x"\n```')
    with pytest.raises(ConfigError, match="credentials"):
        test_settings_of_an_example_can_be_used(file, tmp_path)
    assert len(examples()) >= 4


def unknown_metrics(text: str) -> list[str]:
    """Return the names of metrics in a text that no node has."""
    known = {row[0] for row in table("metrics.md", "metric")}
    known |= {name.removesuffix("_total") for name in known}
    named = {re.sub(r"_(bucket|count|sum)$", "", name) for name in METRIC.findall(text)}
    parts = {name for name in named if any(each.startswith(f"{name}_") for each in known)}
    # Wheels are named after the distribution.
    unknown = named - known - parts - {"peercache_kv"}
    return sorted(name for name in unknown if not is_of_c(name))


def is_of_c(name: str) -> bool:
    """Return whether a name is that of a function in a compiled file."""
    return any(f"{name}(" in file.read_text() for file in (ROOT / "src").rglob("*.c"))


def values_of_the_chart() -> set[str]:
    """Return the names of the Helm chart's values, `tls.kind`."""
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "peercache" / "values.yaml").read_text())
    groups = {group: names for group, names in values.items() if isinstance(names, dict)}
    return {f"{group}.{name}" for group, names in groups.items() for name in names}


def unknown_events(text: str) -> list[str]:
    """Return what looks like a log event in a text, of a component that has events, and is none."""
    known = {row[0] for row in table("log-events.md", "event")}
    components = {event.partition(".")[0] for event in known}
    return sorted(
        named
        for named in set(EVENT.findall(text)) - known - values_of_the_chart()
        if named.partition(".")[0] in components and named.partition(".")[2] not in SUFFIXES
    )


@pytest.mark.parametrize("page", NOW, ids=id_of)
def test_metrics_and_log_events_of_a_page_exist(page: Path) -> None:
    """A reader searches the log for them, or asks a dashboard."""
    text = page.read_text()

    assert not unknown_metrics(text)
    assert not unknown_events(text)


def test_an_unknown_metric_or_event_is_found() -> None:
    """Names with a suffix of Prometheus, files and settings pass."""
    assert unknown_metrics("`peercache_pages_lost_total`") == ["peercache_pages_lost_total"]
    assert not unknown_metrics("rate(peercache_pages_hit_total) peercache_latency_seconds_bucket")
    assert unknown_events("`node.started`, `disk.ended`, `node.toml`, `node.py`") == [
        "node.started"
    ]


def test_reasons_of_a_page_are_those_that_are_counted() -> None:
    """The tables of misses and of refused sets have a row for each reason, and no other."""
    text = (ROOT / "docs/how-to/read-the-metrics.md").read_text()
    section = text.partition("## Why were pages missed?")[2].partition("\n## Is the")[0]
    reported = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))

    assert reported == {row[0] for row in table("metrics.md", "reason")}


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
