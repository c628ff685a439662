"""How large the house is, in figures: `python -m tests.house.figures`. They are no limits.

Code is what is left of `src/` without blank lines, comments, docstrings (those of attributes, too)
and imports. A private access is `something._name` in a test, where something is not `self` or
`cls`; `os._exit` is public, whatever its name. Two C files form a circle if each calls a function
of the other, itself or by way of others; which headers they include does not count, as one header
declares what several files define.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.house.layers import circles
from tests.house.test_tidy import ROOT, SOURCE

_LAYOUT = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)
_OF_C_THAT_IS_NO_CODE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"', re.DOTALL)
_DEFINED_IN_C = re.compile(
    r"^(?!static\b|typedef\b)\w[\w \t\n*]*?\b(\w+)\([^;{}]*\)\s*\{", re.MULTILINE
)


def code_lines(text: str) -> int:
    """Return how many lines of a Python source have code."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (
            is_text and isinstance(node.value.value, str)
        ):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - left_out)


def private_accesses(text: str) -> int:
    """Return how often a Python source reaches into something else than `self` or `cls`."""
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and ast.unparse(node) != "os._exit"
        for node in ast.walk(ast.parse(text))
    )


def calls_among(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return for each C source, by its name, which others define a function that it calls."""
    plain = {name: _OF_C_THAT_IS_NO_CODE.sub(" ", text) for name, text in sources.items()}
    home = {found: name for name, text in plain.items() for found in _DEFINED_IN_C.findall(text)}
    return {
        name: {home[called] for called in re.findall(r"\b(\w+)\s*\(", text) if called in home}
        - {name}
        for name, text in plain.items()
    }


def _texts(folder: Path) -> Iterable[str]:
    return (path.read_text() for path in folder.rglob("*.py"))


def figures() -> dict[str, int]:
    """Return the figures of this checkout."""
    tests = list(_texts(ROOT / "tests"))
    in_c = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.c")}
    return {
        "Python files in src": len(list(SOURCE.rglob("*.py"))),
        "lines of code in src": sum(map(code_lines, _texts(SOURCE))),
        "lines in tests": sum(len(text.splitlines()) for text in tests),
        "private accesses in tests": sum(map(private_accesses, tests)),
        "circles among C files": len(circles(calls_among(in_c))),
    }


if __name__ == "__main__":
    for name, value in figures().items():
        print(f"{name:26} {value:7,}")
