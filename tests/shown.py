"""The commands that a page of the documentation shows to type, as they stand."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands_in(block: str) -> list[str]:
    """Return the commands of a shell block, without comments.

    A command goes on after a backslash, and while a quote is open.
    """
    found, command = [], ""
    for line in block.splitlines():
        begin = re.split(r"(?:^|\s)#\s", f"{line} # ", maxsplit=1)[0]
        is_quoted = f"{command}{begin}".count("'") % 2
        command += f"{line if is_quoted else begin}\n"
        if not command.rstrip(" \n").endswith("\\") and command.count("'") % 2 == 0:
            found.append(command.strip())
            command = ""
    assert not command, f"a command has no end: {command}"
    return [each for each in found if each]


def commands_of(page: str, begin: str) -> list[str]:
    """Return the commands of a page that begin so."""
    blocks = [text for language, text in BLOCK.findall((ROOT / page).read_text())
              if language == "sh"]  # fmt: skip
    return [each for block in blocks for each in commands_in(block) if each.startswith(begin)]


def blocks_of(page: str, heading: str) -> list[tuple[str, str]]:
    """Return language and text of the blocks below a heading of a page, up to the next one."""
    text = (ROOT / page).read_text().partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    return BLOCK.findall(text)
