"""Alerts, board and objectives name what nodes have, and nothing that nodes have is left out."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from peercache.observability.latency import LATENCY_BUCKETS_S, OBJECTIVES
from peercache.observability.metrics import STARTED, Metrics
from tests.house import alerts, board
from tests.house.reference_pages import ROOT, labels_of_metrics

NAMED = re.compile(r"\b(peercache_[a-z_]+[a-z])(?:\{([^}]*)\})?")
RECORDED = re.compile(r"\bpeercache:[\w:]+")
OF_THE_SCRAPE = {"job", "instance", "le"}


def known() -> dict[str, set[str]]:
    """Return the labels of each metric that a node has, by its name without suffix."""
    return {name: set(labels) for name, labels in labels_of_metrics().items()}


def base_of(name: str, among: dict[str, set[str]]) -> str:
    """Return the family of a sample."""
    names = (name, re.sub(r"_(total|bucket|count|sum)$", "", name))
    return next((each for each in names if each in among), "")


def unknown(expr: str) -> list[str]:
    """Return the metrics, labels and recorded series in an expression that there are not."""
    among, found = known(), []
    for name, matchers in NAMED.findall(expr):
        family = base_of(name, among)
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        if not family:
            found.append(name)
        elif labels - among[family] - OF_THE_SCRAPE:
            found.append(f"{name}: {sorted(labels - among[family] - OF_THE_SCRAPE)}")
    return found + [name for name in RECORDED.findall(expr) if name not in alerts.RECORDED]


RULES = [*alerts.RECORDED.values(), *(alert.expr for alert in alerts.ALERTS)]


@pytest.mark.parametrize("expr", [*RULES, *board.expressions()])
def test_an_expression_names_what_nodes_have(expr: str) -> None:
    """A renamed metric or label would leave a rule that never fires, or an empty panel."""
    assert unknown(expr) == []


def test_an_expression_that_names_something_else_is_found() -> None:
    """A search that finds nothing proves nothing."""
    assert unknown("rate(peercache_pages_lost_total[5m])") == ["peercache_pages_lost_total"]
    assert unknown('peercache_members{colour="red"}') == ["peercache_members: ['colour']"]
    assert unknown("peercache:gone:rate5m > 1") == ["peercache:gone:rate5m"]


def test_every_metric_is_shown_by_a_panel() -> None:
    """What is measured can be seen."""
    among = known()
    shown = {
        base_of(name, among) for expr in board.expressions() for name, _ in NAMED.findall(expr)
    }

    missing = sorted(set(among) - shown)
    assert not missing, f"a panel in tests/house/board.py shows none of {missing}; then: make docs"


def test_counters_that_rules_watch_begin_at_zero() -> None:
    """A series that appears with its first increase has no increase for Prometheus."""
    metrics = Metrics()
    metrics.describe_process("0")
    samples = {
        (sample.name, value)
        for family in metrics.registry.collect()
        for sample in family.samples
        for value in sample.labels.values()
    }
    watched = [
        (name, value)
        for expr in RULES
        for name, values in re.findall(r'(peercache_\w+_total)\{reason=~?"([^"]+)"', expr)
        for value in values.split("|")
    ]

    assert len(watched) > 10
    assert set(watched) <= samples
    assert set(STARTED) <= set(vars(metrics))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda each: each.name)
def test_an_objective_is_a_bucket(objective: object) -> None:
    """Only then is the share of fast calls exact."""
    assert objective.within_s in LATENCY_BUCKETS_S


def test_the_runbook_has_an_entry_for_each_alert() -> None:
    """Where its annotation leads."""
    text = (ROOT / "docs/how-to/runbook.md").read_text()
    anchors = {line[3:].lower() for line in text.splitlines() if line.startswith("## ")}

    assert len(alerts.ALERTS) > 10
    for alert in alerts.ALERTS:
        assert alert.annotations()["runbook"] == f"docs/how-to/runbook.md#{alert.name.lower()}"
        assert alert.name.lower() in anchors


needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="there is no promtool (apt-get install prometheus)"
)


def promtool(*arguments: str, folder: Path = ROOT / "deploy/prometheus") -> str:
    """Run promtool; return what it prints, "ok" first where it was content."""
    done = subprocess.run(
        ["promtool", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return ("ok\n" if done.returncode == 0 else "") + done.stdout + done.stderr


@pytest.mark.slow
@needs_promtool
def test_prometheus_takes_the_rules_and_each_alert_fires_and_clears() -> None:
    """On made series: nothing before the fault, the alert in it, nothing after it."""
    assert promtool("check", "rules", "rules.yml").startswith("ok")
    assert promtool("check", "config", "prometheus.yml").startswith("ok")
    assert promtool("test", "rules", "rules_test.yml").startswith("ok")


@pytest.mark.slow
@needs_promtool
def test_an_alert_that_does_not_fire_is_found(tmp_path: Path) -> None:
    """The made series would be worth nothing otherwise."""
    rules = alerts.rules()
    for before, after in (("< 7", "< 1"), ("peercache_disk_open == 0", "peercache_disk_open == 5")):
        assert before in rules
        rules = rules.replace(before, after)
    (tmp_path / "rules.yml").write_text(rules)
    (tmp_path / "rules_test.yml").write_text(alerts.rules_test())

    reported = promtool("test", "rules", "rules_test.yml", folder=tmp_path)

    assert not reported.startswith("ok")
    failed = set(re.findall(r"alertname: (\w+)", reported))
    assert failed == {"PeerCacheCertificateExpires", "PeerCacheDiskClosed"}
