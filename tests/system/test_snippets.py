"""The examples in README and docs: marked Python runs as printed, and commands have their flags.

A Python block after the line `<!-- runnable -->` runs against live nodes. A comment that begins
with a value states the result of its line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peercache import Client
from tests.contracts.frozen.public import COMMANDS, flags_of
from tests.system.nodes import CALL_S, LocalCluster

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
RUNNABLE = re.compile(r"<!-- runnable -->\n+```python\n(.*?)```", re.DOTALL)
SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)
STATED = re.compile(r"#\s*(\[[^\]]*\]|\d+|True|False)(?=:|$)")
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
TRIAL = re.compile(r"(, )?insecure=True")
PATIENT = f"op_timeout_s={CALL_S}, exists_timeout_s={CALL_S}"


def runnable_blocks() -> list[Any]:
    """Return each marked block with the page that it stands on."""
    return [
        pytest.param(block, id=f"{path.name}-{number}")
        for path in PAGES
        for number, block in enumerate(RUNNABLE.findall(path.read_text()))
    ]


def stated(line: str) -> list[Any]:
    """Return the value that a line's comment begins with, or nothing."""
    found = STATED.search(line)
    return [ast.literal_eval(found[1])] if found else []


def run(block: str, names: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Run a block; return what each stated value is, and what it is stated to be."""
    lines = block.splitlines()
    results: list[tuple[Any, Any]] = []
    for node in ast.parse(block).body:
        source = ast.unparse(node)
        if isinstance(node, ast.Expr):
            value = eval(source, names)
            results += [(value, one) for one in stated(lines[node.lineno - 1])]
            continue
        exec(source, names)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Name):
                value = names[inner.targets[0].id]
                results += [(value, one) for one in stated(lines[inner.lineno - 1])]
    return results


@pytest.mark.parametrize("block", runnable_blocks())
def test_example_gives_what_its_comments_state(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes are at the addresses that the pages name, the first one at the default address."""
    with LocalCluster() as cluster:
        nodes = [cluster.start("a"), cluster.start("b")]
        for node in nodes:
            cluster.wait_for_members(node, 2)
        homes = [node.ready["home"] for node in nodes]
        named = sorted(set(re.findall(r"ipc://[\w/.-]+", block)))
        for name, home in zip(named, homes, strict=False):
            patient = f'"{home}", cluster="{cluster.name}", {PATIENT}'
            block = block.replace(f'"{name}"', patient)
        block = TRIAL.sub("", block)  # These nodes have a cluster of their own.
        monkeypatch.setenv("PEERCACHE_HOME", homes[0])
        monkeypatch.setenv("PEERCACHE_CLUSTER", cluster.name)
        for timeout in ("OP_TIMEOUT_S", "EXISTS_TIMEOUT_S"):
            monkeypatch.setenv(f"PEERCACHE_{timeout}", str(CALL_S))
        names: dict[str, Any] = {}

        results = run(block, names)
        for value in names.values():
            if isinstance(value, Client):
                value.close()

    assert results
    assert [value for value, _ in results] == [expected for _, expected in results]


def test_stated_value_that_is_wrong_is_found() -> None:
    """A comment is compared, at the top of a block and within it."""
    assert run("1 + 1  # 3: no\nif True:\n    x = [True]  # [False]", {}) == [
        (2, 3),
        ([True], [False]),
    ]


def refused_clients(text: str) -> list[str]:
    """Return the homes of clients in a page's Python without the `insecure` of their nodes.

    The default home is "".
    """
    trials = set()
    for line in "\n".join(SHELL.findall(text)).replace("\\\n", " ").splitlines():
        if re.search(r"peercache.node .*--insecure\b", line):
            home = re.search(r"--home (ipc://\S+)", line)
            trials.add(home[1] if home else "")
    opened = []
    for block in PYTHON.findall(text):
        for arguments in re.findall(r"Client\.open\(([^)]*)\)", block):
            home = re.search(r'home="(ipc://[^"]+)"', arguments)
            opened.append((home[1] if home else "", arguments))
    return [
        home for home, arguments in opened if home in trials and "insecure=True" not in arguments
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_clients_of_a_page_are_taken_by_its_nodes(path: Path) -> None:
    """A client without `insecure` reads nothing from other hosts of a node with it."""
    assert not refused_clients(path.read_text())


def test_a_client_that_its_node_refuses_is_found() -> None:
    """The commands of README once did not go with its Python."""
    node = "```sh\npython -m peercache.node --insecure \\\n  --home ipc:///a.ipc\n```\n"
    client = '```python\nClient.open(home="ipc:///a.ipc", fabric="tcp")\n```\n'
    assert refused_clients(node + client) == ["ipc:///a.ipc"]
    assert not refused_clients(node + client.replace('fabric="tcp"', "insecure=True"))
    assert not refused_clients(client)
    node, client = node.replace("  --home ipc:///a.ipc", ""), "```python\nClient.open()\n```\n"
    assert refused_clients(node + client) == [""]
    assert not refused_clients(node + client.replace("()", "(insecure=True)"))


def commands_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each peercache command line of a page's shell blocks: its name, and its flags."""
    for block in SHELL.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.partition(" | ")[0].partition("#")[0].split()
            if words[:3] == ["python", "-m", "peercache.node"]:
                words = ["peercache", "node", *words[3:]]
            if words[:1] != ["peercache"]:
                continue
            names = [" ".join(words[1:3]), " ".join(words[1:2])]
            name = next((one for one in names if one in COMMANDS), names[0])
            flags = [word.partition("=")[0] for word in words if word.startswith("--")]
            yield name, flags


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_of_a_page_exist_with_their_flags(path: Path) -> None:
    """A reader can type what the page shows."""
    for name, flags in commands_of(path.read_text()):
        if name.split()[:1] == ["completion"]:
            continue
        assert name in COMMANDS, f"peercache {name}"
        assert set(flags) <= set(flags_of(name)), f"peercache {name}"
