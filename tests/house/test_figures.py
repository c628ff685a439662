"""The figures of the house: what counts as code, as a private access, as a circle of C files."""

from __future__ import annotations

from tests.house.figures import calls_among, code_lines, private_accesses
from tests.house.layers import circles

SOURCE = '''"""A module.

With a docstring of several lines.
"""

from __future__ import annotations

import os  # which one

NAME = 1  # a comment
"""What it is."""


def made() -> str:
    """Return a text."""
    # why
    return """of
    two lines"""
'''


def test_code_is_what_is_left_without_docstrings_comments_and_imports() -> None:
    """A text that is a value is code, in each of its lines."""
    assert code_lines(SOURCE) == 4


def test_a_private_access_reaches_into_something_else() -> None:
    """One's own names and Python's are not private."""
    assert private_accesses("self._a + cls._b + x.__class__ + x.y") == 0
    assert private_accesses("x._a + x.y._b + self.z._c") == 3


def test_c_files_that_call_each_other_are_a_circle() -> None:
    """Calls count, whether direct or by way of a third file; comments and own calls do not."""
    sources = {
        "a.c": "int a(int x)\n{\n    return b(x) + a(x);\n}\n",
        "b.c": "static int b2(void) { return 0; }\nint b(int x)\n{\n    return c(x);\n}\n",
        "c.c": "int c(int x)\n{\n    return a(x);\n}\n",
        "d.c": "int d(int x)\n{\n    /* b(x) calls d(x) */\n    return a(x);\n}\n",
    }

    assert calls_among(sources)["d.c"] == {"a.c"}
    assert circles(calls_among(sources)) == [["a.c", "b.c", "c.c"]]
    assert circles({"p": {"q"}, "q": {"p"}, "r": {"s"}, "s": {"r"}}) == [["p", "q"], ["r", "s"]]
