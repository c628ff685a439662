"""Every `peercache` command that the documentation shows exists, with the flags that it shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from peercache.cli.main import peercache
from tests.house.reference_pages import ROOT
from tests.house.test_names_shown import NOW

SNIPPET = re.compile(r"```(?:sh|bash)\n(.*?)```", re.DOTALL)
INLINE = re.compile(r"`(peercache [^`\n]+)`")
SAME = re.compile(r"python3? -m peercache\.node\b|python3? -m peercache\b(?!\.)")


def commands_in(text: str) -> Iterator[str]:
    """Yield the command lines of a page that begin with `peercache`, joined over line ends."""
    for snippet in SNIPPET.findall(text):
        joined = re.sub(r"\\\n\s*", " ", snippet)
        named = SAME.sub(lambda m: "peercache node" if "node" in m[0] else "peercache", joined)
        for line in named.splitlines():
            # Behind a pipe or `sudo -u …` stands the same command.
            for part in re.split(r"\s*[|;]\s*|\s*&&\s*", line):
                found = re.search(r"(?:^|\s|/)(peercache\s.*)", part)
                if found and not part.lstrip().startswith(("#", "pip", "git", "eval", "curl")):
                    yield found[1]
    yield from INLINE.findall(text)


def problem_of(line: str) -> str:
    """Return what is wrong with a command line, "" for nothing. Values are not looked at."""
    try:
        words = shlex.split(line, comments=True)[1:]
    except ValueError:
        return ""  # A part of a longer text, with a quote that ends elsewhere.
    command: click.Command = peercache
    context = click.Context(peercache, info_name="peercache")
    while words and isinstance(command, click.Group):
        name = words[0]
        if name.startswith("-") or not re.fullmatch(r"[a-z]+", name):
            break  # `peercache …`, or a flag of the whole program.
        found = command.get_command(context, name)
        if found is None:
            return f"{command.name or 'peercache'} has no command {name!r}"
        command, words = found, words[1:]
        context = click.Context(command, info_name=name, parent=context)
    known = {flag for parameter in command.params for flag in [*parameter.opts,
             *parameter.secondary_opts]} | {"--help"}  # fmt: skip
    for word in words:
        flag = word.partition("=")[0]
        if re.fullmatch(r"--[a-z][a-z-]*", flag) and flag not in known:
            return f"`{command.name}` has no flag {flag}"
    return ""


@pytest.mark.parametrize("page", NOW, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist_with_their_flags(page: Path) -> None:
    """A reader copies them as they are."""
    problems = {line: problem_of(line) for line in commands_in(page.read_text())}

    assert {line: problem for line, problem in problems.items() if problem} == {}


def test_commands_of_the_documentation_are_found() -> None:
    """A rule that sees no command protects nothing."""
    assert sum(len(list(commands_in(page.read_text()))) for page in NOW) > 60


@pytest.mark.parametrize(
    "line",
    ["peercache nodes", "peercache node --pool 4GiB", "peercache disk chek /data"],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    """Commands, subcommands and flags."""
    assert problem_of(line)
