"""The house rules that a machine can check; each rule is shown to fail on a small offender.

A rule takes one parsed module and returns what is wrong with it, a sentence each.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias

import attrs
import pytest

from tests.house.layers import HOMES, LAYERS, circles

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "peercache"

# One worker reads the sources once for all of them.
pytestmark = pytest.mark.xdist_group("source")

FILE_LINES_MAX = 900
FUNCTION_LINES_MAX = 70

PURE = frozenset({"model", "config", "wire", "paths"})
"""Rooms of which a simulation replays every file; of the actors it is every file but the loop."""

CHARTER = ("Owns", "Takes", "Sends", "Keeps", "Limits")


@attrs.frozen
class Module:
    """One source file. name: dotted, below `peercache`; "" is the package itself.

    nodes: of the whole tree, for the many rules that look at each.
    """

    name: str
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]

    @classmethod
    def of(cls, name: str, text: str) -> Module:
        """Parse a source."""
        tree = ast.parse(text)
        return cls(name, text, tree, tuple(ast.walk(tree)))

    @property
    def top(self) -> str:
        """The package or module directly below `peercache`."""
        return self.name.partition(".")[0]

    @property
    def folder(self) -> str:
        """The folder below `peercache` that the file is in, dotted; "" is the top."""
        return folder_of(self.name)

    @property
    def is_deterministic(self) -> bool:
        """Whether a simulation replays it: time and randomness must be handed in."""
        if self.top == "actors":
            return self.name != "actors.runtime"
        return self.top in PURE and self.name != "config.settings"


def folder_of(name: str) -> str:
    """Return the folder of a module below `peercache`; a folder's `__init__` is in it."""
    while name and name not in LAYERS:
        name = name.rpartition(".")[0]
    return name


Rule: TypeAlias = Callable[[Module], Iterator[str]]


@cache
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
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # ruff bans relative imports, so a module is always named in full.
            yield from ((node.lineno, node.module or "", alias.name) for alias in node.names)


def own_imports_of(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line, module): `from peercache.model import keys` is `model.keys`."""
    for line, source, name in imports_of(module):
        if source != "peercache" and not source.startswith("peercache."):
            continue
        below = source.removeprefix("peercache").removeprefix(".")
        whole = f"{below}.{name}".strip(".")
        path = SOURCE / whole.replace(".", "/")
        is_module = whole in LAYERS or path.is_dir() or path.with_suffix(".py").exists()
        yield line, whole if is_module else below


def every_module_is_in_a_known_folder(module: Module) -> Iterator[str]:
    """A new folder is given its place, so that the layering covers it; the top stays empty."""
    allowed_at_top = ("", "__main__", "errors")
    if module.folder == "" and module.name not in allowed_at_top:
        yield f"1: {module.name} is in no folder of the table"


def imports_point_down(module: Module) -> Iterator[str]:
    """A folder knows only the folders that its line of the table names."""
    # An entry point, `python -m ...`, starts what people start.
    if module.name == "errors" or module.name.endswith("__main__"):
        return
    allowed = {name.strip("'") for name in LAYERS[module.folder].split()}
    for line, target in own_imports_of(module):
        folder = folder_of(target)
        if target != "errors" and folder != module.folder and folder not in allowed:
            yield f"{line}: {module.folder or 'the top'} imports {target}"


def actors_know_no_other_actor(module: Module) -> Iterator[str]:
    """Actors talk by messages: an actor imports nothing that is in another actor's folder."""
    if not module.folder.startswith("actors."):
        return
    for line, target in own_imports_of(module):
        folder = folder_of(target)
        if folder.startswith("actors.") and folder != module.folder:
            yield f"{line}: an actor imports {target}"


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
        for node in module.nodes:
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
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            whole = (node.value.id, node.attr)
            if (whole[0] == "random" and whole[1] != "Random") or whole == ("os", "urandom"):
                yield f"{node.lineno}: {'.'.join(whole)} is used"


def nothing_is_ordered_by_identity(module: Module) -> Iterator[str]:
    """`id` and `hash` differ from run to run: nothing may be ordered or chosen by them."""
    if not module.is_deterministic:
        return
    for node in module.nodes:
        if isinstance(node, ast.Name) and node.id in ("id", "hash"):
            yield f"{node.lineno}: {node.id} is used"
        if isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.iter, ast.Set):
            yield f"{node.iter.lineno}: a set is iterated"


def state_actors_open_with_their_charter(module: Module) -> Iterator[str]:
    """Ten lines show a stranger what an actor owns, receives, sends, keeps, and what bounds it."""
    if module.top == "actors" and module.name.endswith(".actor"):
        docstring = ast.get_docstring(module.tree) or ""
        for word in CHARTER:
            if not re.search(rf"^{word}\b", docstring, re.MULTILINE):
                yield f"1: the charter does not state what it {word.lower()}"


def files_and_functions_are_short(module: Module) -> Iterator[str]:
    """A file is read in one sitting, a function on one screen."""
    length = len(module.text.splitlines())
    if length > FILE_LINES_MAX:
        yield f"1: {length} lines, {FILE_LINES_MAX} are allowed"
    for node in module.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{node.lineno}: {node.name} has {length} lines"


def generations_are_compared_in_one_place(module: Module) -> Iterator[str]:
    """One function decides hit or miss. (An owner may assert that its own words are right.)"""
    # The look before the bytes decides no hit, nor does the disk's mover: it asks whether the
    # owner's own page is still there to write.
    if module.name in ("paths.verify", "model.seal", "storage.mover"):
        return
    asserted = {
        id(inner)
        for node in module.nodes
        if isinstance(node, ast.Assert)
        for inner in ast.walk(node)
    }
    for node in module.nodes:
        if not isinstance(node, ast.Compare) or id(node) in asserted:
            continue
        text = ast.unparse(node)
        if "word" in text and "generation" in text:
            yield f"{node.lineno}: {text}"


def only_reading_verifies(module: Module) -> Iterator[str]:
    """One read path, and what a node takes over from another, import the verification."""
    if module.name in ("paths.read", "paths.takeover"):
        return
    for line, source, name in imports_of(module):
        if source == "peercache.paths.verify" and name in ("", "verified"):
            yield f"{line}: the verification is imported"
        if (source, name) == ("peercache.paths", "verify"):
            yield f"{line}: the verification is imported"


def only_the_segment_stores_seals(module: Module) -> Iterator[str]:
    """Words and seals are stored by the segment's own function, which only the node calls."""
    if module.name == "memory.published":
        return
    for line, source, name in imports_of(module):
        if (source, name) == ("peercache.memory.published", "_store"):
            yield f"{line}: the store of seals is imported"
    for node in module.nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            if _is_of_seals(node.value):
                yield f"{node.lineno}: {ast.unparse(node)} is assigned"
        elif isinstance(node, ast.Call):
            yield from _changes_of_seals(module, node)
        elif isinstance(node, ast.Constant) and node.value == "peercache_seals_store":
            yield f"{node.lineno}: the store of seals is taken from the library"


def _changes_of_seals(module: Module, node: ast.Call) -> Iterator[str]:
    function = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    on = [node.func.value] if isinstance(node.func, ast.Attribute) else []
    into = node.args[:1] if function in ("copyto", "put", "place", "putmask") else []
    into += [keyword.value for keyword in node.keywords if keyword.arg == "out"]
    if function in ("fill", "put", "itemset", "setfield", "sort", "partition"):
        into += on
    if any(map(_is_of_seals, into)):
        yield f"{node.lineno}: {ast.unparse(node)}"
    if function == "store_words" and module.top != "node":
        yield f"{node.lineno}: {ast.unparse(node)}"


def _is_of_seals(node: ast.expr) -> bool:
    """Whether an expression is the words or seals of an object, or a part of them."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return isinstance(node, ast.Attribute) and node.attr in ("words", "seals")


RULES: list[Rule] = [
    every_module_is_in_a_known_folder,
    imports_point_down,
    actors_know_no_other_actor,
    foreign_libraries_have_one_home,
    cores_know_no_event_loop,
    time_and_randomness_are_handed_in,
    nothing_is_ordered_by_identity,
    state_actors_open_with_their_charter,
    files_and_functions_are_short,
    generations_are_compared_in_one_place,
    only_reading_verifies,
    only_the_segment_stores_seals,
]

# (rule, the module it would stand in, its source): each must be found.
OFFENDERS: list[tuple[Rule, str, str]] = [
    (every_module_is_in_a_known_folder, "misc", ""),
    (imports_point_down, "model.keys", "from peercache.actors.pool.actor import Pool"),
    (imports_point_down, "config.settings", "from peercache import node"),
    (imports_point_down, "client.api", "def f():\n    from peercache.sglang import store"),
    (imports_point_down, "paths.read", "from peercache.actors import pool"),
    (imports_point_down, "memory.layout", "import peercache.fabric.shm"),
    (imports_point_down, "net.link", "from peercache import Client"),
    (
        actors_know_no_other_actor,
        "actors.pool.actor",
        "from peercache.actors.ring.actor import Ring",
    ),
    (actors_know_no_other_actor, "actors.pool.actor", "from peercache.actors.ring import actor"),
    (actors_know_no_other_actor, "actors.pool.slots", "from peercache.actors.disk.index import x"),
    (foreign_libraries_have_one_home, "fabric.tcp", "import pynng.tls"),
    (foreign_libraries_have_one_home, "client.api", "from sglang.srt import x"),
    (foreign_libraries_have_one_home, "node.node", "import asyncio"),
    (cores_know_no_event_loop, "actors.pool.actor", "import trio"),
    (cores_know_no_event_loop, "paths.read", "async def f(): pass"),
    (cores_know_no_event_loop, "model.keys", "from trio.lowlevel import x"),
    (time_and_randomness_are_handed_in, "actors.pool.actor", "import time"),
    (time_and_randomness_are_handed_in, "actors.ring.actor", "import random\nrandom.random()"),
    (time_and_randomness_are_handed_in, "actors.pool.slots", "from random import choice"),
    (time_and_randomness_are_handed_in, "paths.cache", "import os\nos.urandom(8)"),
    (nothing_is_ordered_by_identity, "actors.pool.actor", "sorted(x, key=lambda p: id(p))"),
    (nothing_is_ordered_by_identity, "actors.pool.actor", "[x for x in {1, 2}]"),
    (state_actors_open_with_their_charter, "actors.pool.actor", '"""Owns\nTakes\nSends\nKeeps"""'),
    (files_and_functions_are_short, "model.keys", "x = 1\n" * (FILE_LINES_MAX + 1)),
    (files_and_functions_are_short, "model.keys", "def f():\n" + "    x = 1\n" * 70),
    (generations_are_compared_in_one_place, "fabric.shm", "if word == record.generation: x"),
    (generations_are_compared_in_one_place, "client.api", "hit = r['generation'] != words[0]"),
    (only_reading_verifies, "client.api", "from peercache.paths.verify import verified"),
    (only_reading_verifies, "fabric.tcp", "from peercache.paths import verify"),
    (only_reading_verifies, "sglang.store", "import peercache.paths.verify"),
    (only_the_segment_stores_seals, "memory.attached", "self.words[3] = 5"),
    (only_the_segment_stores_seals, "client.api", "memory.words[a:b] |= 1"),
    (only_the_segment_stores_seals, "fabric.shm", "memory.words.fill(0)"),
    (only_the_segment_stores_seals, "client.api", "memory.store_words(a, b)"),
    (only_the_segment_stores_seals, "node.node", "segment.seals[3] = seal"),
    (only_the_segment_stores_seals, "node.node", "segment.seals['word'][3] |= 1"),
    (only_the_segment_stores_seals, "node.node", "segment.seals[:4]['key'] = key"),
    (only_the_segment_stores_seals, "fabric.shm", "memory.seals['word'].fill(0)"),
    (only_the_segment_stores_seals, "node.node", "np.copyto(segment.seals, seals)"),
    (only_the_segment_stores_seals, "node.node", "np.bitwise_or(a, 1, out=segment.words)"),
    (only_the_segment_stores_seals, "node.node", "from peercache.memory.published import _store"),
    (only_the_segment_stores_seals, "fabric.shm", "f = function('peercache_seals_store')"),
]


def names_in_two_folders(read: list[Module]) -> dict[str, set[str]]:
    """Return the public classes that have a namesake in another folder, with their folders."""
    folders: dict[str, set[str]] = {}
    for module in read:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                folders.setdefault(node.name, set()).add(module.folder)
    return {name: homes for name, homes in folders.items() if len(homes) > 1}


def test_a_public_class_has_one_home() -> None:
    """A name shows a reader which class is meant, without a look at the imports."""
    twice = [
        Module.of("node.a", "class Box: ..."),
        Module.of("http.b", "class Box: ...\nclass _P: ..."),
        Module.of("net.c", "class _P: ..."),
    ]

    assert names_in_two_folders(twice) == {"Box": {"node", "http"}}
    assert not names_in_two_folders(modules())


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


@pytest.mark.parametrize("folder", ["tests", "sims", "benchmarks"])
def test_files_outside_the_package_are_short_too(folder: str) -> None:
    """A file is a subject; what outgrows one is two subjects."""
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}

    assert lengths
    assert {path: length for path, length in lengths.items() if length > FILE_LINES_MAX} == {}


def imports_by_file(folder: Path, package: str) -> dict[str, set[str]]:
    """Return which modules of a tree each module imports, at its top or within a function."""
    files = {}
    for path in folder.rglob("*.py"):
        parts = (package, *path.relative_to(folder).with_suffix("").parts)
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        module = Module.of(name, path.read_text())
        wanted = {
            found
            for _, source, imported in imports_of(module)
            for found in (f"{source}.{imported}" if f"{source}.{imported}" in files else source,)
            if found in files
        }
        graph[name] = wanted - {name}
    return graph


@pytest.mark.parametrize(
    ("folder", "package"),
    [(SOURCE, "peercache"), (ROOT / "sims", "sims"), (ROOT / "tests", "tests")],
    ids=["src", "sims", "tests"],
)
def test_files_import_each_other_in_no_circle(folder: Path, package: str) -> None:
    """Every file can be read after the files that it imports."""
    graph = imports_by_file(folder, package)

    assert len(graph) > 20
    assert not circles(graph)


def test_a_circle_among_files_is_found() -> None:
    """Files in a circle are named; those that import it, or that it imports, are not."""
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "e"}, "d": {"a"}, "e": set()}

    assert circles(graph) == [["a", "b", "c"]]


def test_the_table_of_layers_names_only_lines_above() -> None:
    """The order of the table is the order of the layers."""
    above: set[str] = set()
    for folder, allowed in LAYERS.items():
        assert {name.strip("'") for name in allowed.split()} <= above, folder
        above.add(folder)
    missing = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("__init__.py")
        if str(path.parent.relative_to(SOURCE)).replace("/", ".").strip(".") not in LAYERS
    ]
    assert not missing


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
        (imports_point_down, "client.api", "from peercache.node.runner import x"),
        (imports_point_down, "fabric.shm", "from peercache.memory.attached import x"),
        (imports_point_down, "cli.demo.story", "from peercache import Client"),
        (imports_point_down, "model.records", "from peercache.model.keys import x"),
        (time_and_randomness_are_handed_in, "actors.pool.actor", "import random\nr: random.Random"),
        (
            generations_are_compared_in_one_place,
            "actors.pool.page_table",
            "assert word == d.generation",
        ),
        (only_reading_verifies, "paths.write", "from peercache.paths.verify import wants"),
        (only_the_segment_stores_seals, "node.node", "memory.store_words(a, b)"),
        (only_the_segment_stores_seals, "fabric.shm", "words[1:] = segment.words[1:]"),
        (only_the_segment_stores_seals, "fabric.shm", "seals[1:] = segment.seals(offsets)"),
        (only_the_segment_stores_seals, "node.memory", "self.seals = segment.seals"),
        (
            only_the_segment_stores_seals,
            "memory.attached",
            "from peercache.memory.published import PublishedSegment",
        ),
    ],
)
def test_rule_lets_the_allowed_pass(rule: Rule, name: str, source: str) -> None:
    """What the design allows is not forbidden by accident."""
    assert not list(rule(Module.of(name, source)))
