"""The rules of language that a machine can check; each is shown to fail on a small offender."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.reference_pages import LEVELS, PAGES, ROOT, log_events

READ = ("src", "sims", "tests", "benchmarks", "examples", "docs")
READ_AT_THE_TOP = ("*.md", "Makefile", "*.py", "*.toml", ".ci/*", "*.yml", "*.yaml")
SUFFIXES = {".py", ".c", ".h", ".md", ".pml", ".toml", ".sh", ".html", ".css", ".ini", ".j2", ""}

VAGUE = re.compile(
    r"(?<![a-z])(?:" + "|".join(["who" + "ever", *(f"{k}body" for k in ("no", "some", "any"))])
    + "|every" + r"body)(?![a-z])",
    re.IGNORECASE,
)  # fmt: skip
"""Words that hide which component acts. (Put together here, so that this file holds none.)"""

MADE_BY_TOOLS = {"__pycache__", "peercache_kv.egg-info", "peercache.egg-info"}

COMPONENTS = frozenset(
    {
        "client",
        "connector",
        "directory",
        "discovery",
        "disk",
        "drain",
        "engines",
        "events",
        "fabric",
        "handover",
        "home",
        "http",
        "lmcache",
        "manager",
        "membership",
        "memory",
    }
    | {"node", "pool", "rdma", "segment", "sglang", "shm", "tcp", "tls", "vllm"}
)
"""The first part of a log event: the component that an operator looks for."""

EVENT = re.compile(r"([a-z]+)\.[a-z][a-z0-9]*(?:_[a-z0-9]+)*")


def texts() -> Iterator[Path]:
    """Yield every file of the project that a person reads."""
    for folder in READ:
        yield from sorted((ROOT / folder).rglob("*"))
    for pattern in READ_AT_THE_TOP:
        yield from sorted(ROOT.glob(pattern))


def vague_words(text: str) -> Iterator[str]:
    """Components have names: no text, comment, message or function hides one behind a pronoun."""
    for number, line in enumerate(text.splitlines(), start=1):
        if VAGUE.search(line):
            yield f"{number}: {line.strip()}"


def log_calls(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the event of every log call."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        is_log = node.func.attr in LEVELS and "log" in ast.unparse(node.func.value)
        if is_log or node.func.attr.endswith("warn_once"):
            yield node.args[0]


def badly_named_events(source: str) -> Iterator[str]:
    """A log event is `component.what_happened`; what varies is a field."""
    tree = ast.parse(source)
    for event in log_calls(tree):
        for part in ast.walk(event):
            if isinstance(part, ast.JoinedStr):
                yield f"{part.lineno}: an event is put together"
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                shaped = EVENT.fullmatch(part.value)
                if not shaped or shaped[1] not in COMPONENTS:
                    yield f"{part.lineno}: {part.value}"


def test_no_text_hides_which_component_acts() -> None:
    """Comments, docstrings, messages, names and documents name the component."""
    read = [
        path
        for path in texts()
        if path.is_file() and path.suffix in SUFFIXES and not MADE_BY_TOOLS & set(path.parts)
    ]

    vague = [
        f"{path.relative_to(ROOT)}:{problem}"
        for path in read
        for problem in vague_words(path.read_text(errors="replace"))
    ]

    # A checker that read nothing would be content with everything.
    assert len(read) > 200
    assert not vague, f"{len(vague)}\n" + "\n".join(vague)


@pytest.mark.parametrize(
    "text",
    [
        "# " + "No" + "body waits.",
        '"""Return the page to who' + 'ever asked."""',
        "def test_some" + "body_reads() -> None: ...",
        "Any" + "body's page, and every" + "body sees it.",
    ],
)
def test_a_vague_word_is_found(text: str) -> None:
    """A rule that cannot fail protects nothing."""
    assert list(vague_words(text))


def test_words_that_only_look_vague_pass() -> None:
    """The rule looks at whole words."""
    assert not list(vague_words("a message body, an empty body; any bodyguard"))


def test_log_events_are_named_after_their_component() -> None:
    """An operator finds all events of a component by its name."""
    broken = []
    count = 0
    for path in sorted((ROOT / "src" / "peercache").rglob("*.py")):
        source = path.read_text()
        count += len(list(log_calls(ast.parse(source))))
        broken += [f"{path.relative_to(ROOT)}:{found}" for found in badly_named_events(source)]

    assert count > 50
    assert not broken, "\n".join(broken)


def test_every_log_event_of_the_reference_has_its_shape() -> None:
    """Events that a constant or a helper names are in the reference, and obey the same rule."""
    page = (PAGES / "log-events.md").read_text()
    events = re.findall(r"^\| `([^`]+)`", log_events(), re.MULTILINE)

    assert len(events) > 50
    assert all(f"`{event}`" in page for event in events)
    shaped = [EVENT.fullmatch(event) for event in events]
    assert [
        event
        for event, match in zip(events, shaped, strict=True)
        if match is None or match[1] not in COMPONENTS
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "log.warning('failed')",
        "self._log.info('disk.Failed')",
        "self._log.info('disk.slab.failed')",
        "self._log.error('a sentence of its own')",
        "log.info('weather.changed')",
        "log.info(f'disk.{reason}')",
        "log.info('disk.opened' if x else 'opened')",
        "self._warn_once('refused', 3)",
    ],
)
def test_a_badly_named_event_is_found(source: str) -> None:
    """A rule that cannot fail protects nothing."""
    assert list(badly_named_events(source))


def test_well_named_events_pass() -> None:
    """What the rule allows is not forbidden by accident."""
    assert not list(badly_named_events("log.info('disk.opened' if x else 'rdma.rail_left_out')"))
