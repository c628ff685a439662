"""The ledger of measured figures: each is on its page and has a command; none is left out."""

from __future__ import annotations

import datetime as dt
import importlib.util
import re
from pathlib import Path

import attrs
import pytest

from tests.contracts.frozen.public import COMMANDS
from tests.house.reference_pages import ROOT

DOCS = ROOT / "docs"
LEDGER = DOCS / "reference" / "figures.md"

MEASURED = re.compile(
    r"\d[\d,.]*\s(?:GB/s|MB/s|MiB/s|µs|ns|ms|%|KB|MB|hits)(?![\w/])"
    r"|\b0\.(?!3[23]\b)\d\d\b|times as long"
)
"""What a measured figure looks like; 0.32 and 0.33 are versions of vLLM."""

LIMITS = {
    "architecture.md#decisions",
    "ask-where-a-prefix-lies.md#blocks-on-gpus",
    "attach-and-detach.md#behavior-during-faults",
    "consistency.md#stored-is-found",
    "disk-tier.md#write-from-memory-to-disk",
    "keep-two-copies.md#settings",
    "membership.md#the-failure-detector",
    "performance.md#",
    "prefill-and-decode.md#what-was-tested",
    "prefill-and-decode.md#when-a-prefill-host-dies",
    "publish-block-events.md#publish-object-events-to-dynamos-router",
    "publish-block-events.md#publish-what-a-connector-stores-and-what-is-evicted",
    "rdma.md#connection-setup",
    "rdma.md#deadlines",
    "rdma.md#how-a-read-flows",
    "rdma.md#multiple-rails",
    "read-the-metrics.md#why-were-pages-missed",
    "ring-and-directory.md#authority",
    "ring-and-directory.md#lost-messages",
    "run-with-sglang.md#configuration-keys",
    "share-between-tenants.md#",
    "share-between-tenants.md#choose-quotas",
    "simulation.md#bugs-found-by-simulation",
    "simulation.md#canaries",
    "simulation.md#faults",
    "size-and-check-the-disk.md#choose-disk_size",
    "size-the-pool.md#memory-of-the-directory",
    "testing.md#hosts-with-faults",
    "use-idle-memory.md#settings",
    "use-the-dashboard.md#",
    "use-with-lmcache.md#what-to-expect",
    "use-with-vllm.md#back-pressure",
}
"""Sections whose numbers are limits, defaults, sizes of formats, or a summary of a table below."""


@attrs.frozen
class Row:
    """One figure of the ledger."""

    page: Path
    anchor: str
    quote: str
    command: str
    date: str
    machine: str


def slug(heading: str) -> str:
    """Return the anchor of a heading, as the site and GitHub make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def sections(text: str) -> list[tuple[str, str]]:
    """Return the anchor and the prose of each section. The part below the title has no anchor."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    parts = re.split(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    found = list(zip(parts[1::2], parts[2::2], strict=True))
    return [("" if n == 0 else slug(head), body) for n, (head, body) in enumerate(found)]


def rows() -> list[Row]:
    """Return the rows of the ledger."""
    found = []
    for line in LEDGER.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 5 and (link := re.search(r"\]\(([^)#]+)#?([^)]*)\)", cells[0])):
            page = (LEDGER.parent / link[1]).resolve()
            quote = cells[1].replace("\\|", "|")
            found.append(Row(page, link[2], quote, cells[2].strip("`"), cells[3], cells[4]))
    return found


def exists(command: str) -> bool:
    """Return whether a command of the ledger is there: a target, a module, a command of ours."""
    if made := re.match(r"make ([\w-]+)", command):
        return bool(re.search(rf"^{made[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE))
    if module := re.search(r"python -m ([\w.]+)", command):
        return importlib.util.find_spec(module[1]) is not None
    if ours := re.match(r"peercache (\w+)", command):
        return ours[1] in COMMANDS
    return command == "trial" or command.startswith("dd ")


def left_out(page: Path, text: str, ledger: list[Row]) -> list[str]:
    """Return the sections with figures that neither the ledger nor `LIMITS` has."""
    known = {f"{row.page.name}#{row.anchor}" for row in ledger}.union(LIMITS)
    measured = [anchor for anchor, body in sections(text) if MEASURED.search(body)]
    return [anchor for anchor in measured if f"{page.name}#{anchor}" not in known]


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.page.name}: {row.quote[:40]}")
def test_a_figure_is_on_its_page_and_can_be_measured_again(row: Row) -> None:
    """The figure is in the section that the row links to, and its command is in this checkout."""
    assert row.quote in dict(sections(row.page.read_text())).get(row.anchor, ""), row
    assert exists(row.command), f"no such command: {row.command}"
    assert dt.date.fromisoformat(row.date) >= dt.date(2026, 11, 20)
    assert f"| {row.machine} | " in LEDGER.read_text().split("| page |")[0]


TEXTS = [
    ROOT / "README.md",
    *sorted((DOCS / "explanation").glob("*.md")),
    *sorted(set((DOCS / "how-to").glob("*.md")) - {DOCS / "how-to" / "runbook.md"}),  # Thresholds.
    *sorted((DOCS / "spec").glob("*.md")),
]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.name))
def test_no_section_with_figures_is_left_out(page: Path) -> None:
    """A new figure takes a row with its command, or its section is one of limits."""
    missing = left_out(page, page.read_text(), rows())

    assert not missing, f"{page.name}: a row in docs/reference/figures.md, or LIMITS: {missing}"


def test_limits_are_sections_that_are_there() -> None:
    """A section that was renamed or deleted leaves the list."""
    there = {f"{page.name}#{anchor}" for page in TEXTS for anchor, _ in sections(page.read_text())}

    assert not LIMITS - there


def test_a_figure_without_a_row_and_a_command_that_is_gone_are_found() -> None:
    """The checks can fail."""
    text = "# Page\n\n## Cost\n\nA call takes 12 ms.\n\n## Use\n\nCall it.\n"
    row = Row(Path("page.md"), "cost", "12 ms", "make peers", "2026-11-26", "A")

    assert left_out(Path("page.md"), text, []) == ["cost"]
    assert not left_out(Path("page.md"), text, [row])
    assert not exists("make gone")
    assert not exists("python -m benchmarks.gone")
    assert not exists("peercache gone")
