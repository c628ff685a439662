"""The tutorial, step by step: its commands and its Python, with the answers that it promises."""

from __future__ import annotations

import re
import shlex
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pace import wait_until
from tests.system.nodes import NodeProcess

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "first-cluster.md"
BLOCK = re.compile(r"```(sh|python)\n(.*?)```", re.DOTALL)
ANSWER = re.compile(r"^(?P<code>.*?)\s+# (?P<answer>\[.*?\]|\d+(?=:|$)|True|False)")


@pytest.fixture
def page() -> Iterator[str]:
    """Yield the tutorial with a folder and a port of this test's own."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        text = PAGE.read_text().replace("ipc:///tmp/", f"ipc://{folder}/")
        yield text.replace("127.0.0.1:31998", f"127.0.0.1:{port}")


def flags_in(snippet: str) -> list[str]:
    """Return the flags of the one `peercache node` of a snippet."""
    (line,) = [line for line in snippet.splitlines() if line.startswith("peercache node")]
    return [*shlex.split(line)[2:], "--http-listen", "127.0.0.1:0"]


def run(snippet: str, names: dict[str, Any]) -> None:
    """Run a snippet of Python; each answer that it shows must be the one that comes."""
    for line in snippet.splitlines():
        shown = ANSWER.match(line)
        if shown is None:
            exec(line, names)  # The page's own code.
        else:
            assert repr(eval(shown["code"], names)) == shown["answer"], line


@pytest.mark.slow
def test_every_step_of_the_tutorial_does_what_it_promises(page: str) -> None:
    """Two nodes, pages from one to the other, one killed, started again."""
    blocks = BLOCK.findall(page)
    starts = [text for kind, text in blocks if kind == "sh" and "peercache node" in text]
    steps = [text for kind, text in blocks if kind == "python"]
    assert (len(starts), len(steps)) == (2, 5)
    first_flags, second_flags = map(flags_in, starts)
    nodes = [first, second] = [NodeProcess(first_flags), NodeProcess(second_flags)]
    names: dict[str, Any] = {}
    try:
        wait_until(lambda: '"membership.member_changed"' in second.said())
        for step in steps[:2]:
            run(step, names)
        assert names["b"].stats()["home_members_alive"] == 2
        first.kill()
        run(steps[2], names)
        nodes.append(NodeProcess([*first_flags, "--discovery", second.ready["control"]]))
        # Five seconds, as the page states; a loaded machine takes longer.
        wait_until(lambda: names["a"].batch_set(["prompt-1"], [names["page"]]) == [True])
        wait_until(lambda: names["b"].batch_get(["prompt-1"], [names["buffer"]]) == [True])
        for step in steps[3:]:
            run(step, names)
    finally:
        for node in nodes:
            node.end()
