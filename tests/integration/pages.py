"""The commands of the pages that a user of an engine reads, for tests that start that engine."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.system.nodes import CALL_S, NodeProcess

ROOT = Path(__file__).parents[2]
SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def json_of(page: str, flag: str) -> Any:
    """Return what a page gives to a flag of an engine, in its first command that has it."""
    for block in SHELL.findall((ROOT / page).read_text()):
        words = shlex.split(block.replace("\\\n", " "), comments=True)
        if flag in words:
            return json.loads(words[words.index(flag) + 1])
    raise AssertionError(f"{page} has no {flag}")


@contextmanager
def node_of_a_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeProcess]:
    """Yield the node that the pages start, where an engine without an address looks for it.

    The machine may have another node at the default address: the environment names this one's.
    """
    home = f"ipc://{folder}/home.ipc"
    monkeypatch.setenv("PEERCACHE_HOME", home)
    for timeout in ("OP_TIMEOUT_S", "EXISTS_TIMEOUT_S"):
        monkeypatch.setenv(f"PEERCACHE_{timeout}", str(CALL_S))
    flags = ["--insecure", "--listen", "127.0.0.1:0", "--home", home]
    node = NodeProcess([*flags, "--pool-size", "64MiB", "--metrics-port", "0"])
    try:
        yield node
    finally:
        node.end()
