"""Hits come from one place: the whole source is searched for another.

`tests/house/test_tidy.py` sees to it that generations are compared, and the verification is
imported, in one module each. Here is the rest of the way: from the verification to what a caller is
notified.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src" / "peercache"
READING = "paths/read.py"
TAKING_OVER = "paths/takeover.py"
TAKEN = "verified(records, space_of(namespace), fetched.seals)"
CALLERS = ("client/", "sglang/")
SPECTATORS = (
    "cli/bench/", "cli/demo/", "cli/operate/", "http/dashboard.py", "model/status.py",
    "node/status.py",
)  # fmt: skip

JUDGED = "verified(records, self._space, fetched.seals)"
ENTERED = "batch.hit(places[hits], records[hits], fetched.fabric)"


def calls_of(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    """Yield the calls of a function or method by its last name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _last_name(node.func) == name:
            yield node


def stores_of(tree: ast.AST, name: str) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield what is stored under a name, whole or in part: (target, value)."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            targets = [node.target]
        for target in targets:
            base = target.value if isinstance(target, ast.Subscript) else target
            value: ast.expr | None = getattr(node, "value", None)
            if _last_name(base) == name and value is not None:
                yield target, value


def functions_of(tree: ast.AST) -> dict[str, ast.FunctionDef]:
    """Return the functions and methods of a module by name."""
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def problems_of(path: str, tree: ast.Module) -> list[str]:
    """Return every way of a module from bytes to a hit that is not the verification."""
    if path == READING:
        return list(_problems_of_reading(tree))
    if path == TAKING_OVER:
        # Not to a caller: into a slot of the pool, where readers verify it again.
        judged = [ast.unparse(c) for c in calls_of(tree, "verified")]
        return [] if judged == [TAKEN] else [f"{path}: verified is not called once, with the seals"]
    kinds = ("ReadOutcome", "verified", "checksums_agree")
    found = [f"{c.lineno}: {kind} is called" for kind in kinds for c in calls_of(tree, kind)]
    # Those above the client may count what they received, under whatever name.
    found += [
        f"{target.lineno}: hits are stored"
        for target, _ in stores_of(tree, "hits")
        if not path.startswith(SPECTATORS)
        and not (isinstance(target, ast.Name) and path.startswith(CALLERS))
    ]
    return [f"{path}:{problem}" for problem in found]


def _problems_of_reading(reading: ast.Module) -> Iterator[str]:
    functions = functions_of(reading)
    judge = functions["_judge"]
    if [ast.unparse(c) for c in calls_of(reading, "verified")] != [JUDGED]:
        yield "verified is not called once, with the words that were fetched"
    (_, first), *later = stores_of(judge, "hits")
    if ast.unparse(first) != JUDGED:
        yield "hits do not begin as what is verified"
    for target, value in later:
        if ast.unparse(value) != "False":
            yield f"{ast.unparse(target)} = {ast.unparse(value)}"
    entered = list(calls_of(reading, "hit"))
    if [ast.unparse(call) for call in entered] != [ENTERED] or entered[0] not in ast.walk(judge):
        yield "hits are entered elsewhere than where they were judged"
    for target, value in stores_of(reading, "hits"):
        is_entry = target in ast.walk(functions["hit"])
        is_start = "np.zeros" in ast.unparse(value)
        if ast.unparse(target).startswith("self.hits") and not is_entry and not is_start:
            yield f"{ast.unparse(target)} is stored outside of the one entry"
    outcomes = [ast.unparse(call.args[0]) for call in calls_of(reading, "ReadOutcome")]
    if outcomes != ["batch.hits"]:
        yield f"the outcome is made of {outcomes}"


def test_hits_are_produced_by_the_one_verification_only() -> None:
    """From a word that equals the generation to `True` there is one way, and no side entrance."""
    paths = sorted(SOURCE.rglob("*.py"))

    problems = [
        problem
        for path in paths
        for problem in problems_of(str(path.relative_to(SOURCE)), ast.parse(path.read_text()))
    ]

    assert len(paths) > 20
    assert problems == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("client/client.py", "outcome = ReadOutcome(np.ones(3), [], {}, {})"),
        ("fabric/shm.py", "hits = verified(records, words)"),
        ("fabric/tcp/client.py", "batch.hits[places] = True"),
        ("sglang/store.py", "outcome.hits[:] = True"),
        (READING, "batch.hit(places, records, '')"),
        (READING, "self.hits[places] = True"),
        (READING, "ReadOutcome(everything, [], {}, {})"),
    ],
)
def test_a_side_entrance_is_found(path: str, text: str) -> None:
    """A search that cannot find anything proves nothing."""
    assert problems_of(path, ast.parse(f"{(SOURCE / path).read_text()}\n{text}"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"hits = {JUDGED}", "hits = fetched.seals['word'] != ODD"),
        ("hits[corrupt] = False", "hits[corrupt] = True"),
        ("batch.hit(places[hits]", "batch.hit(places[arrived]"),
        (JUDGED, "verified(records, self._space, sealed(records))"),
    ],
)
def test_a_weaker_judgement_is_found(before: str, after: str) -> None:
    """Nor may the one way itself become wider."""
    text = (SOURCE / READING).read_text()

    assert text.count(before) == 1
    assert problems_of(READING, ast.parse(text.replace(before, after)))
