"""The house rules that a machine can check; each rule is shown to fail on a small offender.

A rule takes one parsed module and returns what is wrong with it, a sentence each.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import attrs
import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "peercache"

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70

# Imports point down, from a higher number to a lower one. A package stands for all its modules.
LEVELS: dict[str, int] = {
    # L0: the standard library and attrs.
    **dict.fromkeys(["ids", "errors", "quantities", "config", "config_rules"], 0),
    # L1: values, wire, seams, and the plain state that actors are made of.
    **dict.fromkeys(["runs", "keys", "records", "messages", "codec", "ports", "observe"], 1),
    **dict.fromkeys(["hash_ring", "flags", "view", "redial", "slots", "reservations"], 1),
    **dict.fromkeys(["page_table", "holdings", "streams", "waiting"], 1),
    **dict.fromkeys(["claims", "graves", "silence", "reporting", "outbox", "channel_exchange"], 1),
    **dict.fromkeys(
        ["promotion", "granting", "pool_figures", "pool_answers", "committing", "disk_state"], 1
    ),
    # L2: state machines and sans-IO paths.
    **dict.fromkeys(["actors", "transfer"], 2),
    # L3: one foreign library or kernel facility each.
    **dict.fromkeys(["net", "segment", "fabric", "disk", "rdma", "http"], 3),
    # L4 wires a node, L5 is the blocking API, and the package itself shows it.
    **dict.fromkeys(["node"], 4),
    **dict.fromkeys(["client"], 5),
    **dict.fromkeys([""], 6),
    # L7: what people and engines start.
    **dict.fromkeys(["sglang", "demo", "cli", "bench", "doctor", "disk_command"], 7),
    **dict.fromkeys(["__main__"], 7),
}

# Packages may not look sideways: only what stands here, and everything within L0 and L1.
SIDEWAYS = {
    ("fabric", "segment"),  # the shm fabric maps what a segment publishes
    ("rdma", "segment"),  # memory is populated before it is registered
    ("cli", "demo"),
    ("cli", "bench"),
    ("cli", "disk_command"),
    ("cli", "doctor"),
    ("doctor", "bench"),  # which knows how to measure the machine's limits
    ("bench", "demo"),  # which starts nodes and ends them in every case
    ("__main__", "cli"),
}

# A foreign library is known to few places, so that a change of it has few places to be made.
# docs/explanation/dependencies.md says why each is there; attrs and numpy are free to all.
HOMES: dict[str, frozenset[str]] = {
    "pynng": frozenset({"net"}),
    "pyverbs": frozenset({"rdma"}),
    "sglang": frozenset({"sglang"}),
    "torch": frozenset({"sglang"}),
    "cbor2": frozenset({"codec"}),
    "h11": frozenset({"http"}),
    "rich": frozenset({"cli", "demo", "bench"}),
    "structlog": frozenset({"observe"}),
    "prometheus_client": frozenset({"observe", "http"}),
    "trio": frozenset({"actors", "fabric", "http", "net", "node", "rdma"}),
    "xxhash": frozenset({"client", "disk"}),
    "tomli": frozenset({"config"}),
    "typing_extensions": frozenset({"actors"}),
    "matplotlib": frozenset({"bench"}),
    "sqlite3": frozenset({"disk"}),
    "asyncio": frozenset(),
}

STATE_ACTORS = frozenset({"membership", "ring", "directory", "publisher", "pool", "disk", "rdma"})
CHARTER = ("Owns", "Hears", "Says", "Keeps", "Limits")


@attrs.frozen
class Module:
    """One source file. name: dotted, below `peercache`; "" is the package itself."""

    name: str
    text: str
    tree: ast.Module

    @classmethod
    def of(cls, name: str, text: str) -> Module:
        """Parse a source."""
        return cls(name, text, ast.parse(text))

    @property
    def top(self) -> str:
        """The package or module directly below `peercache`."""
        return self.name.partition(".")[0]

    @property
    def level(self) -> int | None:
        """The level, None for a module that nobody has given one."""
        return LEVELS.get(self.top)

    @property
    def is_deterministic(self) -> bool:
        """Whether a simulation replays it: time and randomness must be handed in."""
        if self.top == "actors":
            return self.name.rpartition(".")[2] in STATE_ACTORS
        return self.level in (0, 1) or self.top == "transfer"


Rule: TypeAlias = Callable[[Module], Iterator[str]]


def modules() -> list[Module]:
    """Read the whole package."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module.of(name, path.read_text()))
    return found


def imports_of(module: Module) -> Iterator[tuple[int, str, str]]:
    """Yield (line, imported module, imported name or ""), wherever in the file it stands."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # ruff bans relative imports, so a module is always named in full.
            yield from ((node.lineno, node.module or "", alias.name) for alias in node.names)


def own_imports_of(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line, top) for imports from this package; `from peercache import x` is `x`."""
    for line, source, name in imports_of(module):
        if source == "peercache":
            yield line, name if (SOURCE / name).is_dir() or name in LEVELS else ""
        elif source.startswith("peercache."):
            yield line, source.split(".")[1]


def every_module_has_a_level(module: Module) -> Iterator[str]:
    """A new module is given its place, so that the layering covers it."""
    if module.level is None:
        yield f"1: {module.top} stands in no level of the table"


def imports_point_down(module: Module) -> Iterator[str]:
    """A level knows only the levels below it."""
    for line, target in own_imports_of(module):
        if target == module.top or module.level is None:
            continue
        level = LEVELS.get(target)
        sideways = (module.top, target) in SIDEWAYS or level in (0, 1)
        if level is None or level > module.level or (level == module.level and not sideways):
            yield f"{line}: {module.top} (L{module.level}) imports {target} (L{level})"


def actors_know_no_other_actor(module: Module) -> Iterator[str]:
    """Actors talk by messages: they import the loop they run in and nothing else of the folder."""
    if module.top != "actors" or module.name in ("actors", "actors._actor"):
        return
    for line, source, name in imports_of(module):
        whole = f"{source}.{name}"
        if whole.startswith("peercache.actors.") and not whole.startswith("peercache.actors._"):
            yield f"{line}: an actor imports {whole}"


def foreign_libraries_have_one_home(module: Module) -> Iterator[str]:
    """Each foreign library is imported where it belongs only."""
    for line, source, _ in imports_of(module):
        library = source.partition(".")[0]
        if library in HOMES and module.top not in HOMES[library]:
            yield f"{line}: {library} is imported outside {sorted(HOMES[library])}"


def cores_know_no_event_loop(module: Module) -> Iterator[str]:
    """Values, state actors and paths run without trio, so their tests and simulations do too."""
    if module.is_deterministic:
        for line, source, _ in imports_of(module):
            if source.partition(".")[0] == "trio":
                yield f"{line}: trio in {module.name}"
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)):
                yield f"{node.lineno}: async in {module.name}"


def time_and_randomness_are_handed_in(module: Module) -> Iterator[str]:
    """What a simulation replays asks no clock, and no random number generator of its own."""
    if not module.is_deterministic:
        return
    for line, source, name in imports_of(module):
        if source in ("time", "datetime", "uuid", "secrets") or (source, name) == ("os", "urandom"):
            yield f"{line}: {source} is imported"
        if source == "random" and name not in ("", "Random"):
            yield f"{line}: random.{name} is imported"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            whole = (node.value.id, node.attr)
            if (whole[0] == "random" and whole[1] != "Random") or whole == ("os", "urandom"):
                yield f"{node.lineno}: {'.'.join(whole)} is used"


def nothing_is_ordered_by_identity(module: Module) -> Iterator[str]:
    """`id` and `hash` differ from run to run: nothing may be ordered or chosen by them."""
    if not module.is_deterministic:
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and node.id in ("id", "hash"):
            yield f"{node.lineno}: {node.id} is used"
        if isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.iter, ast.Set):
            yield f"{node.iter.lineno}: a set is iterated"


def state_actors_open_with_their_charter(module: Module) -> Iterator[str]:
    """Ten lines tell a stranger what an actor owns, hears, says, keeps, and what bounds it."""
    if module.top == "actors" and module.is_deterministic:
        docstring = ast.get_docstring(module.tree) or ""
        for word in CHARTER:
            if not re.search(rf"^{word}\b", docstring, re.MULTILINE):
                yield f"1: the charter says nothing of what it {word.lower()}"


def files_and_functions_are_short(module: Module) -> Iterator[str]:
    """A file is read in one sitting, a function on one screen."""
    length = len(module.text.splitlines())
    if length > FILE_LINES_MAX:
        yield f"1: {length} lines, {FILE_LINES_MAX} are allowed"
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{node.lineno}: {node.name} has {length} lines"


def every_module_says_what_it_is(module: Module) -> Iterator[str]:
    """The first line of a file is a sentence."""
    if not ast.get_docstring(module.tree):
        yield "1: no docstring"


def nothing_is_left_undone(module: Module) -> Iterator[str]:
    """What is not done is planned elsewhere, not noted in the source."""
    for number, line in enumerate(module.text.splitlines(), start=1):
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line):
            yield f"{number}: {line.strip()}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node):
            yield f"{node.lineno}: a stub"


def generations_are_compared_in_one_place(module: Module) -> Iterator[str]:
    """One function decides hit or miss. (An owner may assert that its own words are right.)"""
    # The disk's mover decides no hit: it asks whether the owner's own page is still there to write.
    if module.name in ("transfer.verify", "disk.mover"):
        return
    asserted = {
        id(inner)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Assert)
        for inner in ast.walk(node)
    }
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Compare) or id(node) in asserted:
            continue
        text = ast.unparse(node)
        if "word" in text and "generation" in text:
            yield f"{node.lineno}: {text}"


def only_reading_verifies(module: Module) -> Iterator[str]:
    """There is one read path, so there is one importer of the verification."""
    if module.name == "transfer.reading":
        return
    for line, source, name in imports_of(module):
        if source == "peercache.transfer.verify" and name in ("", "verified"):
            yield f"{line}: the verification is imported"
        if (source, name) == ("peercache.transfer", "verify"):
            yield f"{line}: the verification is imported"


def only_the_segment_stores_words(module: Module) -> Iterator[str]:
    """Generation words are stored by the segment's own function, which only the node calls."""
    if module.name == "segment.published":
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            if _is_words(node.value):
                yield f"{node.lineno}: {ast.unparse(node)} is assigned"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changes = node.func.attr in ("fill", "put", "itemset", "setfield", "sort")
            if changes and _is_words(node.func.value):
                yield f"{node.lineno}: {ast.unparse(node)}"
            if node.func.attr == "store_words" and module.top != "node":
                yield f"{node.lineno}: {ast.unparse(node)}"


def _is_words(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "words"


RULES: list[Rule] = [
    every_module_has_a_level,
    imports_point_down,
    actors_know_no_other_actor,
    foreign_libraries_have_one_home,
    cores_know_no_event_loop,
    time_and_randomness_are_handed_in,
    nothing_is_ordered_by_identity,
    state_actors_open_with_their_charter,
    files_and_functions_are_short,
    every_module_says_what_it_is,
    nothing_is_left_undone,
    generations_are_compared_in_one_place,
    only_reading_verifies,
    only_the_segment_stores_words,
]

# (rule, the module it would stand in, its source): each must be found.
OFFENDERS: list[tuple[Rule, str, str]] = [
    (every_module_has_a_level, "misc", ""),
    (imports_point_down, "keys", "from peercache.actors.pool import Pool"),
    (imports_point_down, "config", "from peercache import node"),
    (imports_point_down, "client.api", "def f():\n    from peercache.sglang import store"),
    (imports_point_down, "transfer.reading", "from peercache.actors import pool"),
    (imports_point_down, "segment.layout", "import peercache.fabric.shm"),
    (imports_point_down, "net.link", "from peercache import Client"),
    (actors_know_no_other_actor, "actors.pool", "from peercache.actors.ring import Ring"),
    (actors_know_no_other_actor, "actors.pool", "from peercache.actors import ring"),
    (foreign_libraries_have_one_home, "fabric.tcp", "import pynng.tls"),
    (foreign_libraries_have_one_home, "client.api", "from sglang.srt import x"),
    (foreign_libraries_have_one_home, "node.node", "import asyncio"),
    (cores_know_no_event_loop, "actors.pool", "import trio"),
    (cores_know_no_event_loop, "transfer.reading", "async def f(): pass"),
    (cores_know_no_event_loop, "keys", "from trio.lowlevel import x"),
    (time_and_randomness_are_handed_in, "actors.pool", "import time"),
    (time_and_randomness_are_handed_in, "actors.ring", "import random\nrandom.random()"),
    (time_and_randomness_are_handed_in, "slots", "from random import choice"),
    (time_and_randomness_are_handed_in, "transfer.cache", "import os\nos.urandom(8)"),
    (nothing_is_ordered_by_identity, "actors.pool", "sorted(x, key=lambda p: id(p))"),
    (nothing_is_ordered_by_identity, "actors.pool", "[x for x in {1, 2}]"),
    (state_actors_open_with_their_charter, "actors.pool", '"""Owns\nHears\nSays\nKeeps"""'),
    (files_and_functions_are_short, "keys", "x = 1\n" * 401),
    (files_and_functions_are_short, "keys", "def f():\n" + "    x = 1\n" * 70),
    (every_module_says_what_it_is, "keys", "x = 1"),
    (nothing_is_left_undone, "keys", "x = 1  # TODO: more"),
    (nothing_is_left_undone, "keys", "def f():\n    raise NotImplementedError"),
    (generations_are_compared_in_one_place, "fabric.shm", "if word == record.generation: x"),
    (generations_are_compared_in_one_place, "client.api", "hit = r['generation'] != words[0]"),
    (only_reading_verifies, "client.api", "from peercache.transfer.verify import verified"),
    (only_reading_verifies, "fabric.tcp", "from peercache.transfer import verify"),
    (only_reading_verifies, "sglang.store", "import peercache.transfer.verify"),
    (only_the_segment_stores_words, "segment.attached", "self.words[3] = 5"),
    (only_the_segment_stores_words, "client.api", "segment.words[a:b] |= 1"),
    (only_the_segment_stores_words, "fabric.shm", "segment.words.fill(0)"),
    (only_the_segment_stores_words, "client.api", "segment.store_words(a, b)"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_whole_package_obeys(rule: Rule) -> None:
    """No module of the package breaks this rule."""
    read = modules()

    broken = [
        f"src/peercache/{module.name.replace('.', '/')}:{problem}"
        for module in read
        for problem in rule(module)
    ]

    # A checker that read nothing would be content with everything.
    assert len(read) > 20
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(("rule", "name", "source"), OFFENDERS)
def test_rule_finds_an_offender(rule: Rule, name: str, source: str) -> None:
    """A rule that cannot fail protects nothing."""
    assert list(rule(Module.of(name, source)))


def test_every_rule_has_an_offender() -> None:
    """No rule is added without the proof that it can fail."""
    assert {rule for rule, _, _ in OFFENDERS} == set(RULES)


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (imports_point_down, "client.api", "from peercache.node.embedded import x"),
        (imports_point_down, "fabric.shm", "from peercache.segment.attached import x"),
        (imports_point_down, "demo.story", "from peercache import Client"),
        (imports_point_down, "records", "from peercache.keys import x"),
        (time_and_randomness_are_handed_in, "actors.pool", "import random\nr: random.Random"),
        (generations_are_compared_in_one_place, "page_table", "assert word == d.generation"),
        (only_reading_verifies, "transfer.writing", "from peercache.transfer.verify import wants"),
        (only_the_segment_stores_words, "node.node", "segment.store_words(a, b)"),
        (only_the_segment_stores_words, "fabric.shm", "words[1:] = segment.words[1:]"),
    ],
)
def test_rule_lets_the_allowed_pass(rule: Rule, name: str, source: str) -> None:
    """What the design allows is not forbidden by accident."""
    assert not list(rule(Module.of(name, source)))
