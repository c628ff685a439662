"""How the documentation site reads docstrings: an extension of griffe, which mkdocs.yml names.

A docstring describes a parameter, an attribute or an error in a line `name: meaning`; `name` may be
several names. The site shows these lines as a list.
"""

from __future__ import annotations

import re
from typing import Any

try:
    import griffe
except ImportError:  # Only the documentation site needs it: the extra `docs`.
    griffe = None  # type: ignore[assignment]

NAMED = re.compile(r"(\*{0,2}[A-Za-z_]\w*(?:, \*{0,2}\w+)*):\s+(?=\S)")


def with_listed_names(text: str) -> str:
    """Return a docstring as Markdown: a line `name: meaning`, with its continuation, is an item."""
    lines: list[str] = []
    is_item = False
    for line in text.splitlines():
        before = lines[-1].rstrip() if lines else ""
        if named := NAMED.match(line):
            if before and not is_item:
                lines.append("")
            names = ", ".join(f"`{name}`" for name in named[1].split(", "))
            lines.append(f"* {names}: {line[named.end() :]}")
            is_item = True
        elif is_item and line and (line.startswith(" ") or not before.endswith(".")):
            lines.append(f"    {line.strip()}")
        else:
            # After an item, a sentence at the margin is a paragraph of its own.
            lines += ["", line] if is_item and line else [line]
            is_item = False
    return "\n".join(lines)


if griffe is not None:

    class Docstrings(griffe.Extension):
        """Rewrites each docstring that the site shows."""

        def on_object(self, *, obj: Any, **_: Any) -> None:
            """Rewrite one."""
            if obj.docstring is not None:
                obj.docstring.value = with_listed_names(obj.docstring.value)
