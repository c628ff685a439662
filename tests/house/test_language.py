"""The rules of language that a machine can check; each is shown to fail on a small offender.

`DIALECT` is checked in the documentation that is written by hand. Of it, code and commit subjects
are checked for `IN_CODE`, what is not a test for `IN_PRODUCT` too, and tests for `IN_TESTS`: the
other words are still in many docstrings.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.house.reference_pages import BEGIN, END, LEVELS, PAGES, ROOT, log_events

READ = ("src", "sims", "tests", "benchmarks", "examples", "docs")
READ_AT_THE_TOP = ("*.md", "Makefile", "*.py", "*.toml", ".ci/*", "*.yml", "*.yaml")
SUFFIXES = {".py", ".c", ".h", ".md", ".pml", ".toml", ".sh", ".html", ".css", ".ini", ".j2", ""}

VAGUE = re.compile(
    r"(?<![a-z])(?:" + "|".join(["who" + "ever", *(f"{k}body" for k in ("no", "some", "any"))])
    + "|every" + r"body)(?![a-z])",
    re.IGNORECASE,
)  # fmt: skip
"""Words that hide which component acts. (Put together here, so that this file holds none.)"""

DIALECT = {
    r"told|tells?|telling": "sends, reports, notifies, returns, shows; told apart: separates",
    r"hears?|heard": "receives, is notified",
    r"says": "reports, shows, states, explains",
    r"patience": "timeout",
    r"beside": "next to, compared with, in addition to, with",
    r"anew": "again",
    r"lies|lying": "is on, is stored at; of a member: forged record",
    r"liars?": "Byzantine member, attacker",
    r"mend(?:s|ed|ing)?": "fix",
    r"stands? still|standing still|stood still": "hangs, is paused",
    r"believes?|believed": "trusts, accepts",
    r"vouch(?:es|ed)?": "verifies, validates",
    r"is sure of|are sure of": "is guaranteed",
    r"is none|are none|that are some": "is invalid, is not a, valid",
    r"to be had": "available",
    r"for ever": "forever, permanently",
    r"shall": "must, should",
    r"wants": "requires, must be, expects",
    r"for want of": "without, for lack of",
}
"""Words that a reader would not search for, and what the documentation of other projects has."""

IN_CODE = (
    r"patience", r"anew", r"liars?", r"mend(?:s|ed|ing)?",
    r"stands? still|standing still|stood still", r"is sure of|are sure of", r"to be had",
    r"for ever", r"beside",
)  # fmt: skip
"""Those of `DIALECT` that no line of code, comment or text has any more, nor a commit subject."""

IN_PRODUCT = (*IN_CODE, r"told|tells?|telling", r"hears?|heard")
"""Those that no line of `PRODUCT` has any more."""

IN_TESTS = (r"says",)
"""Those that no line of a test has any more, beyond `IN_CODE`."""

PRODUCT = ("src", "sims", "benchmarks", "examples", "deploy", ".ci")

OF_OTHERS = (
    r"docs/adr/\S+", r"\bfp\.tell\(\)",
    r"the view says dead", r"behind commits, says",
)  # fmt: skip
"""What stays: decisions keep their file names, a file of Python has a position, and tests expect
the lines of the dashboard as it shows them."""

SUBJECTS_SINCE = "e9b753ca605e03f115fd1cdf0ff58218e77f0cc5"
"""The commit after which subjects are checked."""

BY_HAND = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")

NOT_PROSE = (
    rf"^{re.escape(BEGIN)}$.*?^{re.escape(END)}$",  # Follows from the code.
    r"^ *```.*?^ *```$",
    r"`[^`]*`",  # The name of a setting, a message, a file.
    r"(?<=\])\([^)\s]*\)",  # Where a link leads: pages keep their file names.
)

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
        "placement",
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


def prose_of(text: str) -> str:
    """Return a page without code, link targets and made parts; lines keep their numbers."""
    for pattern in NOT_PROSE:
        text = re.sub(
            pattern, lambda cut: "\n" * cut[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL
        )
    return text


def dialect_in(text: str) -> Iterator[str]:
    """Yield each line of prose with a word of the dialect, and what to write instead."""
    for number, line in enumerate(prose_of(text).splitlines(), start=1):
        for words, better in DIALECT.items():
            for found in re.findall(rf"\b(?:{words})\b", line, re.IGNORECASE):
                yield f"{number}: {found!r}, write: {better}: {line.strip()}"


def written_by_hand() -> Iterator[tuple[Path, str]]:
    """Yield the current pages with their text: decisions and releases are records of their time."""
    for name in BY_HAND:
        text = (ROOT / name).read_text()
        if name == "CHANGELOG.md":
            before, _, rest = text.partition("\n## Unreleased\n")
            text = f"{before}\n## Unreleased\n{rest.partition(chr(10) + '## ')[0]}"
        yield ROOT / name, text
    for page in sorted((ROOT / "docs").rglob("*.md")):
        if page.parent.name != "adr":
            yield page, page.read_text()


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


def test_the_documentation_has_words_that_a_search_engine_finds() -> None:
    """Machines send, receive, report and return; a wait has a timeout."""
    pages = list(written_by_hand())

    found = [
        f"{page.relative_to(ROOT)}:{line}" for page, text in pages for line in dialect_in(text)
    ]

    assert len(pages) > 40
    assert not found, f"{len(found)}\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "The node tells the others.",
        "An owner hears of it.\nThe log says so.",
        "The call waits for a whole patience.",
        "It stands beside the pool, and is read anew.",
        "The page lies on disk.",
        "A liar is believed when it has told everything.",
        "Mend the disk of a node that stood still.",
        "A namespace is sure of a share, for ever.",
        f"{BEGIN}\n\n{END}\n\nSpilled text lies behind a made part.",
        "What [a liar](security.md) can do.",
    ],
)
def test_a_word_of_the_dialect_is_found(text: str) -> None:
    """A rule that cannot fail protects nothing."""
    assert list(dialect_in(text))


@pytest.mark.parametrize(
    "text",
    [
        "`patience_s`, and the event `anew`",
        "```text\nbeside\n```",
        f"{BEGIN}\n\n| a liar | beside |\n\n{END}",
        "[find a prefix](ask-where-a-prefix-lies.md#over-http)",
        "A recommended amendment, families, satellites, shallow",
    ],
)
def test_names_code_and_made_parts_keep_their_words(text: str) -> None:
    """The code is not changed by a rule for prose."""
    assert not list(dialect_in(text))


def test_what_to_write_instead_is_no_word_of_the_dialect() -> None:
    """A failure proposes words that pass."""
    proposed = " ".join(better.replace("told apart:", "") for better in DIALECT.values())

    assert not list(dialect_in(proposed))


def forbidden_in(text: str, forbidden: Iterable[str] = IN_CODE) -> Iterator[str]:
    """Yield each line with a word that code may not have, and what to write instead.

    A part of a name is a word, too: `_told`, `TellPool`.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        read = re.sub("|".join(OF_OTHERS), "", line)
        for words in forbidden:
            for found in re.findall(rf"(?<![A-Za-z])(?i:{words})(?![a-z]|(?<=[A-Z])[A-Z])", read):
                yield f"{number}: {found!r}, write: {DIALECT[words]}: {line.strip()}"


def sources_in(*folders: str) -> list[Path]:
    """Return the files of Python and C in these folders, but for this one, which has the words."""
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".c", ".h"} and path != Path(__file__)
    ]


@pytest.mark.parametrize(
    ("folders", "words", "least_files"),
    [
        pytest.param(("src", "sims", "tests", "benchmarks", "examples"), IN_CODE, 500, id="code"),
        pytest.param(("tests",), IN_TESTS, 300, id="tests"),
    ],
)
def test_sources_have_no_word_of_the_dialect_that_is_gone(
    folders: tuple[str, ...], words: tuple[str, ...], least_files: int
) -> None:
    """Neither a name nor a comment, a docstring, an event or an error."""
    files = sources_in(*folders)
    found = [
        f"{path.relative_to(ROOT)}:{problem}"
        for path in files
        for problem in forbidden_in(path.read_text(), words)
    ]

    assert len(files) > least_files
    assert not found, "\n".join(found)


def test_what_is_not_a_test_has_none_of_more_words() -> None:
    """Of Python, C, templates and the files of a deployment."""
    files = [
        path
        for folder in PRODUCT
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file() and path.suffix in SUFFIXES | {".yaml", ".tpl", ".json"}
        if not MADE_BY_TOOLS & set(path.parts)
    ]
    found = [
        f"{path.relative_to(ROOT)}:{problem}"
        for path in files
        for problem in forbidden_in(path.read_text(), IN_PRODUCT)
    ]

    assert len(files) > 350
    assert not found, "\n".join(found)


def test_commit_subjects_have_no_word_of_the_dialect_that_is_gone() -> None:
    """Where the history is there: not in a distribution, nor in a shallow clone."""
    log = subprocess.run(
        ["git", "-C", str(ROOT), "log", "--format=%s", f"{SUBJECTS_SINCE}..HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    if log.returncode:
        pytest.skip("this checkout has no history")

    assert not list(forbidden_in(log.stdout))


def test_a_word_of_the_dialect_is_found_in_code() -> None:
    """With what to write instead."""
    (found,) = forbidden_in("x = 1  # begin an" + "ew")

    assert found.startswith("1: 'an" + "ew', write: again")


@pytest.mark.parametrize(
    "text", ["def _told(): ...", "TellPool(fact)", "# heard of it", "--beside", "TOLD_MAX = 3"]
)
def test_a_part_of_a_name_is_a_word(text: str) -> None:
    """A name is read, too."""
    assert list(forbidden_in(text, IN_PRODUCT))


@pytest.mark.parametrize("text", ["decoder.fp.tell()", "untold, intellect, sheared, HEARTBEAT_MS"])
def test_names_of_others_and_parts_of_words_pass(text: str) -> None:
    """The rule looks at whole words of names."""
    assert not list(forbidden_in(text, IN_PRODUCT))


@pytest.mark.parametrize(
    "text", ["def test_it_says_so() -> None: ...", '"""What it says."""', "# Says so.", "SAYS = 1"]
)
def test_a_word_that_is_gone_from_tests_is_found(text: str) -> None:
    """In a name, a docstring and a comment."""
    assert list(forbidden_in(text, IN_TESTS))


def test_lines_that_tests_expect_of_the_dashboard_pass() -> None:
    """They are output of the product; the same word next to them is found."""
    line = 'assert "b gives no answer; the view says dead" in shown'

    assert not list(forbidden_in(line, IN_TESTS))
    assert list(forbidden_in(f"{line}  # it says so", IN_TESTS))


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
