"""What the documentation names exists: settings in its examples, metrics, log events, reasons."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from peercache.config.settings import Config
from peercache.errors import ConfigError
from tests.contracts.frozen.public import table
from tests.house.reference_pages import ROOT

PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
NOW = [page for page in PAGES if page.parent.name != "adr" and page.name != "CHANGELOG.md"]
"""Pages about this build: decisions and changes are records of their time."""

FOR_SGLANG = re.compile(r'\{\s*"backend_name"[^{}]*\}')
TOML = re.compile(r"```toml\n(.*?)```", re.DOTALL)
METRIC = re.compile(r"\bpeercache_[a-z_]+[a-z]\b")
EVENT = re.compile(r"`([a-z]+\.[a-z_]+)`")
SUFFIXES = {"c", "crl", "crt", "h", "ini", "ipc", "json", "key", "md", "py", "so", "toml"}


def id_of(page: Path) -> str:
    """Return how a page is called in a test's name."""
    return str(page.relative_to(ROOT))


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
    told = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))

    assert told == {row[0] for row in table("metrics.md", "reason")}
